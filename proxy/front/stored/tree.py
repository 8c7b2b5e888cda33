"""The admin listener's tree of the store, one level at a time."""

import msgspec
from aiohttp import web

from proxy.core.views.listing import ListedCheckpoint, ListedNode, list_node
from proxy.core.views.tree import STORE, Node, NodeId, children_of, node_of, parse_node_id, under
from proxy.driver.contact.known_models import model_names
from proxy.driver.served import Served
from proxy.front.json_answers import json_response
from proxy.front.stored.queries import list_stored, require_store, whole_number
from proxy.store.store import CheckpointStore

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


class Tree:
    """Shows the store as a tree."""

    def __init__(self, served: Served, store: CheckpointStore | None) -> None:
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
        node = list_node(node_of(node_id, checkpoints), names, present.namespaces)
        children = children_of(node_id, checkpoints, offset, limit)
        end = offset + len(children)
        return TreeLevel(
            node,
            [
                list_node(child, names, present.namespaces)
                if isinstance(child, Node)
                else list_stored(child, names, store, present)
                for child in children
            ],
            end if end < node.n_children else None,
            store.version,
        )
