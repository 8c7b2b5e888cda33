"""The admin listener's view of the store: which checkpoints there are, and pinning them.

Browsers are refused. The listener is on loopback and has no password, so any page that an operator
visits could otherwise reach it; browsers send an Origin with every request that changes something.
"""

from typing import Any

import msgspec
from aiohttp import web

from proxy.core.model import Checkpoint, CheckpointId
from proxy.driver.lifecycle import Lifecycle
from proxy.driver.room import present_of
from proxy.errors import StoreFault
from proxy.store.store import CheckpointStore


class ListedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint as operators see it; `value_seconds` is what losing it would cost."""

    id: str
    kind: str
    n_tokens: int
    size_bytes: int
    created_at: float
    last_used_at: float
    is_pinned: bool
    value_seconds: float


class Checkpoints:
    """Lists and pins checkpoints."""

    def __init__(self, lifecycle: Lifecycle, store: CheckpointStore | None) -> None:
        self._lifecycle = lifecycle
        self._opened_store = store

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/checkpoints", self.list),
            web.put("/checkpoints/{id}/pin", self.pin),
            web.delete("/checkpoints/{id}/pin", self.unpin),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Return all checkpoints, the most valuable first."""
        store = self._store(request)
        session = self._lifecycle.current
        values = store.values(present_of(session.attachment if session else None))
        listed = [_listed(checkpoint, values[checkpoint.id]) for checkpoint in store]
        return _json(200, {"checkpoints": sorted(listed, key=lambda c: -c.value_seconds)})

    async def pin(self, request: web.Request) -> web.Response:
        """Keep a checkpoint whatever happens, until it is unpinned."""
        return await self._set_pinned(request, is_pinned=True)

    async def unpin(self, request: web.Request) -> web.Response:
        return await self._set_pinned(request, is_pinned=False)

    async def _set_pinned(self, request: web.Request, *, is_pinned: bool) -> web.Response:
        store = self._store(request)
        try:
            checkpoint_id = CheckpointId(int(request.match_info["id"], 16))
            found = await store.pin(checkpoint_id, is_pinned=is_pinned)
        except ValueError:
            found = None
        except StoreFault as fault:
            return _json(503, {"error": str(fault)})
        if found is None:
            return _json(404, {"error": "there is no checkpoint with this id"})
        return _json(200, {"id": f"{found.id:016x}", "is_pinned": found.is_pinned})

    def _store(self, request: web.Request) -> CheckpointStore:
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="not for browsers")
        if self._opened_store is None:
            raise web.HTTPServiceUnavailable(text="the store is not open")
        return self._opened_store


def _listed(checkpoint: Checkpoint, value_seconds: float) -> ListedCheckpoint:
    return ListedCheckpoint(
        id=f"{checkpoint.id:016x}",
        kind=checkpoint.kind.value,
        n_tokens=checkpoint.n_tokens,
        size_bytes=checkpoint.size_bytes,
        created_at=checkpoint.created_at,
        last_used_at=checkpoint.last_used_at,
        is_pinned=checkpoint.is_pinned,
        value_seconds=round(value_seconds, 3),
    )


def _json(status: int, content: Any) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(content), content_type="application/json"
    )
