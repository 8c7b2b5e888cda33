"""Checkpoints and the nodes above them as operators are told of them.

Owns: the names of their fields, which the admin listener, the commands and docs/operations.md share. Pure.
"""

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from proxy.core.model import Checkpoint
from proxy.core.prefix import Namespace
from proxy.core.views.tree import Level, Node, NodeId


class ListedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint as operators see it; `value_seconds` is what losing it would cost.

    Only a running proxy knows that, and whether its file is likely in memory. `model` is what the model was
    called when it was last served; None if that is not known.
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
