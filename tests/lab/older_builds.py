"""Turns files that llama-server 0.7.0 saved into those of older builds."""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.llama.files import StateFile, read_state_file
from proxy.serving import saver

RewriteStateFile = Callable[[Path], None]
"""Applied to each file that llama-server saved, before the proxy reads it."""

_ROTATION_BYTES = 8
_VERSION_OFFSET = 4
_BEFORE_ROTATIONS = 8


def keep_as_saved(path: Path) -> None:
    """Leave a saved file as llama-server wrote it."""


@contextmanager
def rewriting(rewrite: RewriteStateFile) -> Iterator[None]:
    """Rewrite every file that is saved while the block runs."""

    def read_rewritten(path: Path) -> StateFile:
        rewrite(path)
        return read_state_file(path)

    setattr(saver, "read_state_file", read_rewritten)  # noqa: B010 - mypy forbids the plain assignment
    try:
        yield
    finally:
        setattr(saver, "read_state_file", read_state_file)  # noqa: B010 - as above


def strip_context_checkpoints(path: Path) -> None:
    """Cut a state file off behind its state, as builds before 0.7.0 write it."""
    os.truncate(path, read_state_file(path).state_end)


def to_version_3(path: Path) -> None:
    """Rewrite a file of version 4 as builds before 0.7.0 write it: no rotations, no appendices."""
    strip_context_checkpoints(path)
    state = read_state_file(path)
    if state.version != 4 or state.sections is None:
        raise ValueError(f"{path} is not a readable file of version 4")
    data = bytearray(path.read_bytes())
    for found in reversed(state.sections):
        if found.cell_bytes:
            start = found.offset + found.n_cells * found.cell_bytes + _BEFORE_ROTATIONS
            del data[start : start + _ROTATION_BYTES]
    struct.pack_into("<I", data, _VERSION_OFFSET, 3)
    path.write_bytes(data)
