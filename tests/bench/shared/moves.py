"""Time to the first token when a conversation goes on at another host, over a link of 1 Gbit/s."""

import asyncio
from contextlib import ExitStack
from statistics import median

import aiohttp

from tests.bench.processes import Setup
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.shared.hosts import OPTIONS, Host, Hosts, Wanted
from tests.bench.shared.network import Network
from tests.bench.traces.chat import Reply, chat
from tests.bench.traces.metrics import read_counters
from tests.bench.traces.session import Session, header

LINK = 1e9
BAR = 1.2
DOWN = 'shared_bytes_total{direction="down"}'
LENGTHS = {10_000: 3, 30_000: 2}
"""Prompt tokens, about, and how often each is measured."""
_CHARACTERS_PER_TOKEN = 3.55
SETUP = Setup(n_slots=1, n_ctx=40960, n_threads=2, proxy_options=OPTIONS)


async def first_token(host: Host, session: Session) -> Reply:
    """Send what a conversation says next."""
    async with aiohttp.ClientSession() as http:
        return await chat(http, host.base_url, session.request().body())


async def counter(host: Host, name: str) -> float:
    return read_counters(await host.proxy.metrics()).get(name, 0.0)


async def measure_moves(network: Network, leftovers: ExitStack, wanted: Wanted) -> Section:
    """Return the table: what a move takes, and what it must take."""
    section = Section(
        "The first token after a move (small hybrid model, 1 Gbit/s)",
        f"at most {BAR} of bytes / rate + the first token after a local restore",
        (
            *("tokens", "state", "evaluated anew", "after the move", "bytes / rate"),
            *("after a local restore", "ratio", "CPU of the proxy / GB"),
        ),
    )
    for n_tokens, n_times in LENGTHS.items():
        tell(f"{n_tokens} tokens move")
        async with Hosts(network, leftovers, "hybrid", size="small", setup=SETUP) as hosts:
            sessions = [_session(n_tokens, i) for i in range(n_times)]
            runs = [await _move(hosts, session) for session in sessions]
            local = median(await _restore(hosts, sessions))
        anew, moved, n_bytes, cpu = (median(each) for each in zip(*runs, strict=True))
        least = 8 * n_bytes / LINK + local
        section.add(
            *(n_tokens, f"{n_bytes / 1e6:.1f} MB", f"{anew:.2f} s", f"{moved:.2f} s"),
            *(f"{8 * n_bytes / LINK:.2f} s", f"{local:.2f} s", f"{moved / least:.2f}"),
            f"{1e9 * cpu / n_bytes:.1f} s" if n_bytes else "-",
            is_met=n_bytes > 0 and moved <= BAR * least,
        )
    return section


def _session(n_tokens: int, run: int) -> Session:
    told = header(900 + run, int(n_tokens * _CHARACTERS_PER_TOKEN))
    return Session(f"move{n_tokens}-{run}", told, 70_000 + 100 * run).ask()


async def _move(hosts: Hosts, session: Session) -> tuple[float, float, float, float]:
    """Return the seconds of evaluating and of moving; the bytes moved; the seconds of the CPU."""
    here, there = hosts.all
    anew = (await first_token(here, session)).first_token_seconds
    await hosts.settled()
    before, cpu = await counter(there, DOWN), there.proxy.cpu_seconds()
    session.answer().ask()
    moved = (await first_token(there, session)).first_token_seconds
    n_bytes = await counter(there, DOWN) - before
    cpu = there.proxy.cpu_seconds() - cpu
    await hosts.settled()
    return anew, moved, n_bytes, cpu


async def _restore(hosts: Hosts, sessions: list[Session]) -> list[float]:
    """Return the seconds of the same requests at the host that stored their states; without the bucket."""
    here, _ = hosts.all
    assert hosts.bucket is not None
    await asyncio.to_thread(hosts.bucket.stop)
    # The slot is to hold nothing of them, and to be saved before the next one needs it.
    seconds = []
    for session in (Session("other", header(990, 2000), 80_000).ask(), *sessions):
        seconds.append((await first_token(here, session)).first_token_seconds)
        await here.proxy.settled()
        await asyncio.sleep(1.0)
    return seconds[1:]
