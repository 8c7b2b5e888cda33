"""What waits for an answer of llama-server at the moment, so that it can be cut off when that is gone.

Told to end, llama-server stops decoding and takes no more connections, but then waits for the clients of
the requests that it will not answer: until they hang up, or somebody kills it (server-http.cpp, SIGTERM).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Protocol


class Cuttable(Protocol):
    """One exchange; `heard_at` is when llama-server last said something in it, of the monotonic clock."""

    @property
    def heard_at(self) -> float: ...

    def cut(self) -> None: ...


class Call:
    """A call that ends in TimeoutError when it is cut."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self.heard_at = time.monotonic()

    def cut(self) -> None:
        with suppress(RuntimeError):  # it is just ending by itself, or has been cut already
            self._limit.reschedule(asyncio.get_running_loop().time())


class Pending:
    """All that waits."""

    def __init__(self) -> None:
        self._waiting: set[Cuttable] = set()

    @contextmanager
    def noted(self, exchange: Cuttable) -> Iterator[None]:
        """Let an exchange be cut while the block runs."""
        self._waiting.add(exchange)
        try:
            yield
        finally:
            self._waiting.discard(exchange)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Let whatever is awaited in the block be cut: it ends in TimeoutError."""
        async with asyncio.timeout(None) as limit:
            with self.noted(Call(limit)):
                yield

    def cut_silent(self, seconds: float) -> int:
        """Cut what llama-server has said nothing to for so long; return how many."""
        silent = [e for e in self._waiting if e.heard_at <= time.monotonic() - seconds]
        for exchange in silent:
            exchange.cut()
        return len(silent)
