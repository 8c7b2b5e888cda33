"""A store that no proxy uses, opened to be looked at and changed.

Opening it removes and repairs nothing, unlike a proxy's opening; it is locked against proxies meanwhile.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.core.model import Checkpoint
from proxy.core.prefix import Namespace, TokenIds, hash_prefixes
from proxy.driver.contact.known_models import model_names
from proxy.errors import StoreFault
from proxy.store import new_state, opening
from proxy.store.index import Index
from proxy.store.new_state import NewState
from proxy.store.state_files import StateFiles


@dataclass(frozen=True, slots=True)
class OfflineStore:
    """The index and the state files of one directory."""

    index: Index
    files: StateFiles

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
        self.index.update([replace(checkpoint, is_pinned=is_pinned)])

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint, its entry first."""
        opening.remove(self.index, self.files, checkpoint)

    def commit(self, state: NewState) -> Checkpoint:
        """Seal a state's file and enter it, as a proxy does; raises StoreFault or OSError."""
        hashes = hash_prefixes(state.namespace, state.tokens)
        return new_state.commit(self.index, self.files, state, hashes, ())


@contextmanager
def open_offline(directory: Path, *, may_be_new: bool = False) -> Iterator[OfflineStore]:
    """Lock and open the store in *directory*.

    Raises StoreLocked if a proxy has it, StoreFault if there is none or it cannot be read.
    """
    if not may_be_new and not (directory / "index" / "data.mdb").exists():
        raise StoreFault(f"there is no store in {directory}: no proxy has ever used it")
    descriptor = opening.lock(directory)
    try:
        index = Index(directory / "index")
        try:
            yield OfflineStore(index, StateFiles(directory))
        finally:
            index.close()
    finally:
        os.close(descriptor)
