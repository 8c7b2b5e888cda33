"""Which slot llama-server will choose for a request that cannot name one.

Owns: llama-server's rule (server-context.cpp, get_available_slot): among the idle slots the one whose
tokens share the longest prefix with the prompt, the lowest id on ties, if that prefix is more than a
tenth of the prompt; else the one used longest ago. Pure.
"""

from collections.abc import Iterable

from proxy.core.model import SlotId
from proxy.core.prefix import TokenIds, common_prefix_length
from proxy.core.slots import Empty, Known, Slot, Unknown

MIN_SIMILARITY = 0.1
"""llama-server's default of --slot-prompt-similarity."""


def shared_at_least(slot: Slot, tokens: TokenIds) -> int:
    """Return how many leading tokens of a prompt a slot surely holds."""
    content = slot.content
    return common_prefix_length(content.tokens, tokens) if isinstance(content, Known) else 0


def shared_at_most(slot: Slot, tokens: TokenIds) -> int:
    """Return how many leading tokens of a prompt a slot may hold when it is idle next.

    A leased one may hold its request's prompt then, and whatever is generated behind it. Not yet if that
    request waits, ready to be sent, as ours does, and no more if it has had its answer.
    """
    if not slot.is_leased or slot.is_ready or slot.is_closing:
        return _held_at_most(slot, tokens)
    if slot.destined is None:
        return len(tokens)
    n_common = common_prefix_length(slot.destined, tokens)
    n_destined = n_common if n_common < len(slot.destined) else len(tokens)
    if slot.is_running or (isinstance(slot.content, Unknown) and slot.content.likely is not None):
        return n_destined  # it holds nothing any more but what it is destined for
    return max(n_destined, _held_at_most(slot, tokens))


def _held_at_most(slot: Slot, tokens: TokenIds) -> int:
    match slot.content:
        case Empty():
            return 0
        case Known() as content:
            n_held = common_prefix_length(content.tokens, tokens)
            is_whole = n_held == len(content.tokens)
            return min(n_held + content.n_tail, len(tokens)) if is_whole else n_held
        case Unknown():
            return len(tokens)


def rivals(target: Slot, slots: Iterable[Slot], tokens: TokenIds) -> list[SlotId]:
    """Return the other slots that llama-server may choose for a prompt instead of *target*."""
    n_target = shared_at_least(target, tokens)
    found = []
    for slot in slots:
        n_rival = shared_at_most(slot, tokens) if slot.id != target.id else -1
        if n_rival > n_target or (n_rival == n_target and slot.id < target.id):
            found.append(slot.id)
    return found


def is_similar_enough(target: Slot, tokens: TokenIds) -> bool:
    """Return whether llama-server chooses by similarity at all."""
    return shared_at_least(target, tokens) > MIN_SIMILARITY * len(tokens)
