"""The demo's table, its verdict and its last sentence. Pure."""

from rich import box
from rich.table import Table

from tests.bench.play import Measured

SLACK_TOKENS = 32


def results_table(through_proxy: list[Measured], alone: list[Measured]) -> Table:
    """Return both runs side by side."""
    # Just fits a terminal of 80 columns.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False, show_edge=False)
    table.add_column("request", no_wrap=True)
    for heading in ("prompt\ntokens", "new"):
        table.add_column(heading, justify="right")
    for run, style in (("proxy", "green"), ("alone", "yellow")):
        for heading in ("reused", "evaluated", "first\ntoken"):
            table.add_column(f"{run}:\n{heading}", justify="right", style=style)
    for left, right in zip(through_proxy, alone, strict=True):
        if left.request.restarts:
            table.add_section()
            table.add_row("[dim]restart of both[/]")
        table.add_row(
            left.request.label,
            f"{left.n_prompt:,}",
            f"{left.n_new:,}",
            *_costs(left),
            *_costs(right),
        )
    return table


def _costs(measured: Measured) -> tuple[str, str, str]:
    seconds = f"{measured.first_token_seconds:.2f}s"
    return f"{measured.n_reused:,}", f"{measured.n_evaluated:,}", seconds


def failures(through_proxy: list[Measured], alone: list[Measured]) -> list[str]:
    """Return what the proxy promises and did not do."""
    found = [
        f"{m.request.label}: {m.n_evaluated} tokens evaluated for {m.n_new} new ones"
        for m in through_proxy
        if m.n_evaluated > m.n_new + SLACK_TOKENS
    ]
    ours, theirs = _first_after_restart(through_proxy), _first_after_restart(alone)
    if ours.first_token_seconds >= theirs.first_token_seconds:
        found.append("the first request after the restart was not answered sooner")
    return found


def _first_after_restart(results: list[Measured]) -> Measured:
    return _after_restart(results)[0]


def _after_restart(results: list[Measured]) -> list[Measured]:
    index = next(i for i, measured in enumerate(results) if measured.request.restarts)
    return results[index:]


def summary(through_proxy: list[Measured], alone: list[Measured]) -> str:
    """Return what was saved after the restart, in one sentence."""
    ours, theirs = _after_restart(through_proxy), _after_restart(alone)
    n_saved = sum(m.n_evaluated for m in theirs) - sum(m.n_evaluated for m in ours)
    seconds = sum(m.first_token_seconds for m in theirs) - sum(m.first_token_seconds for m in ours)
    ratio = theirs[0].first_token_seconds / ours[0].first_token_seconds
    return (
        f"In the {len(ours)} requests after the restart the proxy saved llama-server "
        f"{n_saved:,} tokens and its user {seconds:.1f} s of waiting; the first of them was "
        f"answered after {ours[0].first_token_seconds:.2f} s instead of "
        f"{theirs[0].first_token_seconds:.2f} s, {ratio:.0f} times sooner."
    )
