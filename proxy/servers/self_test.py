"""The self-test: it measures how much of a restored state this server reuses.

One state grows through three lengths, because a probe that is shorter than a sliding window learns the
wrong rule. At each length the state is saved, and restored for requests that go on from it, repeat it, stop
before its end or leave it. Then two slots restore the longest state at once.
"""

import asyncio

from msgspec.structs import replace

from proxy.core.conditions import DegradationKind
from proxy.core.model import CAREFUL_RULE, CheckpointKind, Rule, RuleKind, SlotId
from proxy.core.rule import RestoreProbe, SelfTestResult, judge
from proxy.core.slots import Empty, Unknown, choose_slot_to_empty
from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from proxy.errors import UpstreamRefused
from proxy.llama.state_file import StateFile
from proxy.log import get_logger
from proxy.serving.process import SELF_TEST, SIZES, Process
from proxy.serving.queue import Lease, Turn

SHORT_TOKENS = 64
PROBE_LENGTHS = (SHORT_TOKENS, 2200, 4400)
_MORE_TOKENS = 8
BACK_TOKENS = 20
_DIVERGING_UP_TO_TOKENS = 2200


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

    async def try_beside(self, slot_id: SlotId, other_id: SlotId) -> tuple[bool, bool]:
        """Restore what *slot_id* holds into both slots and run them at once, then in turn.

        Returns whether both continued from it, and whether each kept its tokens while the other ran.
        """
        pair = (slot_id, other_id)
        async with self._process.room.probe(slot_id, PROBE_LENGTHS[-1] + _MORE_TOKENS) as saved:
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


# How a process gets its rule.
#
# The rule is measured once for a model and build. When restores are not reused as the rule says, the server
# has changed (other flags, say), and the rule is measured again.


def begin(process: Process) -> None:
    """Take the remembered rule; if there is none, lease an empty slot and measure the rule there.

    Nothing is awaited, so that no request can take the slot first.
    """
    if not process.can_cache:
        return process.note_examined()
    if known := process.known(SELF_TEST, SelfTestResult):
        _publish(process, known)
    elif lease := _lease_empty(process):
        _start(process, lease, process.launches.try_turn() or Turn(None))
    else:
        process.note_examined()
        process.degrade(DegradationKind.NO_SLOT_FOR_SELF_TEST)


def look_again(process: Process) -> None:
    """Measure the rule again if requests contradict it; each time more contradictions are needed."""
    if process.n_contradictions < process.n_contradictions_allowed:
        return
    if (turn := process.launches.try_turn()) is None:
        return
    slot = choose_slot_to_empty(process.slots)
    lease = process.queue.try_lease(slot.id) if slot else None
    if lease is None:
        return turn.end()  # everything is busy: the next look may find a free slot
    get_logger("learning").warning(
        "restores are not reused as the rule says: the self-test runs again",
        rule=process.rule.kind.value,
        n_contradictions=process.n_contradictions,
    )
    process.n_contradictions = 0
    process.n_contradictions_allowed *= 2
    _start(process, lease, turn)


def _lease_empty(process: Process, without: SlotId | None = None) -> Lease[None] | None:
    for slot in process.slots:
        if slot.id != without and isinstance(slot.content, Empty):
            if lease := process.queue.try_lease(slot.id):
                return lease
    return None


def _start(process: Process, lease: Lease[None], turn: Turn) -> None:
    if not process.is_caching:
        process.rule = CAREFUL_RULE
        process.degrade(DegradationKind.SELF_TEST_PENDING)
    measuring = process.tasks.start(_measure(process, lease.slot_ids[0]))
    measuring.add_done_callback(lambda _: turn.end())
    lease.hand_over(measuring)


async def _measure(process: Process, slot_id: SlotId) -> None:
    try:
        result = await _run(process, slot_id)
        # If nothing can be restored, that may have been a disturbance: the next start measures again.
        await process.remember(SELF_TEST, result if result.rule.can_restore else None)
        await process.remember(SIZES, list(process.sizes))
    except Exception as error:
        process.metrics.self_tests.labels("failed").inc()
        if process.is_caching:  # by the rule known before, which stays
            process.faults.record("self-test", error)
        else:
            process.faults.count("self-test")
            process.fail_self_test(str(error) or type(error).__name__)
        return
    process.metrics.self_tests.labels(result.rule.kind).inc()
    _publish(process, result)
    get_logger("learning").info(
        "self-test done",
        rule=result.rule.kind.value,
        end_holds_from=result.rule.end_holds_from,
        restores_beside=result.restores_beside,
        keeps_idle=result.keeps_idle,
    )


async def _run(process: Process, slot_id: SlotId) -> SelfTestResult:
    await process.launches.clear_others()
    # Of an empty slot nothing is due.
    await process.saves.write_back(slot_id, CheckpointKind.CONVERSATION)
    await process.erase(slot_id)
    process.slots.set_content(slot_id, Unknown(can_be_adopted=False))
    process.queue.reconsider()  # no request need wait for what this slot held
    test = SelfTest(process, (await process.upstream.model_meta()).n_vocab)
    rule = await test.learn_rule(slot_id)
    result = SelfTestResult(rule, repairs_windows=process.room.saver.repairs_windows)
    if rule.kind is not RuleKind.NOTHING:
        result = await _try_beside(process, test, slot_id, result)
    await process.erase(slot_id)  # raises if the process that was measured is gone
    return result


async def _try_beside(
    process: Process, test: SelfTest, slot_id: SlotId, result: SelfTestResult
) -> SelfTestResult:
    """Try two slots at once if another slot is empty and no request wants it."""
    if process.clears_idle_slots:
        return replace(result, keeps_idle=False)  # each would empty the other
    other = _lease_empty(process, without=slot_id)
    if other is None:  # the result of an earlier test is still the best that is known
        known = process.self_test or result
        return replace(result, restores_beside=known.restores_beside, keeps_idle=known.keeps_idle)
    with other:
        (other_id,) = other.slot_ids
        process.slots.set_content(other_id, Unknown(can_be_adopted=False))
        restores_beside, keeps_idle = await test.try_beside(slot_id, other_id)
        await process.erase(other_id)
    return replace(result, restores_beside=restores_beside, keeps_idle=keeps_idle)


def _publish(process: Process, result: SelfTestResult) -> None:
    process.set_rule(result.rule)
    process.self_test = result
    process.room.saver.repairs_windows = result.repairs_windows
    if process.clears_idle_slots is None and result.keeps_idle is not None:
        process.note_clearing(clears=not result.keeps_idle)
    if result.restores_beside:
        process.recover(DegradationKind.RESTORES_DISTURB)
    elif result.restores_beside is False and not process.clears_idle_slots:
        process.degrade(DegradationKind.RESTORES_DISTURB)
