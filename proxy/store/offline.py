"""A store that no proxy uses: opened, checked and mended."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec

from proxy.core.model import Checkpoint
from proxy.core.tokens import Namespace, TokenIds, hash_prefixes
from proxy.errors import IndexDamaged, StateFileMalformed, StoreFault
from proxy.llama.state_file import read_state_file
from proxy.store import opening
from proxy.store.files import StateFiles
from proxy.store.index import Index
from proxy.store.known_models import model_names
from proxy.store.rebuilding import (
    Lost,
    Rebuild,
    open_or_renew,
    read_sidecar,
    rebuild_at_once,
    states_without_entry,
    write_missing_sidecars,
    write_sidecar,
)
from proxy.store.writing import NewState, commit_state

# A store that no proxy uses, opened to be looked at and changed.
#
# Opening it removes and repairs nothing, unlike a proxy's opening; it is locked against proxies
# meanwhile.


@dataclass(frozen=True, slots=True)
class OfflineStore:
    """The index and the state files of one directory."""

    index: Index
    files: StateFiles
    rebuild: Rebuild | None = None
    """What opening it has mended."""

    def checkpoints(self) -> list[Checkpoint]:
        return self.index.all()

    def model_names(self) -> dict[Namespace, str]:
        """Return what the model of each namespace is called, as far as that is known."""
        return model_names(self.index)

    def get(self, checkpoint_id: str) -> Checkpoint:
        """Return a checkpoint by its id in hex; raises StoreFault if it is not there."""
        for checkpoint in self.index.all():
            if checkpoint.id == int(checkpoint_id, 16):
                return checkpoint
        raise StoreFault(f"there is no checkpoint {checkpoint_id}")

    def tokens(self, checkpoint: Checkpoint) -> TokenIds:
        """Return the tokens of a checkpoint; raises StoreFault if the index has lost them."""
        tokens = self.index.tokens(checkpoint.id)
        if tokens is None or len(tokens) != checkpoint.n_tokens:
            raise StoreFault(f"the tokens of {checkpoint.file_name} are gone: run check --fix")
        return tokens

    def pin(self, checkpoint: Checkpoint, *, is_pinned: bool) -> None:
        opening.rewrite(self.index, self.files, [replace(checkpoint, is_pinned=is_pinned)])

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint, its entry first."""
        opening.remove(self.index, self.files, checkpoint)

    def commit(self, state: NewState) -> Checkpoint:
        """Seal a state's file and enter it, as a proxy does; raises StoreFault or OSError."""
        hashes = hash_prefixes(state.namespace, state.tokens)
        return commit_state(self.index, self.files, state, hashes, ())[0]


@contextmanager
def open_offline(
    directory: Path, *, may_be_new: bool = False, mends_index: bool = False
) -> Iterator[OfflineStore]:
    """Lock and open the store in *directory*; a damaged index is only mended if *mends_index*.

    Raises StoreLocked if a proxy has it, StoreFault if there is none or it cannot be read, IndexDamaged if
    the index has to be mended.
    """
    path, files = directory / "index", StateFiles(directory)
    is_new = not (path / "data.mdb").exists()
    if is_new and not may_be_new and not any(directory.glob("lpc-*.state")):
        raise StoreFault(f"there is no store in {directory}: no proxy has ever used it")
    descriptor = opening.lock(directory)
    try:
        index = open_or_renew(path, files) if mends_index else _open_whole(path, files)
        try:
            yield OfflineStore(index, files, rebuild_at_once(index, files))
        finally:
            index.close()
    finally:
        os.close(descriptor)


def _open_whole(path: Path, files: StateFiles) -> Index:
    """Open an index that has everything; raises IndexDamaged and leaves it as it is."""
    if not (path / "data.mdb").exists() and any(states_without_entry(files, set())):
        raise IndexDamaged(path, "it is gone")
    index = Index(path)
    flaw = index.inconsistency()
    if not flaw and (reason := index.rebuild_reason) is not None:
        named = {checkpoint.file_name for checkpoint in index.all()}
        flaw = reason if states_without_entry(files, named) else ""
    if flaw:
        index.close()
        raise IndexDamaged(path, flaw)
    return index


# Holds the index against the files, all of both, and mends what differs.
#
# A proxy compares sizes when it starts, and verifies a file before it is used; this reads every byte.


Note = Callable[[int], object]


class ProblemKind(StrEnum):
    """What can be wrong, in the words of a report."""

    FILE_GONE = "the file of a checkpoint is gone"
    FILE_UNREADABLE = "the file of a checkpoint cannot be read"
    FILE_CHANGED = "the file of a checkpoint is not what was saved"
    MADE_OF_CHANGED = "a checkpoint may stem from one that is not what was saved"
    TOKENS_DIFFER = "a file holds other tokens than the index says"
    NOT_FOUND = "a checkpoint would not be found"
    RECORD_GONE = "the record beside a state is gone or damaged"
    FILE_WITHOUT_ENTRY = "a file that no entry names"
    VALUE_UNREADABLE = "a value in the index that cannot be read"
    INDEX_DAMAGED = "the index is damaged"
    STATE_LOST = "a state that cannot be entered again"


CURES = {
    ProblemKind.FILE_GONE: "its entry is removed",
    ProblemKind.FILE_UNREADABLE: "it is left alone: see who owns it, and its mode",
    ProblemKind.FILE_CHANGED: "file and entry are removed",
    ProblemKind.MADE_OF_CHANGED: "file and entry are removed",
    ProblemKind.TOKENS_DIFFER: "the index is made anew from the states",
    ProblemKind.NOT_FOUND: "the index is made anew from the states",
    ProblemKind.RECORD_GONE: "it is written again",
    ProblemKind.FILE_WITHOUT_ENTRY: "it is removed",
    ProblemKind.VALUE_UNREADABLE: "it is removed",
    ProblemKind.INDEX_DAMAGED: "it is made anew from the states",
    ProblemKind.STATE_LOST: "it is removed",
}
"""What `mend` does about each."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong, and the checkpoint or file that it is wrong with."""

    kind: ProblemKind
    name: str
    size_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """What was looked at, and what is wrong with it."""

    n_checkpoints: int
    size_bytes: int
    problems: tuple[Problem, ...]

    @property
    def is_curable(self) -> bool:
        return all(problem.kind is not ProblemKind.FILE_UNREADABLE for problem in self.problems)


def examine(store: OfflineStore, note: Note) -> Examined:
    """Look at all entries and files; *note* is told how many bytes were read. Raises StoreFault."""
    checkpoints = store.checkpoints()
    kinds = {c: kind for c in checkpoints if (kind := _problem_of(store, c, note))}
    changed = [c for c, kind in kinds.items() if kind is ProblemKind.FILE_CHANGED]
    for checkpoint in checkpoints:
        if any(checkpoint.may_stem_from(damaged) for damaged in changed):
            kinds.setdefault(checkpoint, ProblemKind.MADE_OF_CHANGED)
    problems = _mended_by_opening(store.rebuild)
    problems += [Problem(kind, c.file_name, c.size_bytes) for c, kind in kinds.items()]
    told = {problem.name for problem in problems}
    orphans = store.files.unnamed(told | {checkpoint.file_name for checkpoint in checkpoints})
    problems += [
        Problem(ProblemKind.FILE_WITHOUT_ENTRY, name, store.files.size_bytes(name))
        for name in orphans
    ]
    problems += [
        Problem(ProblemKind.VALUE_UNREADABLE, ascii(name))
        for name in store.index.unreadable_values()
    ]
    return Examined(len(checkpoints), sum(c.size_bytes for c in checkpoints), tuple(problems))


def _problem_of(store: OfflineStore, checkpoint: Checkpoint, note: Note) -> ProblemKind | None:
    name = checkpoint.file_name
    try:
        is_same = store.files.is_intact(name, checkpoint.content)
        note(checkpoint.size_bytes)
        if not is_same:
            return ProblemKind.FILE_CHANGED
        in_file = read_state_file(store.files.path(name)).tokens
    except FileNotFoundError:
        return ProblemKind.FILE_GONE
    except OSError:
        return ProblemKind.FILE_UNREADABLE
    except StateFileMalformed:
        return ProblemKind.FILE_CHANGED
    if store.index.tokens(checkpoint.id) != in_file:
        return ProblemKind.TOKENS_DIFFER
    if store.index.n_missing(checkpoint.id, hash_prefixes(checkpoint.namespace, in_file)):
        return ProblemKind.NOT_FOUND
    return None if read_sidecar(store.files, name) else ProblemKind.RECORD_GONE


def _mended_by_opening(rebuild: Rebuild | None) -> list[Problem]:
    """Return what was wrong with an index that was made anew, and the states that are lost by that."""
    if rebuild is None:
        return []
    lost = [
        Problem(
            ProblemKind.FILE_UNREADABLE if why is Lost.UNREADABLE else ProblemKind.STATE_LOST,
            name,
            detail=why,
        )
        for name, why in rebuild.lost.items()
    ]
    return [Problem(ProblemKind.INDEX_DAMAGED, "index", detail=rebuild.reason), *lost]


def mend(store: OfflineStore, problems: tuple[Problem, ...]) -> None:
    """Do about each problem what CURES says; raises StoreFault or OSError."""
    by_name = {checkpoint.file_name: checkpoint for checkpoint in store.checkpoints()}
    for problem in problems:
        match problem.kind:
            case ProblemKind.FILE_WITHOUT_ENTRY:
                store.files.remove(problem.name)
            case ProblemKind.FILE_GONE | ProblemKind.FILE_CHANGED | ProblemKind.MADE_OF_CHANGED:
                store.remove(by_name[problem.name])
            case ProblemKind.RECORD_GONE:
                write_sidecar(store.index, store.files, by_name[problem.name])
    for name in store.index.unreadable_values():
        store.index.delete_value(name)
    if {ProblemKind.TOKENS_DIFFER, ProblemKind.NOT_FOUND} & {p.kind for p in problems}:
        write_missing_sidecars(store.index, store.files, store.checkpoints())
        store.index.begin_rebuild("entries differ from the states")
        rebuild_at_once(store.index, store.files)
