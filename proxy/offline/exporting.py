"""Writes checkpoints of one namespace into one file."""

import io
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

import msgspec

from proxy.core.model import Checkpoint
from proxy.core.prefix import tokens_to_bytes
from proxy.driver.contact.known_models import Owner, owners
from proxy.errors import StoreFault
from proxy.offline.bundle import (
    FORMAT_VERSION,
    MANIFEST,
    Hashing,
    Manifest,
    Note,
    member,
    member_names,
)
from proxy.offline.store import OfflineStore
from proxy.store.opening import LOCK_NAME


def export_checkpoints(
    store: OfflineStore, checkpoints: Sequence[Checkpoint], file: Path, note: Note
) -> None:
    """Write *checkpoints* to *file*, which appears when it is whole; raises StoreFault or OSError.

    What *file* was is replaced, unless it is the store's own or no regular file.
    """
    _require_replaceable(store, file)
    manifest = Manifest(FORMAT_VERSION, _owner_of(store, checkpoints), tuple(checkpoints))
    # A file of its own, mode 0600 from the first byte: one that lies there may be open to others.
    descriptor, partial = tempfile.mkstemp(prefix=".export-", suffix=".part", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as output:
            with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
                _write(tar, store, manifest, note)
            output.flush()
            os.fsync(output.fileno())
        Path(partial).replace(file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _require_replaceable(store: OfflineStore, file: Path) -> None:
    """Raise StoreFault if a file in the place of *file* would cost more than what it says."""
    directory, parent = store.files.directory.resolve(), file.parent.resolve()
    is_in_store = parent == directory and (file.name.startswith("lpc-") or file.name == LOCK_NAME)
    if is_in_store or parent == directory / "index":
        raise StoreFault(f"{file} is a name of the store's own files: choose another")
    if file.exists() and not file.is_file():
        raise StoreFault(f"{file} is no regular file: choose another")


def _owner_of(store: OfflineStore, checkpoints: Sequence[Checkpoint]) -> Owner:
    namespaces = {checkpoint.namespace for checkpoint in checkpoints}
    if len(namespaces) != 1:
        raise StoreFault("a file holds checkpoints of one namespace: choose those of one")
    owner = dict(owners(store.index)).get(namespaces.pop())
    if owner is None:
        raise StoreFault("the store does not know any more which model these checkpoints are of")
    return owner


def _write(tar: tarfile.TarFile, store: OfflineStore, manifest: Manifest, note: Note) -> None:
    _add(tar, MANIFEST, msgspec.json.encode(manifest))
    for checkpoint in manifest.checkpoints:
        tokens_name, state_name = member_names(checkpoint)
        _add(tar, tokens_name, tokens_to_bytes(store.tokens(checkpoint)))
        path = store.files.path(checkpoint.file_name)
        with path.open("rb") as state:
            reader = Hashing(state, note)
            head = member(state_name, checkpoint.size_bytes)
            tar.addfile(head, cast(IO[bytes], reader))
        if reader.checksum != checkpoint.checksum:
            raise StoreFault(f"{path} is not what was saved: run check")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    tar.addfile(member(name, len(content)), io.BytesIO(content))
