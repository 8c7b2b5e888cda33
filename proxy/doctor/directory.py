"""Tries out the shared directory: what this process may do there, and what llama-server writes into it."""

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.core.model import SlotId
from proxy.doctor.facts import DirectoryFacts, ProbeSaveFacts
from proxy.errors import StateFileMalformed, UpstreamRefused
from proxy.store.budget import Limits
from proxy.store.state_files import StateFiles
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.replies import Saved
from proxy.upstream.state_file import read_state_file

FreeBytes = Callable[[Path], int]


def free_bytes_of(path: Path) -> int:
    """Return how many bytes this user can still write on the disk of *path*."""
    return shutil.disk_usage(path).free


class ProbeFiles(StateFiles):
    """State files of which none is to stay: every name given out is remembered."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._issued: list[str] = []

    def new_temporary_name(self) -> str:
        name = super().new_temporary_name()
        self._issued.append(name)
        return name

    def remove_all(self) -> None:
        """Remove whatever lies there under the names given out, as far as that is allowed."""
        for name in self._issued:
            try:
                self.remove(name)
            except OSError:
                continue  # told as `left_behind` of the save that made it


@dataclass(frozen=True, slots=True)
class ProbeStore:
    """What saves of probes need: no index, and nothing is ever committed."""

    upstream: LlamaServer
    files: ProbeFiles

    @property
    def store(self) -> "ProbeStore":
        return self

    async def discard(self, temporary_name: str) -> None:
        """Delete a probe's file."""
        await asyncio.to_thread(self.files.remove, temporary_name)


def examine_directory(
    files: ProbeFiles, limits: Limits, free_bytes: FreeBytes = free_bytes_of
) -> DirectoryFacts:
    """Make, list, read and remove a file; look at permissions and free space."""
    path = files.directory
    facts = DirectoryFacts(
        path=str(path),
        own_uid=os.geteuid(),
        budget_bytes=limits.max_bytes,
        min_free_bytes=limits.min_free_bytes,
    )
    try:
        status = path.stat()
        facts = replace(
            facts,
            mode=status.st_mode & 0o7777,
            owner_uid=status.st_uid,
            free_bytes=free_bytes(path),
        )
        _use(files)
    except OSError as error:
        return replace(facts, problem=error.strerror or str(error))
    return facts


def _use(files: ProbeFiles) -> None:
    name = files.new_temporary_name()
    path = files.path(name)
    try:
        path.touch(mode=0o600, exist_ok=False)
        if name not in list(files.names()):
            raise OSError(0, "a file that was made there is not listed")
        path.read_bytes()
    finally:
        files.remove(name)


async def probe_save(
    upstream: LlamaServer, files: ProbeFiles, slot_id: SlotId
) -> tuple[Saved | None, ProbeSaveFacts]:
    """Save a slot that is believed to be empty; return the reply and what became of the file.

    Raises UpstreamFault if llama-server could not be asked.
    """
    name = files.new_temporary_name()
    try:
        saved = await upstream.save(slot_id, name)
    except UpstreamRefused as refusal:
        _try_to_remove(files, name)
        return None, ProbeSaveFacts(refusal=str(refusal))
    return saved, _examine_file(files, name, saved)


def _examine_file(files: ProbeFiles, name: str, saved: Saved) -> ProbeSaveFacts:
    path = files.path(name)
    try:
        status = path.stat()
    except OSError:
        return ProbeSaveFacts(left_behind=name)
    problem, is_whole = "", False
    try:
        state = read_state_file(path)
        is_whole = (len(state.tokens), status.st_size) == (saved.n_saved, saved.n_written)
    except StateFileMalformed:
        pass
    except OSError as error:
        problem = error.strerror or str(error)
    return ProbeSaveFacts(
        has_appeared=True,
        is_whole=is_whole,
        problem=problem,
        left_behind="" if _try_to_remove(files, name) else name,
        mode=status.st_mode & 0o7777,
        owner_uid=status.st_uid,
    )


def _try_to_remove(files: ProbeFiles, name: str) -> bool:
    try:
        files.remove(name)
    except OSError:
        return False
    return True
