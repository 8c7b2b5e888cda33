"""What single traces must do beyond coming close to an exact cache. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.bench.section import Section
from tests.bench.traces.outcomes import Outcomes
from tests.bench.traces.result import ALONE, Case, Result

GROWN_AT_MOST = 97_500 / 92_856
"""The bar for sessions that an exact cache evaluates 92,856 tokens for, in proportion."""
TIMES_FEWER_TOKENS, TIMES_LESS_WALL = 2.2, 1.8
AGENT_WALL_AT_MOST = 1.05
KEPT_AT_MOST = 1.3
HEADER_SLACK_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that was measured, and what it must be, in words."""

    case: Case
    what: str
    measured: str
    bar: str
    is_met: bool


def special_section(outcomes: Outcomes) -> Section:
    """Return the bars that single traces have."""
    section = Section(
        "What single traces must do",
        "as in the table",
        ("trace", "model", "slots", "what", "measured", "bar"),
    )
    for bar in special_bars(outcomes):
        model = f"{bar.case.kind} {bar.case.size}"
        cells = (bar.case.trace, model, bar.case.n_slots, bar.what, bar.measured, bar.bar)
        section.add(*cells, is_met=bar.is_met)
    return section


def special_bars(outcomes: Outcomes) -> Iterator[Bar]:
    """Yield the bars of all cases that were measured, as far as what they need was measured too."""
    for case in [*outcomes.cases("proxy"), *outcomes.cases("proxy", "small")]:
        result, alone = outcomes.median(case), outcomes.alone(case)
        assert result is not None
        match case.trace, case.size:
            case "interleaved", "small" if alone:
                yield from _interleaved(outcomes, result, alone)
            case "agent", "small" if alone:
                yield _agent_wall(outcomes, case)
            case "agent", _:
                yield kept_bytes(result)
            case (("subagents" | "titles"), _) if alone:
                yield _never_more(result, alone)
            case "grown", _:
                yield _grown(outcomes, result)


def _interleaved(outcomes: Outcomes, result: Result, alone: Result) -> Iterator[Bar]:
    times = alone.n_evaluated / result.n_evaluated
    yield Bar(
        result.case,
        f"tokens: {result.n_evaluated:,} against {alone.n_evaluated:,} alone",
        f"{times:.2f} times fewer",
        f"at least {TIMES_FEWER_TOKENS}",
        times >= TIMES_FEWER_TOKENS,
    )
    ours, theirs = outcomes.seconds(result.case), outcomes.seconds_alone(result.case)
    yield Bar(
        result.case,
        f"wall: {ours:.1f} s against {theirs:.1f} s alone",
        f"{theirs / ours:.2f} times less",
        f"at least {TIMES_LESS_WALL}",
        theirs / ours >= TIMES_LESS_WALL,
    )


def _agent_wall(outcomes: Outcomes, case: Case) -> Bar:
    ours, theirs = outcomes.seconds(case), outcomes.seconds_alone(case)
    return Bar(
        case,
        f"wall: {ours:.1f} s against {theirs:.1f} s alone, medians",
        f"{ours / theirs:.3f} times",
        f"at most {AGENT_WALL_AT_MOST}",
        ours / theirs <= AGENT_WALL_AT_MOST,
    )


def _never_more(result: Result, alone: Result) -> Bar:
    return Bar(
        result.case,
        "tokens, against llama-server alone",
        f"{result.n_evaluated:,}",
        f"at most {alone.n_evaluated:,}",
        result.n_evaluated <= alone.n_evaluated,
    )


def _grown(outcomes: Outcomes, result: Result) -> Bar:
    others = [outcomes.median(replace(result.case, variant=variant)) for variant in ALONE]
    alone = ", ".join(f"{r.case.variant} {r.n_evaluated:,}" for r in others if r)
    n_at_most = round(GROWN_AT_MOST * result.n_exact)
    return Bar(
        result.case,
        f"tokens: exact {result.n_exact:,}" + (f", {alone}" if alone else ""),
        f"{result.n_evaluated:,}",
        f"at most {n_at_most:,}",
        result.n_evaluated <= n_at_most,
    )


def kept_bytes(result: Result) -> Bar:
    """Return the bar on what is kept of one session: its final state, and its header's."""
    n_header = result.requests[0].log.get("cuts", [0])[0]
    final = max(result.kept, key=lambda state: state.n_tokens)
    headers = [
        state.size_bytes
        for state in result.kept
        if abs(state.n_tokens - n_header) <= HEADER_SLACK_TOKENS
    ]
    n_at_most = KEPT_AT_MOST * final.size_bytes + sum(headers[:1])
    n_points = len(final.restore_points)
    return Bar(
        result.case,
        f"MB kept in {len(result.kept)} states; the final one has {final.size_bytes / 1e6:.1f}, "
        f"{final.state_bytes / 1e6:.1f} without its {n_points} context checkpoints",
        f"{result.n_kept_bytes / 1e6:.1f}",
        f"at most {n_at_most / 1e6:.1f}",
        result.n_kept_bytes <= n_at_most,
    )
