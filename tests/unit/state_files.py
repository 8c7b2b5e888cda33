"""Writes small state files as llama-server 0.7.0 (version 4) and older builds (2 and 3) lay them out."""

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from proxy.core.model import FilePart
from proxy.errors import StateFileMalformed
from proxy.llama.files import read_state_file
from proxy.llama.state_edits import Source, select_context_checkpoints

MAGIC = 0x67677371
F16_ROW = (1, 8)
"""(ggml type, bytes per row) of the attention tensors written here."""
F32_ROW = (0, 16)
F16_BYTES = 2


def words(tokens: Iterable[int], media: bytes = b"", n_media: int = 0) -> bytes:
    """Return the token list as llama-server writes it, media chunks included."""
    ids = [*tokens]
    return struct.pack(f"<3i{len(ids)}iI", -1, 1, len(ids), *ids, n_media) + media


def legacy_words(tokens: Iterable[int]) -> bytes:
    ids = [*tokens]
    return struct.pack(f"<{len(ids)}i", *ids)


def state_file(payload: bytes, *sections: bytes, version: int = 4, magic: int = MAGIC) -> bytes:
    return struct.pack("<III", magic, version, len(payload) // 4) + payload + b"".join(sections)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell at a position; its part of each tensor is told by `filling`, which a copy shares."""

    position: int
    filling: int


def cells_at(positions: Iterable[int]) -> list[Cell]:
    return [Cell(position, position) for position in positions]


def attention(
    cells: int | Sequence[Cell],
    *,
    first: int = 0,
    n_layers: int = 2,
    version: int = 4,
    is_v_transposed: bool = False,
    has_v: bool = True,
    is_mrope: bool = False,
    n_streams: int = 1,
    stream: int = -1,
    row_bytes: int = F16_ROW[1],
    rotations: tuple[int, int] = (0, 0),
) -> bytes:
    """Return an attention section whose cells, given or so many from *first* on, lie in one stream."""
    if isinstance(cells, int):
        cells = cells_at(range(first, first + cells))
    kv = struct.pack("<II", is_v_transposed, n_layers)
    if version >= 4:
        kv += struct.pack("<II", *rotations)
    kv += b"".join(_rows(tensor, cells, row_bytes) for tensor in range(n_layers))
    if has_v:
        write_v = _columns if is_v_transposed else _rows
        kv += b"".join(write_v(n_layers + layer, cells, row_bytes) for layer in range(n_layers))
    filled = (
        struct.pack("<I", len(cells))
        + b"".join(_cell(cell, version, is_mrope) for cell in cells)
        + kv
    )
    streams = [struct.pack("<I", 0)] * n_streams
    streams[stream] = filled if cells else streams[stream]
    return struct.pack("<I", n_streams) + b"".join(streams)


def value(tensor: int, strip: int, cell: Cell, n_bytes: int) -> bytes:
    """Return what a cell has in a strip of a tensor."""
    number = cell.filling * 1009 + tensor * 97 + strip * 13 + 1
    return (number % (1 << 8 * n_bytes)).to_bytes(n_bytes, "little")


def _rows(tensor: int, cells: Sequence[Cell], row_bytes: int) -> bytes:
    values = (value(tensor, 0, cell, row_bytes) for cell in cells)
    return struct.pack("<iQ", F16_ROW[0], row_bytes) + b"".join(values)


def _columns(tensor: int, cells: Sequence[Cell], row_bytes: int) -> bytes:
    strips = range(row_bytes // F16_BYTES)
    values = (value(tensor, strip, cell, F16_BYTES) for strip in strips for cell in cells)
    return struct.pack("<iII", F16_ROW[0], F16_BYTES, len(strips)) + b"".join(values)


def _cell(cell: Cell, version: int, is_mrope: bool) -> bytes:
    n_coordinates = (3 if version > 2 else 2) if is_mrope else 0
    extra = struct.pack("<iii", cell.filling, cell.filling, 7)[: 4 * n_coordinates]
    return struct.pack("<iI", cell.position, 1) + extra + struct.pack("<i", 0)


def recurrent(last_position: int, *, n_layers: int = 4, n_with_state: int = 3) -> bytes:
    """Return a recurrent section: one cell, whatever the number of tokens."""
    row = struct.pack("<iQ", *F32_ROW) + b"\xef" * F32_ROW[1]
    head = struct.pack("<I", 1) + struct.pack("<iI", last_position, 0)
    return head + struct.pack("<II", 0, n_layers) + row * 2 * n_with_state


def compressed(n_tokens: int, *, n_window: int = 2, is_partial: bool = False) -> bytes:
    """Return DeepSeek V4's section; a context checkpoint's is partial: without the compressed keys."""
    cells = cells_at(range(n_tokens))
    whole = attention(cells, n_layers=0, has_v=False), attention(cells[-n_window:], has_v=False)
    layers = range(2)
    keys = b"".join(_compressed(i, n_tokens // 4) for i in layers)
    left = b"".join(_compressed(i, 3) + _compressed(i, 3)[4:] for i in layers)
    caches = struct.pack("<4I", 2, n_tokens // 4, 1, len(layers)) + keys
    compressors = struct.pack("<6I", 1, 4, 3, 4, 1, len(layers)) + left
    parts = [*whole[is_partial:], *[caches] * (0 if is_partial else 3), *[compressors] * 3]
    return b"DSV4" + struct.pack("<II", 1, is_partial) + b"".join(parts)


def _compressed(layer: int, n_rows: int) -> bytes:
    size = F32_ROW[1]
    return (
        struct.pack("<IiQQQ", layer, F32_ROW[0], size // 4, n_rows, size) + b"\xcd" * size * n_rows
    )


def context_checkpoint(n_tokens: int, pos_min: int, pos_max: int, *states: bytes) -> bytes:
    """Return one context checkpoint with the states of the model, of a draft model and of speculation."""
    states = (*states, b"", b"", b"")[:3]
    blobs = b"".join(struct.pack("<Q", len(state)) + state for state in states)
    return struct.pack("<qii", n_tokens, pos_min, pos_max) + blobs


def partial_state(*sections: bytes, sequence: int = 0) -> bytes:
    """Return the model's state in a context checkpoint, made in the slot of that number."""
    return struct.pack("<Ii", 0xAF143CD8, sequence) + b"".join(sections)


def appendix(*entries: bytes, version: int = 1) -> bytes:
    """Return the appendix with these context checkpoints."""
    return b"SCKP" + struct.pack("<II", version, len(entries)) + b"".join(entries)


def context_checkpoints(*entries: tuple[int, int, int], version: int = 1) -> bytes:
    """Return the appendix with one context checkpoint per (n_tokens, pos_min, pos_max)."""
    blobs = (b"\x11" * 5,) * 3
    return appendix(*(context_checkpoint(*entry, *blobs) for entry in entries), version=version)


def draft_state() -> bytes:
    blob = struct.pack("<Q", 9) + b"\x22" * 9
    return b"SDFT" + struct.pack("<I", 1) + blob * 2


def parts_of(path: Path) -> tuple[FilePart, ...]:
    """Return the parts of a state file as it is, none of what is no state file."""
    try:
        sizes = read_state_file(path).part_sizes
    except (OSError, StateFileMalformed):
        return ()
    with path.open("rb") as file:
        return tuple(FilePart(n, xxhash.xxh3_128_digest(file.read(n))) for n in sizes)


def select_points(path: Path, own: Collection[int], grafted: Mapping[int, Path]) -> set[int]:
    """Thin and graft a state file; return the restore points that it has then.

    The checksums that were carried must be those of the file.
    """
    donors = {point: Source(donor, parts_of(donor)) for point, donor in grafted.items()}
    parts = select_context_checkpoints(Source(path, parts_of(path)), own, donors)
    assert parts == parts_of(path)
    return {*read_state_file(path).restore_points}
