"""Each fault of a bucket under traffic: answers, failures, and what it costs until the first token."""

import asyncio
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from statistics import median

import aiohttp

from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.shared.hosts import Host, Hosts, Wanted
from tests.bench.shared.network import HARNESS, Network
from tests.bench.traces.chat import ChatFailed, chat
from tests.bench.traces.session import Session, header
from tests.lab.buckets import Rclone
from tests.lab.faulty_link import Fault, FaultyLink

N_REQUESTS = 50
N_TURNS = 5
N_CHARACTERS = 5000
"""Of each conversation's header: enough tokens to be worth a transfer."""
ADDED_SECONDS = 0.020
_AT_ONCE = 3
"""So many faults are measured beside each other."""
TWO_WRITERS = "two writers"
"""Both hosts get each request at once, so that both upload what it leads to."""
_PAUSE_SECONDS = 0.6
"""Enough for an idle slot to be saved, so that uploads meet the fault too."""


@dataclass
class Run:
    """What traffic got."""

    texts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    n_failed: int = 0
    n_harmed: int = 0


async def measure_faults(network: Network, leftovers: ExitStack, wanted: Wanted) -> Section:
    """Return the table; both hosts serve each conversation by turns."""
    section = Section(
        f"Faults of the bucket, {N_REQUESTS} requests each on two hosts (tiny hybrid model)",
        "no answer differs, no request fails, at most 20 ms more until the first token at the median",
        (
            *("fault", "requests to the bucket harmed", "answers that differ", "failed requests"),
            *("first token, median", "without the tier", "added"),
        ),
    )
    kind = (wanted.kinds or ["hybrid"])[0]
    names = [each.value for each in Fault if each is not Fault.NONE and wanted.has(each.value)]
    groups = [names[i : i + _AT_ONCE] for i in range(0, len(names), _AT_ONCE)]
    for group in [*groups, [TWO_WRITERS]] if wanted.has(TWO_WRITERS) else groups:
        tell(f"faults: {', '.join(group)}")
        *runs, alone = await _side_by_side(network, leftovers, kind, group)
        for name, ours in zip(group, runs, strict=True):
            n_wrong = sum(a != b for a, b in zip(ours.texts, alone.texts, strict=True))
            with_fault, without = median(ours.seconds), median(alone.seconds)
            added = with_fault - without
            section.add(
                *(name, ours.n_harmed, n_wrong, ours.n_failed),
                *(f"{with_fault * 1e3:.0f} ms", f"{without * 1e3:.0f} ms", f"{added * 1e3:.0f} ms"),
                is_met=not n_wrong and not ours.n_failed and added <= ADDED_SECONDS,
            )
            tell(repr(section.rows[-1]))
    return section


async def _side_by_side(
    network: Network, leftovers: ExitStack, kind: str, names: list[str]
) -> list[Run]:
    """Have the same conversations with each fault and without the tier, request by request.

    A fault comes after the first conversation, which goes well. The last result is without the tier.
    """
    runs, links = [Run() for _ in (*names, "")], dict[str, FaultyLink]()
    with ExitStack() as own:
        pairs = [
            Hosts(network, own, kind, bucket=Rclone if name else None) for name in (*names, "")
        ]
        for name, hosts in zip(names, pairs, strict=False):
            assert hosts.bucket is not None
            links[name] = own.enter_context(FaultyLink(hosts.bucket.base_url, HARNESS))
            hosts.reach_bucket_by(links[name].base_url)
        async with AsyncExitStack() as started:
            for hosts in pairs:
                await started.enter_async_context(hosts)
            for number in range(-N_TURNS, N_REQUESTS):
                if number == 0:
                    for name in set(names) - {TWO_WRITERS}:
                        links[name].harm(Fault(name))
                turn = list(zip(pairs, runs, strict=True))
                for hosts, run in turn[:: 1 if number % 4 < 2 else -1]:
                    both = hosts.all if names == [TWO_WRITERS] else [hosts.all[number % 2]]
                    await asyncio.gather(*(_ask(host, number, run) for host in both))
                    await asyncio.sleep(_PAUSE_SECONDS / len(turn))
            for name, run in zip(names, runs, strict=False):
                run.n_harmed = links[name].n_harmed
                links[name].heal()
    return runs


async def _ask(host: Host, number: int, run: Run) -> None:
    conversation, turn = divmod(number, N_TURNS)
    told = header(400 + conversation, N_CHARACTERS, n_tools=2)
    session = Session(f"c{conversation}", told, 1000 * (conversation + 2))
    for _ in range(turn):
        session.ask().answer()
    body = session.ask().request().body(max_tokens=16)
    try:
        async with aiohttp.ClientSession() as http:
            reply = await chat(http, host.base_url, body)
    except ChatFailed as failure:
        tell(f"failed: {failure}")
        reply = None
    if number >= 0:
        run.n_failed += reply is None
        run.texts.append(reply.text if reply else "")
        run.seconds.append(reply.first_token_seconds if reply else 0.0)
