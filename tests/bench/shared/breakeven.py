"""Fetch or evaluate: what the planner chooses over states and link rates, and which is the faster one."""

from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random
from statistics import median

import aiohttp

from tests.bench.processes import Setup
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.shared.always import LIMIT_SECONDS
from tests.bench.shared.hosts import OPTIONS, Host, Hosts, Wanted
from tests.bench.shared.moves import counter
from tests.bench.shared.network import Network
from tests.bench.traces.chat import chat
from tests.bench.traces.session import Session, header

RATES = (10e6, 30e6, 100e6, 1e9)
"""Bits per second of the links by which hosts reach the bucket."""
N_STATES = {"full": 25, "hybrid": 25}
LENGTHS = (8000, 32_000)
"""Characters of the shortest and the longest conversation: evaluating one takes some tenths of a second."""
BAR_RIGHT, BAR_FACTOR = 0.9, 1.2
EQUAL_FACTOR = 1.05
"""Within it, either choice is right."""
CLOSE_FACTOR, N_CLOSE = 1.5, 3
"""Where both ways are so near to each other, one evaluation tells nothing: on a machine that others use it
varies by a third. Then so many conversations of a length are compared."""
N_BEFORE = 12
"""A host has evaluated so many prompts before: its rate is not that of one noisy prompt."""
DONE, LATE = (f'shared_fetches_total{{result="{each}"}}' for each in ("done", "late"))
SETUP = Setup(n_threads=1, proxy_options=OPTIONS)
ALWAYS = replace(SETUP, launcher=("tests.bench.shared.always", "serve"))
_ONLY_DOWN = "url = {}, upload_bytes_per_day = 1"
"""What a host fetched is not shared again: each host is to find what the first one stored."""


@dataclass(frozen=True, slots=True)
class Try:
    """The seconds to the first token of one conversation by the planner's choice, and by either way.

    A transfer that the planner began and gave up was not its choice, but counts in what that took.
    """

    chosen: float
    fetched: float
    evaluated: float
    did_fetch: bool
    gave_up: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What the planner chose for conversations of one length, mostly, and the medians of each way.

    What it chose counts in that way's median, beside the time of that way by itself.
    """

    tries: tuple[Try, ...]

    @property
    def did_fetch(self) -> bool:
        return bool(median(each.did_fetch for each in self.tries))

    @property
    def gave_up(self) -> bool:
        return bool(median(each.gave_up for each in self.tries))

    @property
    def chosen(self) -> float:
        return median(each.chosen for each in self.tries)

    @property
    def fetched(self) -> float:
        too = (each.chosen for each in self.tries if each.did_fetch)
        return median([*(each.fetched for each in self.tries), *too])

    @property
    def evaluated(self) -> float:
        too = (each.chosen for each in self.tries if not (each.did_fetch or each.gave_up))
        return median([*(each.evaluated for each in self.tries), *too])

    @property
    def is_close(self) -> bool:
        """Whether both ways take about as long."""
        quicker, slower = sorted((self.fetched, self.evaluated))
        return slower <= CLOSE_FACTOR * quicker

    @property
    def ways(self) -> tuple[float, float]:
        """What the chosen way takes, and what the other one takes."""
        ways = self.evaluated, self.fetched
        return ways[::-1] if self.did_fetch else ways

    @property
    def is_right(self) -> bool:
        taken, other = self.ways
        return taken <= EQUAL_FACTOR * other

    @property
    def ratio(self) -> float:
        """The time of the choice / that of the faster way; 1 if that is what was chosen."""
        if self.gave_up:
            return self.chosen / min(self.ways)
        return 1.0 if self.is_right else self.ways[0] / self.ways[1]


async def measure_breakeven(network: Network, leftovers: ExitStack, wanted: Wanted) -> Section:
    """Return the table, a row for each model and rate."""
    section = Section(
        "Fetch or evaluate (tiny models; 25 lengths of 2,300 to 9,000 tokens a row)",
        f"the faster one in at least {BAR_RIGHT:.0%}, and never more than {BAR_FACTOR} times its time",
        (
            *(
                "model",
                "link",
                "compared by three",
                "fetched",
                "given up",
                "the faster one chosen",
                "chosen / the faster one: worst",
            ),
            *("median: evaluate", "fetch", "as chosen"),
        ),
    )
    for kind in wanted.kinds or N_STATES:
        rates = [rate for rate in RATES if wanted.has(_in_words(rate))]
        decisions = await _decide(network, leftovers, kind, rates)
        for rate in rates:
            made = decisions[rate]
            share = sum(each.is_right for each in made) / len(made)
            worst = max(each.ratio for each in made)
            ways = (
                [each.evaluated for each in made],
                [each.fetched for each in made],
                [each.chosen for each in made],
            )
            section.add(
                *(kind, _in_words(rate), sum(len(each.tries) > 1 for each in made)),
                *(sum(each.did_fetch for each in made), sum(each.gave_up for each in made)),
                *(f"{share:.0%}", f"{worst:.2f}"),
                *(f"{median(seconds) * 1e3:.0f} ms" for seconds in ways),
                is_met=share >= BAR_RIGHT and worst <= BAR_FACTOR,
            )
            tell(repr(section.rows[-1]))
    return section


def _in_words(rate: float) -> str:
    return f"{rate / 1e6:,.0f} Mbit/s"


async def _decide(
    network: Network, leftovers: ExitStack, kind: str, rates: list[float]
) -> dict[float, list[Decision]]:
    """Return the decisions at each rate; all three ways of a state are taken at nearly the same time."""
    n_states, rng = N_STATES.get(kind, 25), Random(18)
    step = (LENGTHS[1] / LENGTHS[0]) ** (1 / (n_states - 1))
    lengths = [round(LENGTHS[0] * step**i) for i in range(n_states)]
    rng.shuffle(lengths)
    decisions: dict[float, list[Decision]] = {rate: [] for rate in rates}
    async with AsyncExitStack() as started:
        sender = Hosts(network, leftovers, kind, n_hosts=1, bits_per_second=None, setup=SETUP)
        await started.enter_async_context(sender)
        assert sender.tier is not None
        tier = replace(sender.tier, url=_ONLY_DOWN.format(sender.tier.url))
        alone = Hosts(network, leftovers, kind, n_hosts=1, bucket=None, setup=SETUP)
        await started.enter_async_context(alone)
        there = dict[float, list[Hosts]]()
        for rate in rates:
            at = partial(Hosts, network, leftovers, kind, n_hosts=1, bits_per_second=rate)
            there[rate] = [at(bucket=tier, setup=setup) for setup in (SETUP, ALWAYS)]
            for hosts in there[rate]:
                await started.enter_async_context(hosts)
        # Of a host that has never evaluated anything, nobody knows how fast it is; of one that has only
        # evaluated something long, not how fast it is with the first tokens.
        for number, length in enumerate(LENGTHS * (N_BEFORE // len(LENGTHS))):
            for rate, each in product(rates, range(2)):
                await _ask(there[rate][each].all[0], 800 + number, length, 1)
        for number, length in enumerate(lengths * N_CLOSE):
            await _ask(sender.all[0], number, length, 1)
        await sender.settled()
        for i, length in enumerate(lengths):
            tries = {rate: tuple[Try, ...]() for rate in rates}
            for number in range(i, N_CLOSE * n_states, n_states):
                close = [r for r, made in tries.items() if not made or Decision(made[:1]).is_close]
                anew = await _ask(alone.all[0], number, length, 2) if close else 0.0
                for rate in close:
                    tries[rate] += (await _try(there[rate], number, length, anew),)
            for rate, made in tries.items():
                decisions[rate].append(Decision(made))
                tell(f"{_in_words(rate)}, {length:,} characters: {made}")
    return decisions


async def _try(there: list[Hosts], number: int, length: int, anew: float) -> Try:
    """Send one conversation as the planner has it, and by a fetch; to evaluate it *anew* took so long."""
    planner, always = there
    chosen, did_fetch, gave_up = await _fetching(planner.all[0], number, length)
    fetched, was_fetched, _ = await _fetching(always.all[0], number, length)
    fetched = fetched if was_fetched else max(LIMIT_SECONDS, 2 * anew)
    return Try(chosen, fetched, anew, did_fetch, gave_up)


async def _fetching(host: Host, number: int, length: int) -> tuple[float, bool, bool]:
    """Return the seconds to the first token, and whether a state was fetched, or given up on its way."""
    before = [await counter(host, name) for name in (DONE, LATE)]
    seconds = await _ask(host, number, length, 2)
    done, late = [await counter(host, name) for name in (DONE, LATE)]
    return seconds, done > before[0], late > before[1]


async def _ask(host: Host, number: int, length: int, turn: int) -> float:
    session = Session(f"b{number}", header(2000 + number, length, n_tools=2), 90_000 + 100 * number)
    for _ in range(turn - 1):
        session.ask().answer()
    async with aiohttp.ClientSession() as http:
        body = session.ask().request().body(max_tokens=4)
        seconds = (await chat(http, host.base_url, body)).first_token_seconds
    await host.proxy.settled()
    return seconds
