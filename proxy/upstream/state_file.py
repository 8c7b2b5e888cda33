"""llama-server's slot state files, read as far as the proxy needs them.

Owns: the layout of a state file (llama_state_seq_save_file of libllama plus the server's token list
and, since 0.7.0, its appendices). Reads headers and skips over tensor data, so that a file of many
GiB costs a few hundred small reads.

A file says of itself which tokens it holds, which context checkpoints it carries and what its cache
looks like. It has no checksum and no trace of the model: those are the store's and the namespace's
business. A composition that is not understood leaves the state *opaque*: its tokens are still known,
and it can be restored at its end.
"""

import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from proxy.core.prefix import TokenIds
from proxy.errors import StateFileMalformed
from proxy.upstream.state_sections import (
    CONTEXT_CHECKPOINTS_MAGIC,
    CONTEXT_CHECKPOINTS_VERSION,
    FoundSection,
    Reader,
    Section,
    read_sections,
)

MAGIC = 0x67677371
SUPPORTED_VERSIONS = (3, 4)
_MAX_TOKENS = 1 << 26


@dataclass(frozen=True, slots=True)
class ContextCheckpoint:
    """A context checkpoint in a file: its positions, and where its bytes begin.

    The bytes are three numbers (n_tokens, pos_min, pos_max) and the states of the model, of a draft
    model and of speculation, each behind its length and mostly the last two empty.
    """

    n_tokens: int
    pos_min: int
    pos_max: int
    offset: int
    state_bytes: tuple[int, ...]

    @property
    def restore_point(self) -> int:
        """At how many tokens llama-server continues from it.

        server-context.cpp, the branch "restored context checkpoint".
        """
        return min(self.n_tokens, max(self.pos_min + 1, self.pos_max))

    @property
    def state_offset(self) -> int:
        """Where the state of the model begins."""
        return self.offset + 16 + 8

    @property
    def size_bytes(self) -> int:
        return 16 + sum(8 + n_bytes for n_bytes in self.state_bytes)


@dataclass(frozen=True, slots=True)
class StateFile:
    """What a state file says of itself; `sections` is None if they were not understood.

    The state ends at `state_end`; the context checkpoints behind it, in the file's order, end at
    `context_checkpoints_end`. An appendix that is damaged or unknown counts as what follows them.
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
    def layout(self) -> tuple[Section, ...] | None:
        """What of the sections does not depend on the tokens, None if it was not understood."""
        return None if self.sections is None else tuple(f.section for f in self.sections)

    @property
    def n_cells(self) -> tuple[int, ...]:
        """How many cells each section has."""
        return tuple(found.n_cells for found in self.sections or ())

    @property
    def has_every_position(self) -> bool:
        """Whether the attention state of every token is there, and nothing else is needed."""
        return bool(self.sections) and all(
            found.section.kind == "attention" and found.n_cells == len(self.tokens)
            for found in self.sections or ()
        )


def read_state_file(path: Path) -> StateFile:
    """Read the state file at *path*.

    Raises StateFileMalformed if it is not a state file or its token list is cut off, OSError if it
    cannot be read.
    """
    with path.open("rb") as file:
        return read_state(file)


def read_state(file: BinaryIO) -> StateFile:
    """Read an open state file, as `read_state_file` does."""
    reader = Reader(file, os.fstat(file.fileno()).st_size)
    magic, version, n_words = reader.numbers("III")
    if magic != MAGIC:
        raise StateFileMalformed("does not begin with llama.cpp's magic number")
    tokens, n_media = _read_tokens(reader, n_words)
    sections = _read_sections(reader, version, len(tokens))
    state_end = reader.position
    points = () if sections is None else _read_context_checkpoints(reader)
    end = reader.position
    return StateFile(version, tokens, n_media, sections, points, state_end, end, reader.size_bytes)


def _read_sections(reader: Reader, version: int, n_tokens: int) -> tuple[FoundSection, ...] | None:
    """Return the sections, None if they are not understood: then the state ends where the file does."""
    try:
        if version in SUPPORTED_VERSIONS:
            return read_sections(reader, version, n_tokens)
    except StateFileMalformed:
        pass
    reader.position = reader.size_bytes
    return None


def _read_tokens(reader: Reader, n_words: int) -> tuple[TokenIds, int]:
    if n_words > _MAX_TOKENS:
        raise StateFileMalformed(f"claims {n_words} words of tokens")
    words = array("i")
    words.frombytes(reader.bytes(4 * n_words))
    if not words or words[0] != -1:
        return words, 0
    if n_words < 4 or words[1] != 1 or not 0 <= words[2] <= n_words - 4:
        raise StateFileMalformed("has a token list of an unknown kind")
    n_tokens = words[2]
    return words[3 : 3 + n_tokens], words[3 + n_tokens]


def _read_context_checkpoints(reader: Reader) -> tuple[ContextCheckpoint, ...]:
    """Return the context checkpoints; of an appendix that cannot be read nothing is passed over."""
    start = reader.position
    if reader.peek_u32() != CONTEXT_CHECKPOINTS_MAGIC:
        return ()
    try:
        _, appendix_version, count = reader.numbers("III")
        if appendix_version == CONTEXT_CHECKPOINTS_VERSION:
            return tuple(_read_context_checkpoint(reader) for _ in range(count))
    except StateFileMalformed:
        # llama-server ignores a damaged appendix too, with a warning and a 200.
        pass
    reader.position = start
    return ()


def _read_context_checkpoint(reader: Reader) -> ContextCheckpoint:
    offset = reader.position
    n_tokens, pos_min, pos_max = reader.numbers("qii")
    state_bytes = []
    for _ in ("model", "draft model", "speculation"):
        (n_bytes,) = reader.numbers("Q")
        reader.skip(n_bytes)
        state_bytes.append(n_bytes)
    return ContextCheckpoint(n_tokens, pos_min, pos_max, offset, tuple(state_bytes))
