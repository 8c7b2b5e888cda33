"""The repair of sliding-window states that a build saves but does not continue.

llama-server saves of a sliding window the cells inside it, from n_tokens - window on. Builds that write
files of version 3 continue a state only if the window reaches one position further back
(server-context.cpp, `pos_min >= pos_min_thold`), so that a state longer than the window is thrown away
by the first request. The repair appends that cell, a copy of the lowest one. It lies outside the window
of every token that can follow, so it is masked, and all it changes is where the window begins.

Owns: when a file is repaired and how. The repaired state is good for its end only, and llama-server's
own gate sees to that: it refuses to go back to any token whose window would reach the copy.
"""

import struct
from array import array
from pathlib import Path
from typing import BinaryIO

from proxy.upstream.state_file import StateFile, read_state_file
from proxy.upstream.state_sections import Block, Cells

NEEDED_BY_VERSIONS = (3,)
"""Versions of files whose builds continue a cut window only after the repair; others must not have it."""

_CHUNK_BYTES = 4 << 20
_LEAST_CELLS = 2
_LOWEST_REPAIRED = 2
"""With a copy at position 0 a window would seem to begin with the prompt, as if none of it were cut."""

Insertion = tuple[int, bytes]
"""Bytes to come before a given offset of the file as it is."""


def repair_window(path: Path) -> bool:
    """Make a state file whose window was cut continuable at its end; return whether it was changed.

    Files that need no repair, cannot be repaired or are repaired already are left alone. Only what
    follows the window is moved, in place and in bounded memory; if that fails, the file is garbage.
    Raises StateFileMalformed if it is not a state file, OSError if it cannot be read or written.
    """
    state = read_state_file(path)
    cells = _cut_window(state)
    if cells is None:
        return False
    with path.open("r+b") as file:
        insertions = _extra_cell(file, cells, len(state.tokens))
        if insertions:
            _insert(file, insertions)
            _write(file, cells.offset - 4, struct.pack("<I", cells.n_cells + 1))
    return bool(insertions)


def _cut_window(state: StateFile) -> Cells | None:
    """Return the cells of a sliding window that does not reach back to the first token.

    It is the second attention section; nothing or a recurrent one follows (llama-kv-cache-iswa.cpp,
    llama-memory-hybrid-iswa.cpp).
    """
    match state.sections:
        case (whole, window) if whole.cells:
            pass
        case (whole, window, last) if whole.cells and last.section.kind == "recurrent":
            pass
        case _:
            return None
    is_cut = whole.n_cells == len(state.tokens) and window.n_cells < whole.n_cells
    return window.cells if is_cut else None


def _extra_cell(file: BinaryIO, cells: Cells, n_tokens: int) -> list[Insertion]:
    """Return what adds a cell below the lowest one, in file order; nothing if there must not be one."""
    positions = _positions(file, cells)
    lowest = n_tokens - cells.n_cells
    is_whole = sorted(positions) == list(range(lowest, n_tokens))
    if lowest < _LOWEST_REPAIRED or cells.n_cells < _LEAST_CELLS or not is_whole:
        return []
    index = positions.index(lowest)
    values = _values(file, cells, index)
    if values == _values(file, cells, positions.index(lowest + 1)):
        return []  # the lowest one is a copy already
    what = _read(file, cells.offset + index * cells.cell_bytes, cells.cell_bytes)
    places = [at for block in cells.blocks for at in _strip_ends(block, cells.n_cells)]
    extra = (cells.end, struct.pack("<i", lowest - 1) + what[4:])
    return [extra, *zip(places, values, strict=True)]


def _positions(file: BinaryIO, cells: Cells) -> list[int]:
    numbers = array("i", _read(file, cells.offset, cells.n_cells * cells.cell_bytes))
    return numbers[:: cells.cell_bytes // 4].tolist()


def _values(file: BinaryIO, cells: Cells, index: int) -> list[bytes]:
    """Return a cell's element of every strip, in file order."""
    return [
        _read(file, end - (cells.n_cells - index) * block.element_bytes, block.element_bytes)
        for block in cells.blocks
        for end in _strip_ends(block, cells.n_cells)
    ]


def _strip_ends(block: Block, n_cells: int) -> list[int]:
    n_bytes = n_cells * block.element_bytes
    return [block.offset + n_bytes * n for n in range(1, block.n_strips + 1)]


def _insert(file: BinaryIO, insertions: list[Insertion]) -> None:
    """Insert bytes at ascending offsets, from the last to the first, so that nothing is overwritten."""
    end = file.seek(0, 2)
    shift = sum(len(data) for _, data in insertions)
    for offset, data in reversed(insertions):
        _move_up(file, offset, end, shift)
        shift -= len(data)
        _write(file, offset + shift, data)
        end = offset


def _move_up(file: BinaryIO, start: int, end: int, n_bytes: int) -> None:
    while start < end:
        offset = max(start, end - _CHUNK_BYTES)
        _write(file, offset + n_bytes, _read(file, offset, end - offset))
        end = offset


def _read(file: BinaryIO, offset: int, n_bytes: int) -> bytes:
    file.seek(offset)
    return file.read(n_bytes)


def _write(file: BinaryIO, offset: int, data: bytes) -> None:
    file.seek(offset)
    file.write(data)
