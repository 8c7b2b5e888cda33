"""Thinning and grafting: which context checkpoints a state file carries.

Since 0.7.0 llama-server writes all context checkpoints of a slot behind the state, each a whole
recurrent state or window. Most are not worth their bytes, and one that is may have been dropped from
the slot's list meanwhile, while an older file of the same conversation still has it.

Owns: rewriting that appendix. The state in front of it is neither moved nor copied.
"""

import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from proxy.errors import StateFileMalformed
from proxy.upstream.state_file import ContextCheckpoint, StateFile, read_state
from proxy.upstream.state_sections import (
    CONTEXT_CHECKPOINTS_MAGIC,
    CONTEXT_CHECKPOINTS_VERSION,
    Reader,
    Section,
    read_sections,
)

_VERSIONS_WITH_APPENDIX = (4,)
_SEQUENCE_STATE_MAGIC = 0xAF143CD8
_PIECE_BYTES = 1 << 20

Entry = tuple[BinaryIO, ContextCheckpoint]
"""A context checkpoint and the open file that has it."""


def select_context_checkpoints(
    path: Path, own: Collection[int], grafted: Mapping[int, Path]
) -> frozenset[int]:
    """Leave a state file only its *own* restore points named, add those *grafted* from other files.

    Returns the restore points the file has then. Of several context checkpoints with the same restore
    point the newest is kept, and a point that the file has itself is not taken from another. A donor
    must be a state of the same model; its point is left out if it is not there (any more) or does
    not belong to the same tokens and memory. A file whose appendix is not understood is left alone.

    Needs as much room again as the context checkpoints chosen, for a moment. If writing into the
    file itself fails, the file is garbage. Raises StateFileMalformed if it is not a state file,
    OSError if it cannot be read or written.
    """
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        state = read_state(file)
        if not _is_understood(file, state):
            return frozenset(state.restore_points)
        chosen = _entries(file, state, {*own, *grafted})
        missing = {point: donor for point, donor in grafted.items() if point not in chosen}
        for donor in set(missing.values()):
            points = [point for point in missing if missing[point] == donor]
            chosen |= _entries_of_donor(stack, donor, points, state)
        if {c for _, c in chosen.values()} != {*state.context_checkpoints}:
            _rewrite(path, file, state, sorted(chosen.values(), key=lambda e: e[1].n_tokens))
    return frozenset(chosen)


def _is_understood(file: BinaryIO, state: StateFile) -> bool:
    """Whether one can tell where context checkpoints belong in a file, and what follows them."""
    if state.version not in _VERSIONS_WITH_APPENDIX or state.sections is None:
        return False
    reader = Reader(file, state.size_bytes)
    reader.position = state.context_checkpoints_end
    return reader.peek_u32() != CONTEXT_CHECKPOINTS_MAGIC


def _entries(file: BinaryIO, state: StateFile, points: Collection[int]) -> dict[int, Entry]:
    # The file has them in the order in which they were made, so the newest comes last.
    found = {c.restore_point: (file, c) for c in state.context_checkpoints}
    return {point: entry for point, entry in found.items() if point in points}


def _entries_of_donor(
    stack: ExitStack, donor: Path, points: Collection[int], state: StateFile
) -> dict[int, Entry]:
    try:
        file = stack.enter_context(donor.open("rb"))
        donors_state = read_state(file)
    except (OSError, StateFileMalformed):
        return {}
    found = _entries(file, donors_state, points)
    return {p: (f, c) for p, (f, c) in found.items() if _fits(f, c, donors_state, state)}


def _fits(
    file: BinaryIO, entry: ContextCheckpoint, donors_state: StateFile, state: StateFile
) -> bool:
    n = entry.n_tokens
    if not 0 <= entry.pos_min <= entry.pos_max < n <= len(state.tokens):
        return False
    # The tokens do not tell which images were at their place.
    if donors_state.n_media or state.n_media or donors_state.tokens[:n] != state.tokens[:n]:
        return False
    layout = _layout(file, entry, donors_state.version)
    return (
        bool(layout)
        and donors_state.layout == state.layout
        and (state.layout or ())[-len(layout) :] == layout
        and _extras([entry]) == _extras(state.context_checkpoints[-1:])
    )


def _extras(entries: Sequence[ContextCheckpoint]) -> list[bool]:
    """Return whether a draft model's and speculation's states are there, of one entry or of none."""
    return [bool(n_bytes) for c in entries for n_bytes in c.state_bytes[1:]] or [False, False]


def _layout(file: BinaryIO, entry: ContextCheckpoint, version: int) -> tuple[Section, ...]:
    """Return which sections a context checkpoint has, none if they are not understood.

    They are the last ones of the state: a window, a recurrent state, or both.
    """
    reader = Reader(file, entry.state_offset + entry.state_bytes[0])
    reader.position = entry.state_offset
    try:
        magic, _ = reader.numbers("II")
        sections = read_sections(reader, version, entry.n_tokens)
    except StateFileMalformed:
        return ()
    is_state = magic == _SEQUENCE_STATE_MAGIC and reader.position == reader.size_bytes
    is_filled = all(found.n_cells for found in sections)
    return tuple(found.section for found in sections) if is_state and is_filled else ()


def _rewrite(path: Path, file: BinaryIO, state: StateFile, entries: Sequence[Entry]) -> None:
    # What is chosen is put together aside, as it comes in part from where it will go to.
    with TemporaryFile(dir=path.parent) as aside, path.open("r+b") as target:
        if entries:
            head = CONTEXT_CHECKPOINTS_MAGIC, CONTEXT_CHECKPOINTS_VERSION, len(entries)
            aside.write(struct.pack("<III", *head))
        for source, entry in entries:
            _copy(source, entry.offset, entry.size_bytes, aside)
        rest = state.size_bytes - state.context_checkpoints_end
        _copy(file, state.context_checkpoints_end, rest, aside)
        n_bytes = aside.tell()
        target.seek(state.state_end)
        _copy(aside, 0, n_bytes, target)
        target.truncate()


def _copy(source: BinaryIO, offset: int, n_bytes: int, target: BinaryIO) -> None:
    source.seek(offset)
    while n_bytes:
        piece = source.read(min(n_bytes, _PIECE_BYTES))
        if not piece:
            raise OSError("a state file was cut off while it was read")
        target.write(piece)
        n_bytes -= len(piece)
