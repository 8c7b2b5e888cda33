"""Slot state files as the scripted llama-server writes and reads them.

Real files, laid out as in tests/unit/state_files.py: the header, the tokens, one attention
section, a sliding window or a recurrent state where the model has one, and context checkpoints where the
build writes them.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.unit.state_files import (
    MAGIC,
    attention,
    context_checkpoints,
    recurrent,
    state_file,
    words,
)


class StateFileRefused(Exception):
    """The file is not one that this build loads."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a file brings back into a slot; `window_from` is the lowest position of a sliding window."""

    tokens: list[int]
    points: list[int]
    window_from: int | None = None
    is_recurrent: bool = False


_attention = lru_cache(maxsize=64)(attention)


def write_slot_file(path: Path, state: SlotState, version: int) -> int:
    """Write a state file; return its size."""
    n_tokens = len(state.tokens)
    sections = [_attention(n_tokens, version=min(version, 4))]
    if state.window_from is not None:
        n_window = n_tokens - state.window_from
        window = _attention(n_window, first=state.window_from, version=min(version, 4))
        sections.append(window)
    if state.is_recurrent and n_tokens:
        sections.append(recurrent(n_tokens - 1))
    if state.points and version >= 4:
        # Of recurrent kind: one position, so llama-server continues exactly there.
        sections.append(context_checkpoints(*((p, p - 1, p - 1) for p in state.points)))
    content = state_file(words(state.tokens), *sections, version=version)
    path.write_bytes(content)
    return len(content)


def read_slot_file(path: Path, version: int, *, has_window: bool = False) -> SlotState:
    """Return what the file holds; raises StateFileRefused as llama-server answers 400."""
    try:
        content = path.read_bytes()
        return _parse(content, version, has_window)
    except (OSError, struct.error) as error:
        raise StateFileRefused(str(error)) from error


def _parse(content: bytes, version: int, has_window: bool) -> SlotState:
    magic, found_version, n_words = struct.unpack_from("<III", content)
    if (magic, found_version) != (MAGIC, version):
        raise StateFileRefused("magic or version")
    (n_tokens,) = struct.unpack_from("<I", content, 20)
    tokens = list(struct.unpack_from(f"<{n_tokens}i", content, 24))
    end = 12 + 4 * n_words + len(_attention(n_tokens, version=min(version, 4)))
    window_from = None
    if has_window:
        (n_cells,) = struct.unpack_from("<I", content, end + 4)
        positions = struct.iter_unpack("<i8x", content[end + 8 : end + 8 + 12 * n_cells])
        window_from = min((position for (position,) in positions), default=0)
        end += len(_attention(n_cells, version=min(version, 4)))
    if n_tokens and content.startswith(recurrent(n_tokens - 1), end):
        end += len(recurrent(n_tokens - 1))
    if len(content) < end:
        raise StateFileRefused("the file ends too early")
    return SlotState(tokens, _points(content[end:]), window_from)


def _points(appendix: bytes) -> list[int]:
    if not appendix.startswith(b"SCKP"):
        return []
    _, count = struct.unpack_from("<II", appendix, 4)
    position, points = 12, []
    for _ in range(count):
        points.append(struct.unpack_from("<q", appendix, position)[0])
        position += 16
        for _ in range(3):
            position += 8 + struct.unpack_from("<Q", appendix, position)[0]
    return points
