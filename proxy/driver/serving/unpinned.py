"""Requests for which llama-server chooses the slot itself, such as /v1/messages and embeddings.

It chooses among the slots that are idle *to it*. So such a request waits until every slot that others
lease is really running their request (one that is being restored for somebody looks idle too) and takes
all free slots, and those that come free, until /slots shows which one was chosen. Where it must not land
in a slot that another request leaves behind, such as another tenant's, it waits until all are free.
"""

import asyncio

from proxy.core.model import SlotId
from proxy.core.planning.erasure import must_be_erased
from proxy.core.prefix import Namespace
from proxy.core.slots import Slot
from proxy.driver.requests import Answer, GenerationRequest, Send
from proxy.driver.services import Services
from proxy.driver.serving.uncached import abandon, clear_way, mark_unknown
from proxy.driver.session import Session
from proxy.driver.slots.lease import Choice, Lease
from proxy.errors import UpstreamFault
from proxy.upstream.bodies import GenerationBody, n_completions, without_reuse
from proxy.upstream.routes import is_task_for_each_input

_FIRST_LOOK_SECONDS = 0.01
_LAST_LOOK_SECONDS = 0.5

LastTasks = dict[SlotId, int]
"""The id of the last task that each slot ran, which survives the task."""


class UnpinnedRequest:
    """One request on its way to a slot of llama-server's choice, or to several."""

    def __init__(
        self,
        services: Services,
        session: Session,
        request: GenerationRequest,
        body: GenerationBody | None,
    ) -> None:
        self._services = services
        self._session = session
        self._desk = session.attachment.desk
        self._request = request
        self._body = body
        n_slots = 1 if body is None else n_completions(body)
        self._n_slots = min(n_slots, len(self._desk.table))
        # Embeddings and reranking are one task for each input: all slots are held to the end.
        self._is_one_task = body is not None and not is_task_for_each_input(request.path)
        self._namespace: Namespace = session.attachment.tenant_namespace(request.tenant)
        self._before: LastTasks | None = None
        self._is_placed = False

    async def serve(self, send: Send) -> Answer:
        may_be_passed = self._n_slots == 1  # it then waits only until others really run
        with await self._desk.lease(
            self._choose, may_be_passed=may_be_passed, is_placement=True
        ) as lease:
            placement = None
            try:
                is_clear = await clear_way(self._services, self._session, lease, self._namespace)
                self._before = await self._last_tasks()
                if self._is_one_task:
                    placement = self._services.tasks.start(self._await_placement(lease))
                answer = await send(self._raw(reuses=is_clear), lambda: None)
                used = await self._used(lease)
            except BaseException:
                abandon(self._services, self._session, lease, self._namespace)
                raise
            finally:
                if placement is not None:
                    placement.cancel()
            mark_unknown(self._session, used, self._namespace)
            return answer

    def _raw(self, *, reuses: bool) -> bytes:
        """Return the body, told to reuse nothing if another tenant's tokens are still there."""
        if reuses or self._body is None:
            return self._request.raw
        return without_reuse(self._body)

    def _choose(self) -> Choice[None] | None:
        slots = tuple(self._desk.table)
        free = tuple(slot.id for slot in slots if not slot.is_leased)
        can_be_placed = all(self._can_join(slot) for slot in slots if slot.is_leased)
        return Choice(free, None) if can_be_placed and len(free) >= self._n_slots else None

    def _can_join(self, slot: Slot) -> bool:
        """Return whether the request may even be placed into a slot that somebody uses, at its end."""
        attachment = self._session.attachment
        if not slot.is_running or len(attachment.tenants) > 1:
            return False  # whose tokens it will hold then is not known yet
        return not must_be_erased(attachment.rule, slot.content, self._namespace)

    async def _await_placement(self, lease: Lease[None]) -> None:
        """Give back the slots that llama-server did not choose as soon as it has chosen."""
        pause = _FIRST_LOOK_SECONDS
        while self._before is not None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_SECONDS)
            used = self._changed(await self._last_tasks())
            # A slot whose request has just ended may have been chosen before its lease has.
            if len(used) >= self._n_slots and set(used) <= set(lease.held):
                self._is_placed = True
                self._desk.end_placement(lease, used)
                return

    async def _used(self, lease: Lease[None]) -> list[SlotId]:
        """Return which slots the request ran on; all that it leased if that is not known."""
        after = await self._last_tasks()
        if self._is_placed or self._before is None or after is None:
            return list(lease.held)
        used = self._changed(after)
        while not set(used) <= set(lease.held):  # noqa: ASYNC110 - they join when their leases end
            await asyncio.sleep(_FIRST_LOOK_SECONDS)
        return used

    def _changed(self, after: LastTasks | None) -> list[SlotId]:
        if self._before is None or after is None:
            return []
        return [slot_id for slot_id in after if self._before.get(slot_id) != after[slot_id]]

    async def _last_tasks(self) -> LastTasks | None:
        """Return the last task of each slot; None if llama-server does not tell."""
        try:
            states = await self._session.work.slot_states()
        except UpstreamFault as fault:
            self._services.faults.record("placement", fault)
            return None
        return {SlotId(state.id): state.id_task for state in states}
