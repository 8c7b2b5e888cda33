"""What a careful user does without the proxy: one slot file for each conversation.

Saved after every answer, restored before every request, with llama-server's own /slots and nothing else.
A user knows which request belongs to which conversation: the part of its label before the dot says so.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import aiohttp

from tests.bench.processes import Stack
from tests.bench.traces.chat import ChatFailed, Reply
from tests.bench.traces.play import Player
from tests.bench.traces.trace import Request


class SlotFilesPlayer(Player):
    """Plays a trace on llama-server alone; conversations are spread over the slots, and stay there."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack)
        self._slots: dict[str, int] = {}
        self._busy: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def _ask(
        self, http: aiohttp.ClientSession, request: Request, body: dict[str, Any]
    ) -> Reply:
        conversation = request.label.partition(".")[0]
        n_slots = self._stack.server.n_slots
        slot = self._slots.setdefault(conversation, len(self._slots) % n_slots)
        file = {"filename": f"{conversation}.bin"}
        began = time.monotonic()
        async with self._busy[slot]:
            if (self._stack.slots / file["filename"]).exists():
                await self._act(http, slot, "restore", file)
            waited_seconds = time.monotonic() - began
            reply = await super()._ask(http, request, {**body, "id_slot": slot})
            await self._act(http, slot, "save", file)
        first_token_seconds = reply.first_token_seconds + waited_seconds
        return replace(reply, first_token_seconds=first_token_seconds)

    async def _act(
        self, http: aiohttp.ClientSession, slot: int, action: str, file: dict[str, str]
    ) -> None:
        url = f"{self._stack.server.base_url}/slots/{slot}?action={action}"
        async with http.post(url, json=file) as reply:
            if reply.status != 200:
                raise ChatFailed(f"{action}: {await reply.text()}")
