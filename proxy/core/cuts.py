"""Where a prompt is cut first, and why.

Owns: which of a prompt's stable cuts are worth a stop on the way. Must never know how a cut is found
(by rendering, or by what prompts share) or made (by evaluating the prefix alone).

A stop at a cut costs no tokens: llama-server evaluates `ids[:cut]`, then the request continues there.
What it buys depends on the rule:

- restore points: llama-server makes a context checkpoint just before the end of every prompt, so a
  stop plants one at the cut, which every later save of that slot carries;
- end only: the state at the cut is the only one that a later request can continue, so it is saved
  there, or the slot can be rewound to it for a few tokens when it is saved later;
- any rule: a state that is saved at the cut can be restored into other slots while this one goes on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from proxy.core.model import Candidate, CheckpointKind, Cuts, Rule, RuleKind
from proxy.core.restore import usable_tokens

SLACK_TOKENS = 16
"""A cut counts as covered by a restore point this close below it."""

MIN_CUT_TOKENS = 64
"""A shorter prefix is not worth the round trip of a stop."""

MIN_STRIDE_TOKENS = 32
"""Two context checkpoints are planted no closer than this: the lower one serves both."""

MIN_BRANCH_TOKENS = 64
"""Where prompts share so many tokens more than can be reused, a stop is made for the next one."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Evaluate the first n_tokens alone, and save the slot there if `save_as` says what it is."""

    n_tokens: int
    save_as: CheckpointKind | None = None


def is_covered(rule: Rule, candidates: Iterable[Candidate], n_cut: int) -> bool:
    """Return whether a stored checkpoint can be restored at *n_cut* or just before it."""
    return any(
        usable_tokens(rule, c.checkpoint, min(c.n_common, n_cut), n_cut + 1) >= n_cut - SLACK_TOKENS
        for c in candidates
    )


def branch_of(rule: Rule, n_shared: int, n_prompt: int, n_reused: int) -> int:
    """Return where a prompt branches off from one seen before, 0 if that place can be reused already.

    It shares its first *n_shared* tokens with an earlier prompt, and *n_reused* of them are reused.
    """
    needs_point = rule.kind in (RuleKind.RESTORE_POINTS, RuleKind.END_ONLY)
    is_inside = MIN_CUT_TOKENS <= n_shared < n_prompt - 1
    return n_shared if needs_point and is_inside and n_shared > n_reused + MIN_BRANCH_TOKENS else 0


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
    if not rule.can_restore:
        return ()
    stops: dict[int, Stop] = {}
    for n_cut, save_as in _saved(rule, cuts, shares_header=shares_header):
        near = next((stop for stop in stops if abs(n_cut - stop) <= SLACK_TOKENS), None)
        if not _is_ahead(n_cut, n_reused) or is_covered(rule, candidates, n_cut):
            continue
        if near is None:
            stops[n_cut] = Stop(n_cut, save_as)
        elif n_cut < near:  # both prompts can continue the shorter state
            stops[n_cut] = Stop(n_cut, stops.pop(near).save_as)
    if rule.kind is RuleKind.END_ONLY and _is_ahead(cuts.message_end, n_reused):
        stops.setdefault(cuts.message_end, Stop(cuts.message_end))
    for n_cut in _planted(rule, cuts):
        n_before = max((n for n in (n_reused, *stops) if n <= n_cut), default=0)
        is_far = n_cut >= n_before + MIN_STRIDE_TOKENS
        if _is_ahead(n_cut, n_reused) and is_far and not is_covered(rule, candidates, n_cut):
            stops[n_cut] = Stop(n_cut)
    return tuple(stops[n] for n in sorted(stops))


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
    if rule.kind is RuleKind.END_ONLY:
        return sorted({cuts.surroundings, cuts.last_turn_end} - {0})
    in_turn = [
        n
        for n in (cuts.surroundings, cuts.last_turn_end, cuts.turn_start)
        if n >= rule.end_holds_from
    ]
    return sorted({cuts.header, cuts.branch, *in_turn} - {0})


def _is_ahead(n_cut: int, n_reused: int) -> bool:
    return n_cut >= MIN_CUT_TOKENS and n_cut > n_reused + SLACK_TOKENS
