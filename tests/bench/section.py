"""One table of the benchmark, as markdown. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median


@dataclass
class Section:
    """A titled table whose last column says whether its bar was met; `bar` may be empty.

    One that is not `is_documented` is printed, but not written into a document.
    """

    title: str
    bar: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    n_missed: int = 0
    is_documented: bool = True
    note: str = ""
    """A paragraph below the table."""
    n_keys: int = 1
    """So many columns name a row."""

    def add(self, *cells: object, is_met: bool | None) -> None:
        """Add a row; `is_met` is None where there is no bar."""
        verdict = "-" if is_met is None else "yes" if is_met else "**no**"
        self.n_missed += is_met is False
        self.rows.append((*(_cell(cell) for cell in cells), verdict))

    def markdown(self, level: int = 3) -> str:
        """Return the table under a heading of *level*; without a bar, nothing is said of one."""
        rows = [(*self.columns, "met"), *self.rows]
        if not self.bar:
            rows = [row[:-1] for row in rows]
        # Numbers are right-aligned; a column is numeric if its first cell begins with a digit.
        numeric = [cell[:1].isdigit() for cell in rows[1]] if self.rows else []
        rules = ["---:" if is_numeric else "---" for is_numeric in numeric]
        lines = [_line(rows[0]), _line(rules), *map(_line, rows[1:])]
        verdict = [self._verdict(), ""] if self.bar else []
        note = ["", self.note] if self.note else []
        return "\n".join([f"{'#' * level} {self.title}", "", *verdict, *lines, *note])

    def with_rows_of(self, written: str) -> "Section":
        """Return this table with the rows that it lacks of the table of this title in *written*."""
        table = written.partition(f"# {self.title}\n")[2].partition("\n#")[0]
        lines = [line[2:-2].split(" | ") for line in table.splitlines() if line[:1] == "|"]
        older = [tuple(line) if self.bar else (*line, "-") for line in lines[2:]]
        rows = {row[: self.n_keys]: row for row in (*older, *self.rows)}
        n_missed = sum(row[-1] == "**no**" for row in rows.values())
        return replace(self, rows=[*rows.values()], n_missed=n_missed)

    def _verdict(self) -> str:
        result = f"{self.n_missed} of {len(self.rows)} rows miss it" if self.n_missed else "met"
        return f"Bar: {self.bar}. Result: {result}."


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Return the median of several runs in words, and from where to where they range if they differ."""
    least, middle, most = (
        format(value, form) for value in (min(values), median(values), max(values))
    )
    return middle if least == most else f"{middle} ({least} to {most})"


def _cell(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _line(cells: "tuple[str, ...] | list[str]") -> str:
    return "| " + " | ".join(cells) + " |"
