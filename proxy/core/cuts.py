"""Where a prompt is cut: to make a state that the next request can use, or because the prompt does not fit.

Owns: which of a prompt's stable cuts are worth a stop, which context checkpoints llama-server makes and
drops, and where a conversation that outgrew the context is cut. Must never know how a cut is found (by
rendering, or by comparing prompts) or made (by evaluating the prefix alone).

A stop at a cut costs no tokens: llama-server evaluates `ids[:cut]`, then the request continues there. The
benefit of a stop depends on the rule:

1. Restore points: llama-server makes a context checkpoint just before the end of every prompt, so a stop
   makes one at the cut. Every later save of that slot contains it.
2. End only: a later request can continue a state only at the state's end. So the slot is saved at the cut;
   or a later save rewinds the slot to the cut first, for a few tokens.
3. Any rule: a state that is saved at the cut can be restored into other slots while the request goes on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from proxy.core.model import Candidate, CheckpointKind, Cuts, Rule, highest_point, usable_tokens
from proxy.core.tokens import FIRST_BLOCK_TOKENS

SLACK_TOKENS = 16
"""A cut counts as covered by a restore point this close below it."""

MIN_CUT_TOKENS = 64
"""A stop at a shorter prefix is not worth its round trip."""

MIN_STRIDE_TOKENS = 32
"""Stops for context checkpoints are no closer than this: the lower one serves both."""

MIN_BRANCH_TOKENS = 64
"""If two prompts share this many tokens more than can be reused, the second stops there for a third."""

LONG_MESSAGE_TOKENS = 2048
"""A shorter user message gets no stops inside: a stop costs two short batches, about as much as 50 tokens,
and few messages are changed."""

MESSAGE_STOP_TOKENS = 256
"""A stop inside a user message lies at least so many tokens behind its beginning and before its end."""

CONTEXT_CHECKPOINT_MARGIN = 5
"""llama-server makes a context checkpoint 4 tokens before a prompt's end (server-context.cpp,
"checkpoint the last"); a sliding-window model continues one token before it."""


def own_point(n_prompt: int) -> int:
    """Return where llama-server itself makes a context checkpoint, at the latest, near a prompt's end."""
    return n_prompt - CONTEXT_CHECKPOINT_MARGIN + 1


@dataclass(frozen=True, slots=True)
class Stop:
    """Evaluate the first n_tokens alone; with `save_as`, save the slot there as such a checkpoint."""

    n_tokens: int
    save_as: CheckpointKind | None = None


def is_near(points: tuple[int, ...], n_cut: int) -> bool:
    """Return whether one of the ascending *points* lies at the token *n_cut* or just before it."""
    return highest_point(points, n_cut) >= n_cut - SLACK_TOKENS


def is_covered(rule: Rule, candidates: Iterable[Candidate], n_cut: int) -> bool:
    """Return whether a stored checkpoint can be restored at *n_cut* or just before it."""
    return any(_usable_before(rule, c, n_cut) >= n_cut - SLACK_TOKENS for c in candidates)


def _usable_before(rule: Rule, candidate: Candidate, n_cut: int) -> int:
    n_common = min(candidate.n_common, n_cut)
    return usable_tokens(rule, candidate.checkpoint, n_common, n_cut + 1)


def worth_a_file(
    rule: Rule, cuts: Cuts, candidates: Sequence[Candidate], pays: Callable[[int, int, bool], bool]
) -> Cuts:
    """Return *cuts* without those at which another file of a conversation does not pay.

    Under *end only* each cut needs its own file. `pays(n_saved, n_cut, at_once)` says whether a state of
    *n_cut* tokens pays if a file has *n_saved* of them. A state is saved at once, or behind the end of the
    prompt, mostly when nothing else runs.
    """
    if not rule.is_end_only:
        return cuts

    def kept(n_cut: int, *, at_once: bool) -> int:
        n_saved = max((_usable_before(rule, c, n_cut) for c in candidates), default=0)
        return n_cut if not n_saved or pays(n_saved, n_cut, at_once) else 0

    branch, turn_start = (kept(n_cut, at_once=True) for n_cut in (cuts.branch, cuts.turn_start))
    end = kept(cuts.message_end, at_once=False)
    return replace(cuts, branch=branch, turn_start=turn_start, message_end=end)


def branch_of(rule: Rule, n_shared: int, n_prompt: int, n_reused: int) -> int:
    """Return the token at which a prompt branches off from an earlier one; 0 if no stop is needed there.

    The prompt shares its first *n_shared* tokens with the earlier prompt and reuses *n_reused* of them.
    """
    needs_point = rule.is_restore_points or rule.is_end_only
    is_inside = MIN_CUT_TOKENS <= n_shared < n_prompt - 1
    return n_shared if needs_point and is_inside and n_shared > n_reused + MIN_BRANCH_TOKENS else 0


def cuts_in_message(n_begin: int, n_end: int) -> Iterator[int]:
    """Yield cuts in a user message from *n_begin* to *n_end*: 256, 512, 1,024 ... tokens before its end.

    Users go back and change the end of a long message. With a context checkpoint at each cut, the unchanged
    tokens that are evaluated again are no more than those from the change on, or 256.
    """
    n_back = MESSAGE_STOP_TOKENS
    while n_end - n_back > n_begin:
        yield n_end - n_back
        n_back *= 2


def choose_stops(
    rule: Rule,
    cuts: Cuts,
    candidates: tuple[Candidate, ...],
    n_reused: int,
    n_prompt: int,
    *,
    shares_header: bool = False,
    n_inside: int = 0,
) -> tuple[Stop, ...]:
    """Return the stops, ascending, for a prompt of *n_prompt* tokens that is evaluated from *n_reused* on.

    With *shares_header* the header, with the surroundings if there are any, is saved as soon as it is
    evaluated, for requests in other slots. A long message gets at most *n_inside* stops.
    """
    if not rule.can_restore:
        return ()

    def is_ahead(n_cut: int) -> bool:
        return n_cut >= MIN_CUT_TOKENS and n_cut > n_reused + SLACK_TOKENS

    def is_needed(n_cut: int) -> bool:
        return is_ahead(n_cut) and not is_covered(rule, candidates, n_cut)

    stops: dict[int, CheckpointKind | None] = {}
    for n_cut, save_as in _saved(rule, cuts, shares_header=shares_header):
        near = next((stop for stop in stops if abs(n_cut - stop) <= SLACK_TOKENS), None)
        if is_needed(n_cut) and (near is None or n_cut < near):
            # Of two cuts that are near, the lower one serves the prompts of both; it is saved as the more
            # important one, which came first.
            stops[n_cut] = stops.pop(near) if near is not None else save_as
    if rule.is_end_only and is_ahead(cuts.message_end):
        stops.setdefault(cuts.message_end, None)
    for n_cut in _unsaved(rule, cuts, n_inside):
        if rule.is_restore_points and is_near((own_point(n_prompt),), n_cut):
            continue  # llama-server makes a context checkpoint there itself
        if is_needed(n_cut) and all(_is_far(rule, n_cut, n) for n in (n_reused, *stops)):
            stops[n_cut] = None
    return tuple(Stop(n, stops[n]) for n in sorted(stops))


def _is_far(rule: Rule, n_cut: int, n_other: int) -> bool:
    """Return whether a context checkpoint at *n_cut* lies far enough from the one at *n_other*."""
    if rule.is_end_only:
        return abs(n_cut - n_other) >= rule.stride_tokens
    return n_other > n_cut or n_cut - n_other >= MIN_STRIDE_TOKENS


def _saved(rule: Rule, cuts: Cuts, *, shares_header: bool) -> Iterator[tuple[int, CheckpointKind]]:
    """Yield the cuts at which the slot is saved, the most important first."""
    if not rule.is_end_only and shares_header and cuts.surroundings > cuts.header:
        # This state can also be continued at the header. A later state of the conversation has both cuts.
        yield cuts.surroundings, CheckpointKind.CONVERSATION
    elif rule.is_end_only or shares_header:
        yield cuts.header, CheckpointKind.HEADER
    if rule.is_end_only:
        yield cuts.turn_start, CheckpointKind.TURN_START
        yield cuts.branch, CheckpointKind.BRANCH


def _unsaved(rule: Rule, cuts: Cuts, n_inside: int) -> list[int]:
    """Return the cuts at which a stop makes a context checkpoint, ascending.

    Where a state cannot be continued at its end (a window that is not full), a stop costs a few tokens:
    there only cuts that other prompts share are worth a stop. Under *end only* the live slot has the
    context checkpoint but the files do not: a cut where a conversation forks is not worth its own file.
    """
    if rule.is_any_prefix:
        return []
    inside: Iterable[int] = ()
    is_long = cuts.turn_start - cuts.message_begin >= LONG_MESSAGE_TOKENS
    if cuts.ends_with_user and is_long:
        n_first = cuts.message_begin + MESSAGE_STOP_TOKENS - 1
        inside = islice(cuts_in_message(n_first, cuts.turn_start), n_inside)
    if rule.is_end_only:
        return sorted({cuts.surroundings, cuts.last_turn_end, *inside} - {0})
    marks = cuts.surroundings, cuts.last_turn_end, cuts.turn_start, *inside
    in_turn = [n for n in marks if n >= rule.end_holds_from]
    return sorted({cuts.header, cuts.branch, *in_turn} - {0})


# The context checkpoints of a slot, each by the tokens before it: its points. The rules are those of
# llama-server 0.7.0 (server-context.cpp, update_slots and create_checkpoint).


MAX_CONTEXT_CHECKPOINTS = 32
"""llama-server's default of --ctx-checkpoints: the most that a slot keeps. Of a file with more, the newest
are loaded (server-context.cpp, load_slot_checkpoints)."""

MIN_STEP_TOKENS = 8192
"""llama-server's default of --checkpoint-min-step."""

UBATCH_TOKENS = 512
"""llama-server's default --ubatch-size, a physical batch: on a GPU fewer tokens take nearly as long. It
makes a context checkpoint this many tokens before the one near a prompt's end."""

POINTS_PER_REQUEST = 3
"""llama-server makes at most this many context checkpoints for one request with few new tokens."""


def points_made(n_from: int, n_to: int, *, has_messages: bool) -> tuple[int, ...]:
    """Return the points that an evaluation of the tokens from *n_from* to *n_to* may make, ascending.

    The last one is made for certain: near the end, or where the evaluation begins if that is later. Another
    one lies a physical batch before that, or where the evaluation begins. If the prompt *has_messages*,
    llama-server makes one where the newest user message begins, and one at each user message that begins
    over MIN_STEP_TOKENS behind the last point; nobody tells where, so they count as many as they can be.
    """
    newest = max(n_from, n_to - CONTEXT_CHECKPOINT_MARGIN)
    n_before = max(n_from, newest - UBATCH_TOKENS)
    # A slot without any point gets one at the first user message, however early that begins.
    n_first = n_from + MIN_STEP_TOKENS + 1 if n_from > 0 else 1
    earlier = range(n_first, n_before, MIN_STEP_TOKENS + 1)
    made = (*earlier, n_before, n_before + 2, newest) if has_messages else (n_before, newest)
    return tuple(sorted({n for n in made if 0 < n <= newest}))


def points_after(points: Sequence[int], made: Sequence[int], n_kept: int) -> tuple[int, ...]:
    """Return the points of a slot, the oldest first, after one request has *made* more of them.

    Once the slot has all but one of the *n_kept* that it may have, llama-server drops points within
    MIN_STEP_TOKENS behind the one before, the lowest first, but none of this request. The lowest of all
    goes only if the slot is full all the same.
    """
    kept = list(points)
    for point in made:
        at = 1
        while len(kept) >= n_kept - 1 and at < len(kept):
            if kept[at] <= kept[at - 1] + MIN_STEP_TOKENS and kept[at] not in made:
                del kept[at]
            else:
                at += 1
        kept = kept[max(0, len(kept) - n_kept + 1) :]
        # One at the same tokens is made again; a prediction may be a token too low.
        if not kept or point not in (kept[-1], kept[-1] + 1):
            kept.append(point)
    return tuple(kept) if n_kept else ()


def stops_with_room(n_kept: int) -> int:
    """Return how many stops leave the points of the header and of the request itself in the slot.

    Each stop makes two points; the header has two, and a user message one more. Other stops, as at the
    surroundings, take the header's second place: new sessions then evaluate a batch of the header again.
    """
    return max(0, n_kept - 2 * POINTS_PER_REQUEST) // 2


def kept_after_save(n_kept: int, points: Sequence[int], saved: tuple[int, ...]) -> int:
    """Return how many points a slot keeps, after a save told which of the predicted *points* exist.

    If an old one is gone, llama-server had no room for it. A file with few points tells nothing:
    llama-server makes none for a short prompt, and a prediction can be wrong by a few tokens. If there are
    more than were believed in, nobody has told the number, and it is rather llama-server's default.
    """
    old = [n for n in points[:2] if FIRST_BLOCK_TOKENS <= n < max(saved, default=0)]
    are_there = all(is_near(saved, n + CONTEXT_CHECKPOINT_MARGIN) for n in old)
    if len(saved) >= POINTS_PER_REQUEST and not are_there:
        return len(saved) + 1
    return MAX_CONTEXT_CHECKPOINTS if len(saved) > n_kept else n_kept


# Where a conversation that does not fit the context is cut: in large steps, so that the cut rarely moves.
# A cut depends only on the messages before it, so a longer conversation has the same cuts, also after a
# restart.


_RESERVE_SHARE = 1 / 8
"""The most of the context that is kept free for the answer, however long the client lets it be."""
_KEPT_SHARE = 0.6
"""About this share of the context is filled after a cut, so that the next cut is far away."""
_MOST_RENDERED = 2
"""A rendered message has at most this many times its own tokens."""
_TURN_AHEAD_SHARE = 1 / 2
"""If no turn begins within this share of a step, the conversation is cut in the middle of a turn."""


@dataclass(frozen=True, slots=True)
class MessageSize:
    """One message of a conversation, and how many tokens it has by itself.

    A user message begins a turn, an answer of the model begins a step; results of tool calls begin neither.
    """

    n_tokens: int
    begins_turn: bool = False
    begins_step: bool = False


@dataclass(frozen=True, slots=True)
class ContextCut:
    """The messages that stay: those from `first` on, and `asked`, the user message of a turn cut in two.

    The other messages have `n_left_out` tokens.
    """

    first: int
    asked: int | None
    n_left_out: int


def room_for_prompt(n_ctx: int, n_wanted: int | None) -> int:
    """Return how long a prompt may be to leave room for an answer of *n_wanted* tokens, 1 at least."""
    most = int(n_ctx * _RESERVE_SHARE)
    return n_ctx - (most if n_wanted is None or n_wanted < 0 else min(max(1, n_wanted), most))


def step_of(n_ctx: int, n_room: int) -> int:
    """Return how many tokens one step leaves out."""
    return max(1, n_room - int(n_ctx * _KEPT_SHARE))


def places_to_cut(parts: Sequence[MessageSize], n_step: int) -> list[ContextCut]:
    """Return where a conversation may be cut: the i-th cut leaves out at least i + 1 steps.

    A cut is where the next turn begins, or the next answer of the model if no turn begins soon. The newest
    user message always stays, and tool calls stay together with their results.
    """
    before = [0, *accumulate(part.n_tokens for part in parts)]
    places: list[ContextCut] = []
    begins = [i for i, part in enumerate(parts) if part.begins_turn or part.begins_step]
    turns = [i for i in begins if parts[i].begins_turn]
    while begins := [i for i in begins if before[i] >= (len(places) + 1) * n_step]:
        n_ahead = (len(places) + 1) * n_step + int(n_step * _TURN_AHEAD_SHARE)
        first = next((i for i in begins if parts[i].begins_turn and before[i] < n_ahead), begins[0])
        # If a turn is cut in two, its user message stays.
        asked = None if first in turns else max((i for i in turns if i < first), default=None)
        n_asked = parts[asked].n_tokens if asked is not None else 0
        places.append(ContextCut(first, asked, before[first] - n_asked))
    return places


def first_to_try(places: Sequence[ContextCut], n_over: int, reached: int) -> int:
    """Return the index of the cut to try first for a prompt that is *n_over* tokens too long.

    The first cut that may be enough is tried, because only a rendering tells whether it is enough. No cut
    before *reached* is tried, where the conversation was cut already: past turns may render shorter now.
    """
    enough = (i for i, p in enumerate(places) if p.n_left_out * _MOST_RENDERED >= n_over)
    last = max(0, len(places) - 1)
    return max(next(enough, last), min(reached, last))
