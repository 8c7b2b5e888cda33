"""Where a request runs: which llama-server, which model of a host, which slot llama-server will choose.

Pure: waiting requests, loaded models and the offers of llama-servers come in; a choice goes out.

Which model of a host is loaded next (`next_step`), for the waiting requests in arrival order:

1. A request whose model is loaded goes on, unless an earlier request waits for that model to be unloaded:
   otherwise a busy model would keep the others out for ever. Requests that waited for the load all go on.
2. For a request whose model is not loaded, the model is loaded once no request uses the models that must
   be unloaded for it. One model is loaded at a time.
3. Every other request waits.

Which of several llama-servers with the same model serves a request (`best_offer`):

1. Of those where the request need not wait for another request: the quickest; among equals the one that
   reuses most; among equals the least busy one.
2. If the request would have to wait everywhere: the least busy one; among equals the one that holds most
   of the prompt.

Which slot llama-server chooses for a request that cannot name one (`rivals`; server-context.cpp,
get_available_slot): among the idle slots the one whose tokens share the longest prefix with the prompt, the
lowest id on ties, if that prefix is more than a tenth of the prompt; else the one used longest ago.

Which slot a request continues without a plan (`slot_to_extend`): the slot that holds the prompt of all its
messages but the newest. No other slot may hold as much of that prompt, and neither a restore nor a stop
could gain more than a short message's tokens.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf

from proxy.core.cuts import LONG_MESSAGE_TOKENS, SLACK_TOKENS
from proxy.core.messages import BYTES_PER_TOKEN, Conversation, count_messages
from proxy.core.model import Prompt, Rule, SlotId, highest_point
from proxy.core.plan import STEADY_TOKENS, Situation, plan_request, promised_tokens
from proxy.core.saving import STEADY_SECONDS, state_bytes
from proxy.core.slots import Empty, Known, Slot, SlotPhase, Unknown, must_be_erased, shared_tokens
from proxy.core.tokens import Namespace, TokenIds, common_prefix_length

MIN_SIMILARITY = 0.1
"""llama-server's default of --slot-prompt-similarity."""

SHORT_MESSAGE_BYTES = 3 * LONG_MESSAGE_TOKENS
"""A shorter user message hardly ever gets a stop inside, and llama-server itself makes context checkpoints
where it begins and where it ends."""
_FRAME_TOKENS = 64
"""The most tokens that a template writes around a message."""


@dataclass(frozen=True, slots=True)
class Residents:
    """The models of a host: which are `loaded`, and how many requests use each.

    `used_at` is the time of the last request for each model, by any clock. `n_at_most` models may be loaded
    at once; if it is None, `together` holds the pairs of models that have been loaded at once before.
    """

    loaded: frozenset[str]
    n_users: Mapping[str, int]
    used_at: Mapping[str, float]
    n_at_most: int | None = None
    together: frozenset[frozenset[str]] = frozenset()

    def leaving_for(self, model: str) -> frozenset[str]:
        """Return the models that must be unloaded before *model* can be loaded.

        If there is a choice, idle models are unloaded first, and of these the one unused for longest.
        """
        others = self.loaded - {model}
        if self.n_at_most is None:
            return frozenset(o for o in others if frozenset((o, model)) not in self.together)
        n_too_many = max(0, len(others) + 1 - self.n_at_most)
        by_use = sorted(others, key=lambda o: (self.n_users.get(o, 0) > 0, self.used_at.get(o, 0)))
        return frozenset(by_use[:n_too_many])


def next_step(
    waiting: Sequence[str], residents: Residents, *, kept_out: Collection[str] = ()
) -> tuple[list[int], str | None, frozenset[str]]:
    """Return the requests that go on now, the model to load (None: none), and the models to unload for it.

    *waiting* has the model of each request in arrival order; requests are returned by their index.
    *kept_out* are the models that are just being loaded or unloaded: no request is admitted to them, and no
    other model is loaded meanwhile.
    """
    admitted: list[int] = []
    closed = set(kept_out)
    load, leaving = None, frozenset[str]()
    for index, model in enumerate(waiting):
        if model in closed:
            continue
        if model in residents.loaded:
            admitted.append(index)
            continue
        closed.add(model)
        if kept_out or load is not None:
            continue
        would_leave = residents.leaving_for(model)
        closed |= would_leave
        users = {m for m, n in residents.n_users.items() if n} | {waiting[i] for i in admitted}
        if would_leave.isdisjoint(users):
            load, leaving = model, would_leave
    return admitted, load, leaving


@dataclass(frozen=True, slots=True)
class Offer:
    """What one llama-server can do for a request."""

    seconds: float
    """To restore, evaluate and displace by the cheapest plan, or to wait for a slot that is being saved;
    infinite if the request would have to wait for another request."""
    n_reused: int
    load: float  # how many requests there are for each slot


def make_offer(
    prompt: Prompt, now: Situation, n_waiting: int, n_ahead: int = 0, *, may_start: bool = True
) -> Offer:
    """Return what a llama-server can do for a prompt, which cannot start at once unless it *may_start*.

    *n_waiting* requests wait there already, and *n_ahead* requests were sent there before this one.
    """
    plan = plan_request(prompt, now) if may_start else None
    soon = [(promised_tokens(prompt, now, s), s) for s in now.slots if s.is_closing]
    n_promised, slot = max(soon, key=lambda each: each[0], default=(0, None))
    if plan is not None:
        n_reused, seconds = plan.start.n_reused, plan.start.total_seconds
    elif slot is not None and n_promised:
        n_reused, seconds = n_promised, now.rates.save_seconds(state_bytes(now.sizes, slot.content))
        seconds += now.rates.evaluation_seconds(n_promised, prompt.n_tokens)
    else:
        shared = (shared_tokens(s.content, prompt.tokens, prompt.namespace) for s in now.slots)
        n_reused, seconds = max(shared, default=0), inf
    n_slots, n_used = max(1, len(now.slots)), now.n_busy + n_ahead
    return Offer(seconds if n_used < n_slots else inf, n_reused, (n_used + n_waiting) / n_slots)


def best_offer(offers: Sequence[Offer]) -> int:
    """Return the index of the best offer."""
    indexes = range(len(offers))
    quickest = min(offer.seconds for offer in offers)
    if isinf(quickest):
        return min(indexes, key=lambda i: (offers[i].load, -offers[i].n_reused))
    alike = [i for i in indexes if offers[i].seconds <= quickest + STEADY_SECONDS]
    most = max(offers[i].n_reused for i in alike)
    hottest = [i for i in alike if offers[i].n_reused > most - STEADY_TOKENS]
    return min(hottest, key=lambda i: (offers[i].load, offers[i].seconds))


def shared_at_most(slot: Slot, tokens: TokenIds) -> int:
    """Return how many leading tokens of a prompt a slot may hold when it is idle next.

    A leased slot may then hold its request's prompt and any tokens generated behind the prompt. The present
    content counts if that request was not sent yet (READY), or has had its answer (CLOSING).
    """
    content = slot.content
    n_held = len(tokens) if isinstance(content, Unknown) else 0
    if isinstance(content, Known):
        n_held = common_prefix_length(content.tokens, tokens)
        if n_held == len(content.tokens):
            n_held = min(n_held + content.n_tail, len(tokens))
    if slot.phase in (SlotPhase.FREE, SlotPhase.READY, SlotPhase.CLOSING):
        return n_held
    if slot.destined is None:
        return len(tokens)
    n_destined = common_prefix_length(slot.destined, tokens)
    if n_destined == len(slot.destined):
        n_destined = len(tokens)
    is_overwritten = isinstance(content, Unknown) and content.likely is not None
    return n_destined if slot.is_running or is_overwritten else max(n_destined, n_held)


def rivals(target: Slot, slots: Iterable[Slot], tokens: TokenIds) -> list[SlotId]:
    """Return the other slots that llama-server may choose for a prompt instead of *target*."""
    n_target = shared_tokens(target.content, tokens)
    others = [(shared_at_most(s, tokens), s.id) for s in slots if s.id != target.id]
    return [i for n, i in others if n > n_target or (n == n_target and i < target.id)]


def is_similar_enough(target: Slot, tokens: TokenIds) -> bool:
    """Return whether *target* is so similar to a prompt that llama-server chooses by similarity."""
    return shared_tokens(target.content, tokens) > MIN_SIMILARITY * len(tokens)


Pays = Callable[[int, int], bool]
"""`pays(n_saved, n_tokens)` says whether to save a state of *n_tokens* if a file has *n_saved* of them."""


def slot_to_extend(
    conversation: Conversation,
    slots: Collection[Slot],
    rule: Rule,
    namespace: Namespace,
    n_ctx: int,
    *,
    pays: Pays,
    is_pinned: bool,
) -> Slot | None:
    """Return the free slot that a request continues without a plan; None if the request needs a plan.

    The choice is by messages alone, before the prompt is rendered. llama-server compares the tokens in any
    case: a wrong choice costs tokens, never an answer. Unless the request *is_pinned*, llama-server chooses
    its slot.
    """
    if not rule.can_restore:
        return None

    def n_held(slot: Slot, tokens: TokenIds) -> int:
        return shared_tokens(slot.content, tokens) if is_pinned else shared_at_most(slot, tokens)

    for slot in slots:
        content = slot.content
        if slot.is_leased or not isinstance(content, Known) or content.is_stored_further:
            continue
        n_new = conversation.n_behind(content.conversation)
        if not n_new or must_be_erased(rule, content, namespace):
            continue
        tokens = content.tokens
        # No token is shorter than a byte.
        n_new_tokens = sum(conversation.sizes_bytes[-n_new:]) + (n_new + 1) * _FRAME_TOKENS
        n_most = content.n_tokens + n_new_tokens
        is_only = all(n_held(s, tokens) < len(tokens) for s in slots if s is not slot)
        is_similar = is_pinned or len(tokens) > MIN_SIMILARITY * n_most
        needs_no_plan = _gains_nothing_elsewhere(conversation, n_new, content, rule, pays)
        if n_most < n_ctx and is_only and is_similar and needs_no_plan:
            return slot
    return None


def _gains_nothing_elsewhere(
    conversation: Conversation, n_new: int, content: Known, rule: Rule, pays: Pays
) -> bool:
    """Return whether neither a stop nor a restore can help a request with so many new messages.

    The new messages must be one answer and the results of its tool calls, or one answer and a short user
    message. In the second case templates drop the reasoning of the turn before, so the prompt differs from
    the slot's tokens at the turn start. If a file can be continued before that, the slot must be as well.
    Under *end only* there is a stop wherever another file pays.
    """
    answer, *others = conversation.roles[-n_new:]
    is_step = answer == "assistant" and "assistant" not in others
    if not is_step or not others or others[-1] not in ("tool", "user"):
        return False
    if rule.is_any_prefix:
        return True
    size_bytes, n_saved = sum(conversation.sizes_bytes[1 - n_new :]), content.n_saved
    begins_turn = "user" in others
    n_back = content.turn_start if begins_turn else len(content.tokens)
    n_in_file = highest_point(content.saved_points, n_back)
    if rule.is_end_only:
        n_in_file = min(n_saved, n_back)
        if not n_saved or pays(n_saved, content.n_tokens + size_bytes // BYTES_PER_TOKEN):
            return False
    is_only_in_file = n_in_file > highest_point(content.restore_points, n_back) + SLACK_TOKENS
    is_long = begins_turn and size_bytes > SHORT_MESSAGE_BYTES
    return not is_long and not is_only_in_file


# The slot for a request whose prompt is not looked up, and the slot to empty for another purpose: the one
# with the least to lose.


def choose_slot_for_bypass(
    slots: Collection[Slot], namespace: Namespace, digests: bytes = b""
) -> Slot | None:
    """Return the free slot for a request whose prompt is not known, or None if there is none.

    llama-server reuses what a slot holds of the prompt. The request takes the first that there is of:

    1. a slot that such a request of the same tenant used before. More than half of the messages in the
    slot must come again, or all messages of the request stand there. Else the slot may hold another
    conversation with the same system prompt;
    2. an empty slot;
    3. the slot whose loss costs least.

    *digests* are those of the request's messages; empty if it has none, as an editor's.
    """

    def n_again(held: Unknown) -> int:
        return count_messages(held.digests[: common_prefix_length(held.digests, digests)])

    going_on = [
        (n_again(held), slot.used_at, slot.id, slot)
        for slot, held in _unknown_slots(slots, namespace)
        if 2 * n_again(held) > count_messages(held.digests)
        or (n_again(held) == count_messages(digests) and bool(held.digests) == bool(digests))
    ]
    return max(going_on)[-1] if going_on else choose_slot_to_empty(slots)


def choose_slot_for_brief(
    slots: Collection[Slot], conversation: Conversation, namespace: Namespace
) -> Slot | None:
    """Return the free slot for a chat that is too short to be looked up, or None if each costs something.

    First the slot that holds the chat's beginning, then an empty slot, then that of the oldest brief chat.
    """
    brief = {slot.id: held.brief for slot, held in _unknown_slots(slots, namespace) if held.brief}
    cheap = [slot for slot in slots if slot.id in brief or isinstance(slot.content, Empty)]
    same = (s for s in cheap if s.id in brief and conversation.digests.startswith(brief[s.id]))
    return max(same, key=lambda s: len(brief[s.id]), default=None) or choose_slot_to_empty(cheap)


def _unknown_slots(slots: Iterable[Slot], namespace: Namespace) -> list[tuple[Slot, Unknown]]:
    """Return the free slots that hold what was not read of a tenant's requests."""
    free = [(slot, slot.content) for slot in slots if not slot.is_leased]
    return [(s, c) for s, c in free if isinstance(c, Unknown) and c.tenant == namespace]


def choose_slot_to_empty(slots: Iterable[Slot]) -> Slot | None:
    """Return the free slot whose loss costs least, or None if there is none."""

    def loss(slot: Slot) -> tuple[int, bool, float]:
        n_unsaved = slot.content.n_unsaved + 1 if isinstance(slot.content, Known) else 0
        return n_unsaved, not isinstance(slot.content, Empty), slot.used_at

    return min((slot for slot in slots if not slot.is_leased), key=loss, default=None)
