"""One request whose prompt is known, on its way through a slot.

1. Its prompt was read: plan -> lease a slot -> restore the checkpoint -> stop at cuts -> send -> confirm
   the hit -> release, or save first.
2. It extends what a slot holds: lease that slot -> send -> read the prompt beside the answer -> confirm ->
   release. Until the prompt has been read, `_extended` is that content and `_prompt` has its tokens.

Only the reply confirms a hit. If it reused less than a restore promised, the checkpoint is mostly
quarantined; if more than the slot was known to hold (drift), the slot is erased before its next use.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from proxy import errors
from proxy.core import slots
from proxy.core.conditions import DegradationKind
from proxy.core.model import Candidate, Checkpoint, CheckpointKind, Prompt
from proxy.core.plan import Plan, Start, Why, most_useful, plan_extension, plan_request
from proxy.core.saving import is_cut_at_risk
from proxy.core.slots import TAINTED, Content, Empty, Known, Unknown, must_be_erased, shared_tokens
from proxy.explain.causes import Cause
from proxy.explain.judgement import Account, Judgement
from proxy.explain.report import Inquiry
from proxy.llama.answers import Answer
from proxy.llama.client import Timings
from proxy.llama.requests import honours_id_slot, pin
from proxy.log import get_logger
from proxy.serving import planning
from proxy.serving.launches import wind_up
from proxy.serving.process import Process
from proxy.serving.queue import Choice, Lease
from proxy.serving.request import Request
from proxy.tasks import Turn, wait_for

Read = Callable[[], Coroutine[Any, Any, None]]

_FIRST_TOKEN_SECONDS = 0.2
_LONG_WAIT_SECONDS = 0.05
"""Once a request has waited this long for a slot, another llama-server process may be there."""


class CachedRequest:
    """Serves one request from the cache, as far as that helps."""

    _account: Account
    _inquiry: Inquiry
    _lease: Lease
    _begin_evaluation: Callable[[], Awaitable[None]]
    _reading: "asyncio.Task[None] | None" = None
    _is_placed = True  # known to run in its slot

    def __init__(self, process: Process, request: Request, turn: Turn | None, read: Read) -> None:
        """*turn* ends once llama-server runs the request; *read* reads its prompt, if that was put off."""
        assert request.prompt is not None and request.body is not None
        self._process = process
        self._request = request
        self._turn = turn
        self._read = read
        self._extended = request.extends
        self._prompt = request.prompt
        self._body = request.body
        self._kept = ExitStack()
        """Ends when the slot is prepared: keeps the checkpoint to restore, and announces the first save."""

    @property
    def _plan(self) -> Plan:
        return self._account.plan

    @property
    def _prompt_as_planned(self) -> Prompt:
        """The prompt with the cuts of the plan, which has found the branch."""
        return replace(self._prompt, cuts=self._plan.cuts)

    async def serve(self) -> None:
        """Serve the request; raises what sending raises, and ServerAway before anything was sent."""
        process, request = self._process, self._request
        joined_at = request.queued_at or time.monotonic()
        if not self._extended:
            planning.note_asked(self._process, self._prompt)
            if process.queue.n_waiting:
                self._keep_most_useful(planning.look_up(process, self._prompt)[0])
        lease = process.queue.lease(self._choose, since=request.arrived_at, may_be_overtaken=True)
        with self._kept, await lease as self._lease:
            request.account = self._account
            if self._extended:
                request.foresee = lambda: Judgement(Cause.HIT)
            else:
                self._inquiry = Inquiry(process, self._prompt, request.chat or self._body)
                request.foresee = lambda: self._inquiry.foresee(self._account, request.id)
                state = planning.first_save(process, self._prompt, self._plan)
                self._kept.enter_context(process.queue.announced(state))
            evaluation = process.launches.evaluation(request, self._prompt, self._plan)
            with evaluation as (self._begin_evaluation, self._let_others_go_on):
                if self._extended:
                    await self._begin_evaluation()
                self._account.queued_seconds = time.monotonic() - joined_at
                await self._serve_in_slot(joined_at)

    async def _serve_in_slot(self, joined_at: float) -> None:
        process = self._process
        # A state that is restored into a dying process would be blamed for its end.
        if self._account.queued_seconds > _LONG_WAIT_SECONDS or process.has_broken_off:
            if not await process.is_current():
                raise errors.replaced()
            process.has_broken_off = False
        try:
            can_reuse = bool(self._extended) or await self._prepare()
            self._kept.close()
            self._account.prepared_seconds = time.monotonic() - joined_at
            answer = await self._send(can_reuse=can_reuse)
        except BaseException as error:
            if self._reading is not None:
                self._reading.cancel()  # reading writes into the request, which may begin again
            has_ended = isinstance(error, errors.ServerAway) and error.has_ended
            is_away = isinstance(error, errors.ServerAway) and not has_ended
            if is_away and self._extended and process.queue.is_closed:
                raise errors.replaced() from error  # withdrawn, because another process answers
            self._abandon(is_emptied=isinstance(error, errors.OutOfCells) and self._is_placed)
            # A state may have ended llama-server, or the proxy's own work.
            is_ours = has_ended and await process.quarantine_suspects(self._plan.slot_id)
            if is_ours or isinstance(error, errors.UpstreamLost):
                # No suspect is left, so the request may be tried again.
                ended = "llama-server ended before it answered"
                raise errors.ServerAway(ended, was_sent=False, has_ended=True) from error
            raise
        if answer.timings is not None:
            self._account.add(answer.timings, process.rates)
        if self._extended:
            self._settle_later(answer)
        elif self._account.is_ineffective_restore:
            self._lease.hand_over(process.tasks.start(self._settle_in_doubt(answer)))
        else:
            self._settle(answer)

    # The plan.

    def _choose(self) -> Choice | None:
        """Plan the request over the present slots and checkpoints; None means that it goes on waiting.

        The last plan holds: its slot is granted at once, or the request chooses again.
        """
        if held := self._extended:
            # Nothing is restored or displaced, and `can_extend` says that the request need not wait.
            slot = self._process.slots.holder(held)
            start = slot and Start(slot.id, len(held.tokens), held.n_tokens)
            plan = start and Plan(start, why=Why.EXTENDS)
        elif self._process.launches.must_wait(self._prompt.n_tokens):
            return None
        else:
            plan = planning.plan_behind_media(self._process, self._request) or self._plan_now()
        if not plan:
            return None
        self._account = Account(plan, self._prompt.n_tokens)
        return Choice((plan.slot_id,), plan.is_warm, self._prompt.tokens)

    def _plan_now(self) -> Plan | None:
        """Look the prompt up; return the cheapest plan, whose checkpoint cannot be evicted from now on."""
        began = time.perf_counter()
        self._kept.close()
        now = planning.situation(self._process, self._prompt)
        plan = plan_request(self._prompt, now)
        plan = plan and planning.as_wished(self._process, self._request, self._prompt, plan)
        if plan is None:
            self._keep_most_useful(now.candidates)
        elif plan.start.restored:
            self._keep(plan.start.restored.checkpoint)
        self._process.metrics.lookup_seconds.observe(time.perf_counter() - began)
        return plan

    def _plan_again(self) -> None:
        """Plan the request anew in its slot, because the checkpoint to restore is gone, and missed."""
        plan = planning.plan_in(self._process, self._prompt, self._plan.slot_id)
        plan = planning.as_wished(self._process, self._request, self._prompt, plan)
        if plan.start.restored:
            self._keep(plan.start.restored.checkpoint)
        self._account.move(replace(plan, n_shared=self._plan.n_shared))

    def _keep_most_useful(self, candidates: tuple[Candidate, ...]) -> None:
        _, wanted = most_useful(self._process.rule, candidates, self._prompt.n_tokens)
        if wanted is not None:
            self._keep(wanted)

    def _keep(self, checkpoint: Checkpoint) -> None:
        self._kept.enter_context(self._process.store.keep(checkpoint))
        self._process.store.verify_soon(checkpoint)

    # The slot is prepared as the plan says.

    async def _prepare(self) -> bool:
        """Save the displaced work, erase, restore, stop at cuts; return False if nothing may be reused."""
        process, slot_id = self._process, self._plan.slot_id
        await process.launches.clear_others()
        await process.launches.free_cells(slot_id, self._prompt.n_tokens)
        start = self._plan.start
        if start.displacement.saves:
            is_used = start.restored is None and start.n_reused > 0
            await process.finish(self._lease, process.saves.begin(slot_id, is_used=is_used))
        await self._verify()
        start = self._plan.start  # another one, if the file was damaged
        # The save may have found tokens that must not be reused. A restore replaces all tokens.
        if not start.restored and (start.erases or self._must_erase()) and not await self._erase():
            return False
        try:
            if start.restored:
                await self._restore(start.restored)
            await self._begin_evaluation()
            for stop in self._plan.stops:
                await self._evaluate_to(stop.n_tokens, stop.save_as)
        except Exception as fault:
            await self._require_process(fault)
            process.faults.record("prepare", fault)
            self._account.is_degraded = True
            is_clean = not self._must_erase() or await self._erase()
            # A file that changed meanwhile may have loaded anything.
            return is_clean and not isinstance(fault, errors.StoreFault)
        return True

    async def _require_process(self, fault: Exception) -> None:
        """Raise what ends the request if its process is gone: the *fault* if that may have ended it."""
        if isinstance(fault, errors.UpstreamLost) and await self._process.has_ended():
            raise fault
        if self._process.queue.is_closed:
            raise errors.replaced() from fault

    def _must_erase(self) -> bool:
        """Return whether the slot holds tokens that must not be reused."""
        content, prompt = self._process.slots[self._plan.slot_id].content, self._prompt
        n_common = shared_tokens(content, prompt.tokens, prompt.namespace)
        return must_be_erased(self._process.rule, content, prompt.namespace, n_common)

    async def _erase(self) -> bool:
        """Erase the slot; return False if that fails."""
        try:
            await self._process.finish(self._lease, self._process.erase(self._plan.slot_id))
        except errors.UpstreamFault:
            self._process.faults.count("erase")
            self._account.is_degraded = True
            return False
        return True

    async def _verify(self) -> None:
        """Verify the checkpoint to restore; if its file is no use, make another plan in the same slot."""
        process, began = self._process, time.monotonic()
        while restored := self._plan.start.restored:
            try:
                await planning.verify(process, restored.checkpoint, self._plan.start.n_reused)
                break
            except errors.StoreFault as fault:
                process.faults.record("verify", fault)
                process.metrics.restores.labels("missing").inc()
                self._plan_again()
                self._account.failure = Cause.RESTORE_REFUSED
        self._account.restore_seconds = time.monotonic() - began

    async def _restore(self, restored: Candidate) -> None:
        process, slot_id = self._process, self._plan.slot_id
        # A placement would run in this slot if the restored state is more similar to that prompt.
        await process.queue.until_unheld()
        process.slots.set_content(slot_id, TAINTED)
        began = time.monotonic()
        try:
            restore = process.restore(slot_id, restored, self._account.restore_seconds)
            await process.finish(self._lease, restore)
        except Exception:
            self._account.failure = Cause.RESTORE_REFUSED
            raise
        finally:
            self._account.restore_seconds += time.monotonic() - began

    async def _evaluate_to(self, n_tokens: int, save_as: CheckpointKind | None = None) -> None:
        process, slot_id, keys = self._process, self._plan.slot_id, self._request.keys
        stopped = await process.stop(slot_id, self._prompt_as_planned, n_tokens, keys)
        self._account.add(stopped, process.rates)
        if save_as and not self._account.is_ineffective_restore:
            await process.finish(self._lease, process.saves.begin(slot_id, save_as))
        else:  # the client may leave before the request is sent
            held = self._request.as_left(process.slots[slot_id].content)
            process.slots.set_content(slot_id, held)

    # The request is sent, and may fail.

    async def _send(self, *, can_reuse: bool) -> Answer:
        """Send the request to its prepared slot."""
        raw = pin(self._body, self._plan.slot_id, reuses=can_reuse)
        return await self._process.launches.send(self._turn, self._request, raw, self._note_running)

    def _note_running(self) -> None:
        self._process.queue.note_running(self._plan.slot_id)
        self._read_beside()

    def _read_beside(self) -> None:
        """Begin to read the prompt of a request that extends its slot's content, once.

        Not before llama-server works on the request: both would render the same messages at once. Raises
        ServerAway if another process was seen meanwhile: there a restore may spare the whole evaluation.
        """
        if self._extended and self._reading is None:
            if self._process.queue.is_closed and not self._request.answering.is_set():
                raise errors.replaced()
            self._process.extending.add(self._request)
            self._process.journal.note_chat(self._request)
            self._reading = self._process.tasks.start(self._read_soon())

    async def _read_soon(self) -> None:
        """Read the prompt, but give the first token some time to come before.

        llama-server would render the messages while it evaluates them, and the first token would wait.
        """
        await wait_for(self._request.answering, _FIRST_TOKEN_SECONDS)
        with suppress(errors.ServerAway, errors.WillBeRefused):
            await self._read()

    def _abandon(self, *, is_emptied: bool) -> None:
        """Leave the slot to what may still run in it, until it is known how far that came.

        For want of cells llama-server empties all slots that run (*is_emptied*; server-context.cpp).
        """
        process, answered = self._process, self._answered()
        for slot in [process.slots[slot_id] for slot_id in self._lease.held]:
            content, is_running = slot.content, slot.is_running or answered is not None
            if is_emptied:
                process.slots.set_content(slot.id, Empty())
                continue
            if self._request.is_sent:
                content = TAINTED if self._must_erase() else slots.left_by(self._prompt, content)
            elif not isinstance(content, Unknown):
                continue  # nothing was begun there: it may hold another tenant's tokens
            process.slots.set_content(slot.id, self._request.as_left(content))
            winding_up = wind_up(process, slot.id, self._request, answered, is_running=is_running)
            self._lease.hand_over(process.tasks.start(winding_up))

    def _answered(self) -> Known | None:
        """Return what the slot holds besides tokens of the answer, once these have begun to come."""
        prompt = self._request.prompt if self._extended else self._prompt_as_planned
        has_begun = self._request.answering.is_set() and self._is_placed and not self._must_erase()
        if not has_begun or not prompt or prompt is self._prompt or prompt.is_before_media:
            return None
        return planning.after_prompt(self._process, self._plan.slot_id, prompt)

    # The reply is compared with the plan.

    def _settle_later(self, answer: Answer) -> None:
        """Settle a request that extends its slot's content once its prompt is read; keep the lease."""
        process = self._process
        assert self._request.conversation is not None
        self._request.answering.set()
        self._read_beside()
        slot_id, prompt = self._plan.slot_id, self._prompt
        before = process.slots[slot_id].content
        held = self._request.as_left(slots.left_by(prompt, before))
        process.slots.set_content(slot_id, held)
        task = process.tasks.start(self._settle_extended(answer, before))
        settling = self._request.conversation.digests, task
        process.settling.append(settling)
        task.add_done_callback(lambda _: process.settling.remove(settling))
        self._lease.hand_over(task)

    async def _settle_extended(self, answer: Answer, before: Content) -> None:
        process, request = self._process, self._request
        assert self._reading is not None
        await self._reading
        if request.prompt is None:
            process.report.not_looked_up(request, request.why or "its prompt was not read in time")
            return
        process.slots.set_content(self._plan.slot_id, before)
        self._take_prompt(request.prompt)
        self._settle(answer)

    def _take_prompt(self, prompt: Prompt) -> None:
        """Go on with the prompt that was read meanwhile."""
        self._prompt, self._extended = prompt, None
        planning.note_asked(self._process, self._prompt)
        process, slot = self._process, self._process.slots[self._plan.slot_id]
        self._inquiry = Inquiry(process, prompt, self._request.chat or self._body)
        self._account.plan = plan_extension(prompt, process.rule, slot, process.rates)
        self._account.n_prompt = prompt.n_tokens

    async def _settle_in_doubt(self, answer: Answer) -> None:
        """Settle a request whose restore was not reused: a new process may have answered unnoticed."""
        await self._process.has_ended()
        self._settle(answer)

    def _settle(self, answer: Answer) -> None:
        """Note the reuse and the slot's content that the reply tells, and report the request."""
        process, account, slot_id = self._process, self._account, self._plan.slot_id
        try:
            process.has_broken_off |= answer.is_broken
            if answer.timings is not None or answer.first_token_at is not None:
                process.slots[slot_id].has_answered = True
            if not answer.is_refusal:
                held = self._held(process.slots[slot_id].content, answer.timings)
                process.slots.set_content(slot_id, self._request.as_left(held))
            self._save_now(answer)
            account.value(process.rates, self._request.fetch_seconds)
            judgement = Judgement(Cause.UNKNOWN)
            with process.faults.suppressed("explain"):
                judgement = self._inquiry.judge(account, self._request.id)
            process.report.answered(self._request, judgement)
        except Exception as error:
            # The client has its answer; only the slot's content is lost.
            process.faults.record("settle", error)
            process.slots.set_content(slot_id, TAINTED)

    def _held(self, before: Content, timings: Timings | None) -> Content:
        """Return the slot's content now; unknown if the reply contradicts the prediction."""
        process, prompt, account = self._process, self._prompt_as_planned, self._account
        unknown = Unknown(prompt.namespace, not prompt.is_before_media, origin=before.origin)
        if timings is None:
            process.has_run_out_of_cells |= process.is_overfull
            return replace(unknown, likely=prompt.tokens if self._is_placed else None)
        n_prompt = timings.cache_n + timings.prompt_n
        if prompt.is_before_media and n_prompt > prompt.n_tokens:
            account.n_prompt, n_media = n_prompt, n_prompt - prompt.n_tokens
            if account.is_ineffective_restore:
                self._confirm()
                return unknown
            content = process.content_after(before, prompt, timings)
            # A state with images is not saved.
            return replace(content, n_tail=content.n_tail + n_media, is_given_up=True)
        if n_prompt != prompt.n_tokens:
            account.n_prompt, account.failure = n_prompt, Cause.TOKENIZED_OTHERWISE
            self._disagree(n_prompt)
            return unknown
        self._confirm()
        # A server that clears idle slots brings prompts back from its RAM cache: that is no drift. But for
        # /v1/messages --cache-reuse cannot be switched off, and what it shifts is not exact.
        is_exact = process.clears_idle_slots and honours_id_slot(self._request.route)
        if account.is_drift and not is_exact:
            process.metrics.drift.inc()
            return TAINTED
        if prompt.n_tokens + timings.predicted_n >= process.n_ctx:
            # At the end of the context it may have been shifted: such states are not exact.
            return TAINTED
        process.learn_evaluation(timings)
        if account.is_ineffective_restore:
            before = unknown  # the checkpoint's tokens were not in the slot
        content = process.content_after(before, prompt, timings)
        return replace(content, is_stored_further=self._plan.is_stored_further)

    def _disagree(self, n_really: int) -> None:
        self._process.disable_shape(self._prompt.shape)
        self._process.tasks.start(self._enable_if_misread())
        get_logger("cache").warning(
            "tokenization disagreement: requests of this shape are served uncached",
            id=self._request.id,
            shape=self._prompt.shape,
            n_predicted=self._prompt.n_tokens,
            n_really=n_really,
        )

    async def _enable_if_misread(self) -> None:
        """Serve requests of this shape from the cache again if the proxy itself misread the prompt."""
        known, prompt, keys = self._process.reader.known, self._prompt, self._request.keys
        with suppress(errors.UpstreamFault):
            if prompt.text and await known.was_wrong(prompt.text, prompt.tokens, keys):
                self._process.enable_shape(prompt.shape)

    def _confirm(self) -> None:
        """Compare the reuse with the plan."""
        process, account, start = self._process, self._account, self._plan.start
        if account.is_ineffective_restore and start.restored:
            self._blame(start.restored.checkpoint)
        elif account.n_restored:
            process.recover(DegradationKind.RESTORES_NOT_REUSED)
        if account.is_short:
            process.metrics.live_reuse_short.inc()

    def _blame(self, checkpoint: Checkpoint) -> None:
        """Quarantine a checkpoint if the process that restored it did not reuse it as the rule says.

        But llama-server loads only so many context checkpoints of a file, and its flags may not be known.
        """
        process, account = self._process, self._account
        account.failure = Cause.RESTART if process.queue.is_closed else Cause.RESTORE_NOT_REUSED
        if not process.queue.is_closed:
            n_expected = self._plan.start.n_reused
            process.metrics.restore_ineffective.inc()
            # If an older point was reused, this one was loaded as well.
            if not account.n_reused and planning.counts_on_fewer(process, checkpoint, n_expected):
                return
            detail = f"{account.n_reused} of {n_expected} tokens of {checkpoint.file_name}"
            process.degrade(DegradationKind.RESTORES_NOT_REUSED, detail)
            process.blame(checkpoint, account.failure)

    def _save_now(self, answer: Answer) -> None:
        """Save a slot that was warmed, that is about to lose a context checkpoint that is needed, or whose
        answer was stopped: only a save tells its tokens, and the client soon asks again.
        """
        process, slot = self._process, self._process.slots[self._plan.slot_id]
        n_kept = process.n_kept_points
        is_due = self._request.warms or is_cut_at_risk(process.rule, slot.content, n_kept)
        is_stopped = answer.timings is None and answer.status == 200 and not answer.is_broken
        # During a placement another request may be running in this slot already.
        if (is_due or (is_stopped and self._is_placed)) and not process.queue.is_placing:
            self._lease.hand_over(process.saves.begin(slot.id))
