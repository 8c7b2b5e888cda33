"""What a slot's content costs its owner when another request takes the slot.

Owns: how much unsaved work is lost, whether it is saved first, and what all that costs in seconds. Pure.
"""

from dataclasses import dataclass

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.keeping.write_back import is_write_back_due, worth_of
from proxy.core.model import Prompt, Rule
from proxy.core.prefix import common_prefix_length
from proxy.core.rates import Rates
from proxy.core.slots import Content, Known

MAX_LOST_TOKENS = SLACK_TOKENS
"""A slot that loses no more unsaved work than this to another request is not saved for it."""

HALF_LIFE_SECONDS = 600.0
"""An agent is back within minutes or not soon: what a slot holds counts half after so long."""


@dataclass(frozen=True, slots=True)
class Displacement:
    """What a plan takes from the slot that it uses.

    `delay_seconds` are those that the request itself waits for a save; `seconds` add what it will cost
    the slot's present owner to be where it was.
    """

    n_lost: int = 0
    saves: bool = False
    delay_seconds: float = 0.0
    seconds: float = 0.0


NOTHING_DISPLACED = Displacement()


@dataclass(frozen=True, slots=True)
class Occupant:
    """What a slot holds, how large its state would be, and how long nobody has used it."""

    content: Content
    size_bytes: int = 0
    idle_seconds: float = 0.0

    @property
    def likelihood(self) -> float:
        """How likely its owner comes back while that matters."""
        return float(0.5 ** (max(0.0, self.idle_seconds) / HALF_LIFE_SECONDS))


def displace(
    occupant: Occupant, prompt: Prompt, n_reused: int | None, rule: Rule, rates: Rates
) -> Displacement:
    """Return what becomes of a slot's content if *prompt* takes the slot.

    It reuses *n_reused* tokens of what lies there; None says that the slot is filled anew.
    """
    content = occupant.content
    if not isinstance(content, Known):
        return NOTHING_DISPLACED
    if is_continued(content, prompt):
        return NOTHING_DISPLACED
    n_lost = displaced_tokens(content, prompt, goes_on=n_reused is not None)
    worth = worth_of(content, n_lost, occupant.size_bytes, rates)
    is_savable = n_lost > MAX_LOST_TOKENS and is_write_back_due(rule, content)
    saves = is_savable and worth.is_worth_it
    delay_seconds = worth.save_seconds if saves else 0.0
    has_file = rule.can_restore and (saves or content.n_saved > 0)
    remade_seconds = rates.evaluation_seconds(n_reused or 0, content.n_tokens)
    if has_file:
        lost_seconds = 0.0 if saves else worth.evaluation_seconds if n_lost else 0.0
        restored_seconds = rates.restore_seconds(occupant.size_bytes, is_warm=True) + lost_seconds
        remade_seconds = min(remade_seconds, restored_seconds)
    seconds = delay_seconds + occupant.likelihood * remade_seconds
    return Displacement(n_lost, saves, delay_seconds, seconds)


def displaced_tokens(content: Content, prompt: Prompt, *, goes_on: bool) -> int:
    """Return how many tokens of unsaved work in a slot a prompt would overwrite.

    *goes_on* says that it goes on from what lies there.
    """
    if not isinstance(content, Known) or content.n_unsaved == 0:
        return 0
    if is_continued(content, prompt):
        return 0
    if content.namespace != prompt.namespace or not goes_on:
        return content.n_unsaved
    n_common = common_prefix_length(content.tokens, prompt.tokens)
    return min(content.n_unsaved, content.n_tokens - n_common)


def is_continued(content: Known, prompt: Prompt) -> bool:
    """Return whether a prompt is the same conversation moving on.

    It then goes on from all that the slot holds, or beyond its turn start: what it drops (old reasoning,
    a rewritten answer) nobody will ask for again.
    """
    if content.namespace != prompt.namespace:
        return False
    n_common = common_prefix_length(content.tokens, prompt.tokens)
    is_whole = n_common and n_common >= len(content.tokens) - SLACK_TOKENS
    return bool(is_whole) or 0 < content.turn_start <= n_common + SLACK_TOKENS
