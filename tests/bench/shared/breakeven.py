"""Fetch or evaluate: what the planner chooses over states and link rates, and which is the faster one."""

import asyncio
from contextlib import ExitStack
from statistics import median

import aiohttp

from tests.bench.processes import Setup
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.shared.hosts import OPTIONS, Host, Hosts, Wanted
from tests.bench.shared.moves import DOWN, counter
from tests.bench.shared.network import Network
from tests.bench.traces.chat import chat
from tests.bench.traces.session import Session, header

RATES = (5e6, 20e6, 100e6, 1e9)
"""Bits per second of the link by which the second host reaches the bucket."""
N_STATES = {"full": 25, "hybrid": 25}
LENGTHS = (600, 30_000)
"""Characters of the shortest and the longest conversation."""
BAR_RIGHT, BAR_FACTOR = 0.9, 1.2
SETUP = Setup(n_threads=1, proxy_options=OPTIONS)


async def measure_breakeven(network: Network, leftovers: ExitStack, wanted: Wanted) -> Section:
    """Return the table, a row for each model and rate."""
    section = Section(
        "Fetch or evaluate (tiny models; 25 states of 150 to 8,000 tokens a row)",
        f"the faster one in at least {BAR_RIGHT:.0%}, and never more than {BAR_FACTOR} times its time",
        (
            *("model", "link", "fetched", "the faster one chosen", "worst / the faster one"),
            *("median: evaluate", "fetch", "as chosen"),
        ),
    )
    for kind in wanted.kinds or N_STATES:
        for rate in RATES:
            tell(f"{kind} at {rate / 1e6:.0f} Mbit/s")
            async with Hosts(network, leftovers, kind, bits_per_second=None, setup=SETUP) as hosts:
                rows = await _states(hosts, rate, N_STATES.get(kind, 25))
            faster = [min(anew, fetch) for anew, fetch, *_ in rows]
            right = [
                was_fetched == (fetch < anew) or chosen <= 1.05 * least
                for (anew, fetch, chosen, was_fetched), least in zip(rows, faster, strict=True)
            ]
            worst = max(row[2] / least for row, least in zip(rows, faster, strict=True))
            share = sum(right) / len(right)
            medians = [median(row[i] for row in rows) for i in range(3)]
            section.add(
                *(kind, f"{rate / 1e6:,.0f} Mbit/s", sum(row[3] for row in rows)),
                *(f"{share:.0%}", f"{worst:.2f}", *(f"{each * 1e3:.0f} ms" for each in medians)),
                is_met=share >= BAR_RIGHT and worst <= BAR_FACTOR,
            )
    return section


async def _states(
    hosts: Hosts, rate: float, n_states: int
) -> list[tuple[float, float, float, bool]]:
    """Return for each state the seconds of evaluating, of fetching and of the choice, and which it was.

    The seconds of fetching are bytes / rate and those of a local restore, whatever the planner chose.
    """
    here, there = hosts.all
    step = (LENGTHS[1] - LENGTHS[0]) / (n_states - 1)
    lengths = [LENGTHS[0] + round(i * step) for i in range(n_states)]
    for i, length in enumerate(lengths):
        await _ask(here, i, length, 1)
    await hosts.settled()
    there.machine.limit(rate)
    rows = []
    for i, length in enumerate(lengths):
        before = await counter(there, DOWN)
        chosen = await _ask(there, i, length, 2)
        n_bytes = await counter(there, DOWN) - before
        await there.proxy.settled()
        anew = await _ask(there, 500 + i, length, 2)
        rows.append((anew, chosen, n_bytes, length))
        await there.proxy.settled()
    sizes = {i: size for i, size in enumerate(_state_sizes(hosts, n_states))}
    local = await _local_restore(there)
    return [
        (anew, 8 * (n_bytes or sizes[i]) / rate + local, chosen, n_bytes > 0)
        for i, (anew, chosen, n_bytes, _) in enumerate(rows)
    ]


def _state_sizes(hosts: Hosts, n_states: int) -> list[int]:
    """Return the sizes of the states that the first host has put there, in the order of their upload."""
    assert hosts.tier is not None
    names = sorted(name for name in hosts.tier.sizes() if name.endswith(".state"))
    return [hosts.tier.sizes()[name] for name in names][:n_states]


async def _local_restore(host: Host) -> float:
    """Return the seconds to the first token behind a state that is restored from this host's directory."""
    await _ask(host, 900, 8000, 1)
    for other in (901, 902):
        await _ask(host, other, 600, 1)
    await host.proxy.settled()
    return await _ask(host, 900, 8000, 2)


async def _ask(host: Host, number: int, length: int, turn: int) -> float:
    session = Session(f"b{number}", header(2000 + number, length, n_tools=2), 90_000 + 100 * number)
    for _ in range(turn - 1):
        session.ask().answer()
    async with aiohttp.ClientSession() as http:
        body = session.ask().request().body()
        seconds = (await chat(http, host.base_url, body)).first_token_seconds
    await asyncio.sleep(0.05)
    return seconds
