"""Which checkpoints an operator means, by what is said of them.

Owns: `Selection`. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.core.model import Checkpoint
from proxy.core.views.tree import STORE, NodeId, under


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
