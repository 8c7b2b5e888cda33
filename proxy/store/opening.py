"""What happens before a store is served from: the lock, and the check of index against files."""

import fcntl
import os
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.core.model import Checkpoint
from proxy.core.prefix import TokenIds, hash_prefixes
from proxy.errors import StoreFault, StoreLocked
from proxy.store.index import Index
from proxy.store.state_files import StateFiles

LOCK_NAME = ".llama-prefix-cache.lock"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What an opening check found and removed."""

    n_checkpoints: int
    n_entries_without_file: int
    n_files_without_entry: int
    n_over_budget: int = 0


def lock(directory: Path) -> int:
    """Return the descriptor that keeps other proxies out; raises StoreLocked if one is in."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreFault(f"{directory}: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreLocked(f"another llama-prefix-cache uses {directory}") from error
    return descriptor


def check(index: Index, files: StateFiles) -> tuple[list[Checkpoint], CheckReport]:
    """Remove entries whose file is gone or not the same, and files that no entry names.

    Returns the checkpoints that are left.
    """
    recorded = index.all()
    intact = [found for c in recorded if (found := _intact(index, files, c)) is not None]
    kept_ids = {checkpoint.id for checkpoint in intact}
    for broken in (c for c in recorded if c.id not in kept_ids):
        remove(index, files, broken)
    named = {checkpoint.file_name for checkpoint in intact}
    orphans = [name for name in files.names() if name not in named]
    for name in orphans:
        files.remove(name)
    return intact, CheckReport(len(intact), len(recorded) - len(intact), len(orphans))


def _intact(index: Index, files: StateFiles, checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the record of a checkpoint whose file is the one that was committed, or None."""
    try:
        name = checkpoint.file_name
        if files.is_unchanged(name, checkpoint.file_stamp, checkpoint.size_bytes):
            return checkpoint
        # A copied or restored directory has new inodes: its content decides.
        stamp = files.stamp(name)
        if files.checksum(name) != checkpoint.checksum:
            return None
    except FileNotFoundError:
        return None
    except OSError:  # who may not read it now need not be right about what is in it
        return checkpoint
    accepted = replace(checkpoint, file_stamp=stamp)
    index.update([accepted])
    return accepted


def remove(index: Index, files: StateFiles, checkpoint: Checkpoint) -> TokenIds | None:
    """Delete a checkpoint, its entry first; return the tokens that it held, if the index had them."""
    tokens = index.tokens(checkpoint.id)
    hashes = hash_prefixes(checkpoint.namespace, tokens) if tokens is not None else []
    index.delete(checkpoint.id, hashes)
    files.remove(checkpoint.file_name)
    return tokens
