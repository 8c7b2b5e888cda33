"""Where a prompt is cut: for a state that the next request can use, or because the prompt does not fit.

Owns: which of a prompt's stable cuts are worth a stop on the way, and where a conversation that outgrew
the context is cut. Must never know how a cut is found (by rendering, or by what prompts share) or made
(by evaluating the prefix alone).

A stop at a cut costs no tokens: llama-server evaluates `ids[:cut]`, then the request continues there. What
a stop buys depends on the rule:

1. Restore points: llama-server makes a context checkpoint just before the end of every prompt, so a stop
   plants one at the cut, which every later save of that slot carries.
2. End only: the state at the cut is the only one that a later request can continue, so the slot is saved
   there, or can be rewound to the cut for a few tokens when it is saved later.
3. Any rule: a state that is saved at the cut can be restored into other slots while this one goes on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from proxy.core.model import (
    Candidate,
    CheckpointKind,
    Cuts,
    Rule,
    RuleKind,
    highest_point,
    usable_tokens,
)

SLACK_TOKENS = 16
"""A cut counts as covered by a restore point this close below it."""

MIN_CUT_TOKENS = 64
"""A shorter prefix is not worth the round trip of a stop."""

MIN_STRIDE_TOKENS = 32
"""Two context checkpoints are planted no closer than this: the lower one serves both cuts."""

MIN_BRANCH_TOKENS = 64
"""If two prompts share this many tokens more than can be reused, a stop is made for the next prompt."""

MESSAGE_STOP_TOKENS = 256
"""A stop inside a user message lies at least so many tokens behind its beginning and before its end."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Evaluate the first n_tokens alone, and save the slot there if `save_as` says what it is."""

    n_tokens: int
    save_as: CheckpointKind | None = None


def is_near(points: tuple[int, ...], place: int) -> bool:
    """Return whether one of the ascending *points* lies at a place or just before it."""
    return highest_point(points, place) >= place - SLACK_TOKENS


def is_covered(rule: Rule, candidates: Iterable[Candidate], n_cut: int) -> bool:
    """Return whether a stored checkpoint can be restored at *n_cut* or just before it."""
    return any(
        usable_tokens(rule, c.checkpoint, min(c.n_common, n_cut), n_cut + 1) >= n_cut - SLACK_TOKENS
        for c in candidates
    )


def branch_of(rule: Rule, n_shared: int, n_prompt: int, n_reused: int) -> int:
    """Return where a prompt branches off from an earlier one, 0 if the tokens before can be reused already.

    The prompt shares its first *n_shared* tokens with the earlier prompt, and *n_reused* of them are
    reused.
    """
    needs_point = rule.kind in (RuleKind.RESTORE_POINTS, RuleKind.END_ONLY)
    is_inside = MIN_CUT_TOKENS <= n_shared < n_prompt - 1
    return n_shared if needs_point and is_inside and n_shared > n_reused + MIN_BRANCH_TOKENS else 0


def places_in_message(n_begin: int, n_end: int) -> Iterator[int]:
    """Yield places in a user message from *n_begin* to *n_end*: 256, 512, 1,024 ... tokens before its end.

    Users go back and change the end of a long message. With a context checkpoint at each place, the tokens
    that are evaluated again before the change are no more than those behind it, or 256.
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
    *,
    shares_header: bool = False,
) -> tuple[Stop, ...]:
    """Return the stops, ascending, for a prompt whose evaluation begins at *n_reused*.

    With *shares_header* the header is saved as soon as it is evaluated, for requests in other slots; with
    the surroundings behind it, where there are any.
    """
    if rule.kind is RuleKind.NOTHING:
        return ()

    def is_ahead(n_cut: int) -> bool:
        return n_cut >= MIN_CUT_TOKENS and n_cut > n_reused + SLACK_TOKENS

    def is_needed(n_cut: int) -> bool:
        return is_ahead(n_cut) and not is_covered(rule, candidates, n_cut)

    stops: dict[int, Stop] = {}
    for n_cut, save_as in _saved(rule, cuts, shares_header=shares_header):
        near = next((stop for stop in stops if abs(n_cut - stop) <= SLACK_TOKENS), None)
        if is_needed(n_cut) and (near is None or n_cut < near):
            # Of two that are near, both prompts can continue the shorter state.
            more_important = stops.pop(near).save_as if near is not None else save_as
            stops[n_cut] = Stop(n_cut, more_important)
    if rule.kind is RuleKind.END_ONLY and is_ahead(cuts.message_end):
        stops.setdefault(cuts.message_end, Stop(cuts.message_end))
    for n_cut in _planted(rule, cuts):
        if is_needed(n_cut) and all(_is_far(rule, n_cut, n) for n in (n_reused, *stops)):
            stops[n_cut] = Stop(n_cut)
    return tuple(stops[n] for n in sorted(stops))


def _is_far(rule: Rule, n_cut: int, n_other: int) -> bool:
    """Return whether a context checkpoint may be planted at *n_cut*, and costs another stop nothing."""
    if rule.kind is RuleKind.END_ONLY:
        return abs(n_cut - n_other) >= rule.stride_tokens
    return n_other > n_cut or n_cut - n_other >= MIN_STRIDE_TOKENS


def _saved(rule: Rule, cuts: Cuts, *, shares_header: bool) -> Iterator[tuple[int, CheckpointKind]]:
    """Yield the cuts at which the slot is saved, the most important first."""
    if rule.kind is not RuleKind.END_ONLY and shares_header and cuts.surroundings > cuts.header:
        # The header is a place of that state, and of the conversation's that will supersede it.
        yield cuts.surroundings, CheckpointKind.CONVERSATION
    elif rule.kind is RuleKind.END_ONLY or shares_header:
        yield cuts.header, CheckpointKind.HEADER
    if rule.kind is RuleKind.END_ONLY:
        yield cuts.turn_start, CheckpointKind.TURN_START
        yield cuts.branch, CheckpointKind.BRANCH


def _planted(rule: Rule, cuts: Cuts) -> list[int]:
    """Return the cuts at which a context checkpoint is planted, ascending.

    Where a prompt's end does not hold (a window that is not full), a stop costs a few tokens: there only
    what other prompts share is worth one. Under *end only* the files do not carry it, but the live slot
    has it: the place where a conversation forks is not worth a file of its own there.
    """
    if rule.kind is RuleKind.ANY_PREFIX:
        return []
    inside: Iterable[int] = ()
    if cuts.turn_start == cuts.message_end:  # the prompt ends with a user message
        n_begin = max(cuts.shared, cuts.last_turn_end)
        inside = places_in_message(n_begin + MESSAGE_STOP_TOKENS - 1, cuts.turn_start)
    if rule.kind is RuleKind.END_ONLY:
        return sorted({cuts.surroundings, cuts.last_turn_end, *inside} - {0})
    marks = cuts.surroundings, cuts.last_turn_end, cuts.turn_start, *inside
    in_turn = [n for n in marks if n >= rule.end_holds_from]
    return sorted({cuts.header, cuts.branch, *in_turn} - {0})


# Where a conversation that does not fit the context is cut: in large steps, so that it stays cut there.
# The places are told by the messages before them alone, so that a longer conversation has the same ones,
# after a restart as well.


_RESERVE_SHARE = 1 / 8
"""So much of the context is kept free for the answer, whatever the client allows it."""
_KEPT_SHARE = 0.6
"""About so much of the context is left when a conversation is cut: it is not cut again soon."""
_MOST_RENDERED = 2
"""Templates make no more of a message than so many times its own tokens."""
_TURN_AHEAD_SHARE = 1 / 2
"""If no turn begins within so much of a step, the conversation is cut in the middle of one."""


@dataclass(frozen=True, slots=True)
class MessageSize:
    """One message of a conversation, and how many tokens it has by itself.

    A turn begins where the user says something, a step where the model answers; the results of the
    model's calls begin neither.
    """

    n_tokens: int
    begins_turn: bool = False
    begins_step: bool = False


@dataclass(frozen=True, slots=True)
class ContextCut:
    """What is kept: the messages from *first* on, and the user's message of the turn that is cut in two."""

    first: int
    asked: int | None
    n_left_out: int


def room_for_prompt(n_ctx: int, n_wanted: int | None) -> int:
    """Return how long a prompt may be, so that an answer of *n_wanted* tokens fits behind it."""
    most = int(n_ctx * _RESERVE_SHARE)
    return n_ctx - (most if n_wanted is None or n_wanted < 0 else min(n_wanted, most))


def step_of(n_ctx: int, n_room: int) -> int:
    """Return how many tokens are left out at once."""
    return max(1, n_room - int(n_ctx * _KEPT_SHARE))


def places_to_cut(parts: Sequence[MessageSize], n_step: int) -> list[ContextCut]:
    """Return where a conversation may be cut: the i-th leaves out at least i + 1 steps.

    That is where the next turn begins; where the model answers next if no turn begins soon. The newest
    message of the user is always kept, and calls with their results.
    """
    before = [0, *accumulate(part.n_tokens for part in parts)]
    places: list[ContextCut] = []
    begins = [i for i, part in enumerate(parts) if part.begins_turn or part.begins_step]
    turns = [i for i in begins if parts[i].begins_turn]
    while begins := [i for i in begins if before[i] >= (len(places) + 1) * n_step]:
        n_ahead = (len(places) + 1) * n_step + int(n_step * _TURN_AHEAD_SHARE)
        first = next((i for i in begins if parts[i].begins_turn and before[i] < n_ahead), begins[0])
        # Of a turn that is cut in two, the user's message stays.
        asked = None
        if not parts[first].begins_turn:
            asked = max((i for i in turns if i < first), default=None)
        n_asked = parts[asked].n_tokens if asked is not None else 0
        places.append(ContextCut(first, asked, before[first] - n_asked))
    return places


def first_to_try(places: Sequence[ContextCut], n_over: int, n_at_least: int) -> int:
    """Return which place to try first for a prompt that is *n_over* tokens too long.

    It is the first that may be enough: only a rendering tells. The conversation stays cut as far as it
    was, *n_at_least* places in; turns that are over may take fewer tokens than they did.
    """
    enough = (i for i, p in enumerate(places) if p.n_left_out * _MOST_RENDERED >= n_over)
    last = max(0, len(places) - 1)
    return max(next(enough, last), min(n_at_least, last))
