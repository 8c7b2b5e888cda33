"""Requests whose prompt is not looked up, in a slot of the proxy's or of llama-server's choice."""

import asyncio
from collections.abc import Collection, Iterable
from contextlib import ExitStack

from proxy.core.messages import Route
from proxy.core.model import SlotId
from proxy.core.residency import choose_slot_for_brief, choose_slot_for_bypass
from proxy.core.slots import TAINTED, Known, Slot, Unknown, must_be_erased
from proxy.core.tokens import Namespace
from proxy.errors import UpstreamFault
from proxy.llama import requests
from proxy.llama.answers import Answer
from proxy.serving.launches import LastTasks, begun_since, last_tasks, n_held, outlast, see_through
from proxy.serving.process import Process
from proxy.serving.queue import Choice, Lease
from proxy.serving.request import NO_READ, OnStart, Request, do_nothing
from proxy.tasks import Turn

_FIRST_LOOK_SECONDS = 0.01
_LAST_LOOK_SECONDS = 0.5


class UncachedRequest:
    """Serves one request whose prompt is not looked up; it still takes a lease, so that the slot table
    stays true.

    There are two cases:

    1. llama-server honours `id_slot`: the request runs in a slot of the proxy's choice, whatever that slot
    holds.
    2. llama-server chooses the slot among those that it sees as idle, as for embeddings. So the request
    waits until every leased slot is known to run its request (a slot that is being restored looks idle
    too). Then the request leases all free slots, and slots that come free, until /slots shows which slot
    was chosen. If the request must not run in a slot that another request leaves behind, such as another
    tenant's, it waits until all slots are free.
    """

    def __init__(self, process: Process, request: Request, turn: Turn | None) -> None:
        self._process = process
        self._request = request
        self._turn = turn
        self._body = body = request.body
        self._n_slots = min(request.n_completions, len(process.slots))
        self._namespace = request.namespace
        self._beside_tokens = b"" if body is None else requests.beside_tokens(request.route, body)
        self._before: LastTasks | None = None
        self._is_placed = False
        self._digests = requests.message_digests(request.route, body)

    async def serve_pinned(self, body: requests.GenerationBody) -> None:
        """Serve the request in one slot of the proxy's choice.

        Where its state depends on more than its tokens, only requests that ask for the same may go on.
        """
        self._namespace = Namespace(self._namespace + self._beside_tokens)
        self._beside_tokens = b""
        brief = self._request.conversation if self._request.is_brief else None

        def choose() -> Choice | None:
            slots, namespace = self._process.slots, self._namespace
            slot = choose_slot_for_brief(slots, brief, namespace) if brief else None
            slot = slot or choose_slot_for_bypass(slots, namespace, self._digests)
            return Choice((slot.id,)) if slot else None

        with await self._process.queue.lease(choose, since=self._request.arrived_at) as lease:
            (slot_id,) = lease.held
            try:
                can_reuse = await self._clear_way(lease) and NO_READ not in self._request.wishes
                may_shift = self._request.route is Route.PINNED  # editors count on --cache-reuse
                raw = requests.pin(body, slot_id, reuses=can_reuse, may_shift=may_shift)
                answer = await self._send(raw, lambda: self._process.queue.note_running(slot_id))
            except BaseException:
                self._abandon(lease)
                raise
            if not answer.is_refusal:
                self._mark_unknown([slot_id], brief=brief.digests if brief else b"")

    async def serve_unpinned(self) -> None:
        """Serve the request in a slot of llama-server's choice, or in several."""
        leasing = self._process.queue.lease(
            self._choose,
            since=self._request.arrived_at,
            may_be_overtaken=self._n_slots == 1,  # it waits only until the other requests run
            is_placement=True,
        )
        with await leasing as lease, ExitStack() as ending:
            try:
                is_clear = await self._clear_way(lease)
                self._before = await last_tasks(self._process)
                # Embeddings and reranking are one task for each input: all slots are held to the end.
                is_for_each_input = requests.is_task_for_each_input(self._request.path)
                if self._body is not None and not is_for_each_input:
                    ending.callback(self._process.tasks.start(self._await_placement(lease)).cancel)
                # If another tenant's tokens are still in a slot, nothing may be reused.
                raw = self._request.raw
                may_reuse = is_clear and NO_READ not in self._request.wishes
                if self._body is not None and (self._n_slots > 1 or not may_reuse):
                    raw = requests.pin(self._body, reuses=may_reuse)
                await self._send(raw)
                used = await see_through(self._process.tasks.start(self._used(lease)))
            except BaseException:
                self._abandon(lease)
                raise
            self._mark_unknown(used)
            if self._n_slots > 1:  # its client has its answer, and does not wait
                if not self._is_placed:
                    self._process.queue.end_placement(lease, used)
                lease.hand_over(self._process.tasks.start(self._end_copy(used)))

    async def _send(self, raw: bytes, on_start: OnStart = do_nothing) -> Answer:
        """Send the request, report it, and return the answer.

        The report comes at once: a client that has its answer hangs up, and that cancels this task.
        """
        process, request = self._process, self._request
        answer = await process.launches.send(self._turn, request, raw, on_start)
        if answer.status == 501 and request.route in (Route.PINNED, Route.UNPINNED):
            process.unsupported_paths.add(request.path)
        obstacle = process.obstacle.kind.value if process.obstacle else "nothing is cached"
        process.report.not_looked_up(request, request.why or obstacle)
        return answer

    async def _clear_way(self, lease: Lease) -> bool:
        """Save what would be lost, and erase what may not be reused; return False if that failed."""
        cleared: set[SlotId] = set()
        is_clear = True
        # Slots may join the lease meanwhile. A server that a completion would end has its slots left alone:
        # where a slot cannot be erased, a completion overwrites its content.
        while self._process.takes_completions and (left := set(lease.held) - cleared):
            for slot_id in left:
                is_clear &= await self._clear(lease, slot_id)
            cleared |= left
        return is_clear

    async def _clear(self, lease: Lease, slot_id: SlotId) -> bool:
        process = self._process
        content = process.slots[slot_id].content
        if isinstance(content, Known) and process.pays_to_save(content, lease.held):
            await process.finish(lease, process.saves.begin(slot_id, is_used=True))
        if not must_be_erased(process.rule, process.slots[slot_id].content, self._namespace):
            return True
        # /v1/messages has no flag against reuse. If a slot cannot be erased, one token overwrites it.
        for clear in (process.erase, process.overwrite):
            try:
                await process.finish(lease, clear(slot_id))
                return True
            except UpstreamFault:
                process.faults.count("erase")
        return False

    def _mark_unknown(self, slot_ids: Iterable[SlotId], *, brief: bytes = b"") -> None:
        """Note that the content of these slots is unknown, and that no lookup finds it in a file."""
        for slot_id in slot_ids:
            # A slot that joined the lease late was never cleared: it may still hold its earlier tokens.
            content = self._process.slots[slot_id].content
            is_unclear = must_be_erased(self._process.rule, content, self._namespace)
            # What a process that cannot cache now holds is saved once it can.
            is_kept = not self._process.can_cache and self._namespace == self._request.namespace
            unknown = Unknown(self._namespace, is_kept, brief=brief, digests=self._digests)
            held = TAINTED if is_unclear or self._beside_tokens else self._request.as_left(unknown)
            self._process.slots.set_content(slot_id, held)

    def _abandon(self, lease: Lease) -> None:
        """Hold the slots until the request can no longer run in them."""
        if not (lease.held and self._request.is_sent):
            return  # a slot action took over the lease, or nothing has begun
        self._mark_unknown(lease.held)
        lease.hand_over(self._process.tasks.start(self._outlast(lease)))

    async def _outlast(self, lease: Lease) -> None:
        await outlast(self._process, lambda: lease.reserved, self._request)
        await self._end_copy(lease.reserved)

    async def _end_copy(self, slot_ids: Collection[SlotId]) -> None:
        """Let llama-server end the copy of a prompt to the slots of its other completions.

        llama-server may copy only when it next evaluates anything, over a state that was restored meanwhile
        (docs/upstream/late_copy_overwrites_restore.py). It has emptied the slots of the other completions.
        """
        process = self._process
        if self._n_slots == 1 or process.shares_cells or not slot_ids:
            return
        n_tokens = await n_held(process)
        # A request of /v1/messages that is just starting would be thought to run in that slot.
        await process.queue.until_unheld()
        with process.faults.suppressed("erase", UpstreamFault):
            await process.overwrite(min(slot_ids, key=lambda slot_id: n_tokens.get(slot_id, 0)))

    def _choose(self) -> Choice | None:
        slots = self._process.slots
        free = tuple(slot.id for slot in slots.free())
        can_be_placed = all(self._can_join(slot) for slot in slots if slot.is_leased)
        return Choice(free) if can_be_placed and len(free) >= self._n_slots else None

    def _can_join(self, slot: Slot) -> bool:
        """Return whether the request may run in a slot that is in use now, once its request has ended."""
        process = self._process
        if not slot.is_running or len(process.tenants) > 1:
            return False  # it is not known yet whose tokens the slot will hold then
        return not must_be_erased(process.rule, slot.content, self._namespace)

    async def _await_placement(self, lease: Lease) -> None:
        """Release the other slots as soon as llama-server has chosen one."""
        pause = _FIRST_LOOK_SECONDS
        while self._before is not None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_SECONDS)
            used = await begun_since(self._process, self._before) or []
            # llama-server may choose a slot whose request has ended but whose lease has not.
            if len(used) >= self._n_slots and set(used) <= set(lease.held):
                self._is_placed = True
                self._process.queue.end_placement(lease, used)
                return

    async def _used(self, lease: Lease) -> list[SlotId]:
        """Return the slots in which the request ran; all leased slots if that is not known."""
        used = None if self._is_placed else await begun_since(self._process, self._before)
        if used is None or self._is_placed:  # others may have begun in slots that were given back
            return list(lease.held)
        while not set(used) <= set(lease.held):  # noqa: ASYNC110 - they join when their leases end
            await asyncio.sleep(_FIRST_LOOK_SECONDS)
        return used
