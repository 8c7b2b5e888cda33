"""The self-test: it measures how much of a restored state this server reuses.

It runs where requests contradict the rule that the first files tell, and in `doctor`. One state grows
through three lengths, because a probe that is shorter than a sliding window learns the wrong rule. At each
length the state is saved, and restored for requests that go on from it, repeat it, stop before its end or
leave it.
"""

from proxy.core.conditions import DegradationKind
from proxy.core.model import CheckpointKind, Rule, SlotId
from proxy.core.rule import FULL_WINDOW_TOKENS, RestoreProbe, judge
from proxy.core.slots import Unknown, choose_slot_to_empty
from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from proxy.errors import UpstreamRefused
from proxy.llama.state_file import StateFile
from proxy.log import get_logger
from proxy.serving.process import Process

SHORT_TOKENS = 64
PROBE_LENGTHS = (SHORT_TOKENS, FULL_WINDOW_TOKENS, 2 * FULL_WINDOW_TOKENS)
_MORE_TOKENS = 8
BACK_TOKENS = 20
_DIVERGING_UP_TO_TOKENS = FULL_WINDOW_TOKENS


class SelfTest:
    """Probes leased, empty slots; the holder of the leases erases them afterwards."""

    def __init__(self, process: Process, n_vocab: int) -> None:
        self._process = process
        self._upstream = process.upstream
        n_longest = PROBE_LENGTHS[-1] + 3 * _MORE_TOKENS
        self._text = token_ids(
            (i * 7919 + 1237) % max(2, min(n_vocab, 30011)) for i in range(n_longest)
        )

    async def learn_rule(self, slot_id: SlotId) -> Rule:
        """Return the rule, and leave the longest state in the slot; raises CacheFault.

        Builds before June 2026 (b9538) save all cells that they keep of a window, more than the window
        has, and continue that as it is. One cell more they refuse, so that no window is repaired there.
        """
        self._process.room.saver.repairs_windows = True
        probes: list[RestoreProbe] = []
        for n_tokens in (n for n in PROBE_LENGTHS if n + 3 * _MORE_TOKENS < self._process.n_ctx):
            try:
                probes.append(await self._probe(slot_id, n_tokens))
            except UpstreamRefused:
                self._process.room.saver.repairs_windows = False
                probes.append(await self._probe(slot_id, n_tokens))
        return judge(probes)

    async def _probe(self, slot_id: SlotId, n_tokens: int) -> RestoreProbe:
        self._process.learn_evaluation(
            await self._upstream.evaluate(slot_id, self._text[:n_tokens])
        )
        async with self._process.room.probe(slot_id, n_tokens) as saved:
            state = saved.state
            trials = [
                await self._try(slot_id, saved.file_name, n_tokens, request)
                for request in self._requests(n_tokens, state)
            ]
        return RestoreProbe(n_tokens, state.has_every_position, state.restore_points, tuple(trials))

    def _requests(self, n_tokens: int, state: StateFile) -> list[TokenIds]:
        """Return the prompts to restore a state for; the next length goes on from the last prompt."""
        text, n_common = self._text, n_tokens - BACK_TOKENS
        requests = []
        # Only at the short length: a prompt of which nothing is reused is evaluated whole.
        if n_tokens == SHORT_TOKENS:
            requests += [text[: n_tokens + 1], text[:n_tokens], text[: n_tokens - 1]]
        can_reuse = state.has_every_position or any(p <= n_common for p in state.restore_points)
        if n_tokens <= _DIVERGING_UP_TO_TOKENS and can_reuse:
            requests.append(text[:n_common] + text[-BACK_TOKENS:])
        return [*requests, text[: n_tokens + _MORE_TOKENS]]

    async def _try(
        self, slot_id: SlotId, name: str, n_state: int, prompt: TokenIds
    ) -> tuple[int, int, int]:
        await self._restore(slot_id, name)
        n_common = common_prefix_length(self._text[:n_state], prompt)
        n_reused = (await self._upstream.evaluate(slot_id, prompt)).cache_n
        return n_common, min(n_common, len(prompt) - 1), n_reused

    async def _restore(self, slot_id: SlotId, name: str) -> None:
        await self._upstream.erase(slot_id)
        await self._upstream.restore(slot_id, name)


async def measure(process: Process, slot_id: SlotId) -> None:
    """Measure the rule in a leased slot, which is saved before and empty afterwards, and go by it.

    Raises CacheFault; the rule known before then stays.
    """
    await process.launches.clear_others()
    # Of an empty slot nothing is due.
    await process.saves.write_back(slot_id, CheckpointKind.CONVERSATION)
    await process.erase(slot_id)
    process.slots.set_content(slot_id, Unknown(can_be_adopted=False))
    process.queue.reconsider()  # no request need wait for what this slot held
    test = SelfTest(process, (await process.upstream.model_meta()).n_vocab)
    try:
        rule = await test.learn_rule(slot_id)
    finally:
        process.room.saver.repairs_windows = process.rule.needs_repair
    await process.erase(slot_id)  # raises if the process that was measured is gone
    await process.learn_rule(rule)
    process.recover(DegradationKind.RESTORES_NOT_REUSED)
    process.metrics.self_tests.labels(rule.kind).inc()
    get_logger("learning").info(
        "self-test done", rule=rule.kind.value, end_holds_from=rule.end_holds_from
    )


def look_again(process: Process) -> None:
    """Measure the rule if requests contradict it; each time more contradictions are needed.

    Then the rule is not what the first files told, or the server has changed (other flags, say).
    """
    if process.n_contradictions < process.n_contradictions_allowed:
        return
    if (turn := process.launches.try_turn()) is None:
        return
    slot = choose_slot_to_empty(process.slots)
    lease = process.queue.try_lease(slot.id) if slot else None
    if lease is None:
        return turn.end()  # everything is busy: the next look may find a free slot
    get_logger("learning").warning(
        "restores are not reused as the rule says: the self-test runs",
        rule=process.rule.kind.value,
        n_contradictions=process.n_contradictions,
    )
    process.n_contradictions = 0
    process.n_contradictions_allowed *= 2
    measuring = process.tasks.start(_try_to_measure(process, lease.slot_ids[0]))
    measuring.add_done_callback(lambda _: turn.end())
    lease.hand_over(measuring)


async def _try_to_measure(process: Process, slot_id: SlotId) -> None:
    try:
        await measure(process, slot_id)
    except Exception as error:
        process.metrics.self_tests.labels("failed").inc()
        process.faults.record("self-test", error)
