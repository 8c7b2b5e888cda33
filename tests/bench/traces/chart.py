"""A bar chart of tokens evaluated, as SVG. Pure.

Bars are multiples of what an exact infinite cache evaluates, so that long and short traces fit one scale.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tests.bench.traces.outcomes import Outcomes

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 760, 130, 60, 56, 40, 13
PROXY_COLOUR, ALONE_COLOUR, TEXT_COLOUR, LINE_COLOUR = "#2a7f62", "#c8793a", "#444", "#ccc"
FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Row:
    """One trace; what the proxy and llama-server alone evaluated, in multiples of the exact cache."""

    label: str
    proxy: float
    alone: float


def rows_of(outcomes: Outcomes, kind: str) -> list[Row]:
    """Return the traces that were measured on one memory type, each on the fewest slots."""
    rows: dict[str, Row] = {}
    for case in sorted(outcomes.cases("proxy"), key=lambda case: case.n_slots):
        result, alone = outcomes.median(case), outcomes.alone(case)
        if case.kind == kind and case.trace not in rows and result and alone:
            rows[case.trace] = Row(case.trace, result.ratio, alone.ratio)
    return list(rows.values())


def draw(title: str, rows: Sequence[Row]) -> str:
    """Return the chart as an SVG document."""
    height = TOP + ROW * len(rows) + 24
    longest = max(max(row.proxy, row.alone) for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" {FONT} fill="{TEXT_COLOUR}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
        *_legend(),
        *_exact_line(LEFT + scale, height),
    ]
    for index, row in enumerate(rows):
        parts += _bars(row, TOP + ROW * index, scale)
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> Iterator[str]:
    for x, colour, label in (
        (LEFT, PROXY_COLOUR, "through the proxy"),
        (LEFT + 150, ALONE_COLOUR, "llama-server alone"),
    ):
        yield f'<rect x="{x}" y="28" width="{BAR}" height="{BAR}" fill="{colour}"/>'
        yield f'<text x="{x + BAR + 6}" y="39">{label}</text>'


def _exact_line(x: float, height: int) -> Iterator[str]:
    yield f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{height - 20}" stroke="{LINE_COLOUR}"/>'
    yield f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">exact cache</text>'


def _bars(row: Row, y: int, scale: float) -> Iterator[str]:
    yield f'<text x="{LEFT - 8}" y="{y + BAR + 5}" text-anchor="end">{escape(row.label)}</text>'
    for offset, colour, value in ((0, PROXY_COLOUR, row.proxy), (BAR + 2, ALONE_COLOUR, row.alone)):
        top, width = y + offset, value * scale
        yield f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
        yield f'<text x="{LEFT + width + 5:.1f}" y="{top + BAR - 2}">{value:.2f}</text>'
