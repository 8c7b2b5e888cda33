"""The one thread that writes, what it enters, and how much llama-server has written."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from proxy.core.model import (
    NO_CUTS,
    NO_FAMILY,
    Checkpoint,
    CheckpointId,
    CheckpointKind,
    Cuts,
    Family,
    FilePart,
)
from proxy.core.saving import WantedSave, Written, scarcity, why_refused
from proxy.core.tokens import Namespace, PrefixHash, TokenIds
from proxy.errors import WRITE_BUDGET, NoRoom, StoreFault
from proxy.store.files import FileStamp, StateFiles
from proxy.store.index import Index
from proxy.store.rebuilding import write_sidecar

# The one thread that writes: LMDB wants one writer, and what it did must be noted whoever still waits.


T = TypeVar("T")


class Writer:
    """Does one piece of work after the other, in the order in which they came."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-writer")

    def close(self) -> None:
        """Finish what is pending."""
        self._thread.shutdown(wait=True)

    async def write(
        self, work: Callable[[], T], *, then: Callable[[T], object] = lambda _: None
    ) -> T:
        """Do *work* on the thread and *then* on this one, even if the caller is cancelled.

        Raises StoreFault for any OSError.
        """
        written = asyncio.get_running_loop().run_in_executor(self._thread, work)
        written.add_done_callback(lambda w: w.exception() or then(w.result()))
        try:
            return await asyncio.shield(written)
        except OSError as error:
            raise StoreFault(str(error)) from error


# What llama-server was let write into the directory lately, kept in the index across restarts.


_NAME = "written"


class WriteLedger:
    """Counts the bytes of saved files, and refuses saves that are over the budget of a day."""

    def __init__(self, index: Index, max_bytes_per_day: int) -> None:
        self._index = index
        self._written = index.value(_NAME, Written) or Written()
        self.max_bytes_per_day = max_bytes_per_day
        self.on_write: Callable[[int], None] = lambda _: None

    @property
    def last_day_bytes(self) -> int:
        return self._written.last_day_bytes(time.time())

    @property
    def left_bytes(self) -> int | None:
        """How much may be written now; None if there is no limit."""
        return self.max_bytes_per_day - self.last_day_bytes if self.max_bytes_per_day else None

    @property
    def has_plenty(self) -> bool:
        """Whether so much of the budget is left that nothing is refused for its worth."""
        left_bytes = self.left_bytes
        return left_bytes is None or scarcity(left_bytes, self.max_bytes_per_day) == 0

    def require(self, wanted: WantedSave, pending_bytes: int) -> None:
        """Raise NoRoom if a save is not worth what is left of the budget."""
        budget, now = self.max_bytes_per_day, time.time()
        if refusal := why_refused(wanted, self._written, budget, now, pending_bytes):
            raise NoRoom(WRITE_BUDGET, refusal)

    def note(self, n_bytes: int, wanted: WantedSave) -> Callable[[], None]:
        """Count *n_bytes* that were written; return what writes the count to the index."""
        self._written = self._written.after(n_bytes, wanted, time.time())
        self.on_write(n_bytes)
        return partial(self._index.put_value, _NAME, self._written)


# From a checked temporary file to a checkpoint, in crash-safe order.


@dataclass(frozen=True, slots=True)
class NewState:
    """A checked temporary state file, about to become a checkpoint."""

    temporary_name: str
    namespace: Namespace
    kind: CheckpointKind
    tokens: TokenIds
    restore_points: tuple[int, ...]
    has_every_position: bool
    parts: tuple[FilePart, ...]
    cuts: Cuts = NO_CUTS
    n_prompt: int = 0
    marks: tuple[int, ...] = ()
    family: Family = NO_FAMILY
    ancestors: tuple[CheckpointId, ...] = ()


def commit_state(
    index: Index,
    files: StateFiles,
    state: NewState,
    hashes: Sequence[PrefixHash],
    touched: Sequence[Checkpoint],
) -> tuple[Checkpoint, FileStamp]:
    """Seal a state's file and enter it; records *touched* since the last commit go along.

    Raises StoreFault or OSError, and then neither file nor entry is left.
    """
    final_name = files.new_final_name()
    stamp = files.seal(state.temporary_name, final_name)
    now = time.time()
    checkpoint = Checkpoint(
        id=CheckpointId(int(final_name[4:20], 16) >> 1),
        namespace=state.namespace,
        kind=state.kind,
        n_tokens=len(state.tokens),
        restore_points=state.restore_points,
        has_every_position=state.has_every_position,
        file_name=final_name,
        size_bytes=stamp[1],
        created_at=now,
        last_used_at=now,
        header=state.cuts.header,
        turn_start=state.cuts.turn_start,
        n_prompt=state.n_prompt,
        marks=state.marks,
        family=state.family,
        parts=state.parts,
        verified_at=now,
        ancestors=state.ancestors,
    )
    try:
        write_sidecar(index, files, checkpoint)
        files.sync_directory()
        index.put(checkpoint, state.tokens, hashes)
    except (StoreFault, OSError):
        files.remove(final_name)
        raise
    with suppress(StoreFault):
        index.update(touched)
    return checkpoint, stamp
