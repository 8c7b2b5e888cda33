"""Which slot a request gets whose prompt is not looked up, and which one is emptied for another purpose.

Owns: the choice by what would be lost. Pure.
"""

from collections.abc import Iterable

from proxy.core.prefix import Namespace
from proxy.core.slots import Known, Slot, Unknown


def choose_slot_for_bypass(slots: Iterable[Slot], namespace: Namespace) -> Slot | None:
    """Return the free slot for a request whose prompt is not known, or None if there is none.

    First a slot that such a request of the same tenant used before (llama-server reuses what it can),
    then an empty one, then the one whose loss costs least.
    """

    def rank(slot: Slot) -> tuple[bool, int, float]:
        if isinstance(slot.content, Unknown) and slot.content.tenant == namespace:
            return False, 0, -slot.used_at
        return True, *_loss(slot)

    return min((slot for slot in slots if not slot.is_leased), key=rank, default=None)


def choose_slot_to_empty(slots: Iterable[Slot]) -> Slot | None:
    """Return the free slot whose loss costs least, or None if there is none."""
    return min((slot for slot in slots if not slot.is_leased), key=_loss, default=None)


def _loss(slot: Slot) -> tuple[int, float]:
    n_unsaved = slot.content.n_unsaved + 1 if isinstance(slot.content, Known) else 0
    return n_unsaved, slot.used_at
