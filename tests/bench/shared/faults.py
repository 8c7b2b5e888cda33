"""Each fault of a bucket under traffic: answers, failures, and what it costs until the first token."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import aiohttp

from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.shared.hosts import Hosts
from tests.bench.shared.network import HARNESS, Network
from tests.bench.traces.chat import ChatFailed, chat
from tests.bench.traces.session import Session, header
from tests.lab.buckets import Rclone
from tests.lab.faulty_link import Fault, FaultyLink

N_REQUESTS = 50
N_TURNS = 5
ADDED_SECONDS = 0.020
_PAUSE_SECONDS = 0.6
"""Enough for an idle slot to be saved, so that uploads meet the fault too."""


@dataclass
class Run:
    """What traffic got."""

    texts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    n_failed: int = 0
    n_harmed: int = 0


async def measure_faults(network: Network, leftovers: ExitStack, kinds: list[str]) -> Section:
    """Return the table; both hosts serve each conversation by turns."""
    section = Section(
        f"Faults of the bucket, {N_REQUESTS} requests each on two hosts (tiny hybrid model)",
        "no answer differs, no request fails, at most 20 ms more until the first token at the median",
        (
            *("fault", "requests to the bucket harmed", "answers that differ", "failed requests"),
            *("first token, median", "without the tier", "added"),
        ),
    )
    kind = (kinds or ["hybrid"])[0]
    tell("without the tier")
    alone = await _traffic(network, leftovers, kind, None)
    for fault in (each for each in Fault if each is not Fault.NONE):
        tell(f"fault: {fault.value}")
        ours = await _traffic(network, leftovers, kind, fault)
        n_wrong = sum(a != b for a, b in zip(ours.texts, alone.texts, strict=True))
        with_fault, without = median(ours.seconds), median(alone.seconds)
        added = with_fault - without
        section.add(
            *(fault.value, ours.n_harmed, n_wrong, ours.n_failed),
            *(f"{with_fault * 1e3:.0f} ms", f"{without * 1e3:.0f} ms", f"{added * 1e3:.0f} ms"),
            is_met=not n_wrong and not ours.n_failed and added <= ADDED_SECONDS,
        )
        tell(repr(section.rows[-1]))
    return section


async def _traffic(network: Network, leftovers: ExitStack, kind: str, fault: Fault | None) -> Run:
    """Have conversations on two hosts; the fault comes after the first one, which goes well."""
    with ExitStack() as own:
        hosts = Hosts(network, own, kind, bucket=Rclone if fault else None)
        if fault:
            assert hosts.bucket is not None
            link = own.enter_context(FaultyLink(hosts.bucket.base_url, HARNESS))
            hosts.reach_bucket_by(link.base_url)
        async with hosts:
            run = Run()
            for request in range(-N_TURNS, N_REQUESTS):
                if request == 0 and fault:
                    link.harm(fault)
                await _ask(hosts, request, run)
            if fault:
                run.n_harmed = link.n_harmed
                link.heal()
        return run


async def _ask(hosts: Hosts, number: int, run: Run) -> None:
    conversation, turn = divmod(number, N_TURNS)
    session = Session(f"c{conversation}", header(400, 3000, n_tools=2), 1000 * (conversation + 2))
    for _ in range(turn):
        session.ask().answer()
    body = session.ask().request().body(max_tokens=16)
    host = hosts.all[number % 2]
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
    await asyncio.sleep(_PAUSE_SECONDS)
