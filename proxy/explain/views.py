"""The store and the recent requests as operators see them."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Literal

import msgspec

from proxy.core.model import Checkpoint, Quarantine
from proxy.core.tokens import Namespace
from proxy.explain.explanation import RequestRecord

# The store as people look at it: namespaces, their headers, the sessions of each, their checkpoints.
#
# Owns: which node a checkpoint lies under, and what a node sums up. Pure. Nothing is kept between two
# looks: one level is one pass over the records, so that a level of 10,000 checkpoints takes milliseconds.


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


# Which checkpoints an operator means, by what is said of them.
#
# Owns: `Selection`. Pure.


@dataclass(frozen=True, slots=True)
class Selection:
    """What lies under `node` and was not used for `unused_seconds`; pinned ones only if that is said."""

    node: NodeId = STORE
    unused_seconds: float = 0.0
    with_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Selected:
    """The checkpoints of a selection, and those that are left out because they are pinned."""

    checkpoints: tuple[Checkpoint, ...]
    pinned: tuple[Checkpoint, ...] = ()


def select(selection: Selection, checkpoints: Iterable[Checkpoint], now: float) -> Selected:
    """Return what a selection means, the least lately used first."""
    unused_since = now - selection.unused_seconds
    found = sorted(
        (c for c in under(selection.node, checkpoints) if c.last_used_at <= unused_since),
        key=lambda checkpoint: checkpoint.last_used_at,
    )
    if selection.with_pinned:
        return Selected(tuple(found))
    return Selected(
        tuple(c for c in found if not c.is_pinned), tuple(c for c in found if c.is_pinned)
    )


# Checkpoints and the nodes above them as operators are told of them.
#
# Owns: the names of their fields, which the admin listener, the commands and docs/operations.md share.
# Pure.


class ListedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint as operators see it; `value_seconds` is what losing it would cost.

    Only a running proxy knows that, and whether its file is likely in memory. `model` is what the model was
    called when it was last served; None if that is not known. `quarantine` says why it is never used again,
    and since when; None if it may be.
    """

    id: str
    parent: str
    kind: str
    n_tokens: int
    n_header_tokens: int
    restore_points: tuple[int, ...]
    size_bytes: int
    created_at: float
    last_used_at: float
    n_restores: int
    is_pinned: bool
    is_warm: bool | None = None
    value_seconds: float | None = None
    model: str | None = None
    quarantine: Quarantine | None = None
    level: Literal["checkpoint"] = "checkpoint"


class ListedNode(msgspec.Struct, frozen=True):
    """A node above the checkpoints; what it counts are all checkpoints under it.

    `is_served` says whether the model that llama-server serves now can use them, and `model` what theirs is
    called; None if that is not known.
    """

    id: str
    parent: str | None
    level: str
    n_tokens: int
    n_checkpoints: int
    n_children: int
    n_pinned: int
    size_bytes: int
    created_at: float
    last_used_at: float
    n_restores: int
    is_served: bool | None
    model: str | None = None


class Deleted(msgspec.Struct, frozen=True):
    """What became of checkpoints that were to be deleted; a dry run says what would."""

    n_deleted: int
    deleted_bytes: int
    n_pinned: int = 0
    n_in_use: int = 0
    is_dry_run: bool = False


def list_checkpoint(
    checkpoint: Checkpoint,
    names: Mapping[Namespace, str],
    *,
    value_seconds: float | None = None,
    is_warm: bool | None = None,
) -> ListedCheckpoint:
    """Return a checkpoint as operators see it; *names* are those of the models of namespaces."""
    family = checkpoint.family
    session_id = family.session_id or None
    return ListedCheckpoint(
        id=f"{checkpoint.id:016x}",
        parent=str(NodeId(checkpoint.namespace, family.header_id, session_id)),
        kind=checkpoint.kind.value,
        n_tokens=checkpoint.n_tokens,
        n_header_tokens=checkpoint.header,
        restore_points=checkpoint.restore_points,
        size_bytes=checkpoint.size_bytes,
        created_at=checkpoint.created_at,
        last_used_at=checkpoint.last_used_at,
        n_restores=checkpoint.n_restores,
        is_pinned=checkpoint.is_pinned,
        is_warm=is_warm,
        value_seconds=None if value_seconds is None else round(value_seconds, 3),
        model=names.get(checkpoint.namespace),
        quarantine=checkpoint.quarantine,
    )


def list_node(
    node: Node, names: Mapping[Namespace, str], served: Collection[Namespace]
) -> ListedNode:
    """Return a node as operators see it.

    *names* are those of the models of namespaces, *served* the namespaces of the model that is served now.
    """
    is_store = node.id.level is Level.STORE
    is_known = bool(served) and not is_store
    return ListedNode(
        id=str(node.id),
        parent=None if is_store else str(node.id.parent),
        level=node.id.level.value,
        n_tokens=node.n_tokens,
        n_checkpoints=node.n_checkpoints,
        n_children=node.n_children,
        n_pinned=node.n_pinned,
        size_bytes=node.size_bytes,
        created_at=node.created_at,
        last_used_at=node.last_used_at,
        n_restores=node.n_restores,
        is_served=node.id.namespace in served if is_known else None,
        model=names.get(node.id.namespace) if node.id.namespace else None,
    )


# What operators see at a glance: how requests are served, the slots, the queue, what was saved today.
#
# Owns: the JSON of /overview and /events (docs/live-page.md). Pure.


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """One slot; `n_tokens` and what follows it are 0 where its content is not known.

    `n_coming` is how long the prompt is that is being served there. `used_at` is when it was leased or
    given back, in seconds since 1970; null if that was before the proxy was started.
    """

    id: int
    state: str
    is_closing: bool = False
    n_tokens: int = 0
    n_header: int = 0
    n_unsaved: int = 0
    n_coming: int = 0
    used_at: float | None = None


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """A llama-server that the proxy is attached to; `n_ctx` is what one slot holds.

    `name` is the model where one address has several, else the address.
    """

    name: str
    build: str
    rule: str
    n_ctx: int
    slots: tuple[SlotView, ...]


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """The store; `version` changes with it."""

    n_checkpoints: int
    size_bytes: int
    max_bytes: int
    version: int


class Today(msgspec.Struct, frozen=True, kw_only=True):
    """What requests have reused since `since`: midnight, or when the proxy was started.

    Prompts that were not looked up are not counted in `n_prompt`. `saved_seconds` is measured; null while
    nothing was.
    """

    since: float
    n_requests: int = 0
    n_reusing: int = 0
    n_prompt: int = 0
    n_reused: int = 0
    n_restored: int = 0
    n_missed: int = 0
    saved_seconds: float | None = None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the proxy now, and the requests that have ended since the last look.

    `position` names the look: whoever says it next time gets only what came after it.
    """

    state: str
    since: str
    reasons: tuple[dict[str, str], ...]
    servers: tuple[ServerView, ...]
    n_waiting: int
    store: StoreView | None
    today: Today
    keeps: str
    position: str = ""
    requests: tuple[RequestRecord, ...] = ()
