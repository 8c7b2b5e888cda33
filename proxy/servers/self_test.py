"""The self-test: it measures how much of a restored state this server reuses.

It runs when requests contradict the rule that the first files showed, and in `doctor`. One state grows
through three lengths, because a probe that is shorter than a sliding window shows the wrong rule. At each
length the state is saved, and then restored for prompts that continue it, repeat it, end before it or
diverge from it.
"""

from dataclasses import replace

from proxy.core.conditions import DegradationKind
from proxy.core.model import FULL_WINDOW_TOKENS, NO_RULE, RestoreProbe, Rule, SlotId, judge
from proxy.core.residency import choose_slot_to_empty
from proxy.core.slots import Unknown
from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from proxy.errors import UpstreamRefused
from proxy.llama.state_file import StateFile
from proxy.log import get_logger
from proxy.serving.process import Process

SHORT_TOKENS = 64
PROBE_LENGTHS = (SHORT_TOKENS, FULL_WINDOW_TOKENS, 2 * FULL_WINDOW_TOKENS)
_MORE_TOKENS = 8
BACK_TOKENS = 20


async def learn_rule(process: Process, slot_id: SlotId) -> Rule:
    """Return the rule, and leave the longest state in the slot; raises CacheFault.

    The slot is leased and empty; the holder of the lease erases it afterwards. Nothing can be restored
    where llama-server refuses the shortest state; a longer state may just have no room at that time.
    """
    n_ids = max(2, min((await process.upstream.model_meta()).n_vocab, 30011))
    n_longest = PROBE_LENGTHS[-1] + 3 * _MORE_TOKENS
    text = token_ids((i * 7919 + 1237) % n_ids for i in range(n_longest))
    process.room.repairs_windows = True
    probes: list[RestoreProbe] = []
    for n_tokens in (n for n in PROBE_LENGTHS if n + 3 * _MORE_TOKENS < process.n_ctx):
        try:
            probes.append(await _probe(process, slot_id, text, n_tokens))
        except UpstreamRefused as refusal:
            if probes or refusal.status != 400:
                raise
            return NO_RULE
    return judge(probes)


async def _probe(process: Process, slot_id: SlotId, text: TokenIds, n_tokens: int) -> RestoreProbe:
    upstream, trials = process.upstream, list[tuple[int, int, int]]()
    process.learn_evaluation(await upstream.evaluate(slot_id, text[:n_tokens]))
    async with process.room.probe(slot_id, n_tokens) as saved:
        for prompt in _requests(text, n_tokens, saved.state):
            await upstream.erase(slot_id)
            await upstream.restore(slot_id, saved.file_name)
            n_common = common_prefix_length(text[:n_tokens], prompt)
            n_reused = (await upstream.evaluate(slot_id, prompt)).cache_n
            trials.append((n_common, min(n_common, len(prompt) - 1), n_reused))
    state = saved.state
    return RestoreProbe(n_tokens, state.has_every_position, state.restore_points, tuple(trials))


def _requests(text: TokenIds, n_tokens: int, state: StateFile) -> list[TokenIds]:
    """Return the prompts to restore a state for; the next length goes on from the last prompt."""
    n_common = n_tokens - BACK_TOKENS
    requests = []
    # Only at the short length: if nothing is reused, the whole prompt is evaluated.
    if n_tokens == SHORT_TOKENS:
        requests += [text[: n_tokens + 1], text[:n_tokens], text[: n_tokens - 1]]
    can_reuse = state.has_every_position or any(p <= n_common for p in state.restore_points)
    if n_tokens <= FULL_WINDOW_TOKENS and can_reuse:
        requests.append(text[:n_common] + text[-BACK_TOKENS:])
    return [*requests, text[: n_tokens + _MORE_TOKENS]]


async def measure(process: Process, slot_id: SlotId) -> None:
    """Measure the rule in a leased slot, and use it; the slot is saved before and empty afterwards.

    Raises CacheFault, and then keeps the earlier rule.
    """
    await process.launches.clear_others()
    await process.saves.write_back(slot_id)
    await process.erase(slot_id)
    process.slots.set_content(slot_id, Unknown(can_be_adopted=False))
    process.queue.reconsider()  # no request need wait for this slot's earlier content
    try:
        learned = await learn_rule(process, slot_id)
        rule = replace(learned, stride_tokens=process.rule.stride_tokens)
    finally:
        process.room.repairs_windows = process.rule.needs_repair
    await process.erase(slot_id)  # raises if the measured process is gone
    await process.learn_rule(rule)
    process.recover(DegradationKind.RESTORES_NOT_REUSED)
    process.metrics.self_tests.labels(rule.kind).inc()
    get_logger("learning").info(
        "self-test done", rule=rule.kind.value, end_holds_from=rule.end_holds_from
    )


def look_again(process: Process) -> None:
    """Measure the rule if enough requests contradict it; the number needed doubles each time.

    Contradictions mean that the first files showed a wrong rule, or that the server has changed (other
    flags, say).
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
        "restores are refused, or not reused as the rule says: the self-test runs",
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
