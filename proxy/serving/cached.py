"""What a reply says of its request's plan, and of what the slot holds now.

A hit is what the reply confirms. Less than a restore promised quarantines the checkpoint; more than the
slot was known to hold is drift, and the slot is erased before its next use.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from proxy.core.conditions import DegradationKind
from proxy.core.model import Checkpoint, CheckpointKind, Prompt, SlotId
from proxy.core.plan import Plan, Restore
from proxy.core.saving import at_savable_point, is_place_at_risk
from proxy.core.slots import (
    LOADING,
    TAINTED,
    Content,
    Known,
    Unknown,
    after_evaluation,
    must_be_erased,
    origin_of,
)
from proxy.errors import (
    StoreFault,
    UpstreamEnded,
    UpstreamFault,
    UpstreamLost,
    UpstreamPerhapsReached,
)
from proxy.explain.causes import Cause
from proxy.explain.explanation import Judgement
from proxy.explain.report import Inquiry
from proxy.llama.bodies import GenerationBody, pin
from proxy.llama.client import Timings
from proxy.log import get_logger
from proxy.servers.attachment import Attachment, remember_self_test
from proxy.serving.desk import DeskClosed, EndedOver, Lease
from proxy.serving.launches import ExpectedState, Session, wind_up
from proxy.serving.planning import Planning
from proxy.serving.process import Services, quarantine_suspects
from proxy.serving.request import Account, Answer, GenerationRequest, Send

# What a reply says of its request's plan, and of what the slot holds now.
#
# A hit is what the reply confirms. Less than a restore promised quarantines the checkpoint; more than the
# slot was known to hold is drift, and the slot is erased before its next use.


class Confirmation:
    """Holds one request's reply against its plan."""

    def __init__(
        self, services: Services, attachment: Attachment, request_id: str, prompt: Prompt
    ) -> None:
        self._services = services
        self._attachment = attachment
        self._request_id = request_id
        self._prompt = prompt

    def settle(self, plan: Plan, answer: Answer, account: Account) -> None:
        """Hold the reply against the plan, and record what the slot holds now."""
        table = self._attachment.desk.table
        before = table[plan.slot_id].content
        held: Content = Unknown(self._prompt.namespace, origin=origin_of(before))
        if answer.timings is None and 400 <= answer.status < 500:
            return  # refused before the slot was touched (server-context.cpp, send_error at launch)
        if answer.timings is not None:
            account.add(answer.timings)
            held = self._held(before, answer.timings, account)
        table.set_content(plan.slot_id, held)

    def _held(self, before: Content, timings: Timings, account: Account) -> Content:
        prompt, namespace = self._prompt, self._prompt.namespace
        if timings.cache_n + timings.prompt_n != prompt.n_tokens:
            account.failure = Cause.TOKENIZED_OTHERWISE
            self._disagree(timings)
            return Unknown(namespace, origin=origin_of(before))
        self._confirm(account)
        if account.is_short and not (account.n_reused or account.plan.stops):
            points = before.restore_points if isinstance(before, Known) else ()
            self._attachment.note_missing_point(points, account.plan.start.n_reused)
        if account.is_drift and not self._attachment.clears_idle_slots:
            return TAINTED
        if prompt.n_tokens + timings.predicted_n >= self._attachment.n_ctx:
            # At the end of the context it may have been shifted: such states are not exact.
            return TAINTED
        self._attachment.learn_evaluation(timings)
        return after_evaluation(
            before,
            prompt.tokens,
            namespace,
            cuts=account.plan.cuts,
            n_generated=timings.predicted_n,
            shape=prompt.shape,
            n_believed=self._attachment.n_believed_points,
            stride_tokens=self._attachment.stride_tokens,
        )

    def _disagree(self, timings: Timings) -> None:
        self._services.metrics.tokenization_disagreements.inc()
        self._attachment.disable_shape(self._prompt.shape)
        get_logger("cache").warning(
            "tokenization disagreement: requests of this shape are served uncached",
            id=self._request_id,
            shape=self._prompt.shape,
            n_predicted=self._prompt.n_tokens,
            n_really=timings.cache_n + timings.prompt_n,
        )

    def _quarantine(self, checkpoint: Checkpoint) -> None:
        store, namespace = self._services.store, self._prompt.namespace
        store.quarantine(checkpoint)
        with suppress(StoreFault):  # only an explanation would be the poorer
            tokens = store.index.tokens(checkpoint.id)
            self._services.journal.note_loss(namespace, tokens, Cause.RESTORE_NOT_REUSED)

    def _confirm(self, account: Account) -> None:
        metrics, start = self._services.metrics, account.plan.start
        if account.n_restored and not account.is_ineffective_restore:
            self._attachment.recover(DegradationKind.RESTORES_NOT_REUSED)
        if account.is_ineffective_restore and isinstance(start, Restore):
            self._attachment.degrade(
                DegradationKind.RESTORES_NOT_REUSED,
                f"{account.n_reused} of {start.n_reused} tokens of {start.checkpoint.file_name}",
            )
            metrics.restore_ineffective.inc()
            account.failure = Cause.RESTORE_NOT_REUSED
            self._attachment.n_contradictions += 1
            if not self._attachment.desk.is_closed:
                self._quarantine(start.checkpoint)
            get_logger("cache").warning(
                "a restore was not reused: the checkpoint is quarantined",
                id=self._request_id,
                expected=start.n_reused,
                confirmed=account.n_reused,
                file=start.checkpoint.file_name,
            )
        # A server that clears idle slots puts them into its RAM cache, and brings prompts back from there.
        if account.is_drift and not self._attachment.clears_idle_slots:
            metrics.drift.inc()
        if account.is_short:
            metrics.live_reuse_short.inc()
            self._learn_stride(account)

    def _learn_stride(self, account: Account) -> None:
        """Note how far apart llama-server keeps context checkpoints, and remember it with the rule."""
        attachment, services = self._attachment, self._services
        n_short = account.plan.start.n_reused - (account.n_reused or 0)
        rule = attachment.rule.after_shortfall(n_short)
        if rule == attachment.rule or attachment.self_test is None or attachment.clears_idle_slots:
            return
        attachment.rule = rule
        attachment.self_test = msgspec.structs.replace(attachment.self_test, rule=rule)
        remembering = remember_self_test(services.store, attachment, attachment.self_test)
        services.tasks.start(remembering)


# One request whose prompt is known, on its way through a slot.
#
# lease -> restore the checkpoint -> stop at cuts -> send -> confirm the hit -> release, or save first.


_LONG_WAIT_SECONDS = 0.05
"""After waiting this long for a slot, llama-server may be another process."""


class CachedRequest:
    """Serves one request from the cache, as far as that helps."""

    def __init__(
        self,
        services: Services,
        session: Session,
        request: GenerationRequest,
        body: GenerationBody,
        prompt: Prompt,
        inquiry: Inquiry,
        is_current: Callable[[], Awaitable[bool]],
    ) -> None:
        self._services = services
        self._session = session
        self._attachment = session.attachment
        self._request = request
        self._body = body
        self._prompt = prompt
        self._inquiry = inquiry
        self._is_current = is_current
        self._arrived = request.queued_at or time.monotonic()
        self._planning = Planning(services, session, prompt)
        self._confirmation = Confirmation(services, session.attachment, request.id, prompt)

    async def serve(self, send: Send) -> None:
        """Serve the request; raises what *send* raises, and DeskClosed before anything was sent."""
        self._planning.note_arrival()
        with (
            self._planning,
            await self._attachment.desk.lease(self._planning.choose, may_be_passed=True) as lease,
        ):
            self._attachment.desk.table.destine(lease.reason.slot_id, self._prompt.tokens)
            self._note_planned()
            account = Account(lease.reason, self._prompt.n_tokens)
            account.queued_seconds = time.monotonic() - self._arrived
            if account.queued_seconds > _LONG_WAIT_SECONDS:
                await self._require_current()
            try:
                await self._session.launches.clear_others()
                with self._session.arrivals.announced(self._arrival(lease.reason)):
                    can_reuse = await self._prepare(lease, account)
                self._planning.close()
                account.prepared_seconds = time.monotonic() - self._arrived
                answer = await self._send(lease, account, send, can_reuse=can_reuse)
            except BaseException as error:
                slot_id = lease.reason.slot_id
                self._abandon(lease)
                if await self._may_be_our_fault(slot_id, error):
                    raise EndedOver from error
                raise
            if answer.timings is not None or answer.first_token_at is not None:
                self._attachment.desk.table.note_answer(lease.reason.slot_id)
            try:
                self._confirmation.settle(lease.reason, answer, account)
                self._keep_places(lease)
                self._report(answer, account)
            except Exception as error:
                # The client has its answer; what the slot holds is not worth failing for.
                self._services.faults.record("settle", error)
                self._attachment.desk.table.set_content(lease.reason.slot_id, TAINTED)

    async def _may_be_our_fault(self, slot_id: SlotId, error: BaseException) -> bool:
        """Return whether llama-server ended over what was done for the request, or over a saved state."""
        if isinstance(error, UpstreamEnded | UpstreamPerhapsReached):
            table = self._attachment.desk.table
            return await quarantine_suspects(self._services, table, slot_id)
        return isinstance(error, UpstreamLost)

    def _note_planned(self) -> None:
        try:
            self._inquiry.note_planned()
        except Exception as error:  # only an explanation would be the poorer
            self._services.faults.record("explain", error)

    async def _send(
        self, lease: Lease[Plan], account: Account, send: Send, *, can_reuse: bool
    ) -> Answer:
        """Have the request served in the slot that is prepared for it."""
        slot_id = lease.reason.slot_id
        return await send(
            pin(self._body, slot_id, reuses=can_reuse),
            lambda: self._attachment.desk.note_running(slot_id),
            account.n_reused,
        )

    async def _require_current(self) -> None:
        """Raise DeskClosed if llama-server was replaced while the request waited."""
        if not await self._is_current():
            raise DeskClosed

    async def _prepare(self, lease: Lease[Plan], account: Account) -> bool:
        """Bring the slot to where the plan wants it; return False if it may not be reused at all."""
        plan = lease.reason
        if plan.saves_displaced:
            save = self._session.saves.write_back(plan.slot_id, CheckpointKind.CONVERSATION)
            with self._session.arrivals.announced(self._displaced(plan)):
                await self._services.finish(lease, save)
        plan = await self._verified(lease, account)
        # That save may have found what nobody may reuse.
        content = self._attachment.desk.table[plan.slot_id].content
        prompt, rule = self._prompt, self._attachment.rule
        erases = plan.erases or must_be_erased(rule, content, prompt.namespace, prompt.tokens)
        if erases and not await self._erase(lease, account):
            return False
        try:
            if isinstance(plan.start, Restore):
                await self._restore(lease, plan.start, account)
            await self._make_stops(lease, account)
        except Exception as fault:
            if await self._has_ended(fault):
                raise
            self._services.faults.record("prepare", fault)
            account.is_degraded = True
            # What was loaded from a file that changed meanwhile may be anything.
            return not isinstance(fault, StoreFault)
        return True

    async def _verified(self, lease: Lease[Plan], account: Account) -> Plan:
        """Return the plan once what it restores is verified; another one, in the same slot, if it fails."""
        began = time.monotonic()
        while isinstance(start := lease.reason.start, Restore):
            try:
                await self._services.store.verify(start.checkpoint)
                break
            except StoreFault as fault:
                self._services.faults.record("verify", fault)
                self._services.metrics.restores.labels("missing").inc()
                lease.reason = self._planning.again(lease.reason.slot_id)
                account.move(lease.reason)
                account.failure = Cause.RESTORE_REFUSED
        account.restore_seconds = time.monotonic() - began
        return lease.reason

    async def _has_ended(self, fault: Exception) -> bool:
        """Return whether a call has failed because llama-server ended; a look may have begun before."""
        if not isinstance(fault, UpstreamLost):
            return False
        return not (await self._is_current() and await self._is_current())

    async def _erase(self, lease: Lease[Plan], account: Account) -> bool:
        try:
            await self._services.finish(lease, self._session.work.erase(lease.reason.slot_id))
            return True
        except UpstreamFault:
            self._services.faults.count("erase")
            account.is_degraded = True
            return False

    async def _restore(self, lease: Lease[Plan], start: Restore, account: Account) -> None:
        slot_id, desk = lease.reason.slot_id, self._attachment.desk
        # What is loaded may be more similar to another's prompt than its own slot is.
        await desk.await_choice()
        desk.table.set_content(slot_id, LOADING)
        restore = self._session.work.restore(
            slot_id, self._prompt.namespace, start, account.restore_seconds
        )
        began = time.monotonic()
        try:
            await self._services.finish(lease, restore)
        except Exception:
            account.failure = Cause.RESTORE_REFUSED
            raise
        finally:
            account.restore_seconds += time.monotonic() - began

    async def _make_stops(self, lease: Lease[Plan], account: Account) -> None:
        plan, work, headers = lease.reason, self._session.work, self._request.headers
        for stop in plan.stops:
            stopped = work.stop(plan.slot_id, self._prompt, plan.cuts, stop, headers)
            account.add(await stopped)
            if stop.save_as and not account.is_ineffective_restore:
                saves = self._session.saves
                save = saves.write_back(plan.slot_id, stop.save_as, is_just_predicted=True)
                await self._services.finish(lease, save)

    def _abandon(self, lease: Lease[Plan]) -> None:
        """Leave the slot to what may still run in it; a save will tell how far that came."""
        for slot_id in lease.held:
            origin = origin_of(self._attachment.desk.table[slot_id].content)
            content = Unknown(self._prompt.namespace, likely=self._prompt.tokens, origin=origin)
            self._attachment.desk.table.set_content(slot_id, content)
            winding_up = wind_up(self._session, slot_id, self._prompt.n_tokens)
            lease.hand_over(self._services.tasks.start(winding_up))

    def _keep_places(self, lease: Lease[Plan]) -> None:
        """Save the slot if llama-server is about to drop a place that the conversation comes back to."""
        (slot_id,) = lease.slot_ids
        attachment = self._attachment
        if attachment.desk.is_placing:
            return  # another request may be running in this slot already
        content = attachment.desk.table[slot_id].content
        if is_place_at_risk(attachment.rule, content, attachment.n_believed_points):
            save = self._session.saves.write_back(
                slot_id, CheckpointKind.CONVERSATION, is_just_predicted=True
            )
            lease.hand_over(self._services.tasks.start(save))

    def _displaced(self, plan: Plan) -> ExpectedState | None:
        """Return the state that is saved before the plan takes its slot."""
        attachment = self._attachment
        content = attachment.desk.table[plan.slot_id].content
        if not isinstance(content, Known):
            return None
        saved = at_savable_point(attachment.rule, content)
        if saved is None:
            return None
        size_bytes = attachment.state_bytes(saved)
        expected_at = time.monotonic() + attachment.rates.save_seconds(size_bytes)
        return ExpectedState(
            saved.tokens, saved.namespace, expected_at, size_bytes, saved.restore_points
        )

    def _arrival(self, plan: Plan) -> ExpectedState | None:
        """Return the first state that will be saved on the way, and when about."""
        index = next((i for i, stop in enumerate(plan.stops) if stop.save_as), None)
        if index is None:
            return None
        stop = plan.stops[index]
        points = tuple(before.n_tokens for before in plan.stops[:index])
        rates, size_bytes = self._attachment.rates, self._attachment.bytes_of(stop.n_tokens)
        seconds = plan.option.displacement.delay_seconds + rates.save_seconds(size_bytes)
        seconds += rates.evaluation_seconds(plan.start.n_reused, stop.n_tokens)
        tokens = self._prompt.tokens[: stop.n_tokens]
        expected_at = time.monotonic() + seconds
        return ExpectedState(tokens, self._prompt.namespace, expected_at, size_bytes, points)

    def _report(self, answer: Answer, account: Account) -> None:
        metrics = self._services.metrics
        metrics.prompt_tokens.labels("reused").inc(account.n_reused or 0)
        metrics.prompt_tokens.labels("evaluated").inc(account.n_evaluated)
        metrics.restored_tokens.inc(account.n_restored)
        metrics.evaluation_seconds.inc(account.evaluation_seconds)
        metrics.queue_seconds.observe(account.queued_seconds)
        account.value(self._attachment.rates)
        self._services.report.answered(
            self._request, answer, account.outcome, self._judge(account), account
        )

    def _judge(self, account: Account) -> Judgement:
        try:
            return self._inquiry.judge(account, self._request.id)
        except Exception as error:
            self._services.faults.record("explain", error)
            return Judgement(Cause.UNKNOWN)
