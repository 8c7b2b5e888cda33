"""The context checkpoints of a state that was just saved: the few that stay, and those that come back.

Owns: carrying out what `core.points` chose, on a file that is not committed yet. A file that cannot be
rewritten is kept as llama-server wrote it.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.core.keeping.points import Selection, donors_of, places_of, select_points
from proxy.core.model import Candidate, CheckpointKind, RuleKind
from proxy.core.slots import Known
from proxy.driver.contact.attachment import Attachment
from proxy.driver.saving.saver import SavedSlot
from proxy.driver.services import Services
from proxy.errors import StateFileMalformed
from proxy.store.state_files import StateFiles
from proxy.upstream.context_checkpoints import select_context_checkpoints
from proxy.upstream.state_file import StateFile, read_state_file


@dataclass(frozen=True, slots=True)
class Thinned:
    """A saved state with its context checkpoints chosen; `is_whole` if all that were wanted are there."""

    saved: SavedSlot
    is_whole: bool = True


class Thinner:
    """Rewrites the context checkpoints of saved states."""

    def __init__(self, services: Services, attachment: Attachment) -> None:
        self._services = services
        self._attachment = attachment

    async def thin(
        self, saved: SavedSlot, content: Known, kind: CheckpointKind, relatives: list[Candidate]
    ) -> Thinned:
        """Keep of a temporary file what is worth its bytes; raises StoreFault and OSError."""
        is_wanted = self._attachment.rule.kind is RuleKind.RESTORE_POINTS
        own = {c.restore_point: c.size_bytes for c in saved.state.context_checkpoints}
        if not is_wanted or not own:
            return Thinned(saved)
        donors = donors_of(relatives)
        selection = select_points(own, donors, places_of(content, kind), self._attachment.rates)
        if selection.points == own.keys():
            return Thinned(saved)
        try:
            state = await self._rewrite(saved.file_name, selection, relatives)
        except StateFileMalformed as fault:
            self._services.faults.record("thin", fault)
            return Thinned(saved, is_whole=False)
        await self._services.store.settle(saved.file_name, state.size_bytes)
        is_whole = selection.points <= set(state.restore_points)
        return Thinned(replace(saved, state=state), is_whole)

    async def _rewrite(
        self, file_name: str, selection: Selection, relatives: list[Candidate]
    ) -> StateFile:
        store = self._services.store
        donors = {c.checkpoint.id: c.checkpoint for c in relatives}
        with ExitStack() as kept:
            grafted: dict[int, Path] = {}
            for point, donor_id in selection.grafted.items():
                kept.enter_context(store.keep(donors[donor_id]))
                grafted[point] = store.files.path(donors[donor_id].file_name)
            return await asyncio.to_thread(_select, store.files, file_name, selection, grafted)


def _select(
    files: StateFiles, name: str, selection: Selection, grafted: dict[int, Path]
) -> StateFile:
    path = files.path(name)
    try:
        select_context_checkpoints(path, selection.own, grafted)
    except PermissionError:
        # llama-server runs under another uid: the directory is shared, its files are not.
        files.take_over(name)
        select_context_checkpoints(path, selection.own, grafted)
    return read_state_file(path)
