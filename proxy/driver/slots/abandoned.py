"""Slots of requests whose clients went away: held until llama-server has really let go of them.

llama-server looks once a second whether a client is still there (server-queue.cpp, recv with timeout),
and a request that was still being parsed when its client left starts in its slot all the same. A slot
given back too early would be restored by us and then overwritten by the dead request.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from proxy.core.keeping.write_back import is_write_back_due
from proxy.core.model import CheckpointKind, SlotId
from proxy.driver.session import Session
from proxy.errors import UpstreamFault

DISCONNECT_SECONDS = 1.3
"""llama-server's look for gone clients, and some room."""
_PARSED_TOKENS_PER_SECOND = 200_000
_LOOK_SECONDS = 0.05


async def wind_up(session: Session, slot_id: SlotId, n_tokens: int) -> None:
    """Wait until llama-server has let go of a slot, then learn from a save what it holds.

    Clients that gave up waiting send the same prompt again; what was evaluated of it must not be lost.
    """
    await outlast(session, lambda: [slot_id], n_tokens)
    desk = session.attachment.desk
    content = desk.table[slot_id].content
    # During a placement another request may be running there already.
    if not desk.is_placing and is_write_back_due(session.attachment.rule, content):
        await session.saves.write_back(slot_id, CheckpointKind.CONVERSATION)


async def outlast(
    session: Session, slot_ids: Callable[[], Collection[SlotId]], n_tokens: int = 0
) -> None:
    """Return when a request of *n_tokens* abandoned in one of the slots neither runs nor ever will.

    *slot_ids* are asked for at each look, for slots may still join an abandoned placement.

    That a slot was busy and is idle again proves nothing: it may have been the request before.
    """
    began = time.monotonic()
    await _is_busy(session, slot_ids)
    latency_seconds = time.monotonic() - began  # a server short of time parses slowly too
    parse_seconds = n_tokens / _PARSED_TOKENS_PER_SECOND + 10 * latency_seconds
    await asyncio.sleep(DISCONNECT_SECONDS + parse_seconds)
    while await _is_busy(session, slot_ids):  # noqa: ASYNC110 - llama-server has no event for it
        await asyncio.sleep(_LOOK_SECONDS)


async def _is_busy(session: Session, slot_ids: Callable[[], Collection[SlotId]]) -> bool:
    try:
        states = await session.work.slot_states()
    except UpstreamFault:
        return False  # --no-slots, or llama-server is gone: there is nothing more to see
    return any(state.is_processing for state in states if state.id in slot_ids())
