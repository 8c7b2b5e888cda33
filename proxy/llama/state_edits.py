"""Changes of a saved state file: context checkpoints removed or added, windows put in order or repaired."""

import os
import shutil
import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import xxhash

from proxy.core.model import FilePart
from proxy.errors import StateFileMalformed
from proxy.llama import files

# Context checkpoints are removed from a state file, or copied into it from another. Since 0.7.0
# llama-server writes all context checkpoints of a slot behind the state, each a whole recurrent state or
# window. Most are not worth their bytes. Some that are may have been dropped from the slot, while an older
# file of the same conversation still has them. The state in front of that appendix is neither
# moved nor copied. Copied bytes keep their checksums and are compared with them; only the head of the
# appendix, which is written anew, gets a new checksum.


_VERSIONS_WITH_APPENDIX = (4,)
_SEQUENCE_STATE_MAGIC = 0xAF143CD8


@dataclass(frozen=True, slots=True)
class Source:
    """A state file, and its parts."""

    path: Path
    parts: tuple[FilePart, ...]

    def between(self, begin: int, end: int) -> tuple[FilePart, ...] | None:
        """Return the parts from *begin* to *end*; None if none begins or ends there."""
        offsets = [*accumulate((part.n_bytes for part in self.parts), initial=0)]
        if begin not in offsets or end not in offsets:
            return None
        return self.parts[offsets.index(begin) : offsets.index(end)]


Entry = tuple[BinaryIO, files.ContextCheckpoint, tuple[FilePart, ...]]
"""An open file, a context checkpoint in it, and the parts of that context checkpoint."""


def select_context_checkpoints(
    source: Source, own: Collection[int], grafted: Mapping[int, Source]
) -> tuple[FilePart, ...]:
    """Keep only the restore points *own* in a state file, and add those *grafted* from other files.

    Returns the new parts of the file. Of several context checkpoints with the same restore point the newest
    is kept. A point that the file has itself is not copied from another. A donor must be a state of the
    same model. A donor's point is left out if it is missing, belongs to other tokens or another memory, or
    has no parts of its own. A file whose appendix is not understood is not changed.

    For a moment, the chosen context checkpoints need their size again as free space. If writing into the
    file fails, the file is garbage. Raises StateFileMalformed if it is not a state file, or if copied bytes
    do not match their checksum; the file is then unchanged. Raises OSError if it cannot be read or
    written.
    """
    with ExitStack() as stack:
        file = stack.enter_context(source.path.open("rb"))
        state = files.read_state(file)
        if not _is_understood(file, state):
            return source.parts
        chosen = _entries(source, file, state, {*own, *grafted})
        missing = {point: donor for point, donor in grafted.items() if point not in chosen}
        for donor in set(missing.values()):
            points = [point for point in missing if missing[point] == donor]
            with suppress(OSError, StateFileMalformed):
                donors_file = stack.enter_context(donor.path.open("rb"))
                donors_state = files.read_state(donors_file)
                for point, entry in _entries(donor, donors_file, donors_state, points).items():
                    if _fits(entry, donors_state, state):
                        chosen[point] = entry
        if {c for _, c, _ in chosen.values()} == {*state.context_checkpoints}:
            return source.parts
        return _rewrite(source, file, state, sorted(chosen.values(), key=lambda e: e[1].n_tokens))


def _is_understood(file: BinaryIO, state: files.StateFile) -> bool:
    """Return whether the place of the context checkpoints in a file, and the bytes behind it, are known."""
    reader = files.Reader(file, state.size_bytes)
    reader.position = state.context_checkpoints_end
    is_known = state.version in _VERSIONS_WITH_APPENDIX and state.sections is not None
    return is_known and reader.peek() != files.CONTEXT_CHECKPOINTS_MAGIC


def _entries(
    source: Source, file: BinaryIO, state: files.StateFile, points: Collection[int]
) -> dict[int, Entry]:
    # A file has its context checkpoints in the order in which they were made: the newest wins.
    found = {c.restore_point: c for c in state.context_checkpoints if c.restore_point in points}
    return {
        point: (file, c, parts)
        for point, c in found.items()
        if (parts := source.between(c.offset, c.offset + c.size_bytes))
    }


def _fits(entry: Entry, donors_state: files.StateFile, state: files.StateFile) -> bool:
    """Return whether a donor's context checkpoint has the same tokens and memory layout as a state."""
    file, point, _ = entry
    n = point.n_tokens
    if not 0 <= point.pos_min <= point.pos_max < n <= len(state.tokens):
        return False
    # Tokens do not tell which images a prompt has.
    if donors_state.n_media or state.n_media or donors_state.tokens[:n] != state.tokens[:n]:
        return False
    layout = tuple(found.section for found in _sections(file, point, donors_state.version))
    memory = state.layout or ()
    is_same_memory = donors_state.layout == memory and bool(layout)
    if [section.kind for section in memory[-2:]] == ["recurrent", "attention"]:
        memory = memory[:-1]  # the index of sparse attention: no context checkpoint has one
    if not is_same_memory or memory[-len(layout) :] != layout:
        return False
    # Both must have, or not have, the states of a draft model and of speculation.
    last = state.context_checkpoints[-1].state_bytes if state.context_checkpoints else (0, 0, 0)
    return [*map(bool, point.state_bytes[1:])] == [*map(bool, last[1:])]


def _sections(
    file: BinaryIO, point: files.ContextCheckpoint, version: int
) -> tuple[files.FoundSection, ...]:
    """Return the sections of a context checkpoint; none if they are not understood.

    They are the last of its state, but for an index: a window, a recurrent state, or both.
    """
    begin = point.offset + 16 + 8  # behind its three numbers and the length of the model's state
    reader = files.Reader(file, begin + point.state_bytes[0])
    reader.position = begin
    try:
        magic, _ = reader.numbers("II")
        sections = files.read_sections(reader, version, point.n_tokens)
    except StateFileMalformed:
        return ()
    is_state = magic == _SEQUENCE_STATE_MAGIC and reader.position == reader.size_bytes
    return sections if is_state and all(found.n_cells for found in sections) else ()


def _rewrite(
    source: Source, file: BinaryIO, state: files.StateFile, entries: Sequence[Entry]
) -> tuple[FilePart, ...]:
    kept = source.between(0, state.state_end)
    rest = source.between(state.context_checkpoints_end, state.size_bytes)
    if kept is None or rest is None:
        raise StateFileMalformed("has no checksums of its own for its appendix")
    # The new appendix is written to another file first, because some of it comes from the old one.
    with TemporaryFile(dir=source.path.parent) as aside, source.path.open("r+b") as target:
        parts = [*kept]
        if entries:
            magic, version = files.CONTEXT_CHECKPOINTS_MAGIC, files.CONTEXT_CHECKPOINTS_VERSION
            head = struct.pack("<III", magic, version, len(entries))
            aside.write(head)
            parts.append(FilePart(len(head), xxhash.xxh3_128_digest(head)))
        for donor, point, point_parts in entries:
            _copy(donor, point.offset, point_parts, aside)
            parts += point_parts
        _copy(file, state.context_checkpoints_end, rest, aside)
        aside.seek(0)
        target.seek(state.state_end)
        shutil.copyfileobj(aside, target)
        target.truncate()
    return (*parts, *rest)


def _copy(source: BinaryIO, offset: int, parts: Sequence[FilePart], target: BinaryIO) -> None:
    source.seek(offset)
    for part in parts:
        piece = source.read(part.n_bytes)
        is_as_saved = xxhash.xxh3_128_digest(piece) == part.digest
        files.require(is_as_saved, f"{source.name} is not what was saved")
        target.write(piece)


# The order of cells in a window. A window is a ring. llama-server saves its cells as they lie there,
# mostly with the newest first, and restores them so. It then looks for cells for several batches. Meanwhile
# it drops all positions below the cells that it means to overwrite, and some of these the first batch still
# needs (llama-kv-cache.cpp, `prepare` and `apply_ubatch`; llama.cpp#25297). Answers are wrong from there
# on. In the order of their positions no cell is dropped too early.


def order_windows(path: Path, state: files.StateFile) -> bool:
    """Put the cells of all windows of a state file, in context checkpoints too, in order of position.

    Returns whether the file changed; its parts keep their places and lengths. Raises OSError if it cannot
    be read or written; the file is then garbage.
    """
    if not files.has_two_caches(state.layout):
        return False
    with path.open("r+b") as file:
        whole, window, *others = state.sections or ()
        # With as many cells, it may be the index of sparse attention: its cells stand where the first's do,
        # and a window may come behind it (llama-kv-cache-dsa-iswa.cpp).
        found = [whole, window, *others] if window.n_cells == whole.n_cells else [window]
        for point in state.context_checkpoints:
            found += _sections(file, point, state.version)
        windows = [f for f in found if f.section.kind == "attention" and f.n_cells]
        return any([_put_in_order(file, window) for window in windows])


def _put_in_order(file: BinaryIO, window: files.FoundSection) -> bool:
    section, n_cells, cell_bytes = window.section, window.n_cells, window.cell_bytes
    file.seek(window.offset)
    positions = array("i", file.read(n_cells * cell_bytes))[:: cell_bytes // 4]
    steps = (i for i, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1)
    runs = list(pairwise([0, *steps, n_cells]))
    ordered = sorted(runs, key=lambda run: positions[run[0]])
    if ordered == runs:
        return False
    _move(file, window.offset, ordered, 1, cell_bytes)
    file.seek(8 + 4 * len(section.rotations), os.SEEK_CUR)  # over is_v_transposed and n_layers
    for index, (_, row_bytes) in enumerate(section.rows):
        _, element_bytes, n_strips = struct.unpack("<iII", file.read(12))
        if not section.is_v_transposed or index < section.n_layers:
            element_bytes, n_strips = row_bytes, 1
        _move(file, file.tell(), ordered, n_strips, element_bytes)
    return True


def _move(
    file: BinaryIO, offset: int, runs: Sequence[tuple[int, int]], n_strips: int, cell_bytes: int
) -> None:
    """Write the cells of each strip at *offset* in the order of *runs*; go on behind them."""
    file.seek(offset)
    strip_bytes = cell_bytes * max(end for _, end in runs)
    strips = [file.read(strip_bytes) for _ in range(n_strips)]
    file.seek(offset)
    for strip in strips:
        for begin, end in runs:
            file.write(strip[begin * cell_bytes : end * cell_bytes])


# The repair of sliding-window states that a build saves but does not continue. llama-server saves only the
# cells inside a sliding window, from n_tokens - window on. Builds from June to September 2026 continue a
# state only if the window reaches one position further back (server-context.cpp, `pos_min >=
# pos_min_thold`), so the first request drops any state longer than the window. The repair moves the lowest
# cell one position down. Wherever llama-server then goes on, that cell is outside the window of every token
# that follows, because the test asks for one position more than the window has. So no token misses the
# cell, and none sees it at the wrong position. Nothing is added: b9294 saves every cell that a slot has
# room for, and refuses a file with one cell more.


NEEDED_BY_VERSIONS = (2, 3)
"""Versions of files whose builds continue a cut window only after the repair; others must not have it."""

_LOWEST_REPAIRED = 2
"""With a cell at position 0 the window would seem to begin with the prompt, as if it had not been cut."""


def repair_window(path: Path) -> bool:
    """Repair a state file whose window was cut, to be continued at its end; return whether it changed.

    Files that need no repair, cannot be repaired or are repaired already stay unchanged. Raises
    StateFileMalformed if the file is not a state file, OSError if it cannot be read or written.
    """
    state = files.read_state_file(path)
    if not state.window_tokens:
        return False
    _, window, *others = state.sections or ()
    # Behind the window is nothing or a recurrent section (llama-memory-hybrid-iswa.cpp).
    if [found.section.kind for found in others] not in ([], ["recurrent"]):
        return False
    with path.open("r+b") as file:
        file.seek(window.offset)
        numbers = array("i", file.read(window.n_cells * window.cell_bytes))
        positions = numbers[:: window.cell_bytes // 4].tolist()
        lowest = len(state.tokens) - window.n_cells
        is_whole = sorted(positions) == list(range(lowest, len(state.tokens)))
        if lowest < _LOWEST_REPAIRED or not is_whole:
            return False
        file.seek(window.offset + positions.index(lowest) * window.cell_bytes)
        file.write(struct.pack("<i", lowest - 1))
    return True
