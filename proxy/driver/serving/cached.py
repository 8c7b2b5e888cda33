"""One request whose prompt is known, on its way through a slot.

lease -> restore the checkpoint -> stop at cuts -> send -> confirm the hit -> release, or save first.
"""

import time
from collections.abc import Awaitable, Callable

from proxy.core.explaining.causes import Cause
from proxy.core.keeping.write_back import at_savable_point, is_place_at_risk
from proxy.core.model import CheckpointKind, Prompt
from proxy.core.planning.erasure import must_be_erased
from proxy.core.planning.options import Restore
from proxy.core.planning.plan import Plan
from proxy.core.slots import LOADING, TAINTED, Known, Unknown, restored_tokens
from proxy.driver.reporting.inquiry import Inquiry
from proxy.driver.reporting.report import Findings
from proxy.driver.requests import Answer, GenerationRequest, Send
from proxy.driver.services import Services
from proxy.driver.serving.account import Account
from proxy.driver.serving.confirmation import Confirmation
from proxy.driver.serving.planning import Planning
from proxy.driver.session import Session
from proxy.driver.slots.abandoned import wind_up
from proxy.driver.slots.arrivals import Arrival
from proxy.driver.slots.lease import Lease
from proxy.driver.slots.leases import DeskClosed
from proxy.errors import UpstreamFault
from proxy.upstream.bodies import GenerationBody, pin

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
            except BaseException:
                self._abandon(lease)
                raise
            try:
                self._confirmation.settle(lease.reason, answer, account)
                self._keep_places(lease)
                self._report(answer, account)
            except Exception as error:
                # The client has its answer; what the slot holds is not worth failing for.
                self._services.faults.record("settle", error)
                self._attachment.desk.table.set_content(lease.reason.slot_id, TAINTED)

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
            self._services.faults.record("prepare", fault)
            account.is_degraded = True
        return True

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
        restore = self._session.work.restore(slot_id, self._prompt.namespace, start)
        began = time.monotonic()
        try:
            await self._services.finish(lease, restore)
        except Exception:
            account.failure = Cause.RESTORE_REFUSED
            raise
        finally:
            account.restore_seconds = time.monotonic() - began

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
            n_restored = restored_tokens(self._attachment.desk.table[slot_id].content)
            content = Unknown(
                self._prompt.namespace, likely=self._prompt.tokens, n_restored=n_restored
            )
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

    def _displaced(self, plan: Plan) -> Arrival | None:
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
        return Arrival(saved.tokens, saved.namespace, expected_at, size_bytes, saved.restore_points)

    def _arrival(self, plan: Plan) -> Arrival | None:
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
        return Arrival(tokens, self._prompt.namespace, expected_at, size_bytes, points)

    def _report(self, answer: Answer, account: Account) -> None:
        metrics = self._services.metrics
        metrics.prompt_tokens.labels("reused").inc(account.n_reused or 0)
        metrics.prompt_tokens.labels("evaluated").inc(account.n_evaluated)
        metrics.restored_tokens.inc(account.n_restored)
        metrics.evaluation_seconds.inc(account.evaluation_seconds)
        metrics.queue_seconds.observe(account.queued_seconds)
        account.value(self._attachment.rates)
        self._services.report.answered(
            self._request, answer, account.outcome, self._findings(account)
        )

    def _findings(self, account: Account) -> Findings:
        try:
            return self._inquiry.findings(account, self._request.id)
        except Exception as error:
            self._services.faults.record("explain", error)
            return Findings(account, cause=Cause.UNKNOWN)
