"""Finds out by trying what no field of llama-server's API says: what it does to slots by itself.

Owns: the three experiments. Each leaves the slots it used empty. Requests that name no slot are only
sent where they cannot land on anybody's work.
"""

from proxy.core.model import SlotId
from proxy.doctor.bench import N_MORE, PROBE_TOKENS, Bench
from proxy.doctor.facts import BehaviourFacts

_FIRST_VERSION_THAT_PREFERS_EMPTY_SLOTS = 4
_MOST_SLOTS_TO_FILL = 16


async def examine_behaviour(bench: Bench, file_version: int) -> BehaviourFacts:
    """Try out idle slots, similarity and the RAM cache; raises UpstreamFault or SaveRejected."""
    prefers_similar = await _prefers_similar_slot(bench, file_version)
    return BehaviourFacts(
        keeps_idle_slots=await _keeps_idle_slots(bench),
        prefers_similar_slot=prefers_similar,
        has_ram_cache=await _has_ram_cache(bench, prefers_similar),
    )


def _is_reused(n_reused: int) -> bool:
    # Sliding-window models reuse a few tokens less than they hold.
    return n_reused >= PROBE_TOKENS // 2


async def _keeps_idle_slots(bench: Bench) -> bool | None:
    """Fill one slot and run another one."""
    if bench.n_slots == 1:
        return None
    if len(bench.empty) < 2:
        return await _keeps_held_slots(bench)
    first, *_, last = bench.empty
    held = bench.text(1, PROBE_TOKENS)
    await bench.evaluate(last, held)
    await bench.evaluate(first, bench.text(2, N_MORE))
    async with bench.saver.saved(last) as saved:
        tokens = saved.state.tokens
    await bench.erase()
    return tokens == held


async def _keeps_held_slots(bench: Bench) -> bool | None:
    """See by /slots whether others still hold what they held before the first probe ran."""
    if not any(bench.held.values()):
        return None
    await bench.evaluate(bench.empty[0], bench.text(2, N_MORE))
    statuses = await bench.upstream.slots()
    await bench.erase()
    return all(s.n_prompt_tokens > 0 for s in statuses if bench.held.get(SlotId(s.id)))


async def _prefers_similar_slot(bench: Bench, file_version: int) -> bool | None:
    """Fill the last empty slot and send a longer prompt to nowhere in particular.

    Without similarity it goes to the slot that was used longest ago: since 0.7.0 an empty one, before
    that perhaps somebody's.
    """
    is_safe = bench.is_whole_server or (
        len(bench.empty) >= 2 and file_version >= _FIRST_VERSION_THAT_PREFERS_EMPTY_SLOTS
    )
    if bench.n_slots == 1 or not is_safe:
        return None
    text, slot_id = bench.text(3), bench.empty[-1]
    await bench.evaluate(slot_id, text[:PROBE_TOKENS])
    chosen, _ = await bench.evaluate_anywhere(text)
    await bench.erase()
    return chosen == slot_id


async def _has_ram_cache(bench: Bench, prefers_similar: bool | None) -> bool | None:
    """Displace a prompt, ask for it again, and see whether it is brought back.

    A pinned request only consults the RAM cache while similarity is on (server-context.cpp,
    get_available_slot); without it all slots have to be filled by requests that name none.
    """
    slot_id, text = bench.empty[0], bench.text(4, PROBE_TOKENS + 2 * N_MORE)
    await bench.evaluate(slot_id, text[:PROBE_TOKENS])
    n_reused_live = await bench.evaluate(slot_id, text[: PROBE_TOKENS + N_MORE])
    await bench.evaluate(slot_id, bench.text(5))
    n_reused = await bench.evaluate(slot_id, text)
    await bench.erase()
    if _is_reused(n_reused):
        return True
    if not _is_reused(n_reused_live):
        return None  # this model continues no state that is so short, wherever it comes from
    if prefers_similar:
        return False
    return await _brings_back_displaced(bench)


async def _brings_back_displaced(bench: Bench) -> bool | None:
    """Fill every slot and one more, and ask for the first prompt again."""
    if not bench.is_whole_server or bench.n_slots > _MOST_SLOTS_TO_FILL:
        return None
    text = bench.text(6)
    await bench.evaluate_anywhere(text[:PROBE_TOKENS])
    for seed in range(bench.n_slots):
        await bench.evaluate_anywhere(bench.text(7 + seed, PROBE_TOKENS))
    _, n_reused = await bench.evaluate_anywhere(text)
    await bench.erase()
    return _is_reused(n_reused)
