"""The verbs on a leased slot: restore, stop at a cut, erase.

Owns: the calls, the checks of their results, and what the slot table says afterwards. Must only be
used by whoever holds the slot's lease. Every method leaves the table true, whatever fails.
"""

import time
from dataclasses import replace

from proxy.core.cuts import Stop
from proxy.core.degradation import DegradationKind
from proxy.core.explaining.causes import Cause
from proxy.core.keeping.eviction import Removal
from proxy.core.model import Checkpoint, Cuts, Prompt, SlotId
from proxy.core.planning.evaluation import after_evaluation
from proxy.core.planning.options import Restore
from proxy.core.prefix import Namespace
from proxy.core.slots import LOADING, TAINTED, Empty, Known, Unknown, restored_tokens
from proxy.driver.contact.attachment import Attachment
from proxy.driver.services import Services
from proxy.errors import StoreFault, UpstreamFault, UpstreamRefused
from proxy.upstream.llama_server import Headers
from proxy.upstream.replies import SlotStatus, Timings


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

    async def restore(self, slot_id: SlotId, namespace: Namespace, start: Restore) -> None:
        """Load a checkpoint into a slot; raises CacheFault, and the slot is then empty or unknown."""
        self._attachment.require_same_process()
        checkpoint = start.checkpoint
        tokens = self._services.store.index.tokens(checkpoint.id)
        try:
            if tokens is None:
                raise StoreFault(f"tokens of {checkpoint.file_name} are gone")
            with self._services.store.using(checkpoint):
                with self._attachment.watching(DegradationKind.RESTORES_REFUSED, UpstreamFault):
                    await self._load(slot_id, checkpoint)
        except StoreFault:
            self._services.journal.note_loss(namespace, tokens, Cause.RESTORE_REFUSED)
            self._metrics.restores.labels("missing").inc()
            await self._services.store.remove(checkpoint, Removal.BROKEN)
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
            n_restored=0 if checkpoint.has_every_position else checkpoint.n_tokens,
            n_points_at_most=len(checkpoint.restore_points),
        )
        self._table.set_content(slot_id, restored)

    async def _load(self, slot_id: SlotId, checkpoint: Checkpoint) -> None:
        self._table.set_content(slot_id, LOADING)
        is_warm = self._services.store.is_warm(checkpoint)
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
            checkpoint.size_bytes, seconds, is_warm=is_warm
        )
        if reply.n_restored != checkpoint.n_tokens:
            raise UpstreamRefused(200, f"restored {reply.n_restored} of {checkpoint.n_tokens}")

    async def stop(
        self, slot_id: SlotId, prompt: Prompt, cuts: Cuts, stop: Stop, headers: Headers
    ) -> Timings:
        """Evaluate a prompt up to one of its *cuts*; raises UpstreamFault."""
        before = self._table[slot_id].content
        n_restored = restored_tokens(before)
        tokens = prompt.tokens[: stop.n_tokens]
        evaluating = Unknown(prompt.namespace, likely=tokens, n_restored=n_restored)
        self._table.set_content(slot_id, evaluating)
        timings = await self._upstream.evaluate(slot_id, tokens, headers)
        self._attachment.learn_evaluation(timings)
        content = after_evaluation(
            before,
            tokens,
            prompt.namespace,
            cuts=cuts,
            shape=prompt.shape,
            n_believed=self._attachment.n_believed_points,
        )
        self._table.set_content(slot_id, replace(content, last_cut=stop.n_tokens))
        return timings
