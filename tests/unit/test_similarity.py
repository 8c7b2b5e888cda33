"""Which slot llama-server chooses for a prompt that names none."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.model import SlotId
from proxy.core.residency import MIN_SIMILARITY, is_similar_enough, rivals, shared_at_most
from proxy.core.slots import TAINTED, Content, Empty, Known, Slot, SlotPhase, Unknown, shared_tokens
from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from tests.unit.builders import NAMESPACE, branch, run_of

PROMPT = run_of(100)


def slot(content: Content, number: int = 0, **state: object) -> Slot:
    return replace(Slot(SlotId(number), content), **state)  # type: ignore[arg-type]


def known(n_common: int, n_tokens: int, n_tail: int = 0) -> Known:
    return Known(branch(n_common, n_tokens), NAMESPACE, n_tail=n_tail)


EVALUATING = Unknown(NAMESPACE, likely=run_of(10))


@pytest.mark.parametrize(
    ("held", "at_least", "at_most"),
    [
        (slot(Empty()), 0, 0),
        (slot(known(40, 60)), 40, 40),
        (slot(known(40, 60, n_tail=9)), 40, 40),
        (slot(known(40, 40, n_tail=9)), 40, 49),
        (slot(known(99, 99, n_tail=9)), 99, 100),
        (slot(Unknown(NAMESPACE)), 0, 100),
        (slot(TAINTED), 0, 100),
        (slot(Empty(), phase=SlotPhase.PREPARING), 0, 100),
        (slot(Empty(), phase=SlotPhase.PREPARING, destined=branch(40, 60)), 0, 40),
        (slot(Empty(), phase=SlotPhase.PREPARING, destined=run_of(40)), 0, 100),
        (slot(known(70, 90), phase=SlotPhase.PREPARING, destined=branch(40, 60)), 70, 70),
        (slot(known(70, 90), destined=branch(40, 60), phase=SlotPhase.RUNNING), 70, 40),
        (slot(known(30, 90), phase=SlotPhase.PREPARING, destined=PROMPT), 30, 100),
        (slot(known(30, 90), destined=PROMPT, phase=SlotPhase.READY), 30, 30),
        (slot(known(30, 30, n_tail=5), destined=PROMPT, phase=SlotPhase.CLOSING), 30, 35),
        (slot(TAINTED, phase=SlotPhase.PREPARING, destined=branch(40, 60)), 0, 100),
        (
            slot(
                Unknown(NAMESPACE, likely=run_of(10)),
                phase=SlotPhase.PREPARING,
                destined=branch(40, 60),
            ),
            0,
            40,
        ),
        (slot(EVALUATING, phase=SlotPhase.CLOSING), 0, 100),
    ],
)
def test_what_a_slot_shares_with_a_prompt(held: Slot, at_least: int, at_most: int) -> None:
    assert shared_tokens(held.content, PROMPT) == at_least
    assert shared_at_most(held, PROMPT) == at_most


def test_rival_is_who_holds_more_or_as_much_and_comes_first() -> None:
    slots = [slot(known(n, 100), i) for i, n in enumerate((50, 49, 50, 50, 51))]
    assert rivals(slots[2], slots, PROMPT) == [0, 4]


@pytest.mark.parametrize(("n_common", "is_enough"), [(0, False), (10, False), (11, True)])
def test_tenth_of_the_prompt_is_not_similar_enough(n_common: int, is_enough: bool) -> None:
    assert is_similar_enough(slot(known(n_common, 100)), PROMPT) is is_enough


@dataclass(frozen=True, slots=True)
class Situation:
    """Slots as the table has them, and what those hold that are idle when llama-server chooses."""

    slots: list[Slot]
    idle: dict[SlotId, TokenIds]


WHOLE = token_ids([0, 1, 1, 0, 1, 0, 0, 1, 1])
"""Everything drawn is a part of this and then something else, so that much is shared."""
TINY = st.lists(st.integers(0, 1), max_size=3).map(token_ids)
SOME = st.builds(lambda n, more: joined(WHOLE[:n], more), st.integers(1, len(WHOLE)), TINY)
CONTENTS = st.one_of(
    st.just(Empty()),
    st.builds(Known, SOME, st.just(NAMESPACE), st.integers(0, 3)),
    st.builds(Unknown, st.just(NAMESPACE)),
)
KNOWN = st.builds(Known, SOME, st.just(NAMESPACE), st.integers(0, 3))


def joined(*parts: TokenIds) -> TokenIds:
    return token_ids([token for part in parts for token in part])


@st.composite
def tokens_of(draw: st.DrawFn, content: Content) -> TokenIds:
    """Draw what a slot of this content may really hold."""
    match content:
        case Empty():
            return joined()
        case Known(tokens=tokens, n_tail=n_tail):
            tail = draw(st.lists(st.integers(0, 1), min_size=n_tail, max_size=n_tail))
            return joined(tokens, token_ids(tail))
        case Unknown():
            return draw(SOME)


@st.composite
def idle_tokens(draw: st.DrawFn, held: Slot) -> TokenIds | None:
    """Draw what a slot holds when llama-server chooses; None if something runs in it."""
    content = draw(tokens_of(held.content))
    if held.phase in (SlotPhase.FREE, SlotPhase.READY, SlotPhase.CLOSING):
        return content
    destined = held.destined if held.destined is not None else draw(SOME)
    reached = joined(destined, draw(TINY)) if draw(st.booleans()) else destined
    if held.phase is not SlotPhase.RUNNING:
        n_evaluated = draw(st.integers(0, len(destined)))
        choices = [content, destined[:n_evaluated], reached, None]
        return draw(st.sampled_from(choices))
    return draw(st.sampled_from([reached, None]))


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    slots, idle = [], {}
    for number in range(draw(st.integers(1, 4))):
        held = slot(
            draw(CONTENTS),
            number,
            phase=draw(st.sampled_from(SlotPhase)),
            destined=draw(st.none() | SOME),
        )
        slots.append(held)
        if (tokens := draw(idle_tokens(held))) is not None:
            idle[held.id] = tokens
    return Situation(slots, idle)


def chosen_by_llama_server(idle: dict[SlotId, TokenIds], prompt: TokenIds) -> SlotId | None:
    """server-context.cpp, get_available_slot: the first of the most similar; None if it goes by age."""
    shared = {slot_id: common_prefix_length(tokens, prompt) for slot_id, tokens in idle.items()}
    best = max(shared, key=lambda slot_id: (shared[slot_id], -slot_id), default=None)
    return None if best is None or shared[best] <= MIN_SIMILARITY * len(prompt) else best


@given(situations(), SOME, st.data())
def test_slot_without_rivals_is_the_one_that_is_chosen(
    situation: Situation, prompt: TokenIds, data: st.DataObject
) -> None:
    target = slot(data.draw(KNOWN), data.draw(st.integers(0, len(situation.slots))))
    others = [s for s in situation.slots if s.id != target.id]
    idle = {slot_id: held for slot_id, held in situation.idle.items() if slot_id != target.id}
    idle[target.id] = data.draw(tokens_of(target.content))
    if is_similar_enough(target, prompt) and not rivals(target, others, prompt):
        assert chosen_by_llama_server(idle, prompt) == target.id
