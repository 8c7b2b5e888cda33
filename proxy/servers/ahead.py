"""What a conversation's next prompt begins with, evaluated while its user reads the answer.

Many templates drop the reasoning of a turn once its user writes again. Whatever stands behind that
reasoning, all results of tools, is then evaluated anew, though it has long been known. So behind an answer
that calls no tool, the conversation is rendered as the next message will find it, and evaluated in its
slot: only while nothing else runs, in pieces so short that no request waits long, and for no more seconds
than the operator allows. What the slot held is saved before.
"""

import asyncio
import time
from dataclasses import replace
from functools import partial

from proxy.core.cuts import Stop
from proxy.core.messages import Kind
from proxy.core.model import Cuts, Prompt, SlotId
from proxy.core.slots import Known, SlotPhase, SlotTable
from proxy.errors import ServerAway, TooManyRequests
from proxy.servers.background import is_due
from proxy.serving.planning import plan_in
from proxy.serving.process import Process
from proxy.serving.queue import Choice, FreeElsewhere
from proxy.serving.request import Request

_IDLE_SECONDS = 1.0
"""Agents that go on by themselves do so sooner."""
_WORTH_SECONDS = 1.0
"""A shorter wait is not worth what the slot loses if its client goes on otherwise."""
_PIECE_SECONDS = 0.25
_MIN_PIECE_TOKENS = 128


class Ahead:
    """Goes on, while all is idle, with the conversation that was answered last."""

    def __init__(self, max_seconds: float) -> None:
        """*max_seconds* of evaluation are spent on an answer at most; without any, nothing is done."""
        self._max_seconds = max_seconds
        self._last: tuple[Process, Request] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_evaluating = self._is_visit = False

    async def give_way(self, session: str) -> None:
        """Stop for a client's request; one of the same session waits until the piece under way is done."""
        task, self._task = self._task, None
        if task is None:
            return
        if not self._is_evaluating:
            task.cancel()
        if not self._is_evaluating or (self._last and self._last[1].session == session):
            await asyncio.wait([task])

    def note(self, process: Process, request: Request) -> None:
        """Begin soon behind the answer to a request; an answer aside leaves the one before its turn."""
        if request.kind is not Kind.SIDE:
            answer = request.answer
            # After a tool call no message of the user follows.
            is_last = answer is not None and answer.status == 200 and not answer.calls
            # What is evaluated for a client that moves between machines is lost with its next move.
            is_visit = self._is_visit and request.kind is Kind.TOOL_TURN
            self._is_visit = is_visit or request.shared.startswith("fetched")
            may_follow = is_last and request.keeps_text and not self._is_visit
            self._last = (process, request) if may_follow else None
        if self._last and self._max_seconds and (self._task is None or self._task.done()):
            self._task = process.tasks.start(self._begin(*self._last))

    def may_follow(self, process: Process, request: Request) -> bool:
        """Return whether a request may be gone on with once it is answered."""
        is_plain = not (request.wishes or request.warms)
        is_cached = process.is_caching and request.conversation is not None
        return bool(self._max_seconds) and is_cached and is_plain

    async def close(self) -> None:
        """Stop, and begin no more."""
        self._max_seconds = 0.0
        await self.give_way("")

    async def _begin(self, process: Process, request: Request) -> None:
        try:
            await asyncio.sleep(_IDLE_SECONDS)
            if settling := [task for _, task in process.settling]:
                await asyncio.wait(settling)
            await self._evaluate(process, request)
        except (ServerAway, FreeElsewhere, TooManyRequests):
            pass  # the slot is gone, or wanted
        except Exception as error:  # nobody has asked for it
            process.faults.record("unattended action", error)
        finally:
            self._is_evaluating = False

    async def _evaluate(self, process: Process, request: Request) -> None:
        """Evaluate what comes next in the slot of a request, as far as that pays; raises CacheFault."""
        account, prompt = request.account, request.prompt
        chat, answer = request.chat, request.answer
        if not (account and prompt and chat and answer):
            return
        tokens = await process.reader.read_next(chat, answer.said(), request.headers)
        slot, cuts = process.slots[account.plan.slot_id], Cuts(prompt.cuts.header)
        next_prompt = replace(prompt, tokens=tokens, cuts=cuts, text="", conversation=b"")
        with await process.queue.lease(partial(_when_idle, process.slots, slot.id)) as lease:
            held = slot.content.tokens if isinstance(slot.content, Known) else None
            if not tokens or held is None or held[: prompt.n_tokens] != prompt.tokens:
                return
            begin = _n_reused(process, next_prompt, slot.id)
            seconds = process.rates.evaluation_seconds(begin, len(tokens))
            if not _WORTH_SECONDS <= seconds <= self._max_seconds:
                return
            self._is_evaluating = True
            if is_due(process, replace(slot, phase=SlotPhase.FREE), 0.0):
                save = process.saves.write_back(slot.id)
                await process.finish(lease, save)
            n_piece = max(_MIN_PIECE_TOKENS, int(_PIECE_SECONDS / seconds * (len(tokens) - begin)))
            began, n_evaluated = time.monotonic(), 0
            while begin < len(tokens) and self._task is asyncio.current_task():
                begin = min(len(tokens), begin + n_piece)
                stop = process.stop(slot.id, next_prompt, cuts, Stop(begin), request.headers)
                n_evaluated += (await process.finish(lease, stop)).prompt_n
                # To make it again costs no more than this did, and nobody waits.
                if isinstance(content := process.slots[slot.id].content, Known):
                    saved = replace(content, n_saved=content.n_tokens)
                    process.slots.set_content(slot.id, saved)
        if n_evaluated:
            process.report.went_ahead(request, n_evaluated, time.monotonic() - began)


def _when_idle(table: SlotTable, slot_id: SlotId) -> Choice[None] | None:
    return None if any(slot.is_leased for slot in table) else Choice((slot_id,), None)


def _n_reused(process: Process, prompt: Prompt, slot_id: SlotId) -> int:
    """Return how much of a prompt a slot gives as it stands; all of it if more is to be done."""
    start = plan_in(process, prompt, slot_id).start
    return prompt.n_tokens if start.restored or start.erases else start.n_reused
