"""State files of all versions and every known composition, drawn at random: a model of what is written."""

import struct
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from proxy.llama.files import FoundSection, Section
from tests.unit.state_files import (
    F16_BYTES,
    F16_ROW,
    F32_ROW,
    Cell,
    appendix,
    attention,
    cells_at,
    context_checkpoint,
    draft_state,
    partial_state,
    recurrent,
    state_file,
    words,
)

KINDS = ("full", "swa", "recurrent", "hybrid", "hybrid swa")
MOST_TOKENS = 40


@dataclass(frozen=True)
class Attention:
    """An attention section to be written."""

    cells: list[Cell]
    options: dict[str, Any]

    def write(self, version: int) -> bytes:
        return attention(self.cells, version=version, **self.options)

    def section(self, version: int) -> Section:
        row = (F16_ROW[0], self.options["row_bytes"])
        return Section(
            "attention",
            self.options["n_streams"],
            self.options["is_v_transposed"],
            self.options["n_layers"],
            self.options["rotations"] if version >= 4 else (),
            (row,) * 2 * self.options["n_layers"],
        )

    def at(self, n_tokens: int) -> "Attention":
        """Return the section as it was at so many tokens."""
        first = max(0, n_tokens - len(self.cells))
        return replace(self, cells=cells_at(range(first, n_tokens)))

    def require_found(self, data: bytes, found: FoundSection) -> None:
        """Check that the parser says where everything lies."""
        assert struct.unpack_from("<I", data, found.offset - 4) == (len(self.cells),)
        step = found.cell_bytes
        positions = [
            struct.unpack_from("<i", data, found.offset + i * step)[0]
            for i in range(len(self.cells))
        ]
        assert positions == [cell.position for cell in self.cells]


@dataclass(frozen=True)
class Recurrent:
    """A recurrent section to be written."""

    last_position: int
    n_layers: int
    n_with_state: int

    def write(self, version: int) -> bytes:
        return recurrent(self.last_position, n_layers=self.n_layers, n_with_state=self.n_with_state)

    def section(self, version: int) -> Section:
        return Section("recurrent", 1, False, self.n_layers, (), (F32_ROW,) * 2 * self.n_with_state)

    def at(self, n_tokens: int) -> "Recurrent":
        return replace(self, last_position=n_tokens - 1)

    def require_found(self, data: bytes, found: FoundSection) -> None:
        assert (found.n_cells, found.cell_bytes) == (1, 0)


@dataclass(frozen=True)
class Composition:
    """A whole state file to be written."""

    version: int
    tokens: list[int]
    sections: list[Attention | Recurrent]
    points: list[int] = field(default_factory=list)
    has_draft: bool = False
    slot: int = 0

    def write(self) -> bytes:
        return self.write_with([self.entry(point) for point in self.points])

    def write_with(self, entries: list[bytes]) -> bytes:
        """Return the file with these context checkpoints instead of its own."""
        appendices = [appendix(*entries)] * bool(entries) + [draft_state()] * self.has_draft
        return state_file(words(self.tokens), *self._state(), *appendices, version=self.version)

    def entry(self, point: int) -> bytes:
        """Return a context checkpoint: all of the state that is not there for every position."""
        sections = self.sections[1:] if isinstance(self.sections[0], Attention) else self.sections
        state = [section.at(point).write(self.version) for section in sections]
        partial = partial_state(*state, sequence=self.slot)
        return context_checkpoint(point, point - 1, point - 1, partial)

    def at(self, n_tokens: int) -> "Composition":
        """Return the file of an earlier save in the same conversation, without context checkpoints."""
        sections = [section.at(n_tokens) for section in self.sections]
        return replace(self, tokens=self.tokens[:n_tokens], sections=sections, points=[])

    def _state(self) -> list[bytes]:
        return [section.write(self.version) for section in self.sections]

    @property
    def state_end(self) -> int:
        return 12 + 4 * (len(self.tokens) + 4) + sum(map(len, self._state()))


@st.composite
def attentions(draw: st.DrawFn, n_tokens: int, n_cells: int, *, is_shuffled: bool) -> Attention:
    positions = list(range(n_tokens - n_cells, n_tokens))
    if is_shuffled:
        positions = draw(st.permutations(positions))
    n_streams = draw(st.integers(1, 5))
    options = {
        "n_layers": draw(st.integers(1, 4)),
        "is_v_transposed": draw(st.booleans()),
        "is_mrope": draw(st.booleans()),
        "n_streams": n_streams,
        "stream": draw(st.integers(0, n_streams - 1)),
        "row_bytes": F16_BYTES * draw(st.integers(1, 9)),
        "rotations": (draw(st.integers(0, 64)), draw(st.integers(0, 64))),
    }
    return Attention(cells_at(positions), options)


@st.composite
def recurrents(draw: st.DrawFn, n_tokens: int) -> Recurrent:
    n_layers = draw(st.integers(1, 6))
    return Recurrent(n_tokens - 1, n_layers, draw(st.integers(1, n_layers)))


@st.composite
def compositions(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = KINDS,
    lacking: tuple[int, int] = (0, MOST_TOKENS),
    versions: tuple[int, ...] = (2, 3, 4),
) -> Composition:
    """Draw files of models with these kinds of memory, whose windows lack so many first tokens."""
    kind, version = draw(st.sampled_from(kinds)), draw(st.sampled_from(versions))
    n_tokens = draw(st.integers(4, MOST_TOKENS))
    sections: list[Attention | Recurrent] = []
    if kind != "recurrent":
        sections.append(draw(attentions(n_tokens, n_tokens, is_shuffled=draw(st.booleans()))))
    if "swa" in kind:
        n_window = n_tokens - draw(st.integers(lacking[0], min(lacking[1], n_tokens - 2)))
        sections.append(draw(attentions(n_tokens, n_window, is_shuffled=draw(st.booleans()))))
    if "recurrent" in kind or "hybrid" in kind:
        sections.append(draw(recurrents(n_tokens)))
    points = st.lists(st.integers(1, n_tokens), unique=True, max_size=4).map(sorted)
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n_tokens, max_size=n_tokens))
    return Composition(version, tokens, sections, draw(points), draw(st.booleans()))
