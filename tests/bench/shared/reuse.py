"""Tokens evaluated when conversations change hosts, against one exact cache for all hosts."""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import aiohttp

from tests.bench.processes import Setup
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.shared.hosts import OPTIONS, Host, Hosts, Wanted
from tests.bench.shared.network import Network
from tests.bench.traces.agents import agent, agent_requests
from tests.bench.traces.chat import ChatFailed, chat
from tests.bench.traces.crowds import mixed
from tests.bench.traces.exact import exact_new_tokens
from tests.bench.traces.play import Sent
from tests.bench.traces.tokens import read_exchanges
from tests.bench.traces.trace import Client, Message, Trace, one_client
from tests.lab.buckets import Rclone
from tests.lab.models import MEMORIES

Route = Callable[[int, int], int]
"""Which host serves a client's request, by their numbers."""
N_HOSTS_MIXED = 4
STAGGER_SECONDS = 10.0
"""Clients come one after the other: a header that four hosts evaluate at once can come from nowhere."""
THINK_SECONDS = 3.0
"""Between an answer and the next request of the same client: a tool runs, a person reads."""
AHEAD = OPTIONS[:2]
"""With `ahead_seconds` at its default."""
TOLD_TOKENS = 400
BAR_ALTERNATING, BAR_RANDOM, BAR_AFFINE = 1.05, 1.10, 1.02


@dataclass(frozen=True, slots=True)
class Costs:
    """What a trace cost on all hosts together."""

    n_prompt: int
    n_exact: int
    n_evaluated: int
    n_uploaded_bytes: int
    proxy_cpu_seconds: float

    @property
    def ratio(self) -> float:
        return self.n_evaluated / self.n_exact


class Play:
    """Plays a trace on hosts; each client thinks before its next request, so that hosts can write back."""

    def __init__(self, hosts: Hosts, route: Route) -> None:
        self._hosts, self._route = hosts, route
        self._sent: list[Sent] = []
        self._where: list[str] = []
        self._answers: dict[str, Message] = {}

    async def play(self, trace: Trace) -> Costs:
        """Play all stages, without the restarts between them; raises ChatFailed."""
        self._began = time.monotonic()
        cpu = self._cpu_seconds()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            for stage in trace.stages:
                async with asyncio.TaskGroup() as tasks:
                    for number, client in enumerate(stage.clients):
                        tasks.create_task(self._play_client(http, number, client))
                await self._hosts.settled()
        n_evaluated = await self._hosts.evaluated_tokens()
        exchanges = await asyncio.to_thread(read_exchanges, self._hosts.all[0].server, self._sent)
        exact = exact_new_tokens(exchanges)
        self._tell(exact)
        sizes = self._hosts.tier.sizes() if self._hosts.tier else {}
        return Costs(
            sum(len(exchange.prompt) for exchange in exchanges),
            sum(exact),
            n_evaluated,
            sum(sizes.values()),
            self._cpu_seconds() - cpu,
        )

    def _tell(self, exact: list[int]) -> None:
        """Say which requests evaluated much that was known."""
        for sent, where, n_exact in zip(self._sent, self._where, exact, strict=True):
            n_over = sent.reply.timings.get("prompt_n", 0) - n_exact if sent.reply else 0
            if n_over >= TOLD_TOKENS:
                tell(f"{sent.request.label} {where}: {n_over} tokens of {n_over + n_exact} known")

    async def _play_client(self, http: aiohttp.ClientSession, number: int, client: Client) -> None:
        await asyncio.sleep(number * STAGGER_SECONDS)
        for index, request in enumerate(client):
            chosen = self._route(number, index)
            host: Host = self._hosts.all[chosen]
            self._where.append(f"at host {chosen} after {time.monotonic() - self._began:.0f} s")
            sent = Sent(request, dict(self._answers))
            self._sent.append(sent)
            try:
                body = request.body(self._answers)
                sent.reply = await chat(http, host.base_url, body, request.form)
            except ChatFailed as failure:
                raise ChatFailed(f"{request.label}: {failure}") from failure
            self._answers[request.label] = sent.reply.message
            await asyncio.sleep(THINK_SECONDS)

    def _cpu_seconds(self) -> float:
        return sum(host.proxy.cpu_seconds() for host in self._hosts.all)


def alternating(n_hosts: int) -> Route:
    """Another host for each turn, which is two requests of `agent`."""
    return lambda _, index: index // 2 % n_hosts


def at_random(n_hosts: int) -> Route:
    chosen = random.Random(18)
    return lambda *_: chosen.randrange(n_hosts)


def affine(n_hosts: int) -> Route:
    return lambda number, _: number % n_hosts


@dataclass(frozen=True)
class Case:
    """A row of the table for each model."""

    name: str
    trace: Trace
    n_hosts: int
    route: Callable[[int], Route]
    bar: float
    size: str = "tiny"
    n_threads: int = 1
    options: tuple[str, ...] = OPTIONS


_EIGHT_TURNS = Trace("agent, eight turns", (one_client(agent_requests("a", 100, 8)),))
CASES = (
    Case("two, by turns", agent(), 2, alternating, BAR_ALTERNATING),
    Case("four, at random", mixed(), N_HOSTS_MIXED, at_random, BAR_RANDOM),
    Case("four, by client", mixed(), N_HOSTS_MIXED, affine, BAR_AFFINE),
    # Small models: what is evaluated ahead must take a second.
    Case("ahead: two, by turns", _EIGHT_TURNS, 2, alternating, BAR_ALTERNATING, "small", 2, AHEAD),
)


async def measure_reuse(network: Network, leftovers: ExitStack, wanted: Wanted) -> Section:
    """Return the table of evaluated tokens, with the tier and without."""
    section = Section(
        "A conversation that changes hosts (1 Gbit/s)",
        f"evaluated / one exact cache for all hosts at most {BAR_ALTERNATING} when two hosts alternate, "
        f"{BAR_RANDOM} at random, {BAR_AFFINE} with affinity",
        (
            *("hosts", "trace", "model", "prompt tokens", "exact", "without the tier", "ratio"),
            *("with the tier", "ratio", "uploaded bytes / token spared"),
        ),
    )
    for kind in wanted.kinds or MEMORIES:
        for case in CASES:
            if wanted.has(case.name):
                tell(f"{case.name}, {kind}")
                ours = await _costs(network, leftovers, kind, case, Rclone)
                alone = None  # of a single row, only what the tier makes of it
                if not wanted.rows:
                    alone = await _costs(network, leftovers, kind, case, None)
                n_spared = alone.n_evaluated - ours.n_evaluated if alone else 0
                per_token = f"{ours.n_uploaded_bytes / n_spared:,.0f}" if n_spared > 0 else "-"
                section.add(
                    *(
                        case.name,
                        case.trace.name,
                        f"{case.size} {kind}",
                        ours.n_prompt,
                        ours.n_exact,
                    ),
                    *((alone.n_evaluated, f"{alone.ratio:.3f}") if alone else ("-", "-")),
                    *(ours.n_evaluated, f"{ours.ratio:.3f}", per_token),
                    is_met=ours.ratio <= case.bar,
                )
                tell(repr(section.rows[-1]))
    return section


async def _costs(
    network: Network, leftovers: ExitStack, kind: str, case: Case, bucket: type[Rclone] | None
) -> Costs:
    setup = Setup(n_threads=case.n_threads, proxy_options=case.options)
    async with Hosts(
        network, leftovers, kind, n_hosts=case.n_hosts, size=case.size, bucket=bucket, setup=setup
    ) as hosts:
        return await Play(hosts, case.route(case.n_hosts)).play(case.trace)
