"""The tables of all traces, with what must hold of them. Pure."""

from dataclasses import replace

from tests.bench.section import Section
from tests.bench.traces.outcomes import Outcomes
from tests.bench.traces.result import Result
from tests.bench.traces.special import special_section

AT_MOST = {"agent": 1.02, "interleaved": 1.02, "fresh": 1.02, "restart": 1.02, "mixed": 1.10}
AT_MOST |= {"opencode": 1.35}
"""It goes back again and again to where the same few turns were, of which not every place is kept."""
AT_MOST_ELSE = 1.05
DOCUMENTED_KIND = "hybrid"
AT_MOST_STRIPPED = 1.10
EDITS_AT_MOST_STRIPPED = 1.30
"""An edit that finds its slot taken has no state inside the message then."""


def all_sections(outcomes: Outcomes) -> list[Section]:
    """Return every table that has at least one row."""
    sections = [
        tokens_section(outcomes),
        stripped_section(outcomes),
        cost_section(outcomes),
        special_section(outcomes),
        failures_section(outcomes),
    ]
    return [section for section in sections if section.rows]


def summary_section(outcomes: Outcomes) -> Section:
    """Return the table of the document: the other tables in short, for one kind of memory."""
    section = Section(
        f"Tokens evaluated ({DOCUMENTED_KIND})",
        "proxy / exact at most 1.05; 1.02 for agent, interleaved, fresh and restart; 1.10 for mixed",
        ("trace", "slots", "alone", "exact", "proxy", "proxy / exact", "stripped"),
    )
    for case in outcomes.cases("proxy"):
        result, alone = outcomes.median(case), outcomes.alone(case)
        stripped = outcomes.median(replace(case, variant="stripped"))
        if case.kind != DOCUMENTED_KIND or result is None:
            continue
        section.add(
            *(case.trace, case.n_slots, alone.n_evaluated if alone else ""),
            *(result.n_exact, result.n_evaluated, f"{result.ratio:.3f}"),
            f"{stripped.ratio:.3f}" if stripped else "",
            is_met=result.ratio <= AT_MOST.get(case.trace, AT_MOST_ELSE),
        )
    return section


def tokens_section(outcomes: Outcomes) -> Section:
    """Return tokens evaluated against an exact infinite cache and llama-server alone."""
    section = Section(
        "Tokens evaluated",
        "proxy / exact at most 1.05; 1.02 for agent, interleaved, fresh and restart; 1.10 for mixed, "
        "the median of its runs; 1.35 for opencode",
        (
            "trace",
            "memory",
            "slots",
            "requests",
            "alone",
            "exact",
            "proxy",
            "proxy / exact",
            "at most",
        ),
    )
    for case in outcomes.cases("proxy"):
        result, alone = outcomes.median(case), outcomes.alone(case)
        assert result is not None
        at_most = AT_MOST.get(case.trace, AT_MOST_ELSE)
        section.add(
            *(case.trace, case.kind, case.n_slots, len(result.requests)),
            alone.n_evaluated if alone else "",
            *(result.n_exact, result.n_evaluated, f"{result.ratio:.3f}", f"{at_most:.2f}"),
            is_met=result.ratio <= at_most,
        )
    return section


def stripped_section(outcomes: Outcomes) -> Section:
    """Return tokens evaluated if saved files carry no context checkpoints."""
    section = Section(
        "Tokens evaluated with the context checkpoints stripped from every saved file",
        f"proxy / exact at most {AT_MOST_STRIPPED:.2f}; {EDITS_AT_MOST_STRIPPED:.2f} for edits",
        ("trace", "memory", "slots", "exact", "proxy", "proxy / exact"),
    )
    for case in outcomes.cases("stripped"):
        result = outcomes.median(case)
        assert result is not None
        at_most = EDITS_AT_MOST_STRIPPED if case.trace == "edits" else AT_MOST_STRIPPED
        section.add(
            *(case.trace, case.kind, case.n_slots),
            *(result.n_exact, result.n_evaluated, f"{result.ratio:.3f}"),
            is_met=result.ratio <= at_most if case.kind != "swa" else None,
        )
    return section


def cost_section(outcomes: Outcomes) -> Section:
    """Return times and bytes; `wall` is the time in which clients ran."""
    section = Section(
        "Time and bytes",
        "",
        (
            *(
                "trace",
                "model",
                "slots",
                "proxy: TTFT p50",
                "p95",
                "wall",
                "alone: TTFT p50",
                "p95",
                "wall",
            ),
            *("written MB", "kept MB", "bytes written per token reused"),
        ),
    )
    for case in [*outcomes.cases("proxy"), *outcomes.cases("proxy", "small")]:
        result, alone = outcomes.median(case), outcomes.alone(case)
        assert result is not None
        n_reused = sum(request.n_prompt for request in result.requests) - result.n_evaluated
        section.add(
            *(case.trace, f"{case.kind} {case.size}", case.n_slots),
            *_times(result),
            *(_times(alone) if alone else ("", "", "")),
            *(f"{n / 1e6:.1f}" for n in (result.n_written_bytes, result.n_kept_bytes)),
            f"{result.n_written_bytes / n_reused:.0f}" if n_reused > 0 else "-",
            is_met=None,
        )
    return section


def _times(result: Result) -> tuple[str, ...]:
    p50, p95 = result.first_token_quantiles()
    return f"{p50:.3f} s", f"{p95:.3f} s", f"{result.seconds:.1f} s"


def failures_section(outcomes: Outcomes) -> Section:
    """Return the cases that could not be played."""
    section = Section(
        "Traces that failed", "none", ("trace", "model", "slots", "variant", "reason")
    )
    for failure in outcomes.failures:
        case = failure.case
        model = f"{case.kind} {case.size}"
        section.add(case.trace, model, case.n_slots, case.variant, failure.reason, is_met=False)
    return section
