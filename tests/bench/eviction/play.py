"""Plays a trace on a store of files with a budget, and says what the store saved."""

from dataclasses import dataclass, replace
from heapq import heappop, heappush

from proxy.core.eviction import superseded
from proxy.core.model import Candidate, usable_tokens
from proxy.core.tokens import count_blocks
from tests.bench.eviction.policies import Policy
from tests.bench.eviction.shelf import RATES, File, Memory, Shelf
from tests.bench.eviction.trace import BLOCK_TOKENS, Asked


@dataclass(slots=True)
class Saved:
    """What a store spared the requests of a trace, and what it wrote."""

    n_prompt: int = 0
    n_reused: int = 0
    seconds: float = 0.0
    n_written_bytes: int = 0
    n_evicted: int = 0

    def count(self, n_prompt: int, n_reused: int) -> None:
        self.n_prompt += n_prompt
        self.n_reused += n_reused
        self.seconds += RATES.evaluation_seconds(0, n_prompt)
        self.seconds -= RATES.evaluation_seconds(n_reused, n_prompt)

    @property
    def hit_rate(self) -> float:
        return self.n_reused / self.n_prompt


def play(trace: list[Asked], memory: Memory, kind: type[Policy], budget_bytes: int) -> Saved:
    """Return what whole files within a budget save, with a policy that chooses who goes."""
    shelf, saved = Shelf(memory), Saved()
    policy = kind(shelf, budget_bytes, trace)
    for asked in trace:
        candidates = shelf.candidates(asked)
        best, n_reused = _most_useful(memory, candidates, asked.n_prompt)
        # Whole blocks, as the optimum counts: what was generated behind them is known to neither.
        n_known = min(shelf.n_known_blocks(asked) * BLOCK_TOKENS, asked.n_prompt - 1)
        saved.count(asked.n_prompt, min(n_reused, n_known))
        if candidates:
            _note_asked(shelf, candidates[0], asked.at)
        if best is not None:
            file = shelf.files[best.checkpoint.id]
            used = replace(file.checkpoint, last_used_at=asked.at)
            shelf.replace(File(used, file.asked))
            policy.on_use(shelf.files[used.id], asked.at)
        new = shelf.make(asked, candidates)
        if new.checkpoint.size_bytes > budget_bytes:
            continue
        saved.n_written_bytes += new.checkpoint.size_bytes
        nearest = [c.checkpoint.id for c in candidates[:1]]
        n_over = shelf.size_bytes + new.checkpoint.size_bytes - budget_bytes
        for file in policy.victims(n_over, asked.at, nearest):
            shelf.remove(file)
            policy.on_gone(file)
            saved.n_evicted += 1
        older = [
            shelf.files[c.id]
            for c in superseded(memory.rule, new.checkpoint, shelf.candidates(asked))
        ]
        for file in older:
            shelf.remove(file)
        shelf.put(new)
        policy.on_put(new, older, asked.at)
        for file in older:
            policy.on_gone(file)
    return saved


def _most_useful(
    memory: Memory, candidates: list[Candidate], n_prompt: int
) -> tuple[Candidate | None, int]:
    best, most = None, 0
    for candidate in candidates:
        n = usable_tokens(memory.rule, candidate.checkpoint, candidate.n_common, n_prompt)
        if n > most:
            best, most = candidate, n
    return best, most


def _note_asked(shelf: Shelf, nearest: Candidate, now: float) -> None:
    """Note what a request shares with the checkpoint nearest to it, as the store's catalogue does."""
    n_blocks = count_blocks(nearest.n_common)
    earlier = shelf.asked_at.get(nearest.checkpoint.id, {})
    longer = {n: at for n, at in earlier.items() if n > n_blocks}
    shelf.asked_at[nearest.checkpoint.id] = longer | {n_blocks: now}


NEVER = 1 << 60


def play_optimum(trace: list[Asked], n_blocks: int, n_before: int = 0) -> Saved:
    """Return what Belady's optimum saves with room for so many blocks, behind the first requests.

    It keeps each block once, stores only what is wanted again, and drops what is wanted last: no store of
    this size saves more tokens, whatever it keeps its blocks in.
    """
    wanted: dict[int, int] = {}
    next_of: list[list[int]] = []
    for number in range(len(trace) - 1, -1, -1):
        next_of.append([wanted.get(block, NEVER) for block in trace[number].blocks])
        wanted.update(dict.fromkeys(trace[number].blocks, number))
    kept: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    saved = Saved()
    for number, (asked, nexts) in enumerate(zip(trace, reversed(next_of), strict=True)):
        n_shared = next((i for i, b in enumerate(asked.blocks) if b not in kept), len(asked.blocks))
        if number >= n_before:
            saved.count(asked.n_prompt, min(n_shared * BLOCK_TOKENS, asked.n_prompt - 1))
        for place, (block, wanted_at) in enumerate(zip(asked.blocks, nexts, strict=True)):
            if wanted_at == NEVER:
                kept.pop(block, None)
            else:
                kept[block] = wanted_at
                heappush(heap, (-wanted_at, -place, block))
        while len(kept) > n_blocks:
            wanted_at, _, block = heappop(heap)
            if kept.get(block) == -wanted_at:
                del kept[block]
    return saved
