"""The admin listener's view of the store: which checkpoints there are, pinning and deleting them."""

from aiohttp import web

from proxy.core.model import CheckpointId
from proxy.driver.lifecycle import Lifecycle
from proxy.driver.room import present_of
from proxy.errors import StoreFault
from proxy.front.listing import list_checkpoint
from proxy.front.operators import json_response, require_store
from proxy.store.store import CheckpointStore


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
        store = require_store(request, self._opened_store)
        session = self._lifecycle.current
        present = present_of(session.attachment if session else None)
        listed = [list_checkpoint(checkpoint, store, present) for checkpoint in store]
        return json_response(200, {"checkpoints": sorted(listed, key=lambda c: -c.value_seconds)})

    async def pin(self, request: web.Request) -> web.Response:
        """Keep a checkpoint whatever happens, until it is unpinned."""
        return await self._set_pinned(request, is_pinned=True)

    async def unpin(self, request: web.Request) -> web.Response:
        return await self._set_pinned(request, is_pinned=False)

    async def _set_pinned(self, request: web.Request, *, is_pinned: bool) -> web.Response:
        store = require_store(request, self._opened_store)
        try:
            checkpoint_id = CheckpointId(int(request.match_info["id"], 16))
            found = await store.pin(checkpoint_id, is_pinned=is_pinned)
        except ValueError:
            found = None
        except StoreFault as fault:
            return json_response(503, {"error": str(fault)})
        if found is None:
            return json_response(404, {"error": "there is no checkpoint with this id"})
        return json_response(200, {"id": f"{found.id:016x}", "is_pinned": found.is_pinned})
