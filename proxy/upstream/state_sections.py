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


def read_sections(
    reader: Reader, version: int, n_tokens: int
) -> tuple[tuple[Section, ...], tuple[int, ...]]:
    """Read sections until the state ends, whatever memory types they belong to."""
    sections: list[Section] = []
    n_cells: list[int] = []
    while reader.peek_u32() not in _APPENDICES:
        section, n = _read_section(reader, version)
        sections.append(section)
        n_cells.append(n)
        if n > n_tokens or len(sections) > 3:
            raise StateFileMalformed("has a composition that is not known")
    return tuple(sections), tuple(n_cells)


def _read_section(reader: Reader, version: int) -> tuple[Section, int]:
    start = reader.position
    # Nothing in the file names the memory type: whether cells carry M-RoPE coordinates and whether
    # there is a V (MLA has none) shows only in which reading ends where another section, an
    # appendix or the file ends.
    attempts: list[Callable[[], tuple[Section, int]]] = [
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


def _read_attention(
    reader: Reader, version: int, *, extra_bytes: int, has_v: bool
) -> tuple[Section, int]:
    n_streams = reader.u32()
    if not 1 <= n_streams <= _MAX_STREAMS:
        raise StateFileMalformed("is no attention section")
    n_cells = 0
    body: tuple[bool, int, tuple[int, ...], tuple[tuple[int, int], ...]] = (False, 0, (), ())
    for _ in range(n_streams):
        n = reader.u32()
        if n:
            _skip_cells(reader, n, extra_bytes)
            n_cells, body = n, _read_kv(reader, version, n, has_v)
    is_transposed, n_layers, rotations, rows = body
    return Section("attention", n_streams, is_transposed, n_layers, rotations, rows), n_cells


def _skip_cells(reader: Reader, n_cells: int, extra_bytes: int) -> None:
    cell_bytes = 12 + extra_bytes
    start = reader.position
    for index in {0, n_cells // 2, n_cells - 1}:
        reader.position = start + index * cell_bytes
        position, n_sequences = reader.numbers("iI")
        if n_sequences != 1 or position < 0:
            raise StateFileMalformed("has a cell of another shape")
    reader.position = start
    reader.skip(n_cells * cell_bytes)


def _read_kv(
    reader: Reader, version: int, n_cells: int, has_v: bool
) -> tuple[bool, int, tuple[int, ...], tuple[tuple[int, int], ...]]:
    v_transposed, n_layers = reader.numbers("II")
    if v_transposed > 1 or not 1 <= n_layers <= _MAX_LAYERS:
        raise StateFileMalformed("has an impossible attention header")
    rotations = reader.numbers("II") if version >= 4 else ()
    rows = [_skip_rows(reader, n_cells) for _ in range(n_layers)]
    if has_v:
        skip_v = _skip_columns if v_transposed else _skip_rows
        rows += [skip_v(reader, n_cells) for _ in range(n_layers)]
    return bool(v_transposed), n_layers, rotations, tuple(rows)


def _skip_rows(reader: Reader, n_cells: int) -> tuple[int, int]:
    ggml_type, row_bytes = reader.numbers("iQ")
    if not 0 <= ggml_type < 256:
        raise StateFileMalformed("has an impossible tensor type")
    reader.skip(n_cells * row_bytes)
    return ggml_type, row_bytes


def _skip_columns(reader: Reader, n_cells: int) -> tuple[int, int]:
    ggml_type, element_bytes, n_embd = reader.numbers("iII")
    if not 0 <= ggml_type < 256:
        raise StateFileMalformed("has an impossible tensor type")
    reader.skip(n_cells * element_bytes * n_embd)
    return ggml_type, element_bytes * n_embd


def _read_recurrent(reader: Reader) -> tuple[Section, int]:
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
        rows.append(_skip_rows(reader, n_cells))
    if len(rows) % 2 or len(rows) > 2 * n_layers:
        raise StateFileMalformed("has recurrent tensors of an unknown kind")
    return Section("recurrent", 1, False, n_layers, (), tuple(rows)), n_cells
