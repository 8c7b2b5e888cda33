"""A cached request whose slot llama-server chooses by similarity: /v1/messages drops id_slot.

Owns: making the prepared slot the most similar one that is idle, and finding out which one was chosen.
One such request is placed at a time, and nothing is granted between the last look at what slots hold and
the choice.
"""

import asyncio
import time
from dataclasses import replace

from proxy.core.cuts import Stop
from proxy.core.degradation import DegradationKind
from proxy.core.model import CheckpointKind, SlotId
from proxy.core.planning.erasure import must_be_erased
from proxy.core.planning.options import Option, UseLive
from proxy.core.planning.plan import Plan
from proxy.core.planning.similarity import is_similar_enough, rivals, shared_at_least
from proxy.core.slots import Slot, live_reuse
from proxy.driver.requests import Answer, Send
from proxy.driver.serving.account import Account
from proxy.driver.serving.cached import CachedRequest
from proxy.driver.slots.lease import Lease
from proxy.driver.slots.leases import Hold
from proxy.errors import UpstreamFault

_FIRST_LOOK_SECONDS = 0.005
_LAST_LOOK_SECONDS = 0.25
_RIVAL_SECONDS = 30.0
"""How long a request waits for slots that may turn out more similar than its own."""
_START_SECONDS = 10.0
"""How long nothing is granted for a request that is sent and does not start."""

LastTasks = dict[SlotId, int]


class SimilarRequest(CachedRequest):
    """Serves one request through the slot that is most similar to it."""

    _has_evaluated_all = False
    _is_placed = False

    async def _send(
        self, lease: Lease[Plan], account: Account, send: Send, *, can_reuse: bool
    ) -> Answer:
        if not can_reuse:
            overwrite = self._session.work.overwrite(lease.reason.slot_id, self._prompt.namespace)
            await self._services.finish(lease, overwrite)
        if not self._prompt.fits(self._attachment.n_ctx):
            return await self._send_to_be_refused(send)
        hold = await self._await_turn(lease, account)
        try:
            before = await self._tasks_before(lease.reason.slot_id)
            is_over = asyncio.Event()
            watching = self._services.tasks.start(
                self._watch(lease, account, hold, before, is_over)
            )
        except BaseException:
            hold.release()
            raise
        try:
            answer = await send(self._body.raw, lambda: None, account.n_reused)
            is_over.set()
            await _see_through(watching)
        finally:
            watching.cancel()
            hold.release()
        return self._confirmed(account, answer)

    async def _send_to_be_refused(self, send: Send) -> Answer:
        """Send a prompt that does not fit; the slot that is chosen runs nothing, and stays as it is."""
        hold = await self._attachment.desk.hold()
        try:
            return await send(self._body.raw, lambda: None)
        finally:
            hold.release()

    async def _await_turn(self, lease: Lease[Plan], account: Account) -> Hold:
        """Return, holding the desk, once llama-server must choose the slot that is prepared."""
        slot_id, desk = lease.reason.slot_id, self._attachment.desk
        began, pause = time.monotonic(), _FIRST_LOOK_SECONDS
        while True:
            hold = await desk.hold()
            try:
                stands_out = self._stands_out(slot_id)
                is_late = time.monotonic() - began > _RIVAL_SECONDS
                if stands_out and await self._make_way(slot_id, is_late=is_late):
                    return hold
            except BaseException:
                hold.release()
                raise
            # Only who holds the desk may say so: others then go by what the slot holds.
            desk.table.note_ready(slot_id, is_ready=stands_out)
            hold.release()
            if not stands_out:
                await self._evaluate_all(lease, account)
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_SECONDS)

    def _stands_out(self, slot_id: SlotId) -> bool:
        """Return whether the slot is as similar as it can be, or as it must be."""
        slot, table = self._attachment.desk.table[slot_id], self._attachment.desk.table
        tokens = self._prompt.tokens
        is_most_similar = is_similar_enough(slot, tokens) and not rivals(slot, table, tokens)
        return is_most_similar or self._has_evaluated_all

    async def _evaluate_all(self, lease: Lease[Plan], account: Account) -> None:
        """Let the slot hold all of the prompt but its last tokens: only an equal prompt is as similar."""
        self._has_evaluated_all = True
        n_end = self._prompt.cuts.message_end or self._prompt.n_tokens - 1
        slot = self._attachment.desk.table[lease.reason.slot_id]
        if n_end <= shared_at_least(slot, self._prompt.tokens):
            return
        work, cuts = self._session.work, lease.reason.cuts
        try:
            account.add(
                await work.stop(slot.id, self._prompt, cuts, Stop(n_end), self._request.headers)
            )
        except UpstreamFault as fault:
            self._services.faults.record("placement", fault)

    async def _make_way(self, slot_id: SlotId, *, is_late: bool) -> bool:
        """Empty the free slots that would be chosen instead; return False if one must be waited for."""
        table = self._attachment.desk.table
        for rival in rivals(table[slot_id], table, self._prompt.tokens):
            if table[rival].is_leased:
                if not self._may_end_in(table[rival], is_late=is_late):
                    return False
            else:
                await self._empty(rival)
        return True

    def _may_end_in(self, rival: Slot, *, is_late: bool) -> bool:
        """Return whether it does no harm if the request runs in a rival whose own has just ended.

        A slot that runs is not chosen, but it may come to its end before llama-server chooses.
        """
        attachment = self._attachment
        if must_be_erased(
            attachment.rule, rival.content, self._prompt.namespace, self._prompt.tokens
        ):
            return False
        return is_late or (rival.is_running and len(attachment.tenants) <= 1)

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

    async def _watch(
        self,
        lease: Lease[Plan],
        account: Account,
        hold: Hold,
        before: LastTasks | None,
        is_over: asyncio.Event,
    ) -> None:
        """Find where llama-server begins the request; hold the desk until then, but not for long."""
        began, pause = time.monotonic(), _FIRST_LOOK_SECONDS
        slot_id = lease.reason.slot_id
        self._is_placed = before is None  # nothing else is as similar
        while before is not None and not self._is_placed:
            await _wait(is_over, pause)
            is_last_look = is_over.is_set()
            self._find(lease, account, before, await self._last_tasks())
            if is_last_look:
                break
            pause = min(2 * pause, _LAST_LOOK_SECONDS)
            if time.monotonic() - began > _START_SECONDS:
                hold.release()
                before = {slot_id: before[slot_id]}  # others may begin in the free ones now
        if self._is_placed:
            self._attachment.desk.table.note_running(lease.reason.slot_id)
        if self._is_placed and before is not None and lease.reason.slot_id == slot_id:
            self._attachment.recover(DegradationKind.PLACED_ELSEWHERE)
        hold.release()

    def _find(
        self, lease: Lease[Plan], account: Account, before: LastTasks, after: LastTasks | None
    ) -> None:
        """Look which slot has run something since; go on in another one if it was that."""
        if after is None:
            return
        slot_id, table = lease.reason.slot_id, self._attachment.desk.table
        if after.get(slot_id) != before.get(slot_id):
            self._is_placed = True
            return
        for other, task in before.items():
            if task != after.get(other) and not table[other].is_leased:
                self._is_placed = True
                return self._follow(lease, account, table[other])

    def _follow(self, lease: Lease[Plan], account: Account, chosen: Slot) -> None:
        """Take the slot that was chosen instead; the one that was prepared is free again."""
        attachment, prompt = self._attachment, self._prompt
        if chosen.id not in rivals(
            attachment.desk.table[lease.reason.slot_id], [chosen], prompt.tokens
        ):
            attachment.degrade(DegradationKind.PLACED_ELSEWHERE)
        reuse = live_reuse(attachment.rule, chosen.content, prompt.namespace, prompt.tokens)
        plan = replace(lease.reason, option=Option(chosen.id, UseLive(reuse), 0.0), stops=())
        attachment.desk.move(lease, plan.slot_id, plan)
        attachment.desk.table.destine(plan.slot_id, prompt.tokens)
        account.move(plan)

    def _confirmed(self, account: Account, answer: Answer) -> Answer:
        """Return the answer, without what it says of reuse if its slot is not known."""
        if self._is_placed or answer.timings is None:
            return answer
        account.is_degraded = True
        self._services.metrics.drift.inc()
        self._attachment.degrade(DegradationKind.PLACED_ELSEWHERE)
        return replace(answer, timings=None)

    async def _tasks_before(self, slot_id: SlotId) -> LastTasks | None:
        """Return the last tasks of the slots that nothing but our request can begin to run in now."""
        table = self._attachment.desk.table
        quiet = [s.id for s in table if not s.is_leased or s.is_running or s.id == slot_id]
        before = await self._last_tasks()
        return None if before is None else {other: before.get(other, -1) for other in quiet}

    async def _last_tasks(self) -> LastTasks | None:
        """Return the last task of each slot; None if llama-server does not tell."""
        try:
            states = await self._session.work.slot_states()
        except UpstreamFault as fault:
            self._services.faults.record("placement", fault)
            return None
        return {SlotId(state.id): state.id_task for state in states}


async def _see_through(watching: "asyncio.Task[None]") -> None:
    """Await it although the client, who has its answer, may hang up: where it ran must be known."""
    try:
        await asyncio.shield(watching)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or watching.cancelled():
            raise
        task.uncancel()
        await watching


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
