"""Time to first token after a restart: through the proxy, and on llama-server alone."""

from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from tests.bench.play import Measured, Player
from tests.bench.processes import Stack
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.workload import tool_loop

N_TIMES = 3
LEAST_RATIO = 20.0
MOST_NEW_TOKENS = 150


async def measure_first_token(leftovers: ExitStack) -> Section:
    """Return the table; each measurement is the next request after a restart of everything."""
    section = Section(
        "Time to first token after the restart (hybrid small, default settings)",
        f"at least {LEAST_RATIO:.0f} times sooner than llama-server alone, medians of {N_TIMES}, "
        f"prompt of 10,000 tokens, at most {MOST_NEW_TOKENS} of them new",
        ("run", "prompt", "new", "proxy: evaluated", "proxy: s", "alone: evaluated", "alone: s"),
    )
    through_proxy = await _measure(leftovers, has_proxy=True)
    alone = await _measure(leftovers, has_proxy=False)
    for index, (ours, theirs) in enumerate(zip(through_proxy, alone, strict=True)):
        is_short = ours.n_new <= MOST_NEW_TOKENS
        cells = (index + 1, ours.n_prompt, ours.n_new, *_costs(ours), *_costs(theirs))
        section.add(*cells, is_met=None if is_short else False)
    our_median, their_median = _median(through_proxy), _median(alone)
    ratio = their_median / our_median
    medians = ("", f"{our_median:.2f}", "", f"{their_median:.2f}")
    is_met = ratio >= LEAST_RATIO
    section.add(f"median: {ratio:.1f} times sooner", "", "", *medians, is_met=is_met)
    return section


async def _measure(leftovers: ExitStack, *, has_proxy: bool) -> list[Measured]:
    tell(f"first token: {'through the proxy' if has_proxy else 'llama-server alone'}")
    stack = Stack("hybrid", "small", leftovers, has_proxy=has_proxy)
    await stack.start()
    player = Player(stack)
    first, *following = tool_loop(N_TIMES)
    if has_proxy:
        await player.play(first)
    results = [await player.play(replace(request, restarts=True)) for request in following]
    await stack.stop()
    return results


def _costs(measured: Measured) -> tuple[int, str]:
    return measured.n_evaluated, f"{measured.first_token_seconds:.2f}"


def _median(results: list[Measured]) -> float:
    return median(measured.first_token_seconds for measured in results)
