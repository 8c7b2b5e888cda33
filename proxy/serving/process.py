"""One llama-server process, from first contact until it is gone: its slots, queue, rule, rates and saves.

Owns: each action on a slot (restore, stop at a cut, erase, save and erase), and its entry in the slot
table. Only the holder of a slot's lease may act on that slot. Every method leaves the table true, whatever
fails.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from cachetools import LRUCache

from proxy import errors
from proxy.core import model, slots
from proxy.core.conditions import DegradationKind
from proxy.core.cuts import UBATCH_TOKENS
from proxy.core.model import NO_RULE, Candidate, Checkpoint, Prompt, Quarantine, Rule, SlotId
from proxy.core.rates import Rates
from proxy.core.saving import StateSize, is_worth_saving, state_bytes
from proxy.core.slots import TAINTED, Content, Empty, Known, Slot, SlotTable, Unknown
from proxy.core.tokens import Namespace
from proxy.explain.causes import Cause
from proxy.health import CannotCache
from proxy.llama.client import Headers, LoraAdapter, SlotStatus, Timings
from proxy.log import get_logger
from proxy.serving.queue import Lease, SlotQueue
from proxy.serving.services import ServerServices, note_quarantined

if TYPE_CHECKING:
    from proxy.serving.launches import Launches
    from proxy.serving.prompts import PromptReader
    from proxy.serving.request import Request
    from proxy.serving.saver import Saver
    from proxy.serving.saves import SlotSaves

T = TypeVar("T")

RULE = "self-test {model} {points} context checkpoints {build}"
"""A llama-server that saves context checkpoints has another rule than one that does not: --swa-full and
--ctx-checkpoints decide which, on the same build."""
SIZES = "sizes {model}"
RATES = "rates {model} {build}"
MAX_SIZES = 256
"""The size of the next state is guessed from the sizes of so many."""
ENDED_LLAMA_SERVER = "llama-server ended while it restored, used or saved this state"


@dataclass(eq=False, kw_only=True)
class Process(ServerServices):
    """One llama-server process, and everything that lives as long as that process does."""

    id: str  # which process it is, by /props
    build: str
    model_namespace: Namespace | None = None
    obstacle: CannotCache | None = None
    """Why there is no `model_namespace`: nothing may be saved or restored then."""

    # What llama-server and its flags tell.
    n_ctx: int
    takes_media: bool  # whether it takes images or sounds
    takes_completions: bool = True  # else it ends at the first one
    has_ram_cache: bool  # whether it may keep prompts outside its slots
    shares_cells: bool = False  # whether all slots share the cells of one context (--kv-unified)
    adapters: list[LoraAdapter] = field(default_factory=list)  # with their scales
    saves_context_checkpoints: bool = False
    """By the probe save: it depends on flags that llama-server does not tell."""
    clears_idle_slots: bool | None = None
    """Whether a slot that starts empties idle slots; None if the attach could not tell."""

    # What is learned from saves (`Saver`), and from restores and answers (`CachedRequest`, `planning`).
    rule: Rule = NO_RULE
    n_contradictions: int = 0  # restores that were refused, or reused less than the rule says
    n_contradictions_allowed: int = 2
    rates: Rates = field(default_factory=Rates)
    sizes: deque[StateSize] = field(default_factory=lambda: deque(maxlen=MAX_SIZES))
    n_kept_points: int
    """How many context checkpoints a slot keeps, the newest, by llama-server's flags or the last saves."""
    n_loaded_points: int
    """How many it loads of a file, the newest, by its flags or by restores that were not reused."""
    n_written_points: int = 0  # the most that a file had
    has_run_out_of_cells: bool = False
    """Whether llama-server was seen to empty an idle slot, or to fail, because the cells were full."""
    has_broken_off: bool = False
    """Whether an answer broke off since the process was last known to run."""
    disabled_shapes: set[str] = field(default_factory=set)
    """Kinds of requests whose tokens the proxy predicted wrongly."""
    unsupported_paths: set[str] = field(default_factory=set)  # routes that were answered with 501

    # Clients' API keys.
    asks_for_key: bool = True  # whether llama-server refuses requests without a key
    taken_keys: LRUCache[bytes, bool] = field(default_factory=lambda: LRUCache(1024))
    """Whether llama-server takes a key, by the key's digest."""
    is_one_tenant: bool = False  # whether all keys share states
    tenants: set[bytes] = field(default_factory=set)
    """The tenants that have sent a request, and b"" if keys do not matter."""

    accused: list[Checkpoint]
    """Those quarantined because this process seems to have ended; used again if it turns out to run. If it
    is met again, its next `Process` has the same list."""

    # Requests on their way.
    on_way: "set[Request]" = field(default_factory=set)
    """Requests that another llama-server has read and this process will serve."""
    extending: "WeakSet[Request]" = field(default_factory=WeakSet)
    """Requests that were sent before anybody looked whether this process still runs."""
    settling: "list[tuple[bytes, asyncio.Task[None]]]" = field(default_factory=list)
    """Conversations whose answers are whole, and the tasks that learn what their slots hold now."""

    # Its parts; the attach makes those without a value here.
    queue: SlotQueue
    slots: SlotTable = field(init=False)
    reader: "PromptReader" = field(init=False)
    saver: "Saver" = field(init=False)
    saves: "SlotSaves" = field(init=False)
    launches: "Launches" = field(init=False)
    is_current: Callable[[], Awaitable[bool]] = field(init=False)
    """Asks llama-server now; returns whether this process still answers."""

    def __post_init__(self) -> None:
        self.slots = self.queue.table

    @property
    def can_cache(self) -> bool:
        return self.model_namespace is not None

    @property
    def is_caching(self) -> bool:
        return self.can_cache and self.rule.can_restore

    @property
    def is_overfull(self) -> bool:
        """Whether the slots hold more than the cells of one slot's context, which they share."""
        return self.shares_cells and sum(slot.n_held for slot in self.slots) > self.n_ctx

    def is_short_of_cells(self, n_tokens: int, others: Iterable[Slot]) -> bool:
        """Whether llama-server has too few cells for a prompt of *n_tokens* beside *others*.

        A prompt that never fits is refused, and needs none.
        """
        if not (self.has_run_out_of_cells and n_tokens < self.n_ctx):
            return False
        n_held = sum(slot.n_held + UBATCH_TOKENS * slot.is_leased for slot in others)
        return n_held + n_tokens + UBATCH_TOKENS > self.n_ctx  # answers are added to both

    @property
    def n_queued(self) -> int:
        """How many requests wait for a slot, or for their turn to start."""
        return self.queue.n_waiting + self.launches.turns.n_waiting

    def can_extend(self, content: Known) -> bool:
        """Return whether a request may go on at once in the slot that still holds exactly *content*."""
        is_free = self.slots.holder(content) is not None
        may_start = self.queue.grants_at_once and not self.launches.is_save_coming
        return is_free and may_start and not self.is_short_of_cells(0, self.slots)

    def require_alive(self) -> None:
        """Raise UpstreamUnreachable if another process has taken this one's place."""
        if self.queue.is_closed:
            raise errors.UpstreamUnreachable("llama-server was replaced meanwhile")

    def tenant_namespace(self, tenant: bytes) -> Namespace:
        """Return the namespace of one tenant of this model."""
        return model.tenant_namespace(self.model_namespace, self.tenant_here(tenant))

    def tenant_here(self, tenant: bytes) -> bytes:
        """Return the tenant that counts here: the salt always counts, the key may not."""
        return model.tenant_without_key(tenant) if self.is_one_tenant else tenant

    # What the index remembers of a model, beyond one process.

    def remembered(self, name: str, value_type: type[T]) -> T | None:
        """Return the value remembered under RULE, SIZES or RATES."""
        return self.store.index.value(self.name_here(name), value_type)

    def name_here(self, name: str) -> str:
        """Return the name under which the index has RULE, SIZES or RATES of this model."""
        points = "with" if self.saves_context_checkpoints else "without"
        model_name = (self.model_namespace or b"").hex()
        return name.format(model=model_name, build=self.build, points=points)

    # What is wrong with this process; nothing is noted once the process is gone.

    def degrade(self, kind: DegradationKind, detail: str = "") -> None:
        """Note that something is wrong."""
        if not self.queue.is_closed:
            self.degradations.begin(kind, detail)

    def recover(self, *kinds: DegradationKind) -> None:
        """Note that what was wrong is mended."""
        if not self.queue.is_closed:
            self.degradations.end(*kinds)

    def _note(self, kind: DegradationKind, *, is_wrong: bool) -> None:
        (self.degrade if is_wrong else self.recover)(kind)

    @contextmanager
    def watching(self, kind: DegradationKind, fault_type: type[Exception]) -> Iterator[None]:
        """Begin a degradation if a fault leaves the block, end it if none does; NoRoom is no failure."""
        try:
            yield
        except fault_type as fault:
            if not isinstance(fault, errors.NoRoom):
                self.degrade(kind, str(fault))
            raise
        self.recover(kind)

    def disable_shape(self, shape: str) -> None:
        """Serve requests of this shape uncached: their tokens were predicted wrongly."""
        self.metrics.tokenization_disagreements.inc()
        self.disabled_shapes.add(shape)
        self.degrade(DegradationKind.TOKENIZED_OTHERWISE, f"last: {shape}")

    def enable_shape(self, shape: str) -> None:
        """Serve requests of this shape from the cache again."""
        self.disabled_shapes.discard(shape)
        if not self.disabled_shapes:
            self.recover(DegradationKind.TOKENIZED_OTHERWISE)

    def note_clearing(self, *, clears: bool) -> None:
        """Note whether a slot that starts empties idle slots."""
        self.clears_idle_slots = clears
        self._note(DegradationKind.IDLE_SLOTS_CLEARED, is_wrong=clears)

    # The rule, sizes and rates of this process.

    async def learn_rule(self, rule: Rule) -> None:
        """Use *rule* from now on, and remember it for this model and build; raises StoreFault.

        "Nothing can be restored" is not remembered, because a disturbance may have caused it.
        """
        self.rule = rule
        self.saver.repairs_windows = rule.needs_repair
        self._note(DegradationKind.RULE_IS_NOTHING, is_wrong=not rule.can_restore)
        learned = rule if rule.can_restore else None
        if self.remembered(RULE, Rule) != learned:
            await self.store.put_value(self.name_here(RULE), learned)

    def learn_evaluation(self, timings: Timings) -> None:
        """Note how long an evaluation took, as llama-server says."""
        n_from, n_to = timings.cache_n, timings.cache_n + timings.prompt_n
        self.rates = self.rates.after_evaluation(n_from, n_to, timings.prompt_ms / 1000)

    def content_after(self, before: Content, prompt: Prompt, timings: Timings) -> Known:
        """Return what a slot holds once a prompt, or the first tokens of one, was evaluated in it."""
        return slots.after_evaluation(
            before,
            prompt,
            self.rule,
            n_reused=timings.cache_n,
            n_generated=timings.predicted_n,
            n_kept=self.n_kept_points,
        )

    def pays_to_save(self, content: Content, held: Collection[SlotId] = ()) -> bool:
        """Return whether a save of a slot's content now is worth its seconds to each request.

        All the slots that are *held* are held by one request.
        """
        if not isinstance(content, Known):
            return True  # only a save tells the tokens
        others = [slot for slot in self.slots if slot.id not in held]
        n_stalled = max(1, slots.n_busy(others) + bool(held))
        size_bytes = state_bytes(self.sizes, content)
        return is_worth_saving(content, content.n_unsaved, size_bytes, self.rates, n_stalled)

    # Slots as llama-server sees them.

    async def slot_states(self) -> list[SlotStatus]:
        """Return llama-server's own view of its slots; raises UpstreamFault."""
        with self.watching(DegradationKind.SLOTS_NOT_SHOWN, errors.UpstreamRefused):
            return await self.upstream.slots()

    # The actions on a leased slot.

    async def finish(self, lease: Lease, action: "Coroutine[Any, Any, T] | asyncio.Future[T]") -> T:
        """Await a slot action that must not be cut short: it keeps the lease of a cancelled caller."""
        task = action if isinstance(action, asyncio.Future) else self.tasks.start(action)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._note_failure)
            lease.hand_over(task)
            self.queue.end_placement(lease, lease.reserved)  # the caller's request was not sent
            raise

    def _note_failure(self, task: "asyncio.Future[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.faults.record("unattended action", error)

    async def erase(self, slot_id: SlotId) -> None:
        """Empty a slot; raises UpstreamFault."""
        self.require_alive()
        self.slots.set_content(slot_id, TAINTED)
        # Without --slot-save-path llama-server refuses erases too: that is told already.
        kind = DegradationKind.ERASES_REFUSED
        with self.watching(kind, errors.UpstreamRefused) if self.can_cache else nullcontext():
            await self.upstream.erase(slot_id)
        self.slots.set_content(slot_id, Empty())

    async def empty(self, slot_id: SlotId) -> None:
        """Save a free slot if it pays, then erase the slot; an empty or leased slot is left alone."""
        content = self.slots[slot_id].content
        if isinstance(content, Empty):
            return
        pays = self.pays_to_save(content)
        if (lease := self.queue.try_lease(slot_id, overtakes_all=True)) is None:
            return
        with lease:
            if pays:
                await self.finish(lease, self.saves.begin(slot_id))
            with self.faults.suppressed("erase", errors.UpstreamFault):
                await self.finish(lease, self.erase(slot_id))

    async def empty_oldest(self, slot_id: SlotId) -> bool:
        """Save and empty the free slot beside *slot_id* that was used longest ago; False if none can be.

        Where slots share their cells, that makes room for a prompt or for a restore, which frees none.
        """
        for other in sorted(self.slots, key=lambda slot: slot.used_at):
            await self.queue.until_unheld()
            if other.id != slot_id and not (other.is_leased or isinstance(other.content, Empty)):
                await self.empty(other.id)
                if isinstance(other.content, Empty):
                    return True
        return False

    async def overwrite(self, slot_id: SlotId) -> None:
        """Replace a slot's content by one token, where the slot cannot be erased; raises UpstreamFault."""
        self.require_alive()
        self.slots.set_content(slot_id, TAINTED)
        await self.upstream.overwrite(slot_id)
        self.slots.set_content(slot_id, Empty())

    async def restore(
        self, slot_id: SlotId, restored: Candidate, waited_seconds: float = 0.0
    ) -> None:
        """Load a checkpoint into a slot; raises CacheFault, and the slot is then empty or unknown.

        *waited_seconds* were spent on verification, which reads the file from the disk.
        """
        checkpoint = restored.checkpoint
        if self.store.is_quarantined(checkpoint):  # since the plan was made
            raise errors.StoreFault(f"{checkpoint.file_name} is quarantined")
        tokens = self.store.index.tokens(checkpoint.id)
        try:
            if tokens is None:
                raise errors.StoreFault(f"tokens of {checkpoint.file_name} are gone")
            async with self.store.using(checkpoint):
                with self.watching(DegradationKind.RESTORES_REFUSED, errors.UpstreamFault):
                    await self._load(slot_id, restored, waited_seconds)
        except errors.StoreFault:
            # The store has removed what is damaged; what only changed is verified at its next use.
            self.metrics.restores.labels("missing").inc()
            raise
        except errors.UpstreamLost:
            self.metrics.restores.labels("ended").inc()
            await self.quarantine_suspects(slot_id)
            raise
        except errors.UpstreamFault as fault:
            self.metrics.restores.labels("refused").inc()
            # 200: llama-server has restored less than the file has (`_load`).
            status = fault.status if isinstance(fault, errors.UpstreamRefused) else 0
            if status in (200, 400) and not await self.has_ended():
                self.blame(checkpoint, Cause.RESTORE_REFUSED)
            raise
        self.metrics.restores.labels("done").inc()
        self.metrics.restored_bytes.inc(checkpoint.size_bytes)
        content = slots.as_restored(checkpoint, tokens, self.store.lineage(checkpoint))
        self.slots.set_content(slot_id, content)

    async def _load(self, slot_id: SlotId, restored: Candidate, waited_seconds: float) -> None:
        checkpoint, n_restored = restored.checkpoint, None
        while n_restored is None:
            self.require_alive()
            self.slots.set_content(slot_id, TAINTED)
            self.slots[slot_id].note_restore(checkpoint)
            began = time.monotonic()
            try:
                n_restored = await self.upstream.restore(slot_id, checkpoint.file_name)
            except errors.UpstreamRefused as refusal:
                if refusal.status == 400:
                    # A restore that fails clears the slot (server-context.cpp, SLOT_RESTORE).
                    self.slots.set_content(slot_id, Empty())
                others = (slot for slot in self.slots if slot.id != slot_id)
                are_full = any(s.is_leased or not isinstance(s.content, Empty) for s in others)
                if refusal.status != 400 or not (self.shares_cells and are_full):
                    raise
                if not await self.empty_oldest(slot_id):
                    raise errors.NoRoom("context", "the other slots hold too much") from None
        seconds = time.monotonic() - began
        self.metrics.restore_seconds.observe(seconds)
        self.rates = self.rates.after_restore(
            checkpoint.size_bytes, waited_seconds + seconds, is_warm=restored.is_warm
        )
        if await self.upstream.is_replaced(self.id):
            await self.erase(slot_id)  # its attach would take the state for one of its own
            raise errors.UpstreamUnreachable("another process has restored the state")
        if n_restored != checkpoint.n_tokens:
            raise errors.UpstreamRefused(200, f"restored {n_restored} of {checkpoint.n_tokens}")

    async def stop(self, slot_id: SlotId, prompt: Prompt, n_tokens: int, keys: Headers) -> Timings:
        """Evaluate the first *n_tokens* of a prompt; raises UpstreamFault."""
        self.require_alive()
        before = self.slots[slot_id].content
        tokens = prompt.tokens[:n_tokens]
        evaluating = Unknown(prompt.namespace, likely=tokens, origin=before.origin)
        self.slots.set_content(slot_id, evaluating)
        try:
            timings = await self.upstream.evaluate(slot_id, tokens, keys)
        except errors.UpstreamLost:
            await self.quarantine_suspects(slot_id)
            raise
        self.learn_evaluation(timings)
        evaluated = replace(prompt, tokens=tokens, conversation=b"")
        content = self.content_after(before, evaluated, timings)
        self.slots.set_content(slot_id, replace(content, last_cut=n_tokens))
        return timings

    async def has_ended(self) -> bool:
        """Look at llama-server after a failure; return whether this process seems to be gone.

        A look that was under way may have begun before the failure, so there are two. If a gateway or the
        network failed, the process may have been met again since.
        """
        for _ in range(2):
            await self.is_current()
            newest = self.served[self.upstream.target]
            if newest.id != self.id or newest.queue.is_closed:
                return True
        return False

    def blame(self, checkpoint: Checkpoint, cause: Cause) -> None:
        """Quarantine a checkpoint that contradicts the rule; only if this process has really answered."""
        get_logger("cache").warning(f"quarantined: {cause}", files=[checkpoint.file_name])
        self.n_contradictions += 1
        self.store.quarantine(checkpoint)
        self.note_loss(checkpoint, cause)

    async def quarantine_suspects(self, slot_id: SlotId, *, is_saving: bool = False) -> bool:
        """Quarantine the checkpoints that may have ended llama-server; return whether there are any.

        A checkpoint is suspect if it was being restored, evaluated from or saved when the connection broke
        and the process ended. None is suspect if the process was told to end, because it keeps its
        connections then (`Heard`), or if only the network broke the connection.
        """
        suspects = self.slots[slot_id].suspects(is_saving=is_saving)
        if not suspects or not await self.has_ended():
            return False
        self.slots[slot_id].sources = ()
        # Another llama-server may have ended over it: that it goes on here acquits only those of this one.
        self.accused += (each for each in suspects if not self.store.is_quarantined(each))
        why = Quarantine(ENDED_LLAMA_SERVER, time.time())
        await self._set_quarantine(f"quarantined: {ENDED_LLAMA_SERVER}", why, *suspects)
        for checkpoint in suspects:
            self.note_loss(checkpoint, Cause.ENDED_LLAMA_SERVER)
            if self.tier:
                self.tier.uploads.withdraw(checkpoint)
        return True

    async def acquit(self) -> None:
        """Use the accused checkpoints again: this process answers, so only a gateway or network failed."""
        accused = tuple(self.accused)
        self.accused.clear()
        await self._set_quarantine("used again: the same llama-server answers", None, *accused)
        if self.tier:
            with self.faults.suppressed("quarantine", errors.StoreFault):
                for checkpoint in accused:
                    await self.tier.uploads.readmit(checkpoint)

    async def _set_quarantine(self, event: str, why: Quarantine | None, *of: Checkpoint) -> None:
        get_logger("cache").warning(event, files=[checkpoint.file_name for checkpoint in of])
        try:
            with self.faults.suppressed("quarantine", errors.StoreFault):
                await self.store.change_on_disk(*(each.id for each in of), quarantine=why)
        finally:  # without a disk it holds until the proxy's next start
            note_quarantined(self.all_degradations, self.store.quarantined)

    def note_loss(self, checkpoint: Checkpoint, cause: Cause) -> None:
        """Note why a checkpoint is gone, for the explanations of requests that miss it."""
        with suppress(errors.StoreFault):  # only the explanations suffer
            tokens = self.store.index.tokens(checkpoint.id)
            self.journal.prompts.note_loss(checkpoint.namespace, tokens, cause)
