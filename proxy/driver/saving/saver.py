"""Saving a slot to a file: the call, the checks of what came of it, and the repair.

Owns: everything between llama-server's save and a file that is fit to be committed. Knows nothing of
the slot table; whoever calls holds the slot's lease. A file lives under a temporary name until it is
committed, so one that was left half checked or half repaired is garbage, and is swept as such.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from proxy.core.degradation import DegradationKind
from proxy.core.model import NO_CUTS, CheckpointKind, Cuts, SlotId
from proxy.core.prefix import Namespace
from proxy.core.slots import Content, Known
from proxy.driver.degradations import CannotCache
from proxy.errors import SaveRejected, UpstreamRefused
from proxy.store.new_state import NewState
from proxy.store.state_files import StateFiles
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.replies import Saved
from proxy.upstream.state_file import StateFile, read_state_file
from proxy.upstream.window_repair import NEEDED_BY_VERSIONS, repair_window

RewriteStateFile = Callable[[Path], None]
"""Applied to each file that llama-server saved, before it is read: how tests play older builds."""


def keep_as_saved(path: Path) -> None:
    """Leave a saved file as llama-server wrote it."""


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A checked temporary file, and how long llama-server took to write its bytes."""

    file_name: str
    state: StateFile
    n_written: int
    seconds: float

    def new_state(
        self, namespace: Namespace, kind: CheckpointKind, content: Content | None = None
    ) -> NewState:
        """Return what the store is to commit of a slot that was believed to hold *content*."""
        known = content if isinstance(content, Known) else None
        return NewState(
            self.file_name,
            namespace,
            kind,
            self.state.tokens,
            self.state.restore_points,
            self.state.has_every_position,
            cuts=Cuts(known.header, known.turn_start) if known else NO_CUTS,
            n_prompt=len(known.tokens) if known else 0,
            marks=known.marks if known else (),
        )


class TemporaryFiles(Protocol):
    """Where saved files live until they are committed or deleted: the store, or less than that."""

    @property
    def files(self) -> StateFiles: ...

    async def discard(self, temporary_name: str) -> None: ...


class SaverServices(Protocol):
    """What a save needs of `Services`."""

    @property
    def upstream(self) -> LlamaServer: ...

    @property
    def store(self) -> TemporaryFiles: ...


class Saver:
    """Has llama-server save slots."""

    def __init__(self, services: SaverServices, rewrite: RewriteStateFile) -> None:
        self._services = services
        self._rewrite = rewrite

    @asynccontextmanager
    async def saved(self, slot_id: SlotId) -> AsyncIterator[SavedSlot]:
        """Save a slot; the file is deleted when the block is left, unless it was committed there.

        Raises UpstreamFault, CannotCache if llama-server saves nothing that the proxy can read,
        SaveRejected if the file is not what the reply says, StateFileMalformed if it is no state file,
        StoreFault if there is no store.
        """
        store = self._services.store
        name = store.files.new_temporary_name()
        try:
            yield await self.save(slot_id, name)
        finally:
            await store.discard(name)

    async def save(self, slot_id: SlotId, name: str) -> SavedSlot:
        """Save a slot to a file that the caller deletes or commits; raises as `saved` does."""
        began = time.monotonic()
        try:
            reply = await self._services.upstream.save(slot_id, name)
        except UpstreamRefused as refusal:
            if refusal.status == 501:
                raise CannotCache(DegradationKind.NO_SLOT_SAVE_PATH) from refusal
            raise
        seconds = time.monotonic() - began
        state = await asyncio.to_thread(self._check, name, reply)
        return SavedSlot(name, state, reply.n_written, seconds)

    def _check(self, name: str, reply: Saved) -> StateFile:
        path = self._services.store.files.path(name)
        try:
            n_bytes = path.stat().st_size
            if n_bytes != reply.n_written:
                raise SaveRejected(f"wrote {reply.n_written} bytes, the file has {n_bytes}")
            self._rewrite(path)
            state = self._read(name)
        except FileNotFoundError as error:
            detail = f"nothing came to {path.parent}"
            raise CannotCache(DegradationKind.OTHER_DIRECTORY, detail) from error
        except OSError as error:
            detail = f"{path}: {error.strerror}"
            raise CannotCache(DegradationKind.FILES_UNREADABLE, detail) from error
        if len(state.tokens) != reply.n_saved:
            raise SaveRejected(f"saved {reply.n_saved} tokens, the file has {len(state.tokens)}")
        return state

    def _read(self, name: str) -> StateFile:
        path = self._services.store.files.path(name)
        state = read_state_file(path)
        if state.version in NEEDED_BY_VERSIONS and self._repair(name):
            return read_state_file(path)
        return state

    def _repair(self, name: str) -> bool:
        files = self._services.store.files
        try:
            return repair_window(files.path(name))
        except PermissionError:
            # llama-server runs under another uid: the directory is shared, its files are not.
            files.take_over(name)
            return repair_window(files.path(name))
