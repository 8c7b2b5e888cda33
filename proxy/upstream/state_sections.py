"""The memory sections of a state file: attention caches and recurrent states, in file order.

Owns: how sections are told apart and skipped. Nothing in the file names the memory type, so a section
is what can be read as one and ends where another one, an appendix or the file begins.
"""

import struct
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from proxy.errors import StateFileMalformed

CONTEXT_CHECKPOINTS_MAGIC = 0x504B4353
CONTEXT_CHECKPOINTS_VERSION = 1
DRAFT_MAGIC = 0x54464453
_APPENDICES = (None, CONTEXT_CHECKPOINTS_MAGIC, DRAFT_MAGIC)
_MAX_STREAMS = 256
_MAX_LAYERS = 4096


class Section(msgspec.Struct, frozen=True):
    """One memory section: what of it does not depend on the tokens it holds.

    `rows` are (ggml type, bytes per row) of each tensor, in file order.
    """

    kind: str
    n_streams: int
    is_v_transposed: bool
    n_layers: int
    rotations: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]


class Block(msgspec.Struct, frozen=True):
    """Where one tensor of an attention section lies: strips with one element per cell each.

    A tensor whose rows are cells is a single strip; a transposed V is one strip per embedding value.
    """

    offset: int
    element_bytes: int
    n_strips: int


class Cells(msgspec.Struct, frozen=True):
    """Where the cells of an attention section lie: their count (u32) and, behind it, what each one is.

    A cell's own `cell_bytes` are its position (i32), the number of its sequences (u32), M-RoPE
    coordinates where the model has them, and the sequence (i32). `blocks` are in file order.
    """

    offset: int
    n_cells: int
    cell_bytes: int
    blocks: tuple[Block, ...]

    @property
    def end(self) -> int:
        """Where the section goes on behind what each cell is."""
        return self.offset + self.n_cells * self.cell_bytes


class FoundSection(msgspec.Struct, frozen=True):
    """A section and what a file has in it; `cells` is None of recurrent and of empty sections."""

    section: Section
    n_cells: int
    cells: Cells | None = None


class Reader:
    """Little-endian numbers from a file; every read and skip stays inside it."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self.size_bytes = size_bytes
        self.position = 0

    def numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack("<" + layout, self.bytes(struct.calcsize("<" + layout)))

    def u32(self) -> int:
        return self.numbers("I")[0]

    def bytes(self, n_bytes: int) -> bytes:
        self._require(n_bytes)
        self._file.seek(self.position)
        self.position += n_bytes
        return self._file.read(n_bytes)

    def skip(self, n_bytes: int) -> None:
        self._require(n_bytes)
        self.position += n_bytes

    def _require(self, n_bytes: int) -> None:
        if n_bytes < 0 or self.position + n_bytes > self.size_bytes:
            raise StateFileMalformed(f"ends inside a field at byte {self.position}")

    def peek_u32(self) -> int | None:
        if self.position + 4 > self.size_bytes:
            return None
        value = self.u32()
        self.position -= 4
        return value


def read_sections(reader: Reader, version: int, n_tokens: int) -> tuple[FoundSection, ...]:
    """Read sections until the state ends, whatever memory types they belong to."""
    sections: list[FoundSection] = []
    while reader.peek_u32() not in _APPENDICES:
        sections.append(_read_section(reader, version))
        if sections[-1].n_cells > n_tokens or len(sections) > 3:
            raise StateFileMalformed("has a composition that is not known")
    return tuple(sections)


def _read_section(reader: Reader, version: int) -> FoundSection:
    start = reader.position
    # Nothing in the file names the memory type: whether cells carry M-RoPE coordinates and whether
    # there is a V (MLA has none) shows only in which reading ends where another section, an
    # appendix or the file ends.
    attempts: list[Callable[[], FoundSection]] = [
        lambda: _read_attention(reader, version, extra_bytes=0, has_v=True),
        lambda: _read_attention(reader, version, extra_bytes=12, has_v=True),
        lambda: _read_recurrent(reader),
        lambda: _read_attention(reader, version, extra_bytes=0, has_v=False),
    ]
    for attempt in attempts:
        reader.position = start
        try:
            return attempt()
        except StateFileMalformed:
            continue
    raise StateFileMalformed(f"has an unknown section at byte {start}")


def _read_attention(reader: Reader, version: int, *, extra_bytes: int, has_v: bool) -> FoundSection:
    n_streams = reader.u32()
    if not 1 <= n_streams <= _MAX_STREAMS:
        raise StateFileMalformed("is no attention section")
    found = FoundSection(Section("attention", n_streams, False, 0, (), ()), 0)
    for _ in range(n_streams):
        n_cells = reader.u32()
        if n_cells and found.cells:
            raise StateFileMalformed("has more than one sequence")
        if n_cells:
            found = _read_stream(reader, version, n_streams, n_cells, 12 + extra_bytes, has_v)
    return found


def _read_stream(
    reader: Reader, version: int, n_streams: int, n_cells: int, cell_bytes: int, has_v: bool
) -> FoundSection:
    offset = reader.position
    _skip_cells(reader, n_cells, cell_bytes)
    v_transposed, n_layers = reader.numbers("II")
    if v_transposed > 1 or not 1 <= n_layers <= _MAX_LAYERS:
        raise StateFileMalformed("has an impossible attention header")
    rotations = reader.numbers("II") if version >= 4 else ()
    tensors = [_skip_rows(reader, n_cells) for _ in range(n_layers)]
    if has_v:
        skip_v = _skip_columns if v_transposed else _skip_rows
        tensors += [skip_v(reader, n_cells) for _ in range(n_layers)]
    rows = tuple((ggml_type, b.element_bytes * b.n_strips) for ggml_type, b in tensors)
    return FoundSection(
        Section("attention", n_streams, bool(v_transposed), n_layers, rotations, rows),
        n_cells,
        Cells(offset, n_cells, cell_bytes, tuple(block for _, block in tensors)),
    )


def _skip_cells(reader: Reader, n_cells: int, cell_bytes: int) -> None:
    start = reader.position
    for index in {0, n_cells // 2, n_cells - 1}:
        reader.position = start + index * cell_bytes
        position, n_sequences = reader.numbers("iI")
        if n_sequences != 1 or position < 0:
            raise StateFileMalformed("has a cell of another shape")
    reader.position = start
    reader.skip(n_cells * cell_bytes)


def _skip_rows(reader: Reader, n_cells: int) -> tuple[int, Block]:
    """Skip a tensor whose rows are cells; return its ggml type and where it lies."""
    ggml_type, row_bytes = reader.numbers("iQ")
    if not 0 <= ggml_type < 256:
        raise StateFileMalformed("has an impossible tensor type")
    block = Block(reader.position, row_bytes, 1)
    reader.skip(n_cells * row_bytes)
    return ggml_type, block


def _skip_columns(reader: Reader, n_cells: int) -> tuple[int, Block]:
    """Skip a tensor whose columns are cells; return its ggml type and where it lies."""
    ggml_type, element_bytes, n_embd = reader.numbers("iII")
    if not 0 <= ggml_type < 256:
        raise StateFileMalformed("has an impossible tensor type")
    block = Block(reader.position, element_bytes, n_embd)
    reader.skip(n_cells * element_bytes * n_embd)
    return ggml_type, block


def _read_recurrent(reader: Reader) -> FoundSection:
    n_cells = reader.u32()
    if n_cells > 1:
        raise StateFileMalformed("is no recurrent section")
    for _ in range(n_cells):
        position, n_sequences = reader.numbers("iI")
        if n_sequences != 0 or position < 0:
            raise StateFileMalformed("is no recurrent section")
    is_transposed, n_layers = reader.numbers("II")
    if is_transposed or not 1 <= n_layers <= _MAX_LAYERS:
        raise StateFileMalformed("is no recurrent section")
    rows = []
    # Layers without recurrent state (the attention layers of a hybrid) write nothing, and their
    # number is not in the file: the section ends where the state does.
    while reader.peek_u32() not in _APPENDICES:
        ggml_type, block = _skip_rows(reader, n_cells)
        rows.append((ggml_type, block.element_bytes))
    if len(rows) % 2 or len(rows) > 2 * n_layers:
        raise StateFileMalformed("has recurrent tensors of an unknown kind")
    return FoundSection(Section("recurrent", 1, False, n_layers, (), tuple(rows)), n_cells)
