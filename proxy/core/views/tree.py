"""The store as people look at it: namespaces, their headers, the sessions of each, their checkpoints.

Owns: which node a checkpoint lies under, and what a node sums up. Pure. Nothing is kept between two
looks: one level is one pass over the records, so that a level of 10,000 checkpoints takes milliseconds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from operator import attrgetter

from proxy.core.model import Checkpoint
from proxy.core.prefix import Namespace

_Key = Namespace | int
"""What checkpoints that lie under the same child have in common; negative if it is a checkpoint."""


class Level(StrEnum):
    """How deep a node lies."""

    STORE = "store"
    NAMESPACE = "namespace"
    HEADER = "header"
    SESSION = "session"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class NodeId:
    """Names a node above the checkpoints: as much of this as its level has."""

    namespace: Namespace | None = None
    header_id: int | None = None
    session_id: int | None = None

    @property
    def level(self) -> Level:
        if self.namespace is None:
            return Level.STORE
        if self.header_id is None:
            return Level.NAMESPACE
        return Level.HEADER if self.session_id is None else Level.SESSION

    @property
    def parent(self) -> "NodeId":
        if self.session_id is not None:
            return NodeId(self.namespace, self.header_id)
        return STORE if self.header_id is None else NodeId(self.namespace)

    def __str__(self) -> str:
        parts = [self.namespace.hex()] if self.namespace is not None else []
        parts += [f"{i:016x}" for i in (self.header_id, self.session_id) if i is not None]
        return "/".join(parts)

    def child(self, key: _Key) -> "NodeId | None":
        """Return the id of the child that groups checkpoints by *key*; None if it is a checkpoint."""
        if isinstance(key, bytes):
            return NodeId(Namespace(key))
        if self.level is Level.NAMESPACE:
            return NodeId(self.namespace, key)
        return NodeId(self.namespace, self.header_id, key) if key > 0 else None


STORE = NodeId()


def parse_node_id(text: str) -> NodeId:
    """Return what `str` of a node's id was made from; raises ValueError."""
    if not text:
        return STORE
    namespace, *numbers = text.split("/")
    if len(namespace) != 32 or len(numbers) > 2:
        raise ValueError(f"{text!r} is not the id of a node")
    ids = [int(number, 16) for number in numbers] + [None, None]
    return NodeId(Namespace(bytes.fromhex(namespace)), ids[0], ids[1])


@dataclass(frozen=True, slots=True)
class Node:
    """A node above the checkpoints and what lies under it.

    `n_tokens` is the length of a header; of a session that of its longest checkpoint; else 0.
    """

    id: NodeId
    n_tokens: int
    n_checkpoints: int
    n_children: int
    n_pinned: int
    size_bytes: int
    created_at: float
    last_used_at: float
    n_restores: int


def under(node_id: NodeId, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints that lie somewhere under a node."""
    found, (namespace, header_id, session_id) = list(checkpoints), astuple(node_id)
    if namespace is not None:
        found = [c for c in found if c.namespace == namespace]
    if header_id is not None:
        found = [c for c in found if c.family.header_id == header_id]
    if session_id is not None:
        found = [c for c in found if c.family.session_id == session_id]
    return found


def node_of(node_id: NodeId, checkpoints: Sequence[Checkpoint]) -> Node:
    """Return the node of an id; *checkpoints* are all that lie under it."""
    return Node(
        node_id,
        _n_tokens(node_id.level, checkpoints),
        len(checkpoints),
        len(set(map(_KEYS[node_id.level], checkpoints))),
        sum([c.is_pinned for c in checkpoints]),
        sum([c.size_bytes for c in checkpoints]),
        min([c.created_at for c in checkpoints], default=0.0),
        max([c.last_used_at for c in checkpoints], default=0.0),
        sum([c.n_restores for c in checkpoints]),
    )


def children_of(
    node_id: NodeId, checkpoints: Iterable[Checkpoint], offset: int = 0, limit: int | None = None
) -> list[Node | Checkpoint]:
    """Return what lies directly under a node; *checkpoints* are all that lie under it.

    Nodes come before checkpoints, the last used first; checkpoints by their length. Of the whole list, at
    most *limit* are returned from *offset* on, and only those are summed up.
    """
    key_of = _KEYS[node_id.level]
    groups: defaultdict[_Key, list[Checkpoint]] = defaultdict(list)
    for checkpoint in checkpoints:
        groups[key_of(checkpoint)].append(checkpoint)
    end = None if limit is None else offset + limit
    return [
        group[0] if (child := node_id.child(key)) is None else node_of(child, group)
        for key, group in sorted(groups.items(), key=_rank)[offset:end]
    ]


def _rank(group: tuple[_Key, Sequence[Checkpoint]]) -> tuple[bool, float, float]:
    key, checkpoints = group
    if isinstance(key, int) and key < 0:
        return True, checkpoints[0].n_tokens, checkpoints[0].created_at
    return False, -max([c.last_used_at for c in checkpoints]), 0.0


_KEYS: dict[Level, Callable[[Checkpoint], _Key]] = {
    Level.STORE: attrgetter("namespace"),
    Level.NAMESPACE: attrgetter("family.header_id"),
    Level.HEADER: lambda checkpoint: checkpoint.family.session_id or -checkpoint.id,
    Level.SESSION: lambda checkpoint: -checkpoint.id,
}


def _n_tokens(level: Level, checkpoints: Iterable[Checkpoint]) -> int:
    match level:
        case Level.HEADER:
            return max([c.header for c in checkpoints], default=0)
        case Level.SESSION:
            return max([c.n_tokens for c in checkpoints], default=0)
        case _:
            return 0
