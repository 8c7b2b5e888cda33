"""The store and the recent requests as operators see them.

Owns: the store as a tree, what a node of it sums up, which checkpoints a selection means, and the JSON that
the admin listener, the commands and the live page share (docs/monitoring.md, docs/live-page.md). Pure.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

import msgspec

from proxy.core.model import Checkpoint, Quarantine
from proxy.core.tokens import Namespace
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.compare import Divergence

# The tree: namespaces, their headers, the sessions of each, their checkpoints. What sessions share lies
# under the header itself. Nothing is kept between two looks: one level is one pass over the records, so
# that a level of 10,000 checkpoints takes milliseconds.

_LEVELS = ("store", "namespace", "header", "session")


Path = tuple[Namespace | int, ...]


class NodeId(Path):
    """Names a node above the checkpoints: its namespace, header and session, as its level has them."""

    __slots__ = ()

    def __new__(cls, *path: Namespace | int) -> "NodeId":
        return super().__new__(cls, path)

    @property
    def level(self) -> str:
        return _LEVELS[len(self)]

    @property
    def parent(self) -> "NodeId":
        return NodeId(*self[:-1])

    def __str__(self) -> str:
        return "/".join(i.hex() if isinstance(i, bytes) else f"{i:016x}" for i in self)


STORE = NodeId()


def parse_node_id(text: str) -> NodeId:
    """Return what `str` of a node's id was made from; raises ValueError."""
    if not text:
        return STORE
    namespace, *numbers = text.split("/")
    if len(namespace) != 32 or len(numbers) > 2:
        raise ValueError(f"{text!r} is not the id of a node")
    return NodeId(Namespace(bytes.fromhex(namespace)), *(int(number, 16) for number in numbers))


def parent_of(checkpoint: Checkpoint) -> Path:
    """Return the path of the node that a checkpoint lies directly under."""
    family = checkpoint.family
    path = checkpoint.namespace, family.header_id
    return (*path, family.session_id) if family.session_id else path


def under(node_id: NodeId, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints that lie somewhere under a node."""
    n_ids = len(node_id)
    return [c for c in checkpoints if parent_of(c)[:n_ids] == node_id]


class ListedNode(msgspec.Struct, frozen=True):
    """A node above the checkpoints; what it counts are all checkpoints under it.

    `n_tokens` is the length of a header; of a session that of its longest checkpoint; else 0. `is_served`
    says whether the model that llama-server serves now can use them, and `model` what theirs is called;
    None if that is not known.
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


def node_of(
    node_id: NodeId,
    checkpoints: Collection[Checkpoint],
    names: Mapping[Namespace, str],
    served: Collection[Namespace],
) -> ListedNode:
    """Return the node of an id; *checkpoints* are all that lie under it.

    *names* are those of the models of namespaces, *served* the namespaces of the model that is served now.
    """
    n_ids, namespace = len(node_id), node_id[0] if node_id else None
    lengths = {
        "header": [c.header for c in checkpoints],
        "session": [c.n_tokens for c in checkpoints],
    }
    children = {p[: n_ids + 1] if len(p := parent_of(c)) > n_ids else c.id for c in checkpoints}
    return ListedNode(
        id=str(node_id),
        parent=str(node_id.parent) if node_id else None,
        level=node_id.level,
        n_tokens=max(lengths.get(node_id.level, ()), default=0),
        n_checkpoints=len(checkpoints),
        n_children=len(children),
        n_pinned=sum([c.is_pinned for c in checkpoints]),
        size_bytes=sum([c.size_bytes for c in checkpoints]),
        created_at=min([c.created_at for c in checkpoints], default=0.0),
        last_used_at=max([c.last_used_at for c in checkpoints], default=0.0),
        n_restores=sum([c.n_restores for c in checkpoints]),
        is_served=namespace in served if served and node_id else None,
        model=names.get(namespace) if isinstance(namespace, bytes) else None,
    )


def children_of(
    node_id: NodeId,
    checkpoints: Iterable[Checkpoint],
    names: Mapping[Namespace, str],
    served: Collection[Namespace],
    offset: int = 0,
    limit: int | None = None,
) -> list[ListedNode | Checkpoint]:
    """Return what lies directly under a node; *checkpoints* are all that lie under it.

    Nodes come before checkpoints, the last used first; checkpoints by their length. Of the whole list, at
    most *limit* are returned from *offset* on, and only those are summed up.
    """
    groups = defaultdict[Path, list[Checkpoint]](list)
    leaves = list[Checkpoint]()
    for checkpoint in checkpoints:
        path = parent_of(checkpoint)
        (groups[path[: len(node_id) + 1]] if len(path) > len(node_id) else leaves).append(
            checkpoint
        )
    nodes = sorted(groups.items(), key=lambda group: -max([c.last_used_at for c in group[1]]))
    leaves.sort(key=lambda checkpoint: (checkpoint.n_tokens, checkpoint.created_at))
    everything: list[tuple[Path, list[Checkpoint]] | Checkpoint] = [*nodes, *leaves]
    children = everything[offset : None if limit is None else offset + limit]
    return [
        child
        if isinstance(child, Checkpoint)
        else node_of(NodeId(*child[0]), child[1], names, served)
        for child in children
    ]


@dataclass(frozen=True, slots=True)
class Selection:
    """What lies under `node` and was not used for `unused_seconds`; pinned ones only if that is said."""

    node: NodeId = STORE
    unused_seconds: float = 0.0
    with_pinned: bool = False


def select(
    selection: Selection, checkpoints: Iterable[Checkpoint], now: float
) -> tuple[list[Checkpoint], int]:
    """Return what a selection means, the least lately used first, and how many pinned ones stay."""
    unused_since = now - selection.unused_seconds
    found = sorted(
        (c for c in under(selection.node, checkpoints) if c.last_used_at <= unused_since),
        key=lambda checkpoint: checkpoint.last_used_at,
    )
    selected = [c for c in found if selection.with_pinned or not c.is_pinned]
    return selected, len(found) - len(selected)


class Deleted(msgspec.Struct, frozen=True):
    """What became of checkpoints that were to be deleted; a dry run says what would."""

    n_deleted: int = 0
    deleted_bytes: int = 0
    n_pinned: int = 0
    n_in_use: int = 0
    is_dry_run: bool = False


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


_LISTED_AS_THEY_ARE = {f.name for f in fields(Checkpoint)} & {
    *ListedCheckpoint.__struct_fields__
} - {"id", "kind"}


def list_checkpoint(
    checkpoint: Checkpoint,
    names: Mapping[Namespace, str],
    *,
    value_seconds: float | None = None,
    is_warm: bool | None = None,
) -> ListedCheckpoint:
    """Return a checkpoint as operators see it; *names* are those of the models of namespaces."""
    return ListedCheckpoint(
        id=f"{checkpoint.id:016x}",
        parent=str(NodeId(*parent_of(checkpoint))),
        kind=checkpoint.kind.value,
        n_header_tokens=checkpoint.header,
        is_warm=is_warm,
        value_seconds=None if value_seconds is None else round(value_seconds, 3),
        model=names.get(checkpoint.namespace),
        **{name: getattr(checkpoint, name) for name in _LISTED_AS_THEY_ARE},
    )


# Requests that have ended, and what the live page shows of the day: what was saved.


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One generation request, once it has ended.

    `at` is when it came, in seconds since 1970; the other times are since then. What is not known is null.
    `n_missed` tokens were evaluated although they were known; `cause` says why, `part` and `message`
    (counted from 0) where in the prompt. `server` says which llama-server, or model, served it where there
    are several. `stops` and `cuts` are in tokens; the cuts are header, turn start and branch, 0 where there
    is none. `alternatives` are the next best plans; what the chosen one was to cost stands before them.
    """

    id: str
    at: float
    path: str
    outcome: str
    cause: Cause
    part: PromptPart = PromptPart.NOWHERE
    message: int | None = None
    status: int | None = None
    why: str | None = None
    chosen: str | None = None
    server: str | None = None
    slot: int | None = None
    n_prompt: int | None = None
    expected: int | None = None
    confirmed: int | None = None
    evaluated: int | None = None
    n_missed: int = 0
    saved_seconds: float | None = None
    queued_seconds: float | None = None
    prepared_seconds: float | None = None
    first_token_seconds: float | None = None
    seconds: float
    expected_seconds: float | None = None
    displaced_seconds: float | None = None
    alternatives: tuple[str, ...] | None = None
    stops: tuple[int, ...] | None = None
    cuts: tuple[int, int, int] | None = None
    rewrites: tuple[str, ...] | None = None


class Nearest(msgspec.Struct, frozen=True, kw_only=True):
    """The known prompt that the request is compared with, and how many first tokens they share.

    `kind` is request, or state: one in a slot or file, from before the proxy was started. Then it has no
    `id`, and `n_tokens` is not known.
    """

    kind: str
    n_common: int
    id: str | None = None
    n_tokens: int | None = None
    age_seconds: float | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request reused what it did, and what would help."""

    request: RequestRecord
    says: str
    cure: str
    nearest: Nearest | None = None
    divergence: Divergence | None = None


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

    def after(self, record: RequestRecord) -> "Today":
        """Return the sums with one more request."""
        n_reused, is_known = record.confirmed or 0, record.confirmed is not None
        saved_seconds = self.saved_seconds
        if record.saved_seconds is not None:
            saved_seconds = round((saved_seconds or 0.0) + record.saved_seconds, 4)
        return Today(
            since=self.since,
            n_requests=self.n_requests + 1,
            n_reusing=self.n_reusing + (n_reused > 0),
            n_prompt=self.n_prompt + (record.n_prompt or 0) * is_known,
            n_reused=self.n_reused + n_reused,
            n_restored=self.n_restored + n_reused * (record.chosen == "restore"),
            n_missed=self.n_missed + record.n_missed,
            saved_seconds=saved_seconds,
        )
