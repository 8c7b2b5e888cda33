"""What the proxy takes in memory, by the number of conversations and the length of their prompts."""

import asyncio
from contextlib import ExitStack

from tests.bench.hot import Conversation, Opening, context_for, opening_of
from tests.bench.progress import tell
from tests.bench.readers import rss_bytes
from tests.bench.section import Section
from tests.bench.sides import Sides, ask
from tests.lab.conversation import user

CASES = ((1, 1000), (100, 1000), (1, 10000), (100, 10000), (1, 128000), (4, 128000))
N_TURNS = 3


async def measure_memory(leftovers: ExitStack) -> list[Section]:
    """Return the table; each row has processes of its own, and is read when all is saved."""
    section = Section(
        f"Resident memory of the proxy, conversations of {N_TURNS} requests by turns on one slot",
        "",
        ("conversations", "prompt", "after the start, MB", "afterwards, MB", "at most, MB"),
    )
    for n_conversations, n_tokens in CASES:
        tell(f"memory: {n_conversations} conversations of {n_tokens:,} tokens")
        async with Sides(leftovers, n_ctx=context_for(n_tokens)) as sides:
            proxy = sides.ours.stack.proxy
            assert proxy is not None
            opening = opening_of(sides.alone.stack.server, n_tokens)
            before = rss_bytes(proxy.pid)
            conversations = [
                Conversation(Opening([*opening.messages[:-1], user(100000 + i)], opening.tools))
                for i in range(n_conversations)
            ]
            for _ in range(N_TURNS):
                for conversation in conversations:
                    reply = await asyncio.to_thread(ask, sides.ours.base_url, conversation.body())
                    conversation.go_on(reply)
            await proxy.settled()
            await sides.ours.until_quiet()
            sizes = before, rss_bytes(proxy.pid), rss_bytes(proxy.pid, "VmHWM")
        cells = (f"{n_bytes / 1e6:.0f}" for n_bytes in sizes)
        section.add(n_conversations, n_tokens, *cells, is_met=None)
    return [section]
