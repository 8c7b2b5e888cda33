"""Sends one request after the other and measures what each cost."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp

from tests.bench.ledger import Ledger
from tests.bench.processes import Stack
from tests.bench.workload import Request

MAX_ANSWER_TOKENS = 8
REQUEST_SECONDS = 1800.0


class RequestFailed(Exception):
    """A request was not answered as it must be."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one request cost; `n_new` tokens had never been sent before."""

    request: Request
    n_prompt: int
    n_new: int
    n_evaluated: int
    first_token_seconds: float

    @property
    def n_reused(self) -> int:
        return max(0, self.n_prompt - self.n_evaluated)


class Player:
    """Plays requests on one stack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._ledger = Ledger(stack.server)

    async def play(self, request: Request) -> Measured:
        """Send a request, after a restart if it wants one; return what it cost."""
        if request.restarts:
            await self._stack.restart()
        prompt = await self._ledger.tokens(request)
        n_before = await self._stack.evaluated_tokens()
        first_token_seconds = await stream_first_token(self._stack.base_url, request)
        n_evaluated = await self._stack.evaluated_tokens() - n_before
        return Measured(
            request, len(prompt), self._ledger.enter(prompt), n_evaluated, first_token_seconds
        )


async def stream_first_token(base_url: str, request: Request) -> float:
    """Stream one answer to its end; return the seconds to its first token."""
    body = request.body(stream=True, max_tokens=MAX_ANSWER_TOKENS)
    url = base_url + "/v1/chat/completions"
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        began = time.monotonic()
        with _failures_named(request.label):
            async with client.post(url, json=body) as reply:
                if reply.status != 200:
                    raise RequestFailed(f"answered {reply.status}: {await reply.text()}")
                return await _first_token_at(reply) - began


async def _first_token_at(reply: aiohttp.ClientResponse) -> float:
    """Read a stream to its end; return when its first event came, which is its first token."""
    first, last = 0.0, b""
    async for line in reply.content:
        if line.startswith(b"data: "):
            first, last = first or time.monotonic(), line
            if line.startswith(b'data: {"error"'):
                raise RequestFailed(f"broke off: {line.decode(errors='replace')}")
    if not last.startswith(b"data: [DONE]"):
        raise RequestFailed("the stream ended early")
    return first


@contextmanager
def _failures_named(label: str) -> Iterator[None]:
    try:
        yield
    except RequestFailed as failure:
        raise RequestFailed(f"{label}: {failure}") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RequestFailed(f"{label}: {error or type(error).__name__}") from error
