"""One attached llama-server process: what all that serves for it shares, and what is done in its slots."""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from proxy.core.conditions import DegradationKind
from proxy.core.cuts import Stop
from proxy.core.eviction import Present, Removal
from proxy.core.model import Checkpoint, Cuts, Prompt, Quarantine, SlotId
from proxy.core.plan import Restore
from proxy.core.rates import Rates
from proxy.core.slots import (
    LOADING,
    TAINTED,
    Empty,
    Known,
    Origin,
    SlotTable,
    Unknown,
    after_evaluation,
    origin_of,
)
from proxy.core.tokens import Namespace
from proxy.errors import StoreFault, UpstreamFault, UpstreamLost, UpstreamRefused
from proxy.explain.causes import Cause
from proxy.explain.report import Journal, Report
from proxy.health import Degradations, Faults
from proxy.llama.client import Headers, LlamaServer, SlotStatus, Timings
from proxy.llama.routes import Target
from proxy.log import get_logger
from proxy.metrics import Metrics
from proxy.servers.attachment import Attachment
from proxy.serving.desk import Lease
from proxy.store.store import CheckpointStore
from proxy.tasks import Tasks

# Which models are served: what the value of a checkpoint depends on besides the checkpoint itself.


class NewestAttachments:
    """The newest attachment of each llama-server; a model that its host has unloaded will come back."""

    def __init__(self) -> None:
        self._by_target: dict[Target, Attachment] = {}

    def note(self, target: Target, attachment: Attachment) -> None:
        """Note what a llama-server serves now, if that is known."""
        if attachment.can_cache:
            self._by_target[target] = attachment
        else:
            self._by_target.pop(target, None)

    def present(self, newest: Attachment | None = None) -> Present:
        """Return the present, in which a *newest* attachment counts that was not noted yet."""
        attachments = [*self._by_target.values(), *filter(None, [newest])]
        rates_by: dict[Namespace, Rates] = {}
        for attachment in attachments:
            if attachment.can_cache:
                tenants = {b"", *attachment.tenants}
                names = [attachment.tenant_namespace(tenant) for tenant in tenants]
                rates_by.update(dict.fromkeys(names, attachment.rates))
        rates = attachments[-1].rates if attachments else Rates()
        return Present(time.time(), rates, rates_by)


# What all that serves requests shares, for as long as the proxy runs.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared:
    """The store (None if it could not be opened), and where things are counted, for all llama-servers."""

    opened_store: CheckpointStore | None
    metrics: Metrics
    faults: Faults
    everywhere: Degradations
    report: Report
    journal: Journal
    tasks: Tasks
    served: NewestAttachments

    def of(self, upstream: LlamaServer, where: str) -> "Services":
        """Return what the parts that serve one llama-server share; *where* tells it from others."""
        shared = {field.name: getattr(self, field.name) for field in fields(Shared)}
        return Services(**shared, upstream=upstream, degradations=self.everywhere.at(where))

    async def finish(self, lease: Lease[Any], action: Coroutine[Any, Any, T]) -> T:
        """Await a slot action that must not be cut short: cancelled, it takes the lease along."""
        task = self.tasks.start(action)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._note_failure)
            if not task.done():
                lease.hand_over(task)
            raise

    def _note_failure(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.faults.record("unattended action", error)

    @property
    def store(self) -> CheckpointStore:
        """The store; raises StoreFault if there is none."""
        if self.opened_store is None:
            raise StoreFault("the store is not open")
        return self.opened_store


@dataclass(frozen=True, slots=True)
class Services(Shared):
    """What belongs to one llama-server besides."""

    upstream: LlamaServer
    degradations: Degradations

    @property
    def where(self) -> str:
        """Which llama-server this is, empty if there is only one."""
        return self.degradations.where


# States that may have ended llama-server: quarantined on disk before anything is tried again.
#
# Whatever was being restored, evaluated from, or saved when the connection broke is suspect. A process
# that is told to end lets its connections stand instead (`upstream.pending`), so that nothing is suspect
# then.


WHY = "llama-server ended while it restored this state, evaluated from it or saved it"


async def quarantine_suspects(
    services: Services, table: SlotTable, slot_id: SlotId, *, is_saving: bool = False
) -> bool:
    """Quarantine what may have ended llama-server in a slot; return whether there is anything."""
    suspects = table.suspects(slot_id, is_saving=is_saving)
    table.forget_sources(slot_id)
    if not suspects:
        return False
    names = [checkpoint.file_name for checkpoint in suspects]
    get_logger("cache").warning(f"quarantined: {WHY}", files=names)
    store = services.store
    try:
        await store.quarantine_for_good(suspects, Quarantine(WHY, time.time()))
    except StoreFault as fault:  # they are not offered while this process runs
        services.faults.record("quarantine", fault)
    finally:
        note_quarantined(services.everywhere, store)
    with suppress(StoreFault):  # only an explanation would be the poorer
        for checkpoint in suspects:
            tokens = store.index.tokens(checkpoint.id)
            services.journal.note_loss(checkpoint.namespace, tokens, Cause.ENDED_LLAMA_SERVER)
    return True


def note_quarantined(degradations: Degradations, checkpoints: Iterable[Checkpoint]) -> None:
    """Let /health tell of the checkpoints that are quarantined for good, if there are any."""
    if words := quarantined_in_words(checkpoints):
        degradations.begin(DegradationKind.STATE_ENDED_SERVER, words)
    else:
        degradations.end(DegradationKind.STATE_ENDED_SERVER)


def quarantined_in_words(checkpoints: Iterable[Checkpoint]) -> str:
    """Return which of the checkpoints are quarantined for good, and since when; empty if none is."""
    found = [(c.quarantine.since, c) for c in checkpoints if c.quarantine]
    if not found:
        return ""
    since, newest = max(found, key=lambda each: each[0])
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
    words = f"checkpoint {newest.id:016x} of {newest.n_tokens:,} tokens, since {at}"
    return words if len(found) == 1 else f"{words}, and {len(found) - 1} before"


# The verbs on a leased slot: restore, stop at a cut, erase.
#
# Owns: the calls, the checks of their results, and what the slot table says afterwards. Must only be used
# by whoever holds the slot's lease. Every method leaves the table true, whatever fails.


class SlotWork:
    """Does to slots what plans say."""

    def __init__(self, services: Services, attachment: Attachment) -> None:
        self._services = services
        self._upstream = services.upstream
        self._attachment = attachment
        self._table = attachment.desk.table
        self._metrics = services.metrics

    async def slot_states(self) -> list[SlotStatus]:
        """Return llama-server's own view of its slots; raises UpstreamFault."""
        with self._attachment.watching(DegradationKind.SLOTS_NOT_SHOWN, UpstreamRefused):
            return await self._upstream.slots()

    async def erase(self, slot_id: SlotId) -> None:
        """Empty a slot; raises UpstreamFault."""
        self._attachment.require_same_process()
        self._table.set_content(slot_id, Unknown(can_be_adopted=False))
        with self._attachment.watching(DegradationKind.ERASES_REFUSED, UpstreamFault):
            await self._upstream.erase(slot_id)
        self._table.set_content(slot_id, Empty())

    async def overwrite(self, slot_id: SlotId, namespace: Namespace) -> None:
        """Replace what a slot holds by a single token, where it cannot be erased; raises UpstreamFault."""
        self._attachment.require_same_process()
        self._table.set_content(slot_id, TAINTED)
        await self._upstream.overwrite(slot_id)
        self._table.set_content(slot_id, Unknown(namespace, can_be_adopted=False))

    async def restore(
        self, slot_id: SlotId, namespace: Namespace, start: Restore, waited_seconds: float = 0.0
    ) -> None:
        """Load a checkpoint into a slot; raises CacheFault, and the slot is then empty or unknown.

        *waited_seconds* were spent on its verification: its first part of reading a file from the disk.
        """
        self._attachment.require_same_process()
        checkpoint = start.checkpoint
        if self._services.store.is_quarantined(checkpoint):  # since the plan was made
            raise StoreFault(f"{checkpoint.file_name} is quarantined")
        tokens = self._services.store.index.tokens(checkpoint.id)
        try:
            if tokens is None:
                raise StoreFault(f"tokens of {checkpoint.file_name} are gone")
            async with self._services.store.using(checkpoint):
                with self._attachment.watching(DegradationKind.RESTORES_REFUSED, UpstreamFault):
                    await self._load(slot_id, start, waited_seconds)
        except StoreFault:
            self._metrics.restores.labels("missing").inc()
            await self._services.store.remove(checkpoint, Removal.BROKEN)
            raise
        except UpstreamLost:
            self._metrics.restores.labels("ended").inc()
            await quarantine_suspects(self._services, self._table, slot_id)
            raise
        except UpstreamFault as fault:
            self._metrics.restores.labels("refused").inc()
            if isinstance(fault, UpstreamRefused) and fault.status in (200, 400):
                self._services.store.quarantine(checkpoint)
                self._services.journal.note_loss(namespace, tokens, Cause.RESTORE_REFUSED)
            raise
        self._metrics.restores.labels("done").inc()
        self._metrics.restored_bytes.inc(checkpoint.size_bytes)
        restored = Known(
            tokens,
            namespace,
            restore_points=checkpoint.restore_points,
            header=checkpoint.header,
            turn_start=checkpoint.turn_start,
            marks=checkpoint.marks,
            n_saved=checkpoint.n_tokens,
            saved_points=checkpoint.restore_points,
            origin=Origin(
                0 if checkpoint.has_every_position else checkpoint.n_tokens,
                self._services.store.lineage(checkpoint),
            ),
            n_points_at_most=len(checkpoint.restore_points),
        )
        self._table.set_content(slot_id, restored)

    async def _load(self, slot_id: SlotId, start: Restore, waited_seconds: float) -> None:
        checkpoint = start.checkpoint
        self._table.set_content(slot_id, LOADING)
        self._table.note_restore(slot_id, checkpoint)
        began = time.monotonic()
        try:
            reply = await self._upstream.restore(slot_id, checkpoint.file_name)
        except UpstreamRefused:
            # Every failed restore clears the slot (server-context.cpp, SLOT_RESTORE).
            self._table.set_content(slot_id, Empty())
            raise
        seconds = time.monotonic() - began
        self._metrics.restore_seconds.observe(seconds)
        self._attachment.rates = self._attachment.rates.after_restore(
            checkpoint.size_bytes, waited_seconds + seconds, is_warm=start.is_warm
        )
        if reply.n_restored != checkpoint.n_tokens:
            raise UpstreamRefused(200, f"restored {reply.n_restored} of {checkpoint.n_tokens}")

    async def stop(
        self, slot_id: SlotId, prompt: Prompt, cuts: Cuts, stop: Stop, headers: Headers
    ) -> Timings:
        """Evaluate a prompt up to one of its *cuts*; raises UpstreamFault."""
        before = self._table[slot_id].content
        tokens = prompt.tokens[: stop.n_tokens]
        evaluating = Unknown(prompt.namespace, likely=tokens, origin=origin_of(before))
        self._table.set_content(slot_id, evaluating)
        try:
            timings = await self._upstream.evaluate(slot_id, tokens, headers)
        except UpstreamLost:
            await quarantine_suspects(self._services, self._table, slot_id)
            raise
        self._attachment.learn_evaluation(timings)
        content = after_evaluation(
            before,
            tokens,
            prompt.namespace,
            cuts=cuts,
            shape=prompt.shape,
            n_believed=self._attachment.n_believed_points,
            stride_tokens=self._attachment.stride_tokens,
        )
        self._table.set_content(slot_id, replace(content, last_cut=stop.n_tokens))
        return timings
