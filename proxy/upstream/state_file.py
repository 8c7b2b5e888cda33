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

from proxy.core.prefix import TokenIds
from proxy.errors import StateFileMalformed
from proxy.upstream.state_sections import (
    CONTEXT_CHECKPOINTS_MAGIC,
    FoundSection,
    Reader,
    Section,
    read_sections,
)

MAGIC = 0x67677371
SUPPORTED_VERSIONS = (3, 4)
_MAX_TOKENS = 1 << 26


@dataclass(frozen=True, slots=True)
class StateFile:
    """What a state file says of itself; `sections` is None if they were not understood."""

    version: int
    tokens: TokenIds
    n_media: int
    sections: tuple[FoundSection, ...] | None
    restore_points: tuple[int, ...]
    state_end: int
    size_bytes: int

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
        reader = Reader(file, os.fstat(file.fileno()).st_size)
        magic, version, n_words = reader.numbers("III")
        if magic != MAGIC:
            raise StateFileMalformed("does not begin with llama.cpp's magic number")
        tokens, n_media = _read_tokens(reader, n_words)
        sections, points, end = _read_state(reader, version, len(tokens))
        return StateFile(version, tokens, n_media, sections, points, end, reader.size_bytes)


def _read_state(
    reader: Reader, version: int, n_tokens: int
) -> tuple[tuple[FoundSection, ...] | None, tuple[int, ...], int]:
    """Return the sections, the restore points and where the state ends; an opaque one ends the file."""
    opaque = None, (), reader.size_bytes
    if version not in SUPPORTED_VERSIONS:
        return opaque
    try:
        sections = read_sections(reader, version, n_tokens)
    except StateFileMalformed:
        return opaque
    state_end = reader.position
    return sections, _read_restore_points(reader), state_end


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


def _read_restore_points(reader: Reader) -> tuple[int, ...]:
    """Return the token counts at which the file's context checkpoints let llama-server continue.

    From one at (n_tokens, pos_min, pos_max) it continues at the lower of n_tokens and
    max(pos_min + 1, pos_max): server-context.cpp, the branch "restored context checkpoint".
    """
    if reader.peek_u32() != CONTEXT_CHECKPOINTS_MAGIC:
        return ()
    points = set()
    try:
        _, appendix_version, count = reader.numbers("III")
        if appendix_version != 1:
            return ()
        for _ in range(count):
            n_tokens, pos_min, pos_max = reader.numbers("qii")
            for _ in ("target", "draft", "speculative"):
                (n_bytes,) = reader.numbers("Q")
                reader.skip(n_bytes)
            points.add(min(n_tokens, max(pos_min + 1, pos_max)))
    except StateFileMalformed:
        # llama-server ignores a damaged appendix too, with a warning and a 200.
        return ()
    return tuple(sorted(points))
