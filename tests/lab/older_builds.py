"""Turns files that llama-server 0.7.0 saved into those of older builds."""

import os
import struct
from pathlib import Path

from proxy.llama.state_file import read_state_file

_ROTATION_BYTES = 8
_VERSION_OFFSET = 4
_BEFORE_ROTATIONS = 8


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
        if found.blocks:
            start = found.end + _BEFORE_ROTATIONS
            del data[start : start + _ROTATION_BYTES]
    struct.pack_into("<I", data, _VERSION_OFFSET, 3)
    path.write_bytes(data)
