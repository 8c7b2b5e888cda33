"""From a checked temporary file to a checkpoint, in crash-safe order."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from proxy.core.model import (
    NO_CUTS,
    NO_FAMILY,
    Checkpoint,
    CheckpointId,
    CheckpointKind,
    Cuts,
    Family,
)
from proxy.core.prefix import Namespace, PrefixHash, TokenIds
from proxy.errors import StoreFault
from proxy.store.index import Index
from proxy.store.state_files import StateFiles


@dataclass(frozen=True, slots=True)
class NewState:
    """A checked temporary state file, about to become a checkpoint."""

    temporary_name: str
    namespace: Namespace
    kind: CheckpointKind
    tokens: TokenIds
    restore_points: tuple[int, ...]
    has_every_position: bool
    cuts: Cuts = NO_CUTS
    n_prompt: int = 0
    marks: tuple[int, ...] = ()
    family: Family = NO_FAMILY


def commit(
    index: Index,
    files: StateFiles,
    state: NewState,
    hashes: Sequence[PrefixHash],
    touched: Sequence[Checkpoint],
) -> Checkpoint:
    """Seal a state's file and enter it; records *touched* since the last commit go along.

    Raises StoreFault or OSError, and then neither file nor entry is left.
    """
    final_name = files.new_final_name()
    facts = files.seal(state.temporary_name, final_name)
    now = time.time()
    checkpoint = Checkpoint(
        id=CheckpointId(int(final_name[4:20], 16) >> 1),
        namespace=state.namespace,
        kind=state.kind,
        n_tokens=len(state.tokens),
        restore_points=state.restore_points,
        has_every_position=state.has_every_position,
        file_name=final_name,
        size_bytes=facts.size_bytes,
        file_stamp=facts.stamp,
        checksum=facts.checksum,
        created_at=now,
        last_used_at=now,
        header=state.cuts.header,
        turn_start=state.cuts.turn_start,
        n_prompt=state.n_prompt,
        marks=state.marks,
        family=state.family,
    )
    try:
        index.put(checkpoint, state.tokens, hashes)
    except StoreFault:
        files.remove(final_name)
        raise
    with suppress(StoreFault):
        index.update(touched)
    return checkpoint
