"""The admin listener's view of the store: its checkpoints and its tree."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from proxy.core.eviction import Present, Removal
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.tokens import Namespace
from proxy.errors import StoreFault
from proxy.explain.views import (
    STORE,
    Deleted,
    ListedCheckpoint,
    ListedNode,
    NodeId,
    Selection,
    children_of,
    list_checkpoint,
    node_of,
    parse_node_id,
    select,
    under,
)
from proxy.serving.process import NewestProcesses
from proxy.store.known_models import model_names
from proxy.store.store import CheckpointStore

# Answers of the admin listener in JSON, and who may not have them.


def json_response(status: int, content: Any) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(content), content_type="application/json"
    )


def refuse_foreign_pages(request: web.Request) -> None:
    """Raise HTTPForbidden if another site's page asks: browsers then send its Origin.

    They send the listener's own, too, when its page changes something; names that others can have are
    refused before (`visitors`).
    """
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2].lower() != request.host.lower():
        raise web.HTTPForbidden(text="not for pages of other sites")


# What all of the admin listener's views of the store share.
#
# Other sites' pages are refused. The listener is on loopback and has no password, so any page that an
# operator visits could otherwise reach it; browsers send an Origin with every request that changes
# something, and with every one that comes from another site's page.


_MAX_DIGITS = 18


def require_store(request: web.Request, store: CheckpointStore | None) -> CheckpointStore:
    """Return the store; raises 403 for a page of another site, 503 if there is no store."""
    refuse_foreign_pages(request)
    if store is None:
        raise web.HTTPServiceUnavailable(text="the store is not open")
    return store


def list_stored(
    checkpoint: Checkpoint, names: Mapping[Namespace, str], store: CheckpointStore, present: Present
) -> ListedCheckpoint:
    """Return a checkpoint as operators see it, with what only a running proxy knows."""
    return list_checkpoint(
        checkpoint,
        names,
        value_seconds=store.value_seconds(checkpoint, present),
        is_warm=store.is_warm(checkpoint),
    )


def whole_number(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a number from the query, *most* at most; raises 400 if it is none."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise web.HTTPBadRequest(text=f"{name} must be a whole number, not {text!r}")
    return min(int(text), most)


def is_asked_for(request: web.Request, name: str) -> bool:
    """Return whether a switch is on in the query: `name`, `name=1` or `name=true`."""
    text = request.query.get(name, "false").lower()
    if text not in ("", "1", "true", "0", "false"):
        raise web.HTTPBadRequest(text=f"{name} must be true or false, not {text!r}")
    return text in ("", "1", "true")


# The admin listener's view of the store: which checkpoints there are, pinning and deleting them.


_MAX_SECONDS = 1 << 40


class Checkpoints:
    """Lists, pins and deletes checkpoints."""

    def __init__(self, served: NewestProcesses, store: CheckpointStore | None) -> None:
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
        deleted = await self._delete(store, [checkpoint])
        if deleted.n_in_use:
            return _kept("it is in use; try again", deleted)
        return json_response(200, deleted)

    async def delete_selected(self, request: web.Request) -> web.Response:
        """Delete what lies under a node, was not used for so long, or with `all` everything."""
        store = require_store(request, self._opened_store)
        if store.rebuild_reason:  # what is not entered yet would come back
            raise web.HTTPServiceUnavailable(text="the index is made anew: try again in a while")
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
        selected, n_pinned = select(selection, store, time.time())
        if is_asked_for(request, "dry_run"):
            n_bytes = sum(c.size_bytes for c in selected)
            return json_response(200, Deleted(len(selected), n_bytes, n_pinned, 0, True))
        return json_response(200, await self._delete(store, selected, n_pinned))

    async def _delete(
        self, store: CheckpointStore, selected: Sequence[Checkpoint], n_pinned: int = 0
    ) -> Deleted:
        deleted: list[Checkpoint] = []
        try:
            for checkpoint in selected:
                if await store.remove(checkpoint, Removal.OPERATOR):
                    deleted.append(checkpoint)
        except StoreFault as fault:
            raise web.HTTPServiceUnavailable(text=str(fault)) from fault
        n_in_use = sum(store.get(c.id) is not None for c in selected)
        return Deleted(len(deleted), sum(c.size_bytes for c in deleted), n_pinned, n_in_use)


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


# The admin listener's tree of the store, one level at a time.


_LIMIT = 100
_MAX_LIMIT = 1000
_MAX_OFFSET = 1 << 31


class TreeLevel(msgspec.Struct, frozen=True):
    """A node, some of its children, and where the next ones begin (null at the end).

    `version` changes with the store: pages of one list belong together while it stays.
    """

    node: ListedNode
    children: list[ListedNode | ListedCheckpoint]
    next_offset: int | None
    version: int


class TreeView:
    """Shows the store as a tree."""

    def __init__(self, served: NewestProcesses, store: CheckpointStore | None) -> None:
        self._served = served
        self._opened_store = store

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/tree", self.level)]

    async def level(self, request: web.Request) -> web.Response:
        """Return the children of the node `parent`, of the store itself without one."""
        store = require_store(request, self._opened_store)
        limit = whole_number(request, "limit", _LIMIT, _MAX_LIMIT)
        offset = whole_number(request, "offset", 0, _MAX_OFFSET)
        try:
            node_id = parse_node_id(request.query.get("parent", ""))
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        level = self._level(store, node_id, offset, limit)
        if node_id != STORE and not level.node.n_checkpoints:
            raise web.HTTPNotFound(text="there is no checkpoint under this node")
        return json_response(200, level)

    def _level(self, store: CheckpointStore, node_id: NodeId, offset: int, limit: int) -> TreeLevel:
        names, present = model_names(store.index), self._served.present()
        checkpoints = under(node_id, store)
        known = names, present.rates_by
        node = node_of(node_id, checkpoints, *known)
        children = children_of(node_id, checkpoints, *known, offset, limit)
        end = offset + len(children)
        return TreeLevel(
            node,
            [
                list_stored(child, names, store, present)
                if isinstance(child, Checkpoint)
                else child
                for child in children
            ],
            end if end < node.n_children else None,
            store.version,
        )
