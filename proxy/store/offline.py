"""Opening, checking and mending a store that no proxy is using."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec

from proxy.core.model import Checkpoint
from proxy.core.tokens import hash_prefixes
from proxy.docstrings import docstrings_of_fields
from proxy.errors import StateFileMalformed, StoreFault
from proxy.llama.state_file import read_state_file
from proxy.store.directory import Lost, Rebuild, StoreDirectory

Note = Callable[[int], object]
"""Called with the number of bytes just read."""


@contextmanager
def open_offline(
    directory: Path, *, may_be_new: bool = False, mends_index: bool = False
) -> Iterator[StoreDirectory]:
    """Lock and open the store in *directory*; mend a damaged index only with *mends_index*.

    Nothing else is removed, unlike when a proxy opens the store. Raises StoreLocked if a proxy has the
    directory, StoreFault if there is no store or it cannot be read, IndexDamaged if the index has to be
    mended.
    """
    is_new = not (directory / "index" / "data.mdb").exists()
    if is_new and not may_be_new and not any(directory.glob("lpc-*.state")):
        raise StoreFault(f"there is no store in {directory}: no proxy has ever used it")
    with closing(StoreDirectory(directory, mends_index=mends_index, reads_all=True)) as store:
        yield store


class ProblemKind(StrEnum):
    """What can be wrong, in the words of a report; below each stands what `mend` does about it."""

    @property
    def cure(self) -> str:
        return _CURES[self.name][0]

    FILE_GONE = "the file of a checkpoint is gone"
    """its entry is removed"""
    FILE_UNREADABLE = "the file of a checkpoint cannot be read"
    """it is left alone: see who owns it, and its mode"""
    FILE_CHANGED = "the file of a checkpoint is not what was saved"
    """file and entry are removed"""
    MADE_OF_CHANGED = "a checkpoint may stem from one that is not what was saved"
    """it is removed"""
    TOKENS_DIFFER = "a file holds other tokens than the index says"
    """the index is made anew"""
    NOT_FOUND = "a checkpoint would not be found"
    """the index is made anew"""
    RECORD_GONE = "the record beside a state is gone or damaged"
    """it is written again"""
    FILE_WITHOUT_ENTRY = "a file that no entry names"
    """it is removed"""
    INDEX_DAMAGED = "the index is damaged"
    """it is made anew from the states"""
    STATE_LOST = "a state that cannot be entered again"
    """it is removed"""


_CURES = docstrings_of_fields(ProblemKind)


class Problem(msgspec.Struct, frozen=True):
    """One problem, and the name of the file concerned."""

    kind: ProblemKind
    name: str
    size_bytes: int = 0
    detail: str = ""


def examine(store: StoreDirectory, note: Note) -> list[Problem]:
    """Compare all index entries with all bytes of their files; call *note* with the bytes read.

    Returns the problems; raises StoreFault. A proxy only compares names when it starts, and verifies a file
    before the file is used.
    """
    checkpoints = store.checkpoints()
    kinds = {c: kind for c in checkpoints if (kind := _problem_of(store, c, note))}
    changed = [c for c, kind in kinds.items() if kind is ProblemKind.FILE_CHANGED]
    for checkpoint in checkpoints:
        if any(checkpoint.may_stem_from(damaged) for damaged in changed):
            kinds.setdefault(checkpoint, ProblemKind.MADE_OF_CHANGED)
    problems = _mended_by_opening(store.rebuild) if store.rebuild else []
    problems += [Problem(kind, c.file_name, c.size_bytes) for c, kind in kinds.items()]
    named = {c.file_name for c in checkpoints} | {problem.name for problem in problems}
    unnamed = {*store.files.names()} - named - {*map(store.files.sidecar_name, named)}
    kind = ProblemKind.FILE_WITHOUT_ENTRY
    return problems + [Problem(kind, n, store.files.size_bytes(n)) for n in sorted(unnamed)]


def _problem_of(store: StoreDirectory, checkpoint: Checkpoint, note: Note) -> ProblemKind | None:
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
    return None if store.read_sidecar(name) else ProblemKind.RECORD_GONE


def _mended_by_opening(rebuild: Rebuild) -> list[Problem]:
    """Return the damage of an index that was made anew, and the states lost by that."""
    problems = [Problem(ProblemKind.INDEX_DAMAGED, "index", detail=rebuild.reason)]
    for name, why in rebuild.lost.items():
        is_there = why is Lost.UNREADABLE
        kind = ProblemKind.FILE_UNREADABLE if is_there else ProblemKind.STATE_LOST
        problems.append(Problem(kind, name, detail=why))
    return problems


def mend(store: StoreDirectory, problems: Sequence[Problem]) -> None:
    """Apply the cure of each problem; raises StoreFault or OSError."""
    by_name = {checkpoint.file_name: checkpoint for checkpoint in store.checkpoints()}
    for problem in problems:
        match problem.kind:
            case ProblemKind.FILE_WITHOUT_ENTRY:
                store.files.remove(problem.name)
            case ProblemKind.FILE_GONE | ProblemKind.FILE_CHANGED | ProblemKind.MADE_OF_CHANGED:
                store.remove(by_name[problem.name])
            case ProblemKind.RECORD_GONE:
                store.write_sidecars([by_name[problem.name]])
    if {ProblemKind.TOKENS_DIFFER, ProblemKind.NOT_FOUND} & {p.kind for p in problems}:
        store.make_index_anew("entries differ from the states")
        store.rebuild = None  # `examine` reports only the damage found at opening
