"""Which stored checkpoints are worth a look for one prompt.

Owns: the end of the search. Pure; whoever calls has compared the tokens.
"""

from collections.abc import Iterable

from proxy.core.model import Candidate, Rule
from proxy.core.restore import usable_tokens

WORTH_A_LOOK_SHARE = 0.5
"""A state that saves less than this share of the best one's tokens is not looked at."""


def promising(
    rule: Rule, found: Iterable[Candidate], n_prompt: int, *, n_at_most: int = 32
) -> tuple[Candidate, ...]:
    """Return the usable ones of *found*, which come longest common prefix first.

    The search ends once a candidate's whole common prefix is less than half of what a better one saves:
    none of the rest can save more, and hardly one so much less time to restore.
    """
    kept: list[Candidate] = []
    n_best = 0
    for candidate in found:
        if candidate.n_common < WORTH_A_LOOK_SHARE * n_best or len(kept) == n_at_most:
            break
        n_usable = usable_tokens(rule, candidate.checkpoint, candidate.n_common, n_prompt)
        if n_usable:
            kept.append(candidate)
            n_best = max(n_best, n_usable)
    return tuple(kept)


def most_useful(rule: Rule, candidates: Iterable[Candidate], n_prompt: int) -> Candidate | None:
    """Return the candidate that spares a prompt most; what it needs if it finds no live slot."""
    return max(
        candidates,
        key=lambda c: usable_tokens(rule, c.checkpoint, c.n_common, n_prompt),
        default=None,
    )
