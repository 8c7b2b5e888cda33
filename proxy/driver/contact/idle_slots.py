"""Finds out whether a slot that starts to run empties the idle ones, as with llama-server's default flags.

Only in slots that are known to be empty. Without a save the answer is read from /slots.
"""

from contextlib import suppress

from proxy.core.model import SlotId
from proxy.core.prefix import TokenIds, token_ids
from proxy.core.slots import Empty, SlotTable
from proxy.errors import UpstreamFault
from proxy.upstream.llama_server import LlamaServer

_FEW_TOKENS = token_ids(range(1, 9))


async def disturb(upstream: LlamaServer, table: SlotTable, tokens: TokenIds) -> bool:
    """Run another empty slot for a token, and leave it empty; return whether there was one."""
    for slot in table:
        if isinstance(slot.content, Empty):
            await upstream.evaluate(slot.id, tokens)
            await upstream.erase(slot.id)
            return True
    return False


async def seen_clearing(upstream: LlamaServer) -> bool | None:
    """Fill one empty slot, run another, and see whether the first still holds what it held.

    For servers that save and erase nothing: both keep a few tokens. None if it cannot be told.
    """
    with suppress(UpstreamFault):
        empty = [
            SlotId(status.id)
            for status in await upstream.slots()
            if not status.is_processing and not status.n_prompt_tokens
        ]
        if len(empty) < 2:
            return None
        for slot_id in empty[:2]:
            await upstream.evaluate(slot_id, _FEW_TOKENS)
        first = next(s for s in await upstream.slots() if s.id == empty[0])
        return first.n_prompt_tokens == 0
    return None
