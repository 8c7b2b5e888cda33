"""Models that make room for each other: every request is for another one than the one before."""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from proxy.core.model import CANARY_TOKENS
from tests.bench.moving import N_CTX, Cost, Turn, conversation, lengths, new_folder, worst
from tests.bench.play import stream_first_token
from tests.bench.processes import ProxyProcess, Setup
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.swap_log import SwapSeconds, read_swaps
from tests.lab.conversation import user
from tests.lab.models import MEMORIES
from tests.lab.router import Router, link_models
from tests.lab.swap import Swap

HOSTS = ("router", "llama-swap")
N_CANARY = len(CANARY_TOKENS)
SMALL, OTHER = "hybrid", "full"
N_MEASURED = 3
"""All requests of a conversation but the first."""

Host = Router | Swap


@dataclass(frozen=True, slots=True)
class Run:
    """What every request cost that came after a swap, by model, and what swaps to SMALL took."""

    costs: Mapping[str, list[Cost]]
    swaps: list[SwapSeconds] = field(default_factory=list)


async def measure_swaps(leftovers: ExitStack) -> Section:
    """Return the table of tokens, with four models of 1.5 MB of which one is loaded at a time."""
    section = Section(
        "A model is swapped out and comes back (1.5 MB models)",
        "evaluated by the first request after the swap <= new + 32, and the canary's "
        f"{N_CANARY} tokens",
        ("through", "memory", "prompt", "new", "evaluated", "at most", "without the proxy"),
    )
    sizes = dict.fromkeys(MEMORIES, "tiny")
    for name in HOSTS:
        ours = await _measure(name, sizes, leftovers, has_proxy=True)
        alone = await _measure(name, sizes, leftovers, has_proxy=False)
        for kind in MEMORIES:
            cost, theirs = worst(ours.costs[kind], alone.costs[kind])
            counts = cost.n_prompt, cost.n_new, cost.n_evaluated, cost.n_at_most
            section.add(name, kind, *counts, theirs.n_evaluated, is_met=cost.is_met)
    return section


async def measure_swap_times(leftovers: ExitStack) -> Section:
    """Return the table of seconds, with a larger model and one that takes its place."""
    section = Section(
        "What the first request after a swap takes (hybrid, small)",
        "",
        (
            *("through", "evaluated", "first token", "written back", "unloaded and loaded"),
            *("attached", "the rest", "without the proxy: evaluated", "first token"),
        ),
    )
    for name in HOSTS:
        sizes = {SMALL: "small", OTHER: "tiny"}
        ours = await _measure(name, sizes, leftovers, has_proxy=True)
        alone = await _measure(name, sizes, leftovers, has_proxy=False)
        seconds, their_seconds = _median_seconds(ours), _median_seconds(alone)
        cost, theirs = worst(ours.costs[SMALL], alone.costs[SMALL])
        swap = SwapSeconds.median_of(ours.swaps[-N_MEASURED:])
        parts = (swap.save, swap.load, swap.attach, seconds - swap.total)
        section.add(
            *(name, cost.n_evaluated, f"{seconds:.2f} s"),
            *(f"{part:.2f} s" for part in parts),
            *(theirs.n_evaluated, f"{their_seconds:.2f} s"),
            is_met=None,
        )
    return section


def _median_seconds(run: Run) -> float:
    return median(cost.seconds for cost in run.costs[SMALL])


async def _measure(
    name: str, sizes: Mapping[str, str], leftovers: ExitStack, *, has_proxy: bool
) -> Run:
    """Have a conversation with each model of a host, all of them by turns."""
    tell(f"{name}, {', '.join(sizes)}: {'with' if has_proxy else 'without'} the proxy")
    turns = {kind: conversation(kind) for kind in sizes}
    known = {kind: await lengths(kind, sizes[kind], turns[kind], leftovers) for kind in sizes}
    bench = _Bench(name, sizes, leftovers, has_proxy=has_proxy)
    costs: dict[str, list[Cost]] = {kind: [] for kind in sizes}
    await bench.start()
    for kind in sizes:  # the rule is learned when a model is loaded for the first time
        await stream_first_token(bench.base_url, Turn("hello", [user(9)], model=kind))
        await bench.n_evaluated(kind)
    for i in range(1 + N_MEASURED):
        for kind in sizes:
            seconds = await stream_first_token(bench.base_url, turns[kind][i])
            n_evaluated = await bench.n_evaluated(kind)
            if i:  # nothing was known of the first
                costs[kind].append(Cost(*known[kind][i], n_evaluated, seconds))
    swaps = await bench.stop()
    return Run(costs, swaps)


class _Bench:
    """One host of models, and the proxy before it if wanted."""

    def __init__(
        self, name: str, sizes: Mapping[str, str], leftovers: ExitStack, *, has_proxy: bool
    ) -> None:
        self._folder = new_folder(leftovers)
        self._host = _new_host(name, sizes, self._folder)
        slots = self._folder / "slots"
        leftovers.callback(self._host.kill)
        self._proxy: ProxyProcess | None = None
        if has_proxy:
            setup = Setup(proxy_options=("--log-format", "json"))
            log_path = self._folder / "proxy.log"
            self._proxy = ProxyProcess(self._host.base_url, slots, log_path, setup)
            leftovers.callback(self._proxy.kill)

    @property
    def base_url(self) -> str:
        return self._proxy.base_url if self._proxy else self._host.base_url

    async def start(self) -> None:
        await asyncio.to_thread(self._host.start)
        if self._proxy:
            self._proxy.start()
            await self._proxy.ready()

    async def stop(self) -> list[SwapSeconds]:
        """Stop everything; return what the swaps took."""
        if self._proxy:
            await asyncio.to_thread(self._proxy.stop)
        await asyncio.to_thread(self._host.stop)
        return read_swaps(self._proxy.log_path, SMALL) if self._proxy else []

    async def n_evaluated(self, model: str) -> int:
        """Return what a model has evaluated since it was loaded, but for the canary of the proxy."""
        if self._proxy:
            await self._proxy.ready()
            await self._proxy.settled()
        n_evaluated = await asyncio.to_thread(self._host.evaluated_tokens, model)
        return n_evaluated - N_CANARY if self._proxy else n_evaluated


def _new_host(name: str, sizes: Mapping[str, str], folder: Path) -> Host:
    slots, kinds = folder / "slots", {kind: kind for kind in sizes}
    threads = ("-t", "2") if "small" in sizes.values() else ()
    if name == "router":
        models = link_models(folder / "models", kinds, sizes=sizes)
        return Router(models, slots, n_ctx=N_CTX, extra_args=threads)
    return Swap(folder, kinds, slots, n_ctx=N_CTX, extra_args=threads, sizes=sizes)
