"""A cached request whose slot llama-server chooses by similarity: /v1/messages drops id_slot.

Owns: making the prepared slot the most similar one, and finding out whether it was chosen. Nothing is
granted between the last look at what slots hold and the choice.
"""

import asyncio
import time

from proxy.core.cuts import Stop
from proxy.core.degradation import DegradationKind
from proxy.core.model import CheckpointKind, SlotId
from proxy.core.plan import Plan
from proxy.core.similarity import is_similar_enough, rivals
from proxy.core.slots import TAINTED
from proxy.driver.account import Account
from proxy.driver.cached import CachedRequest
from proxy.driver.lease import Lease
from proxy.driver.requests import Answer, Send
from proxy.errors import UpstreamFault

_FIRST_LOOK_SECONDS = 0.005
_LAST_LOOK_SECONDS = 0.25
_RIVAL_SECONDS = 30.0
"""How long a request waits for slots that may turn out more similar than its own."""

LastTasks = dict[SlotId, int]


class SimilarRequest(CachedRequest):
    """Serves one request through the slot that is most similar to it."""

    async def _send(
        self, lease: Lease[Plan], account: Account, send: Send, *, can_reuse: bool
    ) -> Answer:
        slot_id = lease.reason.slot_id
        if not can_reuse:
            await self._services.finish(
                lease, self._session.work.overwrite(slot_id, self._prompt.namespace)
            )
        began, sending = time.monotonic(), None
        while sending is None:
            with self._attachment.desk.held():
                is_late = time.monotonic() - began > _RIVAL_SECONDS
                if await self._is_most_similar(lease, account) or is_late:
                    before = await self._last_tasks()
                    sending = asyncio.ensure_future(send(self._body.raw, lambda: None))
                    try:
                        await self._await_start(slot_id, before, sending)
                    except BaseException:
                        sending.cancel()
                        raise
            if sending is None:
                await asyncio.sleep(_LAST_LOOK_SECONDS)  # a rival is in use
        return await self._outcome(slot_id, before, sending, account)

    async def _is_most_similar(self, lease: Lease[Plan], account: Account) -> bool:
        """Return whether llama-server must choose the slot, after what had to be done for that."""
        slot_id, table = lease.reason.slot_id, self._attachment.desk.table
        tokens = self._prompt.tokens
        if rivals(table[slot_id], table, tokens) or not is_similar_enough(table[slot_id], tokens):
            await self._evaluate_all(lease, account)
        for rival in rivals(table[slot_id], table, tokens):
            if table[rival].is_leased:
                return False
            await self._empty(rival)
        return True

    async def _evaluate_all(self, lease: Lease[Plan], account: Account) -> None:
        """Let the slot hold all of the prompt but its last tokens: nothing else is as similar."""
        n_end = self._prompt.cuts.message_end or self._prompt.n_tokens - 1
        slot = self._attachment.desk.table[lease.reason.slot_id]
        if n_end <= 0 or n_end <= len(getattr(slot.content, "tokens", ())):
            return
        work, cuts = self._session.work, lease.reason.cuts
        try:
            account.add(
                await work.stop(slot.id, self._prompt, cuts, Stop(n_end), self._request.headers)
            )
        except UpstreamFault as fault:
            self._services.faults.record("placement", fault)

    async def _empty(self, slot_id: SlotId) -> None:
        """Save and erase a free slot that llama-server would choose instead."""
        lease = self._attachment.desk.lease_free(slot_id)
        if lease is None:
            return
        with lease:
            saves, work = self._session.saves, self._session.work
            kind = CheckpointKind.CONVERSATION
            await self._services.finish(lease, saves.write_back(slot_id, kind))
            try:
                await self._services.finish(lease, work.erase(slot_id))
            except UpstreamFault as fault:
                self._services.faults.record("placement", fault)

    async def _await_start(
        self, slot_id: SlotId, before: LastTasks | None, sending: "asyncio.Future[Answer]"
    ) -> None:
        """Return once llama-server has begun the request somewhere, or it has ended."""
        pause = _FIRST_LOOK_SECONDS
        while before is not None and not sending.done():
            await asyncio.wait({sending}, timeout=pause)
            pause = min(2 * pause, _LAST_LOOK_SECONDS)
            after = await self._last_tasks()
            if after is None or after.get(slot_id) != before.get(slot_id):
                break
            if sending.done() or self._strayed(slot_id, before, after):
                return
        self._attachment.desk.table.note_running(slot_id)

    async def _outcome(
        self,
        slot_id: SlotId,
        before: LastTasks | None,
        sending: "asyncio.Future[Answer]",
        account: Account,
    ) -> Answer:
        """Return the answer; if another slot gave it, that one's content is not known any more."""
        try:
            answer = await sending
        except asyncio.CancelledError:
            sending.cancel()
            raise
        after = await self._last_tasks()
        if before is None or after is None or after.get(slot_id) != before.get(slot_id):
            return answer
        desk = self._attachment.desk
        for stray in self._strayed(slot_id, before, after):
            desk.table.set_content(stray, TAINTED)
        if answer.timings is not None:
            account.is_degraded = True
            self._services.metrics.drift.inc()
            self._attachment.degrade(DegradationKind.PLACED_ELSEWHERE)
        return Answer(answer.status, None, answer.first_token_at, answer.is_broken)

    def _strayed(self, slot_id: SlotId, before: LastTasks, after: LastTasks) -> list[SlotId]:
        """Return the free slots that have run something since, though nobody has leased them."""
        table = self._attachment.desk.table
        return [
            other
            for other, task in after.items()
            if other != slot_id and task != before.get(other) and not table[other].is_leased
        ]

    async def _last_tasks(self) -> LastTasks | None:
        """Return the last task of each slot; None if llama-server does not tell."""
        try:
            states = await self._session.work.slot_states()
        except UpstreamFault as fault:
            self._services.faults.record("placement", fault)
            return None
        return {SlotId(state.id): state.id_task for state in states}
