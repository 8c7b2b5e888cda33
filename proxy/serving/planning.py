"""Plans of requests to one process: the situation that a plan is made for, and plans without a choice."""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from proxy.core.conditions import DegradationKind
from proxy.core.cuts import CONTEXT_CHECKPOINT_MARGIN, SLACK_TOKENS, Stop
from proxy.core.model import Candidate, Checkpoint, CheckpointKind, ExpectedState, Prompt, SlotId
from proxy.core.plan import Plan, Situation, Start, Why, as_loaded, plan_request, promising
from proxy.core.residency import Offer, make_offer
from proxy.core.saving import at_savable_point, expected_bytes, state_bytes
from proxy.core.slots import Known, SlotPhase, Unknown, live_reuse, shared_tokens
from proxy.errors import StoreFault
from proxy.llama.client import Timings
from proxy.log import get_logger
from proxy.serving.process import Process
from proxy.serving.request import NO_READ, NO_STORE, Request

LEAST_DISK_SECONDS = 5
"""A disk may take so long for a state, however soon its tokens would be evaluated."""


def look_up(process: Process, prompt: Prompt) -> tuple[tuple[Candidate, ...], int]:
    """Return the usable checkpoints, and the longest prefix shared with any checkpoint."""
    if not process.rule.can_restore:
        return (), 0
    watching = process.watching(DegradationKind.LOOKUPS_FAIL, Exception)
    with process.faults.suppressed("lookup"), watching:
        stored = process.store.find(prompt.namespace, prompt.tokens)
        return promising(process.rule, loaded(process, stored), prompt.n_tokens)
    return (), 0


def has_file(process: Process, prompt: Prompt, n_saved: int) -> bool:
    """Return whether a stored state ends within a prompt, behind its first *n_saved* tokens or later."""
    found, _ = look_up(process, prompt)
    return any(c.n_common == c.checkpoint.n_tokens >= n_saved for c in found)


def loaded(process: Process, found: Iterable[Candidate]) -> Iterator[Candidate]:
    """Return candidates with only those context checkpoints of their files that llama-server loads."""
    n_points = process.n_loaded_points
    return (replace(c, checkpoint=as_loaded(c.checkpoint, n_points)) for c in found)


def counts_on_fewer(process: Process, checkpoint: Checkpoint, n_missed: int) -> bool:
    """Count on fewer context checkpoints of a file, because the one at *n_missed* tokens was not reused.

    llama-server loads only the newest ones, but as many as it has ever written. Half of those down to the
    missed one are counted on, until a save shows more. Returns False if none can be left out.
    """
    n_points = sum(point >= n_missed for point in checkpoint.restore_points)
    if n_points <= max(1, process.n_written_points):
        return False
    n_fewer = max(process.n_written_points, n_points // 2)
    process.n_loaded_points = n_fewer
    get_logger("cache").info("llama-server loads fewer context checkpoints", n=n_fewer)
    return True


def situation(process: Process, prompt: Prompt) -> Situation:
    """Return the slots, checkpoints and rates as they are now."""
    candidates, n_shared = look_up(process, prompt)
    return Situation(
        rule=process.rule,
        slots=tuple(process.slots),
        candidates=candidates,
        rates=process.rates,
        n_ctx=process.n_ctx,
        n_shared=n_shared,
        time=time.monotonic(),
        sizes=process.sizes,
        expected=tuple(process.queue.expected),
        n_kept_points=process.n_kept_points,
    )


def offer(process: Process, request: Request) -> Offer:
    """Return what a llama-server can do for a request now; without a prompt, by how busy it is."""
    n_waiting, n_ahead = process.n_queued, len(process.on_way)
    if request.prompt is None:
        n_used = sum(slot.is_leased for slot in process.slots) + n_waiting + n_ahead
        return Offer(0.0, 0, n_used / max(1, len(process.slots)))
    prompt = replace(request.prompt, namespace=process.tenant_namespace(request.tenant))
    may_start = not process.launches.must_wait(prompt.n_tokens)
    return make_offer(prompt, situation(process, prompt), n_waiting, n_ahead, may_start=may_start)


def plan_in(process: Process, prompt: Prompt, slot_id: SlotId) -> Plan:
    """Return the cheapest plan in one slot, leased or not."""
    now = situation(process, prompt)
    mine = replace(now.slots[slot_id], phase=SlotPhase.FREE)
    plan = plan_request(prompt, replace(now, slots=(mine,), expected=()))
    assert plan is not None  # its slot counts as free, and no state is expected
    return plan


def note_asked(process: Process, prompt: Prompt) -> None:
    """Tell the store which prompt was asked for."""
    with process.faults.suppressed("lookup", StoreFault):
        if (store := process.opened_store) is not None:
            store.note_asked(prompt.namespace, prompt.tokens)


def after_prompt(process: Process, slot_id: SlotId, prompt: Prompt) -> Known:
    """Return what a slot holds once a prompt was evaluated in it, if no less than planned was reused."""
    before = process.slots[slot_id].content
    n_common = shared_tokens(before, prompt.tokens, prompt.namespace)
    n_reused, _ = live_reuse(process.rule, before, n_common, prompt.n_tokens)
    return process.content_after(before, prompt, Timings(n_reused, prompt.n_tokens - n_reused))


async def verify(process: Process, checkpoint: Checkpoint, n_tokens: int) -> None:
    """Verify a checkpoint of which *n_tokens* are wanted; raises StoreFault if it cannot be."""
    await process.store.verify(checkpoint, most_seconds=disk_seconds(process, n_tokens))


def disk_seconds(process: Process, n_tokens: int) -> float:
    """Return how long a disk may take to read or write a state of which *n_tokens* are wanted.

    A disk that fails may take for ever: it gets the time in which llama-server would evaluate the tokens.
    """
    return max(LEAST_DISK_SECONDS, round(process.rates.evaluation_seconds(0, n_tokens)))


def plan_behind_media(process: Process, request: Request) -> Plan | None:
    """Return the plan to go on in a slot with the same text before its first image, if there is one.

    Whether the images are the same is for llama-server to tell, which compares digests of their bytes.
    """
    prompt = request.prompt
    if prompt is None or not prompt.is_before_media or NO_READ in request.wishes:
        return None
    same = [
        slot
        for slot in process.slots.free()
        if isinstance(slot.content, Known)
        and (slot.content.tenant, slot.content.tokens) == (prompt.namespace, prompt.tokens)
    ]
    if not same:
        return None
    newest = max(same, key=lambda slot: slot.used_at)
    start = Start(newest.id, prompt.n_tokens, sys.maxsize)
    return Plan(start, why=Why.EXTENDS, n_shared=prompt.n_tokens)


def as_wished(process: Process, request: Request, prompt: Prompt, plan: Plan) -> Plan:
    """Return the plan without the reuse, or without the saves, that the client does not want.

    The text before an image is saved alone: a state with images in it is not.
    """
    n_tokens = prompt.n_tokens
    if prompt.is_before_media and plan.why is not Why.TOO_LONG:
        start = replace(plan.start, n_at_most=sys.maxsize)
        is_kept = n_tokens - plan.n_shared <= SLACK_TOKENS
        stops = [stop for stop in plan.stops if stop.n_tokens < n_tokens]
        text = Stop(n_tokens, None if is_kept else CheckpointKind.CONVERSATION)
        plan = replace(plan, start=start, stops=(*stops, text))
    if NO_READ in request.wishes:
        seconds = process.rates.evaluation_seconds(0, n_tokens)
        start = Start(plan.slot_id, 0, 0, None, seconds, plan.start.displacement, erases=True)
        plan = replace(plan, start=start, why=Why.NOT_WANTED)
    if NO_STORE in request.wishes:
        plan = replace(plan, stops=tuple(replace(stop, save_as=None) for stop in plan.stops))
    return plan


# States that are about to be saved. When two requests with the same new header come at the same moment,
# the first evaluates and saves the header, and the second waits for that state. The same holds for a
# conversation whose slot is being saved when its next request comes.


def displaced_state(process: Process, slot_id: SlotId) -> ExpectedState | None:
    """Return the state that is saved before another request takes its slot, None if there is none.

    If the slot's request was abandoned, only the save will tell what the slot holds, and the next request
    can go on there at once: so the state has no size, and points everywhere.
    """
    content, can_be_cut = process.slots[slot_id].content, process.rule.is_any_prefix
    if isinstance(content, Unknown) and content.likely and content.tenant:
        tokens, now = content.likely[:-CONTEXT_CHECKPOINT_MARGIN], time.monotonic()
        points = tuple(range(0, len(tokens), SLACK_TOKENS))
        return ExpectedState(tokens, content.tenant, now, 0, points, can_be_cut)
    if not isinstance(content, Known):
        return None
    saved = at_savable_point(process.rule, content)
    size_bytes = state_bytes(process.sizes, saved)
    expected_at = time.monotonic() + process.rates.save_seconds(size_bytes)
    points = saved.restore_points
    return ExpectedState(saved.tokens, saved.tenant, expected_at, size_bytes, points, can_be_cut)


def first_save(process: Process, prompt: Prompt, plan: Plan) -> ExpectedState | None:
    """Return the first state that a plan saves at a stop, None if it saves none."""
    index = next((i for i, stop in enumerate(plan.stops) if stop.save_as), None)
    if index is None:
        return None
    stop, rates = plan.stops[index], process.rates
    points = tuple(before.n_tokens for before in plan.stops[:index])
    size_bytes = expected_bytes(process.sizes, stop.n_tokens, 2) or 0
    seconds = plan.start.displacement.delay_seconds + rates.save_seconds(size_bytes)
    seconds += rates.evaluation_seconds(plan.start.n_reused, stop.n_tokens)
    tokens, expected_at = prompt.tokens[: stop.n_tokens], time.monotonic() + seconds
    can_be_cut = process.rule.is_any_prefix
    return ExpectedState(tokens, prompt.namespace, expected_at, size_bytes, points, can_be_cut)
