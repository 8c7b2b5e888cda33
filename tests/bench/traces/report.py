"""Tables of results, as text for a terminal or markdown alike. Pure."""

from collections.abc import Iterable, Sequence

from tests.bench.traces.result import RequestCost, Result

COLUMNS = (
    *("trace", "memory", "slots", "variant", "evaluated", "exact", "ratio"),
    *("TTFT p50", "TTFT p95", "wall", "written MB", "kept MB"),
)
REQUEST_COLUMNS = (
    *("request", "prompt", "exact", "evaluated", "lost", "slot", "chosen", "expected", "confirmed"),
    *("stops", "cuts", "TTFT", "why"),
)


def results_table(results: Iterable[Result]) -> str:
    """Return one line for each result."""
    return align([COLUMNS, *map(_row, results)])


def _row(result: Result) -> tuple[str, ...]:
    case = result.case
    p50, p95 = result.first_token_quantiles()
    return (
        *(case.trace, case.kind, str(case.n_slots), case.variant),
        *(f"{result.n_evaluated:,}", f"{result.n_exact:,}", f"{result.ratio:.3f}"),
        *(f"{p50:.3f}", f"{p95:.3f}", f"{result.seconds:.1f}"),
        *(f"{n / 1e6:.1f}" for n in (result.n_written_bytes, result.n_kept_bytes)),
    )


def requests_table(result: Result) -> str:
    """Return one line for each request, in the order of sending, and what happened besides them."""
    table = align([REQUEST_COLUMNS, *map(_request_row, result.requests)])
    n_besides = result.n_evaluated - sum(map(_evaluated, result.requests))
    lines = [f"  {name} {value:,.0f}" for name, value in result.counters.items()]
    kept = [
        f"  kept: {state.n_tokens} tokens, {state.size_bytes:,} bytes ({state.state_bytes:,} without "
        f"context checkpoints), restore points {list(state.restore_points)}"
        for state in result.kept
    ]
    return "\n".join([table, f"evaluated besides requests: {n_besides}", *lines, *kept]) + "\n"


def _evaluated(cost: RequestCost) -> int:
    return int(cost.log.get("evaluated", cost.n_evaluated))


def _request_row(cost: RequestCost) -> tuple[str, ...]:
    log = cost.log
    n_evaluated = _evaluated(cost)
    return (
        *(cost.label, f"{cost.n_prompt}", f"{cost.n_exact}", f"{n_evaluated}"),
        f"{n_evaluated - cost.n_exact}",
        *(_text(log.get(name)) for name in ("slot", "chosen", "expected", "confirmed")),
        *(_text(log.get(name)) for name in ("stops", "cuts")),
        f"{cost.first_token_seconds:.3f}",
        _text(log.get("why")),
    )


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(str(part) for part in value) or "-"
    return "-" if value is None else str(value)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table, legible as text too: columns of one width, numbers to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(cell[:1].isdigit() or cell[:1] == "-" for cell in c[1:]) for c in columns]
    rule = ["-" * (w - n) + ":" * n for w, n in zip(widths, numeric, strict=True)]
    return "\n".join(_line(row, widths, numeric) for row in [rows[0], rule, *rows[1:]]) + "\n"


def _line(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    cells = zip(row, widths, numeric, strict=True)
    return f"| {' | '.join(c.rjust(w) if n else c.ljust(w) for c, w, n in cells)} |"
