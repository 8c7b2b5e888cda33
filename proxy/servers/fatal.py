"""Requests during which llama-server ended: after two deaths in a row such a request is refused.

Owns the hashes of the prompts of these requests, and how long a death counts. The index keeps the hashes,
because the proxy may be restarted with llama-server.
"""

import time
from contextlib import suppress
from hashlib import blake2b

from proxy.errors import ProxyError, StoreFault
from proxy.serving.request import Request
from proxy.store.store import CheckpointStore

MAX_DEATHS = 2
FORGET_SECONDS = 600.0
"""A refused request is tried again once no client has sent it for so long."""
_MAX_REMEMBERED = 64
_NAME = "fatal requests"


class FatalRequests:
    """Remembers during which requests llama-server ended: how often in a row, and when last."""

    def __init__(self, store: CheckpointStore | None) -> None:
        self._store = store
        self.deaths: dict[str, tuple[int, float]] = {}
        """By the hash of a request; while none is known, no hash need be made."""
        if store is not None:
            with suppress(StoreFault):
                self.deaths = store.index.value(_NAME, dict[str, tuple[int, float]]) or {}

    def refuse(self, request: Request) -> None:
        """Raise ProxyError if llama-server has ended twice in a row during this request."""
        if (n_deaths := self._n_deaths(request)) >= MAX_DEATHS:
            self.deaths[key_of(request)] = n_deaths, time.time()
            raise ProxyError(
                f"llama-server ended {n_deaths} times in a row while it worked on this request: see "
                "llama-server's log. The request is tried again once nobody has sent it for "
                f"{FORGET_SECONDS / 60:.0f} minutes",
                422,
            )

    async def note_answer(self, request: Request) -> None:
        """Note that a request was answered: its deaths in a row end here."""
        if (key := key_of(request)) in self.deaths:
            del self.deaths[key]
            await self._write()

    async def note_death(self, request: Request) -> None:
        """Note that llama-server ended while it worked on a request."""
        n_before, key = self._n_deaths(request), key_of(request)
        self.deaths.pop(key, None)
        self.deaths[key] = n_before + 1, time.time()
        while len(self.deaths) > _MAX_REMEMBERED:
            del self.deaths[next(iter(self.deaths))]
        await self._write()

    def _n_deaths(self, request: Request) -> int:
        n_deaths, last_at = self.deaths.get(key_of(request), (0, 0.0))
        return n_deaths if time.time() - last_at < FORGET_SECONDS else 0

    async def _write(self) -> None:
        if self._store is not None:
            with suppress(StoreFault):  # then the deaths are known only while the proxy runs
                await self._store.put_value(_NAME, self.deaths)


def key_of(request: Request) -> str:
    """Return a hash of a request's messages, else of its prompt, else of its raw body."""
    content = request.raw if request.prompt is None else request.prompt.tokens.tobytes()
    content = request.conversation.digests if request.conversation else content
    return blake2b(content, digest_size=16).hexdigest()
