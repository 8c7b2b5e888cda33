"""llama-server's files, read as far as the proxy needs them: the states of slots, and models.

Owns: the layout of a state file (llama_state_seq_save_file of libllama plus the server's token list and,
since 0.7.0, its appendices), and that of GGUF. Reads headers and skips over tensor data, so that a file of
many GiB costs a few hundred small reads.

A state file tells its tokens, its context checkpoints and the layout of its cache. It has no checksum and
no trace of the model: the store and the namespace have these. A state whose composition is not understood
is *opaque*: its tokens are still known, and the state can be restored and continued at its end.
"""

import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash
from msgspec.structs import replace

from proxy.core.tokens import TokenIds
from proxy.errors import StateFileMalformed

MAGIC = 0x67677371
SUPPORTED_VERSIONS = (2, 3, 4)
PART_BYTES = 16 << 20
_MAX_TOKENS = 1 << 26
CONTEXT_CHECKPOINTS_MAGIC = 0x504B4353
CONTEXT_CHECKPOINTS_VERSION = 1
DRAFT_MAGIC = 0x54464453
COMPRESSED_MAGIC = 0x34565344
_APPENDICES = (None, CONTEXT_CHECKPOINTS_MAGIC, DRAFT_MAGIC)
_MAX_STREAMS, _MAX_LAYERS, _MAX_CONTEXT_CHECKPOINTS = 256, 4096, 4096
_MAX_ELEMENT_BYTES = 4


class Section(msgspec.Struct, frozen=True):
    """The properties of a memory section that do not depend on its tokens.

    `rows` are (ggml type, bytes per row) of each tensor, in file order.
    """

    kind: str
    n_streams: int
    is_v_transposed: bool
    n_layers: int
    rotations: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]


def has_two_caches(layout: Sequence[Section] | None) -> bool:
    """Return whether states with these sections have a second attention cache.

    It is that of a sliding window, or the index of sparse attention (llama-kv-cache-dsa.cpp).
    """
    return [section.kind for section in layout or ()][:2] == ["attention"] * 2


class FoundSection(msgspec.Struct, frozen=True):
    """A section, and its position in a file.

    The cells of a non-empty attention section begin at `offset`, right behind their count (u32). Each cell
    takes `cell_bytes`: its position (i32), the number of its sequences (u32), M-RoPE coordinates if the
    model has them, and the sequence (i32): 0 bytes in a recurrent or empty section.
    """

    section: Section
    n_cells: int
    offset: int = 0
    cell_bytes: int = 0


class Reader:
    """Little-endian numbers from a file; every read and skip stays inside the file."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self.size_bytes = size_bytes
        self.position = 0

    def numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack("<" + layout, self.bytes(struct.calcsize("<" + layout)))

    def number(self, layout: str = "I") -> int:
        return self.numbers(layout)[0]

    def bytes(self, n_bytes: int) -> bytes:
        self.skip(n_bytes)
        self._file.seek(self.position - n_bytes)
        return self._file.read(n_bytes)

    def skip(self, n_bytes: int) -> None:
        is_inside = 0 <= n_bytes <= self.size_bytes - self.position
        require(is_inside, f"ends inside a field at byte {self.position}")
        self.position += n_bytes

    def peek(self) -> int | None:
        """Return the next number without moving; None at the end."""
        if self.position + 4 > self.size_bytes:
            return None
        number = self.number()
        self.position -= 4
        return number


def require(is_so: bool, otherwise: str) -> None:
    """Raise StateFileMalformed with the text *otherwise* unless *is_so*."""
    if not is_so:
        raise StateFileMalformed(otherwise)


# The memory sections: attention caches and recurrent states, in file order. Only DeepSeek V4's is named in
# the file, so each type is tried until one fits.


def read_sections(reader: Reader, version: int, n_tokens: int) -> tuple[FoundSection, ...]:
    """Read sections until the state ends, whatever memory types they belong to."""
    sections: list[FoundSection] = []
    while reader.peek() not in _APPENDICES:
        sections.append(_read_section(reader, version))
        is_known = sections[-1].n_cells <= n_tokens and len(sections) <= 3
        require(is_known, "has a composition that is not known")
    return tuple(sections)


def _read_section(reader: Reader, version: int) -> FoundSection:
    # The file does not tell whether cells have M-RoPE coordinates and whether there is a V (MLA has none):
    # the first attempt that can read the section is taken. Version 2 has two coordinates, later versions
    # three (llama-kv-cells.h).
    start, rope_bytes = reader.position, 12 if version > 2 else 8
    if reader.peek() == COMPRESSED_MAGIC:
        return _read_compressed(reader, version)
    for attempt in (
        partial(_read_attention, reader, version, extra_bytes=0, has_v=True),
        partial(_read_attention, reader, version, extra_bytes=rope_bytes, has_v=True),
        partial(_read_recurrent, reader),
        partial(_read_attention, reader, version, extra_bytes=0, has_v=False),
    ):
        reader.position = start
        with suppress(StateFileMalformed):
            if (found := attempt()).section.n_layers or not found.n_cells:
                return found
    raise StateFileMalformed(f"has an unknown section at byte {start}")


def _read_attention(reader: Reader, version: int, *, extra_bytes: int, has_v: bool) -> FoundSection:
    n_streams = reader.number()
    require(1 <= n_streams <= _MAX_STREAMS, "is no attention section")
    found = FoundSection(Section("attention", n_streams, False, 0, (), ()), 0)
    for _ in range(n_streams):
        n_cells = reader.number()
        require(not n_cells or not found.n_cells, "has more than one sequence")
        if n_cells:
            found = _read_stream(reader, version, n_streams, n_cells, 12 + extra_bytes, has_v)
    return found


def _read_stream(
    reader: Reader, version: int, n_streams: int, n_cells: int, cell_bytes: int, has_v: bool
) -> FoundSection:
    offset = reader.position
    for index in (0, n_cells // 2, n_cells - 1):
        reader.position = offset + index * cell_bytes
        position, n_sequences = reader.numbers("iI")
        require(n_sequences == 1 and position >= 0, "has a cell of another shape")
    reader.position = offset
    reader.skip(n_cells * cell_bytes)
    v_transposed, n_layers = reader.numbers("II")
    require(v_transposed <= 1 and n_layers <= _MAX_LAYERS, "has an impossible attention header")
    rotations = reader.numbers("II") if version >= 4 else ()
    rows = [_skip_tensor(reader, n_cells) for _ in range(n_layers)]
    if has_v:
        by_columns = bool(v_transposed)
        rows += [_skip_tensor(reader, n_cells, by_columns=by_columns) for _ in range(n_layers)]
    section = Section("attention", n_streams, bool(v_transposed), n_layers, rotations, tuple(rows))
    return FoundSection(section, n_cells, offset, cell_bytes)


def _skip_tensor(reader: Reader, n_cells: int, *, by_columns: bool = False) -> tuple[int, int]:
    """Skip a tensor; return its ggml type, and its bytes per cell.

    Cells are rows; in a transposed V they are columns, with one strip of elements per embedding value.
    """
    ggml_type, *sizes = reader.numbers("iII" if by_columns else "iQ")
    require(0 <= ggml_type < 256, "has an impossible tensor type")
    require(not by_columns or 0 < sizes[0] <= _MAX_ELEMENT_BYTES, "has no elements of that size")
    row_bytes = prod(sizes)
    reader.skip(n_cells * row_bytes)
    return ggml_type, row_bytes


def _read_recurrent(reader: Reader) -> FoundSection:
    n_cells = reader.number()
    require(n_cells <= 1, "is no recurrent section")
    for _ in range(n_cells):
        position, n_sequences = reader.numbers("iI")
        require(n_sequences == 0 and position >= 0, "is no recurrent section")
    is_transposed, n_layers = reader.numbers("II")
    require(not is_transposed and 1 <= n_layers <= _MAX_LAYERS, "is no recurrent section")
    rows: list[tuple[int, int]] = []
    # Layers without recurrent state (the attention layers of a hybrid) write nothing, and their
    # number is not in the file. All are F32 (0), and no other section begins like that.
    while reader.peek() == 0 and len(rows) <= 2 * n_layers:
        rows.append(_skip_tensor(reader, n_cells))
    require(len(rows) in range(0, 2 * n_layers + 1, 2), "has recurrent tensors of an unknown kind")
    return FoundSection(Section("recurrent", 1, False, n_layers, (), tuple(rows)), n_cells)


def _read_compressed(reader: Reader, version: int) -> FoundSection:
    """Read DeepSeek V4's memory (llama-kv-cache-dsv4.cpp): a window, compressed keys, three compressors.

    The compressors keep as much for any number of tokens. A context checkpoint lacks compressed keys.
    """
    _, state_version, is_partial = reader.numbers("III")
    require(state_version == 1 and is_partial <= 1, "has compressed keys of an unknown kind")
    for _ in range(2 - is_partial):  # in front of the window is a cache without layers
        found = _read_attention(reader, version, extra_bytes=0, has_v=False)
    rows = [*found.section.rows]
    for head, n_tensors in [("4I", 1)] * (3 - 3 * is_partial) + [("6I", 2)] * 3:
        *_, n_layers = reader.numbers(head)
        require(n_layers <= _MAX_LAYERS, "has compressed keys of too many layers")
        for tensor in range(n_layers * n_tensors):
            reader.skip(0 if tensor % n_tensors else 4)  # the layer's number
            ggml_type, _, n_rows, row_bytes = reader.numbers("iQQQ")
            reader.skip(n_rows * row_bytes)
            rows += [(ggml_type, n_rows * row_bytes)] * (n_tensors - 1)
    return FoundSection(replace(found.section, kind="compressed", rows=tuple(rows)), found.n_cells)


@dataclass(frozen=True, slots=True)
class ContextCheckpoint:
    """A context checkpoint in a file: its token positions, and the offset of its bytes.

    The bytes are three numbers (n_tokens, pos_min, pos_max) and the states of the model, of a draft
    model and of speculation, each behind its length. The last two are mostly empty.
    """

    n_tokens: int
    pos_min: int
    pos_max: int
    offset: int
    state_bytes: tuple[int, ...]

    @property
    def restore_point(self) -> int:
        """The number of tokens at which llama-server continues from the context checkpoint.

        server-context.cpp, the branch "restored context checkpoint".
        """
        return min(self.n_tokens, max(self.pos_min + 1, self.pos_max))

    @property
    def size_bytes(self) -> int:
        return 16 + sum(8 + n_bytes for n_bytes in self.state_bytes)


@dataclass(frozen=True, slots=True)
class StateFile:
    """The contents of a state file; `sections` is None if they were not understood.

    The state ends at `state_end`; the context checkpoints behind it, in the file's order, end at
    `context_checkpoints_end`. A damaged or unknown appendix counts as bytes behind that.
    """

    version: int
    tokens: TokenIds
    n_media: int
    sections: tuple[FoundSection, ...] | None
    context_checkpoints: tuple[ContextCheckpoint, ...]
    state_end: int
    context_checkpoints_end: int
    size_bytes: int

    @property
    def restore_points(self) -> tuple[int, ...]:
        """The token counts at which the context checkpoints let llama-server continue, ascending."""
        return tuple(sorted({c.restore_point for c in self.context_checkpoints}))

    @property
    def draft_bytes(self) -> int:
        """The size of the rest of the file: the state of a draft model or of draft-mtp."""
        return self.size_bytes - self.context_checkpoints_end

    @property
    def part_sizes(self) -> list[int]:
        """The lengths of the parts with a checksum each, in file order.

        No part crosses the bounds of a context checkpoint, so that it can be copied with its checksums.
        Parts are no longer than PART_BYTES, so that several threads can read one file.
        """
        begins = [c.offset for c in self.context_checkpoints]
        cuts = [0, self.state_end, *begins, self.context_checkpoints_end, self.size_bytes]
        return [
            min(PART_BYTES, end - offset)
            for begin, end in pairwise(cuts)
            for offset in range(begin, end, PART_BYTES)
        ]

    @property
    def layout(self) -> tuple[Section, ...] | None:
        """The properties of the sections that do not depend on the tokens; None if not understood."""
        return None if self.sections is None else tuple(f.section for f in self.sections)

    @property
    def has_every_position(self) -> bool:
        """Whether the file has the attention state of every token, and no other memory."""
        return bool(self.sections) and all(
            found.section.kind == "attention" and found.n_cells == len(self.tokens)
            for found in self.sections or ()
        )

    @property
    def window_tokens(self) -> int:
        """How many tokens the sliding window of the model holds; 0 if it is not full, or nobody can tell.

        The window is the second attention section (llama-kv-cache-iswa.cpp).
        """
        if not has_two_caches(self.layout):
            return 0
        whole, window, *_ = self.sections or ()
        return window.n_cells if window.n_cells < whole.n_cells == len(self.tokens) else 0

    @property
    def recurrent_bytes(self) -> int:
        """The size of the recurrent states in the file, those of its context checkpoints included."""
        rows = (f.section.rows for f in self.sections or () if f.section.kind != "attention")
        one = sum(row_bytes for section_rows in rows for _, row_bytes in section_rows)
        return one * (1 + len(self.context_checkpoints))


def read_state_file(path: Path) -> StateFile:
    """Read the state file at *path*.

    Raises StateFileMalformed if the file is not a state file or its token list is cut off, OSError if it
    cannot be read.
    """
    with path.open("rb") as file:
        return read_state(file)


def read_state(file: BinaryIO) -> StateFile:
    """Read an open state file, as `read_state_file` does."""
    reader = Reader(file, os.fstat(file.fileno()).st_size)
    magic, version, n_words = reader.numbers("III")
    require(magic == MAGIC, "does not begin with llama.cpp's magic number")
    tokens, n_media = _read_tokens(reader, n_words)
    sections = None
    with suppress(StateFileMalformed):
        if version in SUPPORTED_VERSIONS:
            sections = read_sections(reader, version, len(tokens))
    if sections is None:
        reader.position = reader.size_bytes
    state_end = reader.position
    points = _read_context_checkpoints(reader)
    end = reader.position
    return StateFile(version, tokens, n_media, sections, points, state_end, end, reader.size_bytes)


def _read_tokens(reader: Reader, n_words: int) -> tuple[TokenIds, int]:
    require(n_words <= _MAX_TOKENS, f"claims {n_words} words of tokens")
    words = array("i")
    words.frombytes(reader.bytes(4 * n_words))
    if not words or words[0] != -1:
        return words, 0
    is_known = n_words >= 4 and words[1] == 1 and 0 <= words[2] <= n_words - 4
    require(is_known, "has a token list of an unknown kind")
    return words[3 : 3 + words[2]], words[3 + words[2]]


def _read_context_checkpoints(reader: Reader) -> tuple[ContextCheckpoint, ...]:
    """Return the context checkpoints; none, and stay in front of the appendix, if it cannot be read.

    llama-server ignores a damaged appendix too, with a warning and a 200.
    """
    start = reader.position
    if reader.peek() == CONTEXT_CHECKPOINTS_MAGIC:
        with suppress(StateFileMalformed):
            _, appendix_version, count = reader.numbers("III")
            is_known = appendix_version == CONTEXT_CHECKPOINTS_VERSION
            if is_known and count <= _MAX_CONTEXT_CHECKPOINTS:
                return tuple(_read_context_checkpoint(reader) for _ in range(count))
    reader.position = start
    return ()


def _read_context_checkpoint(reader: Reader) -> ContextCheckpoint:
    offset = reader.position
    n_tokens, pos_min, pos_max = reader.numbers("qii")
    state_bytes = []
    for _ in ("model", "draft model", "speculation"):
        state_bytes.append(reader.number("Q"))
        reader.skip(state_bytes[-1])
    return ContextCheckpoint(n_tokens, pos_min, pos_max, offset, tuple(state_bytes))


# A fingerprint of a model file: its tensors' names, shapes and first bytes.
#
# The metadata is left out on purpose: another chat template in the file changes no state. The
# log-probability canary detects differences outside the sample (a merged adapter in the middle of a tensor,
# a rope flag).


SAMPLE_BYTES = 64 << 10
MAX_NAME_BYTES = 64 << 10
WINDOW_KEY, RECURRENT_KEY = b".attention.sliding_window", b".ssm."
INDEX_KEY = b".attention.indexer."
"""Parts of the keys that only models with a sliding window, a recurrent state or sparse attention have."""
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def fingerprint_model(path: Path) -> str | None:
    """Return a hex digest over all parts of the model at *path*, or None if it is not readable GGUF."""
    digest = xxhash.xxh3_128()
    with suppress(OSError, KeyError, ArithmeticError, StateFileMalformed):
        for part in _parts(path):
            with part.open("rb") as file:
                for sample in _samples(Reader(file, os.fstat(file.fileno()).st_size)):
                    digest.update(sample)
        return digest.hexdigest()
    return None


def has_key(path: Path, key: bytes) -> bool:
    """Return whether the metadata of the model at *path* has a *key*, as far as its first MiB tells."""
    with suppress(OSError), path.open("rb") as file:
        return key in file.read(1 << 20)
    return False


def lacks_window(path: Path) -> bool:
    """Return whether the metadata of the model at *path* tells of sparse attention without a window."""
    return has_key(path, INDEX_KEY) and not has_key(path, WINDOW_KEY)


def _parts(path: Path) -> list[Path]:
    match = _SPLIT_NAME.search(path.name)
    if not match:
        return [path]
    stem, n_parts = path.name[: match.start()], int(match.group(2))
    return [path.with_name(f"{stem}-{i:05}-of-{n_parts:05}.gguf") for i in range(1, n_parts + 1)]


def _samples(reader: Reader) -> Iterator[bytes]:
    """Yield the tensor directory, then the first bytes of each tensor."""
    require(reader.bytes(4) == b"GGUF", "is not a GGUF file")
    _, n_tensors, n_fields = reader.numbers("IQQ")
    alignment = 32
    for _ in range(n_fields):
        name = _read_name(reader)
        value = _read_value(reader, reader.number())
        if name == b"general.alignment" and isinstance(value, bytes):
            alignment = int.from_bytes(value, "little")
    directory = reader.position
    offsets = sorted(_read_tensor_offset(reader) for _ in range(n_tensors))
    data = -(-reader.position // alignment) * alignment
    n_bytes, reader.position = reader.position - directory, directory
    yield reader.bytes(n_bytes)
    for offset, end in pairwise([*offsets, reader.size_bytes - data]):
        reader.position = data + offset
        yield reader.bytes(min(SAMPLE_BYTES, end - offset))


def _read_name(reader: Reader) -> bytes:
    n_bytes = reader.number("Q")
    require(n_bytes <= MAX_NAME_BYTES, "has no name where one should be")
    return reader.bytes(n_bytes)


def _read_value(reader: Reader, value_type: int) -> bytes | None:
    """Read a metadata value; only scalars are returned, the rest is skipped."""
    if value_type == _STRING:
        reader.skip(reader.number("Q"))
    elif value_type != _ARRAY:
        return reader.bytes(_SCALAR_BYTES[value_type])
    else:
        element_type, n_elements = reader.numbers("IQ")
        if element_type in _SCALAR_BYTES:
            reader.skip(_SCALAR_BYTES[element_type] * n_elements)
        else:
            for _ in range(n_elements):
                _read_value(reader, element_type)
    return None


def _read_tensor_offset(reader: Reader) -> int:
    _read_name(reader)
    reader.skip(8 * reader.number() + 4)
    return reader.number("Q")
