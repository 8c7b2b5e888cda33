"""One table of the benchmark, as markdown. Pure."""

from dataclasses import dataclass, field


@dataclass
class Section:
    """A titled table whose last column says whether its bar was met; `bar` may be empty."""

    title: str
    bar: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    n_missed: int = 0

    def add(self, *cells: object, is_met: bool | None) -> None:
        """Add a row; `is_met` is None where there is no bar."""
        verdict = "-" if is_met is None else "yes" if is_met else "**no**"
        self.n_missed += is_met is False
        self.rows.append((*(_cell(cell) for cell in cells), verdict))

    def markdown(self, level: int = 3) -> str:
        """Return the table under a heading of *level*."""
        head = (*self.columns, "met")
        # Numbers are right-aligned; a column is numeric if its first cell begins with a digit.
        numeric = [cell[:1].isdigit() for cell in self.rows[0]] if self.rows else []
        rules = ["---:" if is_numeric else "---" for is_numeric in numeric]
        lines = [_line(head), _line(rules), *(_line(row) for row in self.rows)]
        return "\n".join([f"{'#' * level} {self.title}", "", self._verdict(), "", *lines])

    def _verdict(self) -> str:
        if not self.bar:
            return "For information; there is no bar."
        result = f"{self.n_missed} of {len(self.rows)} rows miss it" if self.n_missed else "met"
        return f"Bar: {self.bar}. Result: {result}."


def _cell(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _line(cells: "tuple[str, ...] | list[str]") -> str:
    return "| " + " | ".join(cells) + " |"
