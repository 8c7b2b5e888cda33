"""Cached requests whose slot llama-server chooses by similarity, because /v1/messages drops `id_slot`.

The proxy makes the prepared slot the most similar idle slot. It places one such request at a time, and
grants no lease between its last look at the slots and llama-server's choice.
"""

import asyncio
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

from proxy.core.conditions import DegradationKind
from proxy.core.model import SlotId
from proxy.core.plan import Start
from proxy.core.residency import is_similar_enough, rivals, shared_at_most
from proxy.core.slots import Known, Slot, SlotPhase, live_reuse, must_be_erased, shared_tokens
from proxy.errors import UpstreamFault, WillBeRefused, replaced
from proxy.llama.answers import Answer
from proxy.serving.cached import CachedRequest
from proxy.serving.launches import LastTasks, begun_since, last_tasks, outlast_parsing, see_through
from proxy.tasks import Turn, wait_for

_FIRST_LOOK_SECONDS = 0.005
_LAST_LOOK_SECONDS = 0.25
_RIVAL_SECONDS = 30.0
"""How long a request waits for leased slots that may become more similar than its own."""
_START_SECONDS = 10.0
"""How long no lease is granted while a request that was sent does not start."""


class SimilarRequest(CachedRequest):
    """Serves one request through the slot that is most similar to it."""

    _has_evaluated_all = False
    _is_unreadable = False
    _is_placed = False

    async def _send(self, *, can_reuse: bool) -> Answer:
        slot_id = self._plan.slot_id
        if not can_reuse:
            await self._overwrite()
        if self._prompt.n_tokens >= self._process.n_ctx:
            # It does not fit: llama-server refuses it, and no slot changes.
            with await self._process.queue.hold():
                return await self._send_as_it_is()
        is_over = asyncio.Event()
        with await self._hold_queue() as hold, ExitStack() as ending:
            before = await self._tasks_before(slot_id)
            self._is_placed = before is None  # no other slot is as similar
            watching = self._process.tasks.start(self._watch(hold, before, is_over))
            ending.callback(watching.cancel)
            try:
                answer = await self._send_as_it_is()
            except asyncio.CancelledError:
                self._let_others_go_on()
                await outlast_parsing(self._process, self._request, watching)
                raise
            is_over.set()
            # The next turn may come at once: it waits for this slot.
            self._process.slots[self._plan.slot_id].answered_for = self._prompt.namespace
            await see_through(watching)
            self._process.slots[self._plan.slot_id].answered_for = None
        return self._confirmed(answer)

    async def _overwrite(self) -> None:
        """Leave nothing to reuse in the slot, if possible; raises ServerAway if the process is gone."""
        process = self._process
        try:
            await process.finish(self._lease, process.overwrite(self._plan.slot_id))
        except UpstreamFault as fault:
            process.faults.count("erase")
            if await process.has_ended() or process.queue.is_closed:
                raise replaced() from fault

    async def _send_as_it_is(self) -> Answer:
        on_start = self._note_running if self._is_placed else self._read_beside
        launches = self._process.launches
        return await launches.send(self._turn, self._request, self._body.raw, on_start)

    async def _hold_queue(self) -> Turn:
        """Wait until llama-server must choose the prepared slot; return the hold on the queue."""
        slot_id, queue = self._plan.slot_id, self._process.queue
        began, pause = time.monotonic(), _FIRST_LOOK_SECONDS
        while True:
            hold = await queue.hold()
            is_unread = self._extended and not self._is_unreadable
            if is_unread and self._may_be_passed_over(slot_id):
                hold.end()
                await self._read_first()
                continue
            try:
                stands_out = self._stands_out(slot_id)
                is_late = time.monotonic() - began > _RIVAL_SECONDS
                if stands_out and await self._make_way(slot_id, is_late=is_late):
                    return hold
            except BaseException:
                hold.end()
                raise
            # Set only while the queue is held: other requests then plan with what the slot holds.
            queue.table[slot_id].phase = SlotPhase.READY if stands_out else SlotPhase.PREPARING
            hold.end()
            if not stands_out:
                await self._evaluate_all()
                continue
            self._let_others_go_on()  # the request that has to end first may wait for this prompt
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_SECONDS)

    def _may_be_passed_over(self, slot_id: SlotId) -> bool:
        """Return whether another slot may be as similar to a prompt that is not read yet."""
        table, tokens = self._process.slots, self._prompt.tokens
        others = (slot for slot in table if slot.id != slot_id)
        return any(shared_at_most(slot, tokens) == len(tokens) for slot in others)

    async def _read_first(self) -> None:
        """Read the prompt before it is sent; if it cannot be read, it is sent unread after all."""
        with suppress(WillBeRefused):
            await self._read()
        if self._request.prompt is None:
            self._is_unreadable = True
        else:
            self._take_prompt(self._request.prompt)

    def _stands_out(self, slot_id: SlotId) -> bool:
        """Return whether the slot is similar enough and has no rival, or cannot become more similar."""
        slot, table = self._process.slots[slot_id], self._process.slots
        tokens = self._prompt.tokens
        is_most_similar = is_similar_enough(slot, tokens) and not rivals(slot, table, tokens)
        return is_most_similar or self._has_evaluated_all

    async def _evaluate_all(self) -> None:
        """Evaluate all of the prompt but its last tokens: then only an equal prompt is as similar."""
        self._has_evaluated_all = True
        n_end = self._prompt.cuts.message_end or self._prompt.n_tokens - 1
        content = self._process.slots[self._plan.slot_id].content
        if n_end <= shared_tokens(content, self._prompt.tokens):
            return
        try:
            await self._evaluate_to(n_end)
        except UpstreamFault as fault:
            await self._require_process(fault)
            self._process.faults.record("placement", fault)

    async def _make_way(self, slot_id: SlotId, *, is_late: bool) -> bool:
        """Empty the free slots that would be chosen instead; return False if a leased one has to end.

        Behind an image llama-server knows better which slot goes on: the request follows its choice.
        """
        table, prompt = self._process.slots, self._prompt
        for rival in rivals(table[slot_id], table, prompt.tokens):
            content = table[rival].content
            is_ours = isinstance(content, Known) and content.tenant == prompt.namespace
            if prompt.is_before_media and is_ours:
                continue
            if table[rival].is_leased:
                if not self._may_end_in(table[rival], is_late=is_late):
                    return False
            else:
                await self._process.empty(rival)
        return True

    def _may_end_in(self, rival: Slot, *, is_late: bool) -> bool:
        """Return whether the request may run in a rival, should the rival's own request end now.

        llama-server does not choose a busy slot, but the slot may become idle before the choice.
        """
        process, namespace = self._process, self._prompt.namespace
        n_common = shared_tokens(rival.content, self._prompt.tokens, namespace)
        if must_be_erased(process.rule, rival.content, namespace, n_common):
            return False
        return is_late or (rival.is_running and len(process.tenants) <= 1)

    async def _watch(self, hold: Turn, before: LastTasks | None, is_over: asyncio.Event) -> None:
        """Find the slot in which the request begins; hold the queue until then, but not for long."""
        began, pause = time.monotonic(), _FIRST_LOOK_SECONDS
        slot_id = self._plan.slot_id
        while before is not None and not self._is_placed:
            await wait_for(is_over, pause)
            is_last_look = is_over.is_set()
            begun = await begun_since(self._process, before) or []
            self._find(begun)
            if is_last_look and not begun:
                break
            if is_last_look:
                # In a slot that is still leased: the answer before is on its way, or its prompt is read.
                await asyncio.sleep(_FIRST_LOOK_SECONDS)
            pause = min(2 * pause, _LAST_LOOK_SECONDS)
            if time.monotonic() - began > _START_SECONDS:
                hold.end()
                before = {slot_id: before[slot_id]}  # others may begin in the free slots now
        if self._is_placed and before is not None:
            self._process.queue.note_running(self._plan.slot_id)
            if self._plan.slot_id == slot_id:
                self._process.recover(DegradationKind.PLACED_ELSEWHERE)
        hold.end()

    def _find(self, begun: list[SlotId]) -> None:
        """Find the request's slot among those that have *begun* a task; follow it into another slot."""
        slot_id, table = self._plan.slot_id, self._process.slots
        others = [table[other] for other in begun if not table[other].is_leased]
        self._is_placed = slot_id in begun or bool(others)
        if others and slot_id not in begun:
            self._follow(others[0])

    def _follow(self, chosen: Slot) -> None:
        """Move the lease to the slot that was chosen instead; the prepared slot is free again."""
        process, prompt = self._process, self._prompt
        is_rival = chosen.id in rivals(process.slots[self._plan.slot_id], [chosen], prompt.tokens)
        if not is_rival and not prompt.is_before_media:
            process.degrade(DegradationKind.PLACED_ELSEWHERE)
        n_common = shared_tokens(chosen.content, prompt.tokens, prompt.namespace)
        n_reused, n_at_most = live_reuse(process.rule, chosen.content, n_common, prompt.n_tokens)
        plan = replace(self._plan, start=Start(chosen.id, n_reused, n_at_most), stops=())
        self._lease.move(chosen.id)
        chosen.destined = prompt.tokens
        self._account.move(plan)

    def _confirmed(self, answer: Answer) -> Answer:
        """Return the answer, without its timings if its slot is not known."""
        if self._is_placed or (answer.timings is None and not answer.is_broken):
            return answer
        self._process.slots.forget_free()  # the request ran in any of them, or in its own
        self._account.is_degraded = True
        self._process.metrics.drift.inc()
        self._process.degrade(DegradationKind.PLACED_ELSEWHERE)
        return replace(answer, timings=None)

    async def _tasks_before(self, slot_id: SlotId) -> LastTasks | None:
        """Return the last tasks of the slots in which only our request can begin now."""
        table = self._process.slots
        if len(table) == 1:
            return None
        is_quiet = (SlotPhase.FREE, SlotPhase.RUNNING)
        quiet = [s.id for s in table if s.phase in is_quiet or s.id == slot_id]
        before = await last_tasks(self._process)
        return None if before is None else {other: before.get(other, -1) for other in quiet}
