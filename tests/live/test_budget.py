"""A small budget and many conversations: never exceeded, and what is shared stays."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lab.conversation import Message, prose, system, user
from tests.lab.older_builds import keep_as_saved, strip_context_checkpoints
from tests.lab.rig import Rig
from tests.lab.sampler import SizeSampler
from tests.live.conftest import StartRig, in_long

BUDGET = 4 << 20
N_CONVERSATIONS = 33
HEADERS = [[system(220, seed=seed)] for seed in (1, 2, 3)]
SLACK_TOKENS = 32


def first_request(number: int) -> list[Message]:
    """Return the first request of a conversation; three agents with headers of their own take turns."""
    return [*HEADERS[number % len(HEADERS)], user(number, 60)]


def second_request(number: int) -> list[Message]:
    said = {"role": "assistant", "content": prose(number, 20)}
    return [*first_request(number), said, user(1000 + number, 40)]


async def converse(rig: Rig, number: int) -> None:
    await rig.chat(first_request(number), max_tokens=2)
    await rig.chat(second_request(number), max_tokens=2)


def n_faults(rig: Rig) -> float:
    stages = ("attach", "lookup", "prepare", "save", "settle", "erase")
    return sum(rig.sample("cache_faults_total", stage=stage) for stage in stages)


async def header_tokens(rig: Rig) -> int:
    """Return how many tokens the shortest header has, for sure."""
    counts = []
    for header in HEADERS:
        rendered = await rig.post("/apply-template", {"messages": [*header, user(1)]})
        shared = str(rendered["prompt"]).partition("Task 1")[0]
        tokens = await rig.post("/tokenize", {"content": shared, "parse_special": True})
        counts.append(len(tokens["tokens"]))
    return min(counts) - SLACK_TOKENS


@pytest.mark.parametrize(
    ("kind", "rewrite"),
    [
        ("hybrid", keep_as_saved),
        *in_long(("full", keep_as_saved), ("hybrid", strip_context_checkpoints)),
    ],
)
async def test_budget_holds_at_every_moment_and_headers_survive(
    start_rig: StartRig, tmp_path: Path, kind: str, rewrite: Any
) -> None:
    (tmp_path / "slots").mkdir()
    with SizeSampler(tmp_path / "slots") as sampler:
        async with start_rig(kind, max_store_bytes=BUDGET, rewrite=rewrite) as rig:
            n_header = await header_tokens(rig)
            for number in range(len(HEADERS)):
                await converse(rig, number)
            n_before = await rig.evaluated()
            for number in range(len(HEADERS), N_CONVERSATIONS, 2):
                await asyncio.gather(converse(rig, number), converse(rig, number + 1))
            n_evaluated = await rig.evaluated() - n_before
            assert rig.sample("evictions_total", reason="budget") >= 5, "it was never full"
            assert rig.sample("saves_skipped_total", reason="budget") == 0
            # A conversation is far shorter than its header.
            assert n_evaluated / (N_CONVERSATIONS - len(HEADERS)) < n_header
            assert n_faults(rig) == 0
            await rig.restart()
            for number in range(N_CONVERSATIONS, N_CONVERSATIONS + len(HEADERS)):
                reply = await rig.chat(first_request(number), max_tokens=2)
                assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= n_header
            assert n_faults(rig) == 0
    assert sampler.n_samples > 100
    assert sampler.largest_bytes > 0.6 * BUDGET
    # An older build would not have written what is cut off only after it was saved.
    assert rewrite is strip_context_checkpoints or sampler.largest_bytes <= BUDGET


async def test_slots_that_fill_the_budget_are_adopted_and_the_proxy_caches(
    start_rig: StartRig,
) -> None:
    """Their files fill the budget when the model is examined, and none of them can go."""
    async with start_rig("full") as rig:
        for number in range(2):
            await rig.chat(first_request(number))
        await rig.settled()
        assert rig.running.store is not None
        *_, smaller, larger = sorted(state.size_bytes for state in rig.running.store)
        budget = smaller + larger + smaller // 2
        rig.settings = msgspec.structs.replace(rig.settings, max_store_bytes=budget)
        await rig.restart(server=False)
        assert n_faults(rig) == 0
        before = await rig.evaluated()
        for number in range(2):
            await rig.chat(first_request(number))
        assert await rig.evaluated() - before < 2 * SLACK_TOKENS
