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

    With *shares_header* the header is saved as soon as it is evaluated, for requests in other slots.
    """
    if not rule.can_restore:
        return ()
    stops: dict[int, Stop] = {}
    for n_cut, save_as in _wanted(rule, cuts, shares_header=shares_header):
        is_near = save_as is None and _is_near(n_cut, stops)
        if _is_ahead(n_cut, n_reused) and not is_near and not is_covered(rule, candidates, n_cut):
            stops[n_cut] = Stop(n_cut, save_as)
    if rule.kind is RuleKind.END_ONLY and _is_ahead(cuts.message_end, n_reused):
        stops.setdefault(cuts.message_end, Stop(cuts.message_end))
    return tuple(stops[n] for n in sorted(stops))


def _wanted(
    rule: Rule, cuts: Cuts, *, shares_header: bool
) -> Iterator[tuple[int, CheckpointKind | None]]:
    """Yield the cuts to stop at, the most important first, and what is saved there."""
    is_end_only = rule.kind is RuleKind.END_ONLY
    if is_end_only or shares_header:
        yield cuts.header, CheckpointKind.HEADER
    elif rule.kind is RuleKind.RESTORE_POINTS:
        yield cuts.header, None
    if is_end_only:
        yield cuts.turn_start, CheckpointKind.TURN_START
        yield cuts.branch, CheckpointKind.BRANCH
    elif rule.kind is RuleKind.RESTORE_POINTS:
        yield cuts.turn_start, None
        # Conversations fork where a user message begins; under *end only* that is not worth a file.
        yield cuts.last_turn_end, None
        yield cuts.branch, None


def _is_ahead(n_cut: int, n_reused: int) -> bool:
    return n_cut >= MIN_CUT_TOKENS and n_cut > n_reused + SLACK_TOKENS


def _is_near(n_cut: int, stops: Iterable[int]) -> bool:
    return any(abs(n_cut - stop) <= SLACK_TOKENS for stop in stops)
