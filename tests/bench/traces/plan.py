"""Which cases are measured, and how often. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.bench.traces.catalogue import TRACES
from tests.bench.traces.result import Case, Variant
from tests.lab.models import MEMORIES

N_TIMES_MIXED = 5
N_TIMES_WALL = 3
"""Wall times are compared by their medians."""
RAM_CACHE_ONLY = ("memory-store", "mixed")
"""Long traces which llama-server alone plays with its RAM cache only, the better one by far."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A case, and how many results of it are wanted."""

    case: Case
    n_times: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """What a command line chose; what is empty was not restricted."""

    traces: Sequence[str] = ()
    kinds: Sequence[str] = ()
    sizes: Sequence[str] = ()
    slots: Sequence[int] = ()
    variants: Sequence[Variant] = ()
    n_times: int = 0


def plan(choice: Choice) -> list[Planned]:
    """Return what of the full plan was chosen, and beyond it what was asked for by name."""
    planned = [
        Planned(p.case, choice.n_times or p.n_times)
        for p in _everything(choice)
        if _fits(p, choice)
    ]
    return list(dict.fromkeys(planned))


def _everything(choice: Choice) -> Iterator[Planned]:
    for name, trace in TRACES.items():
        for n_slots in choice.slots or trace().slots:
            for kind in MEMORIES:
                for variant in choice.variants or _variants(name, kind, n_slots):
                    for size in choice.sizes or ("tiny",):
                        case = Case(name, kind, size, n_slots, variant)
                        has_luck = name == "mixed" and case.has_proxy
                        yield Planned(case, N_TIMES_MIXED if has_luck else 1)
    if not (choice.traces or choice.kinds or choice.sizes):
        yield from _small()


def _variants(trace: str, kind: str, n_slots: int) -> Iterator[Variant]:
    yield "proxy"
    if kind != "swa" and n_slots == TRACES[trace]().slots[0]:
        yield "stripped"
    if trace == "claude-code" and kind == "hybrid":
        return  # llama-server alone refuses it: system messages in mid-conversation
    yield "alone-8192"
    # Growing sessions without the RAM cache take minutes, and only one bar asks for them.
    if trace not in RAM_CACHE_ONLY and (trace != "grown" or kind == "hybrid"):
        yield "alone"


def _small() -> Iterator[Planned]:
    """Yield what is measured for its time; by turns, so that the machine's moods hit all alike."""
    for variant in ("proxy", "alone-8192", "alone"):
        yield Planned(Case("interleaved", "hybrid", "small", 1, variant))
        yield Planned(Case("agent", "hybrid", "small", 1, variant), N_TIMES_WALL)


def _fits(planned: Planned, choice: Choice) -> bool:
    case = planned.case
    return all(
        not wanted or value in wanted
        for value, wanted in (
            (case.trace, choice.traces),
            (case.kind, choice.kinds),
            (case.size, choice.sizes),
            (case.n_slots, choice.slots),
            (case.variant, choice.variants),
        )
    )
