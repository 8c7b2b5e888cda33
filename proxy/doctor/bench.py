"""The slots that probes may use: those that were found empty, and nobody else's.

Owns: which slots those are, and that they are empty again afterwards, whatever happens.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from proxy.core.model import SlotId
from proxy.core.prefix import TokenIds, token_ids
from proxy.doctor.directory import ProbeFiles, ProbeStore, probe_save
from proxy.doctor.facts import ProbeSaveFacts, SlotFacts
from proxy.driver.saving.saver import RewriteStateFile, SavedSlot, Saver
from proxy.errors import CacheFault, UpstreamFault, UpstreamRefused
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.replies import SlotStatus

T = TypeVar("T")

PROBE_TOKENS = 64
"""Short enough for a slow machine, long enough to tell from nothing."""
N_MORE = 8
_ERASE_ATTEMPTS = 5
_LET_GO_SECONDS = 0.5


@dataclass
class Bench:
    """What probes need: the empty slots, those that hold work, and files that will not stay."""

    upstream: LlamaServer
    files: ProbeFiles
    saver: Saver
    n_slots: int
    n_vocab: int = 2
    empty: list[SlotId] = field(default_factory=list)
    held: dict[SlotId, int] = field(default_factory=dict)
    """The other idle slots, with how many tokens /slots says they hold; 0 if only a save showed it."""
    n_busy: int = 0
    first_save: ProbeSaveFacts | None = None
    used: set[SlotId] = field(default_factory=set)
    _unfinished: set[asyncio.Future[Any]] = field(default_factory=set)

    def probe_save(self, slot_id: SlotId, n_tokens: int) -> AbstractAsyncContextManager[SavedSlot]:
        """Save a slot for the self-test; the file is deleted on leaving."""
        return self.saver.saved(slot_id)

    @property
    def facts(self) -> SlotFacts:
        return SlotFacts(n_empty=len(self.empty), n_held=len(self.held), n_busy=self.n_busy)

    @property
    def is_whole_server(self) -> bool:
        """Whether every slot is empty, so that nothing of anybody's can be displaced."""
        return len(self.empty) == self.n_slots

    def text(self, seed: int, n_tokens: int = PROBE_TOKENS + N_MORE) -> TokenIds:
        """Return tokens that begin differently for each *seed*."""
        n = max(2, min(self.n_vocab, 30011))
        return token_ids((i * 7919 + seed * 1237 + 41) % n for i in range(n_tokens))

    async def evaluate(self, slot_id: SlotId, tokens: TokenIds) -> int:
        """Make a slot hold *tokens*; return how many of them it reused."""
        self.used.add(slot_id)
        return (await self.upstream.evaluate(slot_id, tokens)).cache_n

    async def evaluate_anywhere(self, tokens: TokenIds) -> tuple[SlotId, int]:
        """Let llama-server choose; return its choice and how many tokens it reused."""
        self.used.update(self.empty)
        reply = await self.upstream.evaluate_anywhere(tokens)
        return SlotId(reply.id_slot), reply.timings.cache_n

    async def to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await *work*, which goes on if this is cancelled: a save that nobody awaits leaves its file."""
        task = asyncio.ensure_future(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait for what was cancelled and had to go on."""
        await asyncio.gather(*self._unfinished, return_exceptions=True)

    async def erase(self) -> None:
        """Empty all slots that were used."""
        for slot_id in sorted(self.used):
            await self.upstream.erase(slot_id)
        self.used.clear()


@asynccontextmanager
async def set_up(
    upstream: LlamaServer, files: ProbeFiles, rewrite: RewriteStateFile, n_slots: int
) -> AsyncIterator[Bench]:
    """Find the empty slots; leave them empty, and no file behind, also when cancelled.

    Raises UpstreamFault.
    """
    saver = Saver(ProbeStore(upstream, files), rewrite)
    bench = Bench(upstream, files, saver, n_slots)
    try:
        await _find_empty_slots(bench)
        yield bench
    finally:
        # A save may still be writing, and slots are erased behind it: files go last.
        await bench.finish()
        with suppress(UpstreamFault):
            await _empty_for_good(bench)
        files.remove_all()


async def _find_empty_slots(bench: Bench) -> None:
    """Sort the slots into busy, held and empty; what /slots calls empty is saved to be sure."""
    for status in await _statuses(bench):
        if status.is_processing:
            bench.n_busy += 1
            continue
        slot_id = SlotId(status.id)
        if status.n_prompt_tokens > 0:
            bench.held[slot_id] = status.n_prompt_tokens
            continue
        saved, facts = await bench.to_its_end(probe_save(bench.upstream, bench.files, slot_id))
        bench.first_save = bench.first_save or facts
        if saved is None or not facts.is_whole or facts.left_behind:
            bench.first_save = facts
            return
        if saved.n_saved:
            bench.held[slot_id] = 0
        else:
            bench.empty.append(slot_id)


async def _statuses(bench: Bench) -> list[SlotStatus]:
    try:
        return await bench.upstream.slots()
    except UpstreamRefused:  # --no-slots: only saves can tell
        return [SlotStatus(slot_id) for slot_id in range(bench.n_slots)]


async def _empty_for_good(bench: Bench) -> None:
    """Erase the used slots until they stay empty.

    A request that was given up while llama-server still parsed it starts after the first erase.
    """
    used = set(bench.used)
    for _ in range(_ERASE_ATTEMPTS if used else 0):
        bench.used.update(used)
        await bench.erase()
        try:
            statuses = await bench.upstream.slots()
        except CacheFault:
            return
        if not any(s.id in used and (s.is_processing or s.n_prompt_tokens) for s in statuses):
            return
        await asyncio.sleep(_LET_GO_SECONDS)
