"""The simulation that eviction is judged by: its optimum is one, and its rivals are what they are named."""

import random
from dataclasses import replace

import pytest

from tests.bench.eviction.__main__ import judged
from tests.bench.eviction.play import play, play_optimum
from tests.bench.eviction.policies import POLICIES, Lru
from tests.bench.eviction.shelf import MEMORIES, File, Memory
from tests.bench.eviction.trace import BLOCK_TOKENS, Asked, n_distinct_blocks

FULL = MEMORIES["full"]


def asked(at: float, *blocks: int) -> Asked:
    return Asked(at, BLOCK_TOKENS * len(blocks), 0, blocks)


def conversations(n_requests: int, seed: int = 1) -> list[Asked]:
    """Return conversations that share a first block and are continued, mostly the recent ones."""
    rng, last, trace = random.Random(seed), list[Asked](), list[Asked]()
    for number in range(n_requests):
        begin: tuple[int, ...] = (0,)
        if last and rng.random() < 0.6:
            begin = last.pop(rng.randrange(max(0, len(last) - 5), len(last))).blocks
        fresh = (1000 * (number + 1) + i for i in range(rng.randint(1, 4)))
        trace.append(asked(10.0 * number, *begin, *fresh))
        last.append(trace[-1])
    return trace


def budget_bytes(n_blocks: int) -> int:
    return n_blocks * BLOCK_TOKENS * FULL.token_bytes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("percent", [5, 20, 60])
def test_no_policy_saves_more_than_the_optimum(policy: str, percent: int) -> None:
    trace = conversations(150)
    n_blocks = n_distinct_blocks(trace) * percent // 100
    best = play_optimum(trace, n_blocks)
    saved = play(trace, FULL, POLICIES[policy], budget_bytes(n_blocks))
    assert 0 < saved.n_reused <= best.n_reused


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_saves_all_that_can_be_with_room_for_all(policy: str) -> None:
    trace = conversations(80)
    everything = play_optimum(trace, 1 << 30)
    saved = play(trace, FULL, POLICIES[policy], budget_bytes(1 << 20))
    assert saved.n_reused == everything.n_reused
    assert saved.n_evicted == 0


def reused(policy: str, trace: list[Asked], n_blocks: int) -> int:
    saved = play(trace, FULL, POLICIES[policy], budget_bytes(n_blocks))
    return saved.n_reused // BLOCK_TOKENS


def test_rivals_differ_where_a_scan_meets_what_is_used_often() -> None:
    """Two uses, then states that nobody wants again, then the first one: LRU has lost it."""
    often = [asked(0, 1, 2), asked(1, 1, 2, 3), asked(2, 1, 2, 3, 4)]
    scan = [asked(10 + n, 100 + 2 * n, 101 + 2 * n) for n in range(8)]
    trace = [*often, *scan, asked(30, 1, 2, 3, 4, 5)]
    assert reused("LRU", trace, 10) == 5
    for policy in ("LFU", "SLRU", "S3-FIFO", "Belady, files"):
        assert reused(policy, trace, 10) == 9, policy


def test_optimum_keeps_what_is_wanted_soonest() -> None:
    trace = [asked(0, 1), asked(1, 2), asked(2, 3), asked(3, 2), asked(4, 1)]
    trace = [replace(a, n_prompt=a.n_prompt + 1) for a in trace]
    assert play_optimum(trace, 1).n_reused == BLOCK_TOKENS
    assert play_optimum(trace, 2).n_reused == 2 * BLOCK_TOKENS


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_a_longer_state_takes_the_place_of_its_conversations_shorter_one(memory: Memory) -> None:
    gone = list[list[int]]()

    class Watched(Lru):
        def on_put(self, file: File, replaced: list[File], now: float) -> None:
            gone.append([each.checkpoint.n_prompt for each in replaced])
            super().on_put(file, replaced, now)

    trace = [asked(0, 1), asked(1, 1, 2), asked(2, 9), asked(3, 1, 2, 3), asked(4, 1, 8)]
    play(trace, memory, Watched, 1 << 60)
    assert gone == [[], [BLOCK_TOKENS], [], [2 * BLOCK_TOKENS], []]


def test_bar_is_that_of_the_better_rival_and_of_the_optimum() -> None:
    shares = {"ours": 0.76, "LRU": 0.73, "S3-FIFO": 0.65}
    assert judged(shares, 0.0) == ("+0.03000", True)
    assert judged(shares, 0.9) == ("+0.03000", False)
    assert judged({**shares, "S3-FIFO": 0.7601}, 0.0) == ("-0.00010", False)
    assert judged({"ours": 0.76, "LRU": 0.73}, 0.0) == ("-", None)
