"""What a plan says of itself: why it is the cheapest."""

from typing import Any

import pytest

from proxy.core.model import Candidate, Prompt, Rule, SlotId
from proxy.core.plan import Situation, Why, plan_request
from proxy.core.slots import Content, Empty, Known, Slot
from tests.unit.builders import (
    ANY_PREFIX,
    NAMESPACE,
    NOTHING,
    RESTORE_POINTS,
    branch,
    candidate,
    run_of,
    steady,
)
from tests.unit.situations import sizes_of

RATES = steady(500.0, 1e6)
BIG_BYTES, SMALL_BYTES = 10**9, 1000


def stored(n_tokens: int, size_bytes: int = SMALL_BYTES) -> tuple[Candidate, ...]:
    fields = {"id": n_tokens, "size_bytes": size_bytes, "has_every_position": True}
    return (candidate(n_tokens, n_tokens, **fields),)


def held(n_tokens: int, **fields: Any) -> Known:
    return Known(run_of(n_tokens), NAMESPACE, n_saved=n_tokens, **fields)


def costly(n_common: int) -> Known:
    """A long conversation that shares its beginning with the prompt and takes long to bring back."""
    return Known(branch(n_common, 9000), NAMESPACE, n_saved=9000)


CASES: dict[Why, tuple[Rule, tuple[Content, ...], tuple[Candidate, ...]]] = {
    Why.LIVE_LONGEST: (ANY_PREFIX, (held(900), Empty()), stored(800)),
    Why.LIVE_CHEAPER: (ANY_PREFIX, (held(800), Empty()), stored(900, BIG_BYTES)),
    Why.RESTORE_LONGEST: (ANY_PREFIX, (held(500), Empty()), stored(900)),
    Why.RESTORE_ELSEWHERE: (ANY_PREFIX, (costly(900), Empty()), stored(900)),
    Why.RESTORE_SHORTER: (ANY_PREFIX, (Empty(),), (*stored(900, BIG_BYTES), *stored(800))),
    Why.NOTHING_FOUND: (RESTORE_POINTS, (Empty(),), ()),
    Why.NOTHING_RESTORABLE: (NOTHING, (Empty(),), stored(900)),
    Why.NOTHING_WORTH_IT: (ANY_PREFIX, (Empty(),), stored(900, BIG_BYTES)),
    Why.TOO_LONG: (ANY_PREFIX, (held(900), Empty()), stored(800)),
    Why.NOTHING_DISPLACED: (ANY_PREFIX, (costly(200), Empty()), ()),
}


@pytest.mark.parametrize("why", CASES)
def test_plan_says_why(why: Why) -> None:
    rule, contents, candidates = CASES[why]
    slots = tuple(Slot(SlotId(i), content) for i, content in enumerate(contents))
    prompt = Prompt(run_of(1000), NAMESPACE)
    n_ctx = 1000 if why is Why.TOO_LONG else 100_000
    now = Situation(rule, slots, candidates, RATES, n_ctx, sizes=sizes_of(BIG_BYTES))
    plan = plan_request(prompt, now)
    assert plan is not None
    assert plan.why is why


def test_a_slot_is_not_called_the_longest_where_another_holds_more_that_is_dear_to_lose() -> None:
    slots = (Slot(SlotId(0), costly(800)), Slot(SlotId(1), held(200)))
    now = Situation(ANY_PREFIX, slots, (), RATES, 100_000, sizes=sizes_of(BIG_BYTES))
    plan = plan_request(Prompt(run_of(1000), NAMESPACE), now)
    assert plan is not None and plan.slot_id == 1
    assert plan.why is Why.NOTHING_DISPLACED
