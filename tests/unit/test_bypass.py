"""Which slot a request gets whose prompt is not known, and which one is emptied."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.messages import DIGEST_BYTES, Conversation
from proxy.core.model import SlotId
from proxy.core.residency import choose_slot_for_brief, choose_slot_for_bypass, choose_slot_to_empty
from proxy.core.slots import Empty, Known, Slot, SlotPhase, Unknown, not_to_save
from proxy.core.tokens import Namespace
from tests.unit.builders import NAMESPACE, OTHER_NAMESPACE, run_of
from tests.unit.situations import live_slots, slots


def test_choose_slot_for_bypass_with_no_free_slot_is_none() -> None:
    leased = [Slot(SlotId(0), Empty(), phase=SlotPhase.PREPARING)]
    assert choose_slot_for_bypass(leased, NAMESPACE) is None


def test_choose_slot_for_bypass_returns_to_the_tenants_latest_unknown_slot() -> None:
    held = slots(Unknown(NAMESPACE), Empty(), Unknown(NAMESPACE), Unknown(OTHER_NAMESPACE))
    chosen = choose_slot_for_bypass(held, NAMESPACE)
    assert chosen is not None and chosen.id == 2


def test_choose_slot_for_bypass_prefers_an_empty_slot_over_a_known_one() -> None:
    chosen = choose_slot_for_bypass(slots(Known(run_of(9), NAMESPACE), Empty()), NAMESPACE)
    assert chosen is not None and chosen.id == 1


def test_choose_slot_for_bypass_among_known_slots_takes_the_least_unsaved() -> None:
    held = slots(Known(run_of(500), NAMESPACE), Known(run_of(500), NAMESPACE, n_saved=490))
    chosen = choose_slot_for_bypass(held, NAMESPACE)
    assert chosen is not None and chosen.id == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("abcdxy", 0),  # goes on
        ("abcxy", 0),  # the last message was edited
        ("vw", 1),  # it is asked again from its beginning
        ("vwxyz", 1),
        ("abxyz", 3),  # another conversation with the same system prompt
    ],
)
def test_choose_slot_for_bypass_goes_on_where_most_of_the_messages_come_again(
    body: str, expected: int
) -> None:
    digests = [
        b"".join(8 * char.encode() for char in text) for text in ("abcd", "vwxy", "abcdefghi", body)
    ]
    held = slots(*(Unknown(NAMESPACE, digests=each) for each in digests[:3]), Empty())
    chosen = choose_slot_for_bypass(held, NAMESPACE, digests[3])
    assert chosen is not None and chosen.id == expected
    editors = choose_slot_for_bypass(held, NAMESPACE)
    assert editors is not None and editors.id == 3


@pytest.mark.parametrize("more", [("a2",), ()])
def test_brief_chat_goes_on_and_is_asked_again_in_its_own_slot(more: tuple[str, ...]) -> None:
    chosen = choose_slot_for_brief(BRIEF_SLOTS, chat("system", "a1", *more), NAMESPACE)
    assert chosen is not None and chosen.id == 2


def test_new_brief_chat_takes_an_empty_slot_before_that_of_another() -> None:
    new = chat("system", "c1")
    chosen = choose_slot_for_brief(BRIEF_SLOTS, new, NAMESPACE)
    assert chosen is not None and chosen.id == 3
    chosen = choose_slot_for_brief(BRIEF_SLOTS[:3], new, NAMESPACE)
    assert chosen is not None and chosen.id == 1


def test_brief_chat_displaces_nothing_that_was_looked_up_nor_another_tenants() -> None:
    others = slots(
        Known(run_of(9), NAMESPACE),
        Unknown(NAMESPACE),
        Unknown(OTHER_NAMESPACE, brief=chat("system", "c1").digests),
    )
    assert choose_slot_for_brief(others, chat("system", "c1", "c2"), NAMESPACE) is None


def chat(*parts: str) -> Conversation:
    digests = b"".join(part.encode().ljust(DIGEST_BYTES) for part in parts)
    return Conversation(digests, ("user",) * (len(parts) - 1), (9,) * (len(parts) - 1))


BRIEF_SLOTS = slots(
    Known(run_of(500), NAMESPACE),
    Unknown(NAMESPACE, brief=chat("system", "b1").digests),
    Unknown(NAMESPACE, brief=chat("system", "a1").digests),
    Empty(),
)


def test_choose_slot_to_empty_takes_the_one_with_least_unsaved_work() -> None:
    saved, dirty = Known(run_of(500), NAMESPACE, n_saved=500), Known(run_of(500), NAMESPACE)
    for lost in (dirty, not_to_save(dirty)):
        chosen = choose_slot_to_empty(slots(lost, saved))
        assert chosen is not None and chosen.id == 1
    chosen = choose_slot_to_empty(slots(saved, Unknown(NAMESPACE), Empty()))
    assert chosen is not None and chosen.id == 2
    chosen = choose_slot_to_empty(slots(saved, Unknown(NAMESPACE)))
    assert chosen is not None and chosen.id == 1


def test_choose_slot_to_empty_of_equals_takes_the_one_used_longest_ago() -> None:
    chosen = choose_slot_to_empty(slots(Empty(), Empty()))
    assert chosen is not None and chosen.id == 0


CHOICES: list[Callable[[tuple[Slot, ...], Namespace], Slot | None]] = [
    choose_slot_for_bypass,
    lambda held, _: choose_slot_to_empty(held),
]


@given(live_slots(), st.sampled_from([NAMESPACE, OTHER_NAMESPACE]), st.sampled_from(CHOICES))
def test_chosen_slot_of_anything_is_never_leased(
    held: tuple[Slot, ...],
    namespace: Namespace,
    choose: Callable[[tuple[Slot, ...], Namespace], Slot | None],
) -> None:
    chosen = choose(held, namespace)
    assert (chosen is None) == all(slot.is_leased for slot in held)
    assert chosen is None or not chosen.is_leased
