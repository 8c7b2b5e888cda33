"""What a dashboard is made of, and the few forms of PromQL that its queries take.

Knows nothing about Grafana's JSON. Grafana fills in `$instance`, the proxies that were chosen, `$__range`,
the time range that is looked at, and `$__rate_interval`, four scrapes or one step of the graph.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from proxy.metrics import PREFIX

RANGE = "$__range"
STEP = "$__rate_interval"

GOOD, FAIR, BAD, DULL, BLUE = "green", "orange", "red", "text", "blue"
HITS = "hit|partial"
"""The outcomes of requests that reused more than the first words of their template."""


class Kind(StrEnum):
    """How a panel shows its queries."""

    VALUES = "values"
    """Numbers of the whole time range."""
    NAMES = "names"
    """The names of what is so now."""
    RANKED = "ranked"
    """Bars, the longest first, of the whole time range."""
    LINES = "lines"
    STACKED = "stacked"
    TIMELINE = "timeline"
    """What was so when."""

    @property
    def is_instant(self) -> bool:
        return self in (Kind.VALUES, Kind.NAMES, Kind.RANKED)


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and what its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: `says` tells how to read it, `if_empty` what it means that there is nothing to show.

    `steps` are the values from which on a number has a colour, `colors` those of single series. `apart` are
    series with an axis of their own, at the right.
    """

    title: str
    kind: Kind
    queries: tuple[Query, ...]
    unit: str
    says: str
    width: int = 8
    height: int = 8
    if_empty: str = ""
    maximum: float | None = None
    steps: tuple[tuple[float | None, str], ...] = ()
    colors: dict[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Annotation:
    """What happened at a moment: a line through every graph, where the expression has a value."""

    name: str
    expr: str
    color: str


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading; the first row has none. A folded one is opened by a click."""

    title: str
    panels: tuple[Panel, ...]
    is_folded: bool = False


def series(name: str, **labels: str) -> str:
    """Return the selector of a metric of ours; a label value may be a regular expression."""
    chosen = "".join(f',{label}=~"{value}"' for label, value in labels.items())
    return f'{PREFIX}_{name}{{instance=~"$instance"{chosen}}}'


def total(name: str, over: str, by: str = "", **labels: str) -> str:
    """Return by how much a counter grew within a time."""
    return f"sum{_by(by)} (increase({series(f'{name}_total', **labels)}[{over}]))"


def per_second(name: str, by: str = "", **labels: str) -> str:
    return f"sum{_by(by)} (rate({series(name, **labels)}[{STEP}]))"


def per_minute(name: str, by: str = "", **labels: str) -> str:
    return f"60 * {per_second(f'{name}_total', by, **labels)}"


def gauge(name: str, by: str = "", **labels: str) -> str:
    return f"sum{_by(by)} ({series(name, **labels)})"


def quantile(share: float, name: str, over: str = STEP, **labels: str) -> str:
    """Return the time within which a share of what a histogram counted was done."""
    buckets = series(f"{name}_bucket", **labels)
    return f"histogram_quantile({share}, sum by (le) (rate({buckets}[{over}])))"


def median_and_worst(name: str, what: str, **labels: str) -> tuple[Query, Query]:
    """Return the median of a histogram, and what only one in twenty exceeds."""
    return (
        Query(quantile(0.5, name, **labels), f"{what}, p50"),
        Query(quantile(0.95, name, **labels), f"{what}, p95"),
    )


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
