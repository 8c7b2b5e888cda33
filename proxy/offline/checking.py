"""Holds the index against the files, all of both, and mends what differs.

A proxy does a quick form of this whenever it starts; this one reads every byte.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from proxy.core.model import Checkpoint
from proxy.core.prefix import hash_prefixes
from proxy.errors import StateFileMalformed
from proxy.offline.store import OfflineStore
from proxy.upstream.state_file import read_state_file

Note = Callable[[int], object]


class ProblemKind(StrEnum):
    """What can be wrong, in the words of a report."""

    FILE_GONE = "the file of a checkpoint is gone"
    FILE_UNREADABLE = "the file of a checkpoint cannot be read"
    FILE_CHANGED = "the file of a checkpoint is not what was saved"
    TOKENS_GONE = "the tokens of a checkpoint are gone"
    TOKENS_DIFFER = "a file holds other tokens than the index says"
    NOT_FOUND = "a checkpoint would not be found"
    FILE_WITHOUT_ENTRY = "a file that no entry names"
    STALE_PREFIXES = "entries that lead to no checkpoint"


CURES = {
    ProblemKind.FILE_GONE: "its entry is removed",
    ProblemKind.FILE_UNREADABLE: "it is left alone: see who owns it, and its mode",
    ProblemKind.FILE_CHANGED: "file and entry are removed",
    ProblemKind.TOKENS_GONE: "file and entry are removed",
    ProblemKind.TOKENS_DIFFER: "file and entry are removed",
    ProblemKind.NOT_FOUND: "its entries are made anew",
    ProblemKind.FILE_WITHOUT_ENTRY: "it is removed",
    ProblemKind.STALE_PREFIXES: "they are made anew",
}
"""What `mend` does about each."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong, and the checkpoint or file that it is wrong with."""

    kind: ProblemKind
    name: str
    size_bytes: int = 0


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
    problems = [
        Problem(kind, checkpoint.file_name, checkpoint.size_bytes)
        for checkpoint in checkpoints
        if (kind := _problem_of(store, checkpoint, note))
    ]
    named = {checkpoint.file_name for checkpoint in checkpoints}
    orphans = [name for name in sorted(store.files.names()) if name not in named]
    problems += [
        Problem(ProblemKind.FILE_WITHOUT_ENTRY, name, store.files.size_bytes(name))
        for name in orphans
    ]
    if len(problems) == len(orphans):  # otherwise they are made anew in any case
        problems += _stale_prefixes(store, checkpoints)
    return Examined(len(checkpoints), sum(c.size_bytes for c in checkpoints), tuple(problems))


def _problem_of(store: OfflineStore, checkpoint: Checkpoint, note: Note) -> ProblemKind | None:
    name = checkpoint.file_name
    try:
        is_same = store.files.checksum(name) == checkpoint.checksum
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
    tokens = store.index.tokens(checkpoint.id)
    if tokens is None or len(tokens) != checkpoint.n_tokens:
        return ProblemKind.TOKENS_GONE
    if tokens != in_file:
        return ProblemKind.TOKENS_DIFFER
    hashes = hash_prefixes(checkpoint.namespace, tokens)
    return ProblemKind.NOT_FOUND if store.index.n_missing(checkpoint.id, hashes) else None


def _stale_prefixes(store: OfflineStore, checkpoints: list[Checkpoint]) -> Iterator[Problem]:
    n_expected = 0
    for checkpoint in checkpoints:
        tokens = store.index.tokens(checkpoint.id)
        if tokens is not None:
            hashes = hash_prefixes(checkpoint.namespace, tokens)
            n_expected += len(hashes) - store.index.n_missing(checkpoint.id, hashes)
    n_stale = store.index.n_prefixes() - n_expected
    if n_stale > 0:
        yield Problem(ProblemKind.STALE_PREFIXES, f"{n_stale} entries")


def mend(store: OfflineStore, problems: tuple[Problem, ...]) -> None:
    """Do about each problem what CURES says; raises StoreFault or OSError."""
    by_name = {checkpoint.file_name: checkpoint for checkpoint in store.checkpoints()}
    for problem in problems:
        match problem.kind:
            case ProblemKind.FILE_WITHOUT_ENTRY:
                store.files.remove(problem.name)
            case ProblemKind.NOT_FOUND | ProblemKind.STALE_PREFIXES | ProblemKind.FILE_UNREADABLE:
                continue
            case _:
                store.remove(by_name[problem.name])
    kinds = {problem.kind for problem in problems}
    if kinds - {ProblemKind.FILE_WITHOUT_ENTRY}:
        _enter_again(store)


def _enter_again(store: OfflineStore) -> None:
    """Make the prefixes of all checkpoints anew: where tokens are gone, nobody knows which they were."""
    store.index.replace_prefixes(
        [
            (checkpoint.id, hash_prefixes(checkpoint.namespace, store.tokens(checkpoint)))
            for checkpoint in store.checkpoints()
        ]
    )
