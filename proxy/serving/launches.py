"""Requests wait before they start: for a turn, for shorter prompts, and for slots of clients that left."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TypeVar

from proxy.core.cuts import UBATCH_TOKENS
from proxy.core.messages import BYTES_PER_TOKEN
from proxy.core.model import Prompt, SlotId
from proxy.core.plan import Plan
from proxy.core.saving import is_write_back_due
from proxy.core.slots import TAINTED, Empty, Known, SlotTable
from proxy.errors import UpstreamFault, replaced
from proxy.llama.answers import Answer
from proxy.llama.client import SlotStatus
from proxy.serving.process import Process
from proxy.serving.request import OnStart, Request, do_nothing
from proxy.tasks import Turn, Turns, wait_for

# With llama-server's default flags, a slot that starts to run empties all idle slots. There only one
# request at a time may be starting: it has the turn from the choice of its slot until llama-server runs the
# request, and the content of the other free slots is saved before. llama-server leaves running slots alone,
# so as many requests generate at once as there are slots. On other servers a turn excludes nobody.

T = TypeVar("T")

LastTasks = dict[SlotId, int]
"""The id of the last task that each slot ran, which survives the task."""

_SHORT_LOOK_SECONDS = 0.02
_BATCH_TOKENS = 2048
"""llama-server's default --batch-size: as many tokens of all prompts are evaluated at once."""
_MOST_TIMES = 1.5
"""How many times longer than predicted a prompt may hold up others. A whole answer does not tell when its
prompt is evaluated."""


def note_emptied(table: SlotTable, statuses: list[SlotStatus]) -> bool:
    """Note the free slots that are empty as llama-server says; return whether the table had one as full.

    llama-server does not tell the content of a slot that has never run a task.
    """
    emptied = {s.id for s in statuses if s.id_task >= 0 and s.n_held == 0}
    before = {s.id: s.content for s in table.free() if s.id in emptied}
    for slot_id in before:
        table.set_content(slot_id, Empty())
    # Nobody knows of a tainted slot whether it held anything.
    return any(not isinstance(held, Empty) and held != TAINTED for held in before.values())


async def last_tasks(process: Process) -> LastTasks | None:
    """Return the id of the last task that each slot ran; None if llama-server does not tell."""
    with process.faults.suppressed("placement", UpstreamFault):
        return {SlotId(state.id): state.id_task for state in await process.slot_states()}
    return None


async def begun_since(process: Process, before: LastTasks | None) -> list[SlotId] | None:
    """Return the slots that have begun another task since *before*; None if that is not told."""
    if before is None or (after := await last_tasks(process)) is None:
        return None
    return [slot_id for slot_id, task in before.items() if after.get(slot_id, -1) != task]


async def see_through(looking: "asyncio.Task[T]") -> T:
    """Await *looking* even if the client hangs up after its answer: its slot must be known."""
    try:
        return await asyncio.shield(looking)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or looking.cancelled():
            raise
        task.uncancel()
        return await looking


class Launches:
    """Orders the starts of requests in the slots of one llama-server process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._evaluations: dict[asyncio.Future[None], int] = {}
        """How many tokens each prompt has that is evaluated, or waits for that; done when that is over."""
        self._table = process.slots
        self.turns = Turns()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn | None]:
        """Wait until no other request is starting, and look which slots are empty now.

        Yields None if a turn would exclude nobody.
        """
        process = self._process
        turn = await self.turns.take() if process.clears_idle_slots else None
        with turn or nullcontext():
            if turn or process.is_overfull:
                # The slots of a placement count as leased. When it is over, llama-server has emptied some.
                while turn and process.queue.is_placing and not process.queue.is_closed:  # noqa: ASYNC110
                    await asyncio.sleep(_SHORT_LOOK_SECONDS)
                # The start before may have emptied a slot just after it was saved.
                await self._wait_for_saves()
                with suppress(UpstreamFault):
                    has_emptied = note_emptied(self._table, await process.slot_states())
                    process.has_run_out_of_cells |= has_emptied and turn is None
            yield turn

    def try_turn(self) -> Turn | None:
        """Return a turn if it is free."""
        return (self.turns if self._process.clears_idle_slots else Turns()).try_take()

    @property
    def is_save_coming(self) -> bool:
        """Whether a slot that is closing has yet to be saved, and the next start would empty it."""
        process = self._process
        closing = (slot for slot in self._table if slot.is_closing)
        return bool(process.clears_idle_slots) and any(
            is_write_back_due(process.rule, slot.content) or process.saves.turns[slot.id].is_taken
            for slot in closing
        )

    def must_wait(self, n_tokens: int) -> bool:
        """Whether a prompt would find its slot empty, or llama-server would fail it and what runs there."""
        running = [slot for slot in self._table if slot.is_leased]
        is_too_long = bool(running) and self._process.is_short_of_cells(n_tokens, running)
        return self.is_save_coming or is_too_long

    async def clear_others(self) -> None:
        """Save and empty free slots, which the coming start would empty anyway.

        Slots share their cells. If a state is restored first and the others are emptied afterwards, the
        newest tokens lie in front: attention is then summed in another order, and near ties fall otherwise.
        """
        await self._wait_for_saves()
        for slot in self._table.free() if self._process.clears_idle_slots else ():
            await self._process.empty(slot.id)

    async def free_cells(self, slot_id: SlotId, n_tokens: int) -> None:
        """Save and empty free slots, the oldest first, until there are cells for *n_tokens* in a slot.

        llama-server itself would empty an idle slot without saving it (server-context.cpp).
        """
        process, others = self._process, [slot for slot in self._table if slot.id != slot_id]
        while process.is_short_of_cells(n_tokens, others):
            if not await process.empty_oldest(slot_id):
                return

    async def _wait_for_saves(self) -> None:
        # Such slots end by themselves, without an event.
        while self.is_save_coming and not self._process.queue.is_closed:  # noqa: ASYNC110
            await asyncio.sleep(_SHORT_LOOK_SECONDS)

    @contextmanager
    def evaluation(
        self, request: Request, prompt: Prompt, plan: Plan
    ) -> Iterator[tuple[Callable[[], Awaitable[None]], Callable[[], None]]]:
        """Yield a function that waits for shorter prompts; from then on later prompts wait for this one.

        The function raises ServerAway if llama-server was replaced meanwhile. Another function lets the
        later prompts go on.

        llama-server fills a batch with the prompts of all slots. If two prompts fit into one batch, both
        requests get their first token when both prompts are evaluated. One after the other, the first gets
        it in half the time, and the second no later.
        """
        with ExitStack() as ending:

            async def wait() -> None:
                if len(self._table) == 1:
                    return
                n_tokens, seconds = self._size(request, prompt, plan.start.n_reused)
                others = {} if self._process.clears_idle_slots else self._evaluations
                # Those with which this prompt fills more than a physical batch, unless they are longer and
                # fill more than a batch.
                least, most = UBATCH_TOKENS - n_tokens, max(n_tokens, _BATCH_TOKENS - n_tokens)
                before = [over for over, n in others.items() if least < n <= most]

                async def over() -> None:
                    """Return once the prompt is evaluated, behind the others, or has had its seconds."""
                    if before:
                        await asyncio.wait(before)
                    await wait_for(request.answering, _MOST_TIMES * seconds)

                mine = asyncio.ensure_future(over())
                self._evaluations[mine] = n_tokens
                mine.add_done_callback(self._evaluations.pop)
                ending.callback(mine.cancel)
                if before:
                    await asyncio.wait(before)
                    if not await self._process.is_current():
                        raise replaced()

            yield wait, ending.close

    def _size(self, request: Request, prompt: Prompt, n_reused: int) -> tuple[int, float]:
        """Return how many tokens will be evaluated, roughly, and how many seconds that takes."""
        n_tokens, rates = prompt.n_tokens, self._process.rates
        if (conversation := request.conversation) and request.extends:
            n_messages = conversation.n_behind(request.extends.conversation)
            n_tokens += sum(conversation.sizes_bytes[-n_messages:]) // BYTES_PER_TOKEN
        seconds = rates.evaluation_seconds(n_reused, n_tokens) if rates.is_measured else 0.0
        return n_tokens - n_reused, seconds

    async def send(
        self, turn: Turn | None, request: Request, raw: bytes, on_start: OnStart = do_nothing
    ) -> Answer:
        """Send a request; its *turn* ends once llama-server runs it.

        Raises what `Request.send` does, and ServerAway if llama-server was replaced.
        """
        # Under end only a save begins with a cut, whose start would empty the slot that is prepared.
        if turn and not self._process.rule.is_end_only:
            await self.clear_others()
        before = await last_tasks(self._process) if turn else None
        if self._process.queue.is_closed:
            raise replaced()
        if turn is None:
            return await request.send(self._process.upstream, raw, on_start)

        def started() -> None:
            turn.end()
            watching.cancel()
            on_start()

        with turn, ExitStack() as ending:
            watching = self._process.tasks.start(self._end_at_start(turn, before))
            ending.callback(watching.cancel)
            try:
                return await request.send(self._process.upstream, raw, started)
            except asyncio.CancelledError:
                await outlast_parsing(self._process, request, watching)
                raise

    async def _end_at_start(self, turn: Turn, before: LastTasks | None) -> None:
        """End the turn when some slot has begun another task; of whole answers the start is not told."""
        while before is not None and not self._process.queue.is_closed:
            await asyncio.sleep(_SHORT_LOOK_SECONDS)
            if await begun_since(self._process, before):
                return turn.end()


# Slots of requests whose clients went away: held until llama-server has really let go of them.
#
# llama-server looks once a second whether a client is still there (server-queue.cpp, recv with timeout).
# A request that was still being parsed when its client left starts in its slot all the same. If the
# slot were given back too early, the proxy would restore a state there and the dead request would
# overwrite it.


DISCONNECT_SECONDS = 1.3
"""llama-server's look for gone clients, and some room."""
_PARSED_TOKENS_PER_SECOND = 200_000
_LOOK_SECONDS = 0.05


def _may_begin_until(process: Process, request: Request | None) -> float:
    """Return until when a request whose client left may begin, on the monotonic clock.

    What does not fit the context never begins.
    """
    n_tokens = min(process.n_ctx, len(request.raw) // BYTES_PER_TOKEN) if request else 0
    left_at = (request and request.answered_at) or time.monotonic()
    return left_at + DISCONNECT_SECONDS + n_tokens / _PARSED_TOKENS_PER_SECOND


async def outlast_parsing(process: Process, request: Request, begun: "asyncio.Task[None]") -> None:
    """Return when a request whose client left has begun, or cannot begin any more.

    *begun* ends when some slot begins another task.
    """
    await asyncio.wait({begun}, timeout=_may_begin_until(process, request) - time.monotonic())


async def wind_up(
    process: Process, slot_id: SlotId, request: Request, answered: Known | None, *, is_running: bool
) -> None:
    """Wait until llama-server has let go of a slot, then learn what the slot holds.

    *answered* is that without the tokens of an answer that has begun: `/slots` tells how many these are.
    Else only a save tells how far the evaluation came. A client that gave up waiting often sends the same
    prompt again, and must not begin from nothing.
    """
    await outlast(process, lambda: [slot_id], request, is_running=is_running)
    if process.queue.is_placing:
        return  # another request may be running there already
    left = process.slots[slot_id].content
    n_tokens = (await n_held(process)).get(slot_id, 0)
    # Under *end only* nothing behind the last cut could be saved later.
    if answered and not process.rule.is_end_only and answered.n_tokens <= n_tokens < process.n_ctx:
        answered = replace(answered, n_tail=n_tokens - answered.n_tokens)
        process.slots.refine(slot_id, left, request.as_left(answered))
    else:
        await process.saves.begin(slot_id)


async def n_held(process: Process) -> dict[SlotId, int]:
    """Return how many tokens each slot holds; 0, or no slot, where llama-server does not tell."""
    with suppress(UpstreamFault):
        return {SlotId(state.id): state.n_held or 0 for state in await process.slot_states()}
    return {}


SlotIds = Callable[[], Collection[SlotId]]


async def outlast(
    process: Process, slot_ids: SlotIds, request: Request | None = None, *, is_running: bool = False
) -> None:
    """Return when a *request* that was abandoned in one of the slots cannot run any more.

    *slot_ids* is called at each look, because slots may still join an abandoned placement. A slot that was
    busy and is idle again proves nothing, for the request before may have run there; unless *is_running*.
    """
    began, until = time.monotonic(), _may_begin_until(process, request)
    is_told = await _is_busy(process, slot_ids) is not None
    latency_seconds = time.monotonic() - began  # a server short of time parses slowly too
    if not (is_running and is_told):
        await asyncio.sleep(until - time.monotonic() + 10 * latency_seconds)
    while await _is_busy(process, slot_ids) and not process.queue.is_closed:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_SECONDS)


async def _is_busy(process: Process, slot_ids: SlotIds) -> bool | None:
    """Return whether llama-server works in one of the slots; None if it does not tell."""
    with suppress(UpstreamFault):  # --no-slots, or llama-server is gone
        states = await process.slot_states()
        return any(state.is_processing for state in states if state.id in slot_ids())
    return None
