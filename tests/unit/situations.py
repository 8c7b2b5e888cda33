"""What a plan is made from: slots and stored states, written short or drawn at random."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from proxy.core.model import (
    Candidate,
    CheckpointId,
    CheckpointKind,
    Cuts,
    Prompt,
    Rule,
    RuleKind,
    SlotId,
)
from proxy.core.plan import Displacement, Plan, Situation, displacements_by, plan_request
from proxy.core.rates import Rates
from proxy.core.saving import StateSize
from proxy.core.slots import Content, Empty, Known, Origin, Slot, SlotPhase, Unknown, shared_tokens
from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from tests.unit.builders import NAMESPACE, OTHER_NAMESPACE, branch, checkpoint, run_of, steady


def slots(*contents: Content) -> tuple[Slot, ...]:
    return tuple(Slot(SlotId(i), c, used_at=float(i)) for i, c in enumerate(contents))


def situation(rule: Rule, *contents: Content, **changes: Any) -> Situation:
    return replace(Situation(rule, slots(*contents), (), Rates(), 100_000), **changes)


def plan(n_prompt: int, rule: Rule, *contents: Content, **changes: Any) -> Plan:
    """Return the plan for the prompt `run_of(n_prompt)`, or for `tokens`; there must be one."""
    tokens = changes.pop("tokens", run_of(n_prompt))
    prompt = Prompt(tokens, NAMESPACE, changes.pop("cuts", Cuts()))
    made = plan_request(prompt, situation(rule, *contents, **changes))
    assert made is not None
    return made


def sizes_of(size_bytes: int) -> tuple[StateSize, ...]:
    """Return sizes by which every state is expected to take *size_bytes*."""
    return (StateSize(10**9, 10**9, size_bytes - 1),) if size_bytes else ()


def displaced(
    content: Content,
    prompt: Prompt,
    n_reused: int | None,
    rule: Rule,
    rates: Rates,
    size_bytes: int = 0,
    idle_seconds: float = 0.0,
) -> Displacement:
    """Return what becomes of a slot's content if a prompt takes the slot and reuses *n_reused* tokens."""
    slot = Slot(SlotId(0), content)
    sizes = sizes_of(size_bytes)
    now = Situation(rule, (slot,), (), rates, 100_000, time=idle_seconds, sizes=sizes)
    n_common = shared_tokens(content, prompt.tokens, prompt.namespace)
    return displacements_by(prompt, now, slot, n_common, n_reused)[0]


TINY_TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(token_ids)
LONG_TOKENS = st.builds(
    lambda n_common, n_more: branch(n_common, n_common + n_more),
    st.integers(0, 1000),
    st.integers(1, 1000),
)
MEASURED_RULES = st.builds(Rule, st.sampled_from(RuleKind), st.integers(0, 8))
SIZES = st.integers(0, 10**6)
STEADY_RATES = st.builds(steady, st.floats(1, 1e5), st.floats(1e3, 1e10))


@st.composite
def points_within(draw: st.DrawFn, n_tokens: int, max_size: int = 3) -> tuple[int, ...]:
    """Draw restore points of a state: ascending, and none behind its end."""
    return tuple(sorted(draw(st.sets(st.integers(1, n_tokens), max_size=max_size))))


@st.composite
def stored_states(draw: st.DrawFn) -> list[tuple[Candidate, TokenIds]]:
    """Draw checkpoints with their tokens; what they share with the request comes later."""
    states = []
    for number in range(draw(st.integers(0, 5))):
        tokens = draw(TINY_TOKENS)
        state = checkpoint(
            len(tokens),
            id=CheckpointId(number),
            kind=draw(st.sampled_from(CheckpointKind)),
            restore_points=draw(points_within(len(tokens))),
            has_every_position=draw(st.booleans()),
            size_bytes=draw(SIZES),
        )
        states.append((Candidate(state, 0, draw(st.booleans())), tokens))
    return states


def found_for(tokens: TokenIds, states: list[tuple[Candidate, TokenIds]]) -> tuple[Candidate, ...]:
    """Return stored states as they are found for a prompt: compared with it."""
    return tuple(replace(c, n_common=common_prefix_length(own, tokens)) for c, own in states)


@st.composite
def known_contents(draw: st.DrawFn, tokens: st.SearchStrategy[TokenIds] = TINY_TOKENS) -> Known:
    held = draw(tokens)
    return Known(
        held,
        draw(st.sampled_from([NAMESPACE, OTHER_NAMESPACE])),
        draw(st.integers(0, 3)),
        draw(points_within(len(held))),
        turn_start=draw(st.integers(0, len(held))),
        last_cut=draw(st.integers(0, len(held))),
        n_saved=draw(st.integers(0, len(held))),
        origin=Origin(draw(st.integers(0, len(held)))),
    )


def contents(tokens: st.SearchStrategy[TokenIds] = TINY_TOKENS) -> st.SearchStrategy[Content]:
    unknown = st.builds(Unknown, st.sampled_from([None, NAMESPACE, OTHER_NAMESPACE]))
    return st.one_of(st.just(Empty()), unknown, known_contents(tokens))


@st.composite
def live_slots(draw: st.DrawFn, min_size: int = 0) -> tuple[Slot, ...]:
    """Draw slots, leased or free, known, empty or unknown."""
    return tuple(
        Slot(
            SlotId(i),
            draw(contents()),
            phase=draw(st.sampled_from((SlotPhase.FREE, SlotPhase.PREPARING))),
            used_at=draw(st.floats(0, 9)),
        )
        for i in range(draw(st.integers(min_size, 3)))
    )
