"""Where a prompt is cut first, and why.

Owns: which of a prompt's stable cuts are worth a stop on the way. Must never know how a cut is found
(by rendering) or made (by evaluating the prefix alone).

A stop at a cut costs no tokens: llama-server evaluates `ids[:cut]`, then the request continues there.
What it buys depends on the rule:

- restore points: llama-server makes a context checkpoint just before the end of every prompt, so a
  stop plants one at the cut, which every later save of that slot carries;
- end only: the state at the cut is the only one that a later request can continue, so it is saved
  there, or the slot can be rewound to it for a few tokens when it is saved later.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from proxy.core.model import Candidate, CheckpointKind, Cuts, Rule, RuleKind
from proxy.core.prefix import BLOCK_TOKENS
from proxy.core.restore import usable_tokens

SLACK_TOKENS = 16
"""A cut counts as covered by a restore point this close below it."""


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


def choose_stops(
    rule: Rule, cuts: Cuts, candidates: tuple[Candidate, ...], n_reused: int
) -> tuple[Stop, ...]:
    """Return the stops, ascending, for a prompt whose evaluation begins at *n_reused*."""
    if rule.kind not in (RuleKind.RESTORE_POINTS, RuleKind.END_ONLY):
        return ()
    saves = rule.kind is RuleKind.END_ONLY
    stops: dict[int, Stop] = {}
    if saves and _is_ahead(cuts.message_end, n_reused):
        stops[cuts.message_end] = Stop(cuts.message_end)
    for n_cut, kind in (
        (cuts.turn_start, CheckpointKind.TURN_START),
        (cuts.header, CheckpointKind.HEADER),
    ):
        if _is_ahead(n_cut, n_reused) and not is_covered(rule, candidates, n_cut):
            stops[n_cut] = Stop(n_cut, kind if saves else None)
    return tuple(stops[n] for n in sorted(stops))


def _is_ahead(n_cut: int, n_reused: int) -> bool:
    return n_cut >= BLOCK_TOKENS and n_cut > n_reused + SLACK_TOKENS
