"""Takes checkpoints out of a file into a store, if the model is the one that they are of.

Nothing in the file is believed: a state must have its checksum and hold the tokens that it is entered for,
since it would be restored for them.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from proxy.core.model import Checkpoint, Cuts
from proxy.core.prefix import Namespace, TokenIds, hash_prefixes, tokens_from_bytes
from proxy.errors import StateFileMalformed
from proxy.offline.bundle import (
    FORMAT_VERSION,
    MANIFEST,
    BundleRefused,
    Hashing,
    Manifest,
    Note,
    member_names,
)
from proxy.offline.models import introduce, knows_models, namespace_of
from proxy.offline.store import OfflineStore
from proxy.store.new_state import NewState
from proxy.upstream.state_file import read_state_file


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the checkpoints in a file."""

    entered: tuple[Checkpoint, ...]
    n_already_there: int
    is_new_model: bool


class Bundle:
    """An opened file of checkpoints."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        try:
            self.manifest = msgspec.json.decode(self._next(MANIFEST).read(), type=Manifest)
        except msgspec.DecodeError as error:
            raise BundleRefused(f"its manifest cannot be read: {error}") from error
        if self.manifest.format != FORMAT_VERSION:
            raise BundleRefused(
                f"it has format {self.manifest.format}, this version reads {FORMAT_VERSION}"
            )

    def states(self) -> Iterator[tuple[Checkpoint, TokenIds, IO[bytes]]]:
        """Yield each checkpoint with its tokens and the file of its state, which is to be read at once."""
        for checkpoint in self.manifest.checkpoints:
            tokens_name, state_name = member_names(checkpoint)
            try:
                tokens = tokens_from_bytes(self._next(tokens_name).read())
            except ValueError as error:
                raise BundleRefused(f"{tokens_name}: {error}") from error
            yield checkpoint, tokens, self._next(state_name)

    def _next(self, name: str) -> IO[bytes]:
        head = self._tar.next()
        file = self._tar.extractfile(head) if head and head.name == name and head.isreg() else None
        if file is None:
            raise BundleRefused(f"it is not what `export` writes: {name} is missing")
        return file


def import_checkpoints(
    store: OfflineStore, file: Path, note: Note, *, may_be_other_model: bool = False
) -> Imported:
    """Enter the checkpoints of *file*; raises BundleRefused, StoreFault or OSError.

    A model that this store has not met is refused if it knows others, unless *may_be_other_model*. What was
    entered before a fault stays: each checkpoint is whole by itself.
    """
    try:
        with tarfile.open(file, "r:") as tar:
            bundle = Bundle(tar)
            owner = bundle.manifest.owner
            is_new = namespace_of(store.index, owner) is None
            if is_new and knows_models(store.index) and not may_be_other_model:
                raise BundleRefused(
                    "it is of another model, quantization, adapter or slot file version than those "
                    "that this directory was used with, or its model answers differently here"
                )
            namespace = introduce(store.index, owner)
            entered = [_enter(store, namespace, *state, note) for state in bundle.states()]
    except tarfile.TarError as error:
        raise BundleRefused(f"it is not what `export` writes: {error}") from error
    new = tuple(checkpoint for checkpoint in entered if checkpoint is not None)
    return Imported(new, len(entered) - len(new), is_new)


def _enter(
    store: OfflineStore,
    namespace: Namespace,
    record: Checkpoint,
    tokens: TokenIds,
    state: IO[bytes],
    note: Note,
) -> Checkpoint | None:
    """Enter one checkpoint; None if the store has one of the same tokens."""
    if _has(store, namespace, tokens):
        note(record.size_bytes)
        return None
    name = store.files.new_temporary_name()
    try:
        with store.files.path(name).open("xb") as target:
            reader = Hashing(state, note)
            reader.copy_to(target)
        if reader.checksum != record.checksum:
            raise BundleRefused("a state in it is damaged")
        return store.commit(_new_state(store, name, namespace, record, tokens))
    finally:
        store.files.remove(name)


def _new_state(
    store: OfflineStore, name: str, namespace: Namespace, record: Checkpoint, tokens: TokenIds
) -> NewState:
    """Return what is to be committed, as far as the state file itself bears it out."""
    try:
        state = read_state_file(store.files.path(name))
    except StateFileMalformed as error:
        raise BundleRefused(f"a state in it is none: {error}") from error
    if state.tokens != tokens or not tokens:
        raise BundleRefused("a state in it holds other tokens than it says")
    return NewState(
        name,
        namespace,
        record.kind,
        tokens,
        state.restore_points,
        state.has_every_position,
        cuts=Cuts(header=record.header, turn_start=record.turn_start),
        n_prompt=record.n_prompt,
        marks=record.marks,
        family=record.family,
    )


def _has(store: OfflineStore, namespace: Namespace, tokens: TokenIds) -> bool:
    found = store.index.reaching(hash_prefixes(namespace, tokens)[-1:])
    return any(store.index.tokens(checkpoint_id) == tokens for checkpoint_id in found)
