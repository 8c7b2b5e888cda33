"""Answers a session's requests on a llama-server driven by hand, the way that the proxy took.

"The same cuts by hand" means, for each request, with nothing but llama-server's own HTTP interface:

1. where the proxy restored a checkpoint: restore our own save of the state with the longest common
   prefix (each slot is saved as it stands after every request); where it went on in a live slot, so
   do we, in the slot of the same number; after a restart all slots are erased;
2. `/completion` with `n_predict` 0 and the prompt's first tokens, for each of the proxy's stops;
3. after a stop: save, erase, restore, which the proxy never does on a request's way;
4. the same request, pinned with `id_slot`.

So both evaluate the same tokens in the same batches, and any difference is a wrong state. On SWA a
restore changes the order in which the window is summed up, so step 3 is left out there: the proxy goes
on live at that point, and so do we.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from proxy.core.tokens import TokenIds, common_prefix_length
from tests.bench.answers import FIELDS, Answer, read_answer
from tests.bench.ledger import Ledger
from tests.bench.request_log import Way
from tests.bench.workload import Request
from tests.lab.server import LlamaServer

N_LAST_PIECE = 128


@dataclass(frozen=True, slots=True)
class State:
    """One of our saves."""

    file_name: str
    tokens: TokenIds


class ByHand:
    """Drives one llama-server, which must be started and which nobody else uses."""

    def __init__(self, server: LlamaServer, *, restores_at_stops: bool) -> None:
        self._server = server
        self._ledger = Ledger(server)
        self._restores_at_stops = restores_at_stops
        self._states: list[State] = []

    async def answer(self, request: Request, way: Way) -> tuple[Answer, int]:
        """Return the answer to a request, and how many tokens of its prompt were reused."""
        tokens = await self._ledger.tokens(request)
        if request.restarts:
            await self._erase_all()
        if way.has_restored:
            await self._restore(way.slot, self._best_state(tokens))
        reused = [await self._stop(way.slot, tokens[:n_tokens]) for n_tokens in way.stops]
        if way.stops and self._restores_at_stops:
            await self._restore(way.slot, await self._save(way.slot, tokens))
        reply = await self._ask(request.body(**FIELDS, id_slot=way.slot, cache_prompt=True))
        reused.append(reply["timings"]["cache_n"])
        self._states.append(await self._save(way.slot, tokens))
        return read_answer(reply), reused[0]

    async def cold_answer(self, request: Request) -> Answer:
        """Return the answer of a fresh slot that reuses nothing."""
        await self._slot_action(0, "erase", {})
        reply = await self._ask(request.body(**FIELDS, id_slot=0, cache_prompt=False))
        return read_answer(reply)

    async def cold_answer_in_two_pieces(self, request: Request) -> Answer:
        """Return the answer of a fresh slot whose last batch has N_LAST_PIECE tokens."""
        tokens = await self._ledger.tokens(request)
        await self._slot_action(0, "erase", {})
        await self._stop(0, tokens[:-N_LAST_PIECE])
        reply = await self._ask(request.body(**FIELDS, id_slot=0, cache_prompt=True))
        return read_answer(reply)

    async def _stop(self, slot: int, tokens: TokenIds) -> int:
        body = {"prompt": tokens.tolist(), "n_predict": 0, "id_slot": slot, "cache_prompt": True}
        reply = await self._post("/completion", body)
        return int(reply["timings"]["cache_n"])

    def _best_state(self, tokens: TokenIds) -> State:
        return max(self._states, key=lambda state: common_prefix_length(state.tokens, tokens))

    async def _save(self, slot: int, tokens: TokenIds) -> State:
        state = State(f"by-hand-{len(self._states)}", tokens)
        await self._slot_action(slot, "save", {"filename": state.file_name})
        return state

    async def _restore(self, slot: int, state: State) -> None:
        await self._slot_action(slot, "erase", {})
        await self._slot_action(slot, "restore", {"filename": state.file_name})

    async def _erase_all(self) -> None:
        for slot in range(self._server.n_slots):
            await self._slot_action(slot, "erase", {})

    async def _slot_action(self, slot: int, action: str, body: dict[str, Any]) -> None:
        await self._post(f"/slots/{slot}?action={action}", body)

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._post("/v1/chat/completions", body)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, reply = await asyncio.to_thread(self._server.request, "POST", path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {reply}")
        return dict(reply)
