"""A store on a real directory, and states as llama-server would have left them."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.core.model import Candidate, Checkpoint, CheckpointKind
from proxy.core.tokens import Namespace, TokenIds, token_ids
from proxy.store.files import final_name_of, id_of, temporary_name_of
from proxy.store.store import CheckpointStore
from tests.lab.page_cache import folder_on_disk

NAMESPACE = Namespace(b"n" * 16)
OTHER_NAMESPACE = Namespace(b"o" * 16)
BUDGET = 1 << 20

Commit = Callable[..., Awaitable[Checkpoint]]


def run_of(n_tokens: int, start: int = 0) -> TokenIds:
    return token_ids(range(start, start + n_tokens))


def branch(n_common: int, n_tokens: int, mark: int = 1_000_000) -> TokenIds:
    """Return *n_tokens* tokens of which exactly the first *n_common* are those of `run_of`."""
    return token_ids([*range(n_common), *range(mark, mark + n_tokens - n_common)])


def new_state(
    store: CheckpointStore, tokens: TokenIds, *, content: bytes = b"", **changes: Any
) -> tuple[Checkpoint, TokenIds]:
    """Write a temporary state file into the store's directory, as llama-server does."""
    name = store.files.new_temporary_name()
    path = store.files.directory / name
    path.write_bytes(content or b"state of " + tokens.tobytes())
    return new_checkpoint(store, name, tokens, [8, path.stat().st_size - 8], **changes), tokens


def new_checkpoint(
    store: CheckpointStore, name: str, tokens: TokenIds, sizes: list[int], **changes: Any
) -> Checkpoint:
    """Return the checkpoint that the temporary file *name*, with parts of these sizes, is to be."""
    now = time.time()
    fields: dict[str, Any] = {
        "id": id_of(name),
        "namespace": NAMESPACE,
        "kind": CheckpointKind.CONVERSATION,
        "n_tokens": len(tokens),
        "restore_points": (),
        "has_every_position": False,
        "file_name": final_name_of(name),
        "size_bytes": sum(sizes),
        "created_at": now,
        "last_used_at": now,
        "parts": store.files.parts(name, sizes),
        "verified_at": now,
    }
    return Checkpoint(**(fields | changes))


def temporary_of(state: tuple[Checkpoint, TokenIds]) -> str:
    return temporary_name_of(state[0].file_name)


def found(
    store: CheckpointStore, tokens: TokenIds, namespace: Namespace = NAMESPACE
) -> list[Candidate]:
    return list(store.find(namespace, tokens))


def names_in(directory: Path) -> set[str]:
    """Return the names of state files, finished or not."""
    states = (".state", ".saving")
    return {p.name for p in directory.iterdir() if p.name[:4] == "lpc-" and p.suffix in states}


@contextmanager
def opened(
    directory: Path, max_bytes: int = BUDGET, max_write_bytes_per_day: int = 0
) -> Iterator[CheckpointStore]:
    store = CheckpointStore(directory, max_bytes, max_write_bytes_per_day)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with opened(tmp_path) as store:
        yield store


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another disk than the test's own."""
    with folder_on_disk() as folder:
        if folder.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs two file systems")
        yield folder


def mount(disk: Path, at: Path) -> None:
    """Let a disk, or what lies below it, be seen at a place."""
    at.unlink(missing_ok=True)
    at.symlink_to(disk)
