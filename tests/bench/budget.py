"""A store filled to its budget by many conversations: its size at every moment, and what is kept."""

import asyncio
from contextlib import ExitStack

from tests.bench.progress import tell
from tests.bench.rigs import open_rig
from tests.bench.section import Section
from tests.bench.workload import Request
from tests.lab.conversation import Message, answer, system, user
from tests.lab.rig import Rig
from tests.lab.sampler import SizeSampler

N_CONVERSATIONS = 200
N_AT_ONCE = 3
N_AGENTS = 3
BUDGET_BYTES = 30 << 20
"""About 20 states of 10,000 tokens."""
SLACK_TOKENS = 32
REASONS = ("budget", "free space", "superseded", "broken")
SKIPS = ("budget", "free space", "larger than the budget")


class Crowd:
    """Conversations of a few agents, each agent with a header of its own."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.n_first = 0
        self.n_header_hits = 0

    async def hold_all(self) -> None:
        """Hold all conversations, a few at once; the agents take turns."""
        numbers = iter(range(N_CONVERSATIONS))

        async def hold_next() -> None:
            for number in numbers:
                await self._hold(number)

        await asyncio.gather(*(hold_next() for _ in range(N_AT_ONCE)))

    async def _hold(self, number: int) -> None:
        first = opening(number)
        reused, n_prompt = await self._ask(first)
        if number >= N_AGENTS:
            self.n_first += 1
            self.n_header_hits += reused >= n_prompt - N_OWN_TOKENS - SLACK_TOKENS
        await self._ask([*first, answer(number), user(5000 + number)])

    async def _ask(self, messages: list[Message]) -> tuple[int, int]:
        body = Request("", messages).body(max_tokens=4)
        usage = (await self._rig.post("/v1/chat/completions", body))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


N_OWN_TOKENS = 120
"""More than the first user message of a conversation has."""


def opening(number: int) -> list[Message]:
    header = system(1890, seed=number % N_AGENTS)
    return [header, user(10 * number)]


async def measure_budget(leftovers: ExitStack) -> Section:
    """Return the table of one store that is filled many times over."""
    tell(f"budget: {N_CONVERSATIONS} conversations")
    section = Section(
        f"A store of {BUDGET_BYTES >> 20} MiB and {N_CONVERSATIONS} conversations (hybrid tiny)",
        "bytes at any moment <= budget; every later conversation finds its agent's header; nothing that "
        "a request was about to use is gone",
        ("what", "measured", "bar"),
    )
    async with open_rig("hybrid", leftovers, max_store_bytes=BUDGET_BYTES) as rig:
        assert rig.server.slot_save_path is not None
        crowd = Crowd(rig)
        with SizeSampler(rig.server.slot_save_path) as sampler:
            await crowd.hold_all()
            await rig.settled()
        largest = sampler.largest_bytes
        section.add("most bytes sampled", largest, BUDGET_BYTES, is_met=largest <= BUDGET_BYTES)
        section.add("samples", sampler.n_samples, "", is_met=None)
        add_header_hits(section, crowd)
        add_counts(section, rig)
    return section


def add_header_hits(section: Section, crowd: Crowd) -> None:
    hits = f"{crowd.n_header_hits} of {crowd.n_first}"
    is_met = crowd.n_header_hits == crowd.n_first
    section.add("conversations that found their header", hits, "all", is_met=is_met)


def add_counts(section: Section, rig: Rig) -> None:
    """Add what the proxy itself counted."""
    assert rig.running.store is not None
    section.add("checkpoints at the end", len(rig.running.store), "", is_met=None)
    section.add("restores", count(rig, "restores", result="done"), "", is_met=None)
    for reason in REASONS:
        section.add(f"evicted: {reason}", count(rig, "evictions", reason=reason), "", is_met=None)
    must_be_none = {
        "saves skipped": sum(count(rig, "saves_skipped", reason=r) for r in SKIPS),
        "restores of a file that was gone": count(rig, "restores", result="missing"),
        "restores not reused": count(rig, "restore_ineffective"),
    }
    for what, n in must_be_none.items():
        section.add(what, n, 0, is_met=n == 0)


def count(rig: Rig, name: str, **labels: str) -> int:
    value = rig.running.metrics.registry.get_sample_value
    return int(value(f"llama_prefix_cache_{name}_total", labels) or 0)
