"""The admin listener's view of the store: which checkpoints there are, pinning and deleting them."""

import time

import msgspec
from aiohttp import web

from proxy.core.keeping.eviction import Removal
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.views.listing import Deleted
from proxy.core.views.selection import Selected, Selection, select
from proxy.core.views.tree import STORE, parse_node_id
from proxy.driver.contact.known_models import model_names
from proxy.driver.served import Served
from proxy.errors import StoreFault
from proxy.front.json_answers import json_response
from proxy.front.stored.queries import (
    is_asked_for,
    list_stored,
    require_store,
    whole_number,
)
from proxy.store.store import CheckpointStore

_MAX_SECONDS = 1 << 40


class Checkpoints:
    """Lists, pins and deletes checkpoints."""

    def __init__(self, served: Served, store: CheckpointStore | None) -> None:
        self._served = served
        self._opened_store = store

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/checkpoints", self.list),
            web.delete("/checkpoints", self.delete_selected),
            web.delete("/checkpoints/{id}", self.delete),
            web.put("/checkpoints/{id}/pin", self.pin),
            web.delete("/checkpoints/{id}/pin", self.unpin),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Return all checkpoints, the most valuable first."""
        store = require_store(request, self._opened_store)
        names, present = model_names(store.index), self._served.present()
        listed = [list_stored(checkpoint, names, store, present) for checkpoint in store]
        return json_response(
            200, {"checkpoints": sorted(listed, key=lambda c: -(c.value_seconds or 0))}
        )

    async def pin(self, request: web.Request) -> web.Response:
        """Keep a checkpoint whatever happens, until it is unpinned."""
        return await self._set_pinned(request, is_pinned=True)

    async def unpin(self, request: web.Request) -> web.Response:
        return await self._set_pinned(request, is_pinned=False)

    async def _set_pinned(self, request: web.Request, *, is_pinned: bool) -> web.Response:
        store = require_store(request, self._opened_store)
        try:
            found = await store.pin(_named(request, store).id, is_pinned=is_pinned)
        except StoreFault as fault:
            return json_response(503, {"error": str(fault)})
        if found is None:
            raise _not_found()
        return json_response(
            200,
            {
                "id": f"{found.id:016x}",
                "is_pinned": found.is_pinned,
                "pinned_bytes": store.pinned_bytes,
                "max_store_bytes": store.limits.max_bytes,
            },
        )

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one checkpoint, a pinned one only with `pinned`."""
        store = require_store(request, self._opened_store)
        checkpoint = _named(request, store)
        if checkpoint.is_pinned and not is_asked_for(request, "pinned"):
            return _kept("it is pinned", Deleted(0, 0, n_pinned=1))
        deleted = await self._delete(store, Selected((checkpoint,)))
        if deleted.n_in_use:
            return _kept("it is in use; try again", deleted)
        return json_response(200, deleted)

    async def delete_selected(self, request: web.Request) -> web.Response:
        """Delete what lies under a node, was not used for so long, or with `all` everything."""
        store = require_store(request, self._opened_store)
        try:
            selection = Selection(
                parse_node_id(request.query.get("under", "")),
                whole_number(request, "unused_seconds", 0, _MAX_SECONDS),
                is_asked_for(request, "pinned"),
            )
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        is_everything = selection.node == STORE and not selection.unused_seconds
        if is_everything and not is_asked_for(request, "all"):
            raise web.HTTPBadRequest(text="say `under`, `unused_seconds` or `all`")
        selected = select(selection, store, time.time())
        if is_asked_for(request, "dry_run"):
            n_bytes = sum(c.size_bytes for c in selected.checkpoints)
            would = Deleted(len(selected.checkpoints), n_bytes, len(selected.pinned), 0, True)
            return json_response(200, would)
        return json_response(200, await self._delete(store, selected))

    async def _delete(self, store: CheckpointStore, selected: Selected) -> Deleted:
        deleted: list[Checkpoint] = []
        try:
            for checkpoint in selected.checkpoints:
                if await store.remove(checkpoint, Removal.OPERATOR):
                    deleted.append(checkpoint)
        except StoreFault as fault:
            raise web.HTTPServiceUnavailable(text=str(fault)) from fault
        n_in_use = sum(store.get(c.id) is not None for c in selected.checkpoints)
        n_bytes = sum(c.size_bytes for c in deleted)
        return Deleted(len(deleted), n_bytes, len(selected.pinned), n_in_use)


def _named(request: web.Request, store: CheckpointStore) -> Checkpoint:
    """Return the checkpoint in the path; raises 404 if there is none."""
    try:
        found = store.get(CheckpointId(int(request.match_info["id"], 16)))
    except ValueError:
        found = None
    if found is None:
        raise _not_found()
    return found


def _kept(why: str, deleted: Deleted) -> web.Response:
    return json_response(409, {"error": why, **msgspec.structs.asdict(deleted)})


def _not_found() -> web.HTTPNotFound:
    return web.HTTPNotFound(
        text='{"error":"there is no checkpoint with this id"}', content_type="application/json"
    )
