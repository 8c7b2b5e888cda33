"""The self-test: what a restored state is good for on this server, measured.

One state grows through a short, a long and a longer length, since a probe that is shorter than a
sliding window learns the wrong rule. Each is saved, and restored for requests that go on from it,
repeat it, stop before its end or leave it. Then two slots restore the longest state at once.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from proxy.core.model import Rule, SlotId
from proxy.core.prefix import TokenIds, common_prefix_length, token_ids
from proxy.core.probes import Probe, Trial, diverging_tells, is_hopeless, judge
from proxy.driver.saving.saver import SavedSlot
from proxy.errors import UpstreamRefused
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.replies import Timings
from proxy.upstream.state_file import StateFile

SHORT_TOKENS = 64
PROBE_LENGTHS = (SHORT_TOKENS, 2200, 4400)
_MORE_TOKENS = 8
BACK_TOKENS = 20
_DIVERGING_UP_TO_TOKENS = 2200


ProbeSave = Callable[[SlotId, int], AbstractAsyncContextManager[SavedSlot]]
"""Saves a slot that holds so many tokens; the file is deleted on leaving."""


class SelfTest:
    """Probes leased, empty slots; whoever holds the leases erases them afterwards."""

    def __init__(
        self,
        upstream: LlamaServer,
        probe_save: ProbeSave,
        n_vocab: int,
        note_evaluation: Callable[[Timings], None] = lambda _: None,
    ) -> None:
        self._upstream = upstream
        self._note_evaluation = note_evaluation
        self._probe_save = probe_save
        n_longest = PROBE_LENGTHS[-1] + 3 * _MORE_TOKENS
        self._text = token_ids(
            (i * 7919 + 1237) % max(2, min(n_vocab, 30011)) for i in range(n_longest)
        )

    async def learn_rule(self, slot_id: SlotId, n_ctx: int) -> Rule:
        """Return the rule, and leave the longest state in the slot.

        Raises CacheFault.
        """
        probes: list[Probe] = []
        for n_tokens in PROBE_LENGTHS:
            if n_tokens + 3 * _MORE_TOKENS < n_ctx and not (probes and is_hopeless(probes[-1])):
                probes.append(await self._probe(slot_id, n_tokens))
        return judge(probes)

    async def try_beside(self, slot_id: SlotId, other_id: SlotId) -> tuple[bool, bool]:
        """Restore what *slot_id* holds into both slots and run them at once, then in turn.

        Returns whether both continued from it, and whether each kept its tokens while the other ran.
        """
        pair = (slot_id, other_id)
        async with self._probe_save(slot_id, PROBE_LENGTHS[-1] + _MORE_TOKENS) as saved:
            n_tokens = len(saved.state.tokens)
            try:
                await asyncio.gather(*(self._restore(each, saved.file_name) for each in pair))
            except UpstreamRefused:
                return False, False
        both = await asyncio.gather(*(self._extend(each, n_tokens, 1) for each in pair))
        in_turn = [await self._extend(each, n_tokens, 2) for each in pair]
        held = n_tokens + _MORE_TOKENS
        return both == [n_tokens, n_tokens], in_turn == [held, held]

    async def _extend(self, slot_id: SlotId, n_tokens: int, times: int) -> int:
        text = self._text[: n_tokens + times * _MORE_TOKENS]
        return (await self._upstream.evaluate(slot_id, text)).cache_n

    async def _probe(self, slot_id: SlotId, n_tokens: int) -> Probe:
        self._note_evaluation(await self._upstream.evaluate(slot_id, self._text[:n_tokens]))
        async with self._probe_save(slot_id, n_tokens) as saved:
            state = saved.state
            trials = [
                await self._try(slot_id, saved.file_name, n_tokens, request)
                for request in self._requests(n_tokens, state)
            ]
        return Probe(n_tokens, state.has_every_position, state.restore_points, tuple(trials))

    def _requests(self, n_tokens: int, state: StateFile) -> list[TokenIds]:
        """Return the prompts to restore a state for, the one that the next length goes on from last."""
        text, n_common = self._text, n_tokens - BACK_TOKENS
        requests = []
        # Only of the short one, because a prompt that is not reused is evaluated whole.
        if n_tokens == SHORT_TOKENS:
            requests += [text[: n_tokens + 1], text[:n_tokens], text[: n_tokens - 1]]
        tells = diverging_tells(state.restore_points, state.has_every_position, n_common)
        if n_tokens <= _DIVERGING_UP_TO_TOKENS and tells:
            requests.append(text[:n_common] + text[-BACK_TOKENS:])
        return [*requests, text[: n_tokens + _MORE_TOKENS]]

    async def _try(self, slot_id: SlotId, name: str, n_state: int, prompt: TokenIds) -> Trial:
        await self._restore(slot_id, name)
        n_common = common_prefix_length(self._text[:n_state], prompt)
        n_reused = (await self._upstream.evaluate(slot_id, prompt)).cache_n
        return Trial(len(prompt), n_common, n_reused)

    async def _restore(self, slot_id: SlotId, name: str) -> None:
        await self._upstream.erase(slot_id)
        await self._upstream.restore(slot_id, name)
