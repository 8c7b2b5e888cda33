"""Where conversations are cut that do not fit the context, and what is left of their bodies."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.cuts import (
    ContextCut,
    MessageSize,
    first_to_try,
    places_to_cut,
    room_for_prompt,
    step_of,
)
from proxy.core.messages import Route
from proxy.stabilize.drops import (
    begins_step,
    begins_turn,
    conversation_of,
    rendered_text,
    shortened,
    wanted_tokens,
)
from proxy.stabilize.model import Json
from tests.lab.apis import RESPONSES
from tests.lab.clients import claude_code as cc
from tests.lab.clients import opencode as oc
from tests.lab.conversation import agent_requests, system, tools

SIZES = st.integers(1, 60)
N_STEP = 200
N_ROOM = 600
"""A quarter of the room is left out at once, so that much of the conversation stays behind a cut."""


@st.composite
def conversations(draw: st.DrawFn) -> list[MessageSize]:
    """Draw turns: what the user says, and answers with the results of their calls."""
    parts = []
    for n_answers in draw(st.lists(st.integers(1, 12), min_size=1, max_size=12)):
        parts.append(MessageSize(draw(SIZES), begins_turn=True))
        for _ in range(n_answers):
            parts.append(MessageSize(draw(SIZES), begins_step=True))
            n_results = draw(st.integers(0, 2))
            parts += [MessageSize(draw(SIZES)) for _ in range(n_results)]
    return parts


@given(conversations(), st.integers(1, 400))
def test_cut_of_anything_keeps_the_newest_question_and_calls_with_their_results(
    parts: list[MessageSize], n_step: int
) -> None:
    newest = max(i for i, part in enumerate(parts) if part.begins_turn)
    for number, place in enumerate(places_to_cut(parts, n_step), 1):
        assert parts[place.first].begins_turn or parts[place.first].begins_step
        assert place.first <= newest or place.asked == newest
        if parts[place.first].begins_turn:
            assert place.asked is None
        else:
            assert place.asked is not None and parts[place.asked].begins_turn
            between = parts[place.asked + 1 : place.first]
            assert not any(part.begins_turn for part in between)
        n_asked = parts[place.asked].n_tokens if place.asked is not None else 0
        n_before = sum(part.n_tokens for part in parts[: place.first])
        assert place.n_left_out == n_before - n_asked
        assert n_before >= number * n_step


def cut_as_it_grows(
    parts: list[MessageSize], *, restarts: bool
) -> Iterator[tuple[int, ContextCut | None]]:
    """Yield how long each request of a conversation is before it is cut, and where it is cut."""
    reached = 0
    for n in range(1, len(parts) + 1):
        n_tokens = sum(part.n_tokens for part in parts[:n])
        if n_tokens <= N_ROOM:
            yield n_tokens, None
            continue
        places = places_to_cut(parts[:n], N_STEP)
        index = first_to_try(places, n_tokens - N_ROOM, 0 if restarts else reached)
        while n_tokens - places[index].n_left_out > N_ROOM and index + 1 < len(places):
            index += 1
        reached = index
        yield n_tokens, places[index]


@given(conversations())
def test_conversation_stays_cut_where_it_is_until_the_context_is_full_again(
    parts: list[MessageSize],
) -> None:
    made = list(cut_as_it_grows(parts, restarts=False))
    assert made == list(cut_as_it_grows(parts, restarts=True))  # nothing depends on memory
    places = [place for _, place in made if place is not None]
    for one, next_one in pairwise(places):
        assert next_one == one or next_one.first > one.first
    n_cuts = len(set(places))
    assert n_cuts <= 1 + sum(part.n_tokens for part in parts) // N_STEP
    for n_tokens, place in made:
        # The longest message and a cut that waits for the next turn are all that may be in the way.
        assert place is None or n_tokens - place.n_left_out <= N_ROOM
    for (n_tokens, place), (_, later) in pairwise(made):
        if place is not None and later is not None and later != place:
            assert n_tokens - place.n_left_out + 60 > N_ROOM


def test_room_is_left_for_the_answer_but_no_more_than_a_share() -> None:
    assert room_for_prompt(8000, 100) == 7900
    assert room_for_prompt(8000, 32000) == room_for_prompt(8000, None) == 7000
    assert room_for_prompt(8000, -1) == 7000
    assert room_for_prompt(8000, 0) == 7999  # llama-server makes one token all the same
    assert step_of(8000, 7000) == 2200
    assert step_of(1, 0) == 1


def test_first_place_that_may_be_enough_is_tried_and_none_before_the_last_cut() -> None:
    places = [ContextCut(i, None, 100 * i) for i in range(1, 5)]
    cases = {(1, 0): 0, (200, 0): 0, (201, 0): 1, (50, 2): 2, (650, 2): 3, (999, 0): 3, (1, 9): 3}
    for (n_over, n_at_least), first in cases.items():
        assert first_to_try(places, n_over, n_at_least) == first
    assert first_to_try([], 10, 3) == 0


def claude_code_body() -> Json:
    later = [*cc.step(20), cc.answer(30), cc.user("Now the docs."), *cc.step(40), *cc.step(50)]
    body = cc.request("Mend it.", *later)
    surroundings = cc.reminder("Where all this happens.")
    first, _, *rest = body["messages"]
    return {**body, "messages": [{**first, "content": [surroundings, *first["content"]]}, *rest]}


def opencode_body() -> Json:
    later = [*oc.step(20), oc.answer(30), oc.user("Now the docs."), *oc.step(40), *oc.step(50)]
    return oc.request(oc.user("Mend it."), *later)


def responses_body() -> Json:
    return RESPONSES.body(agent_requests(2, 2, header=[system(20)])[-1], tools(2))


BODIES = pytest.mark.parametrize(
    ("form", "body"),
    [
        (Route.MESSAGES, claude_code_body()),
        (Route.CHAT, opencode_body()),
        (Route.RESPONSES, responses_body()),
    ],
    ids=["messages", "chat", "responses"],
)


@BODIES
def test_every_cut_of_a_body_leaves_header_question_and_paired_calls(
    form: Route, body: Json
) -> None:
    conversation = conversation_of(form, body)
    before = [None, *conversation]
    parts = [
        MessageSize(len(rendered_text(m)), begins_turn(m), begins_step(m, before[i]))
        for i, m in enumerate(conversation)
    ]
    places = places_to_cut(parts, 300)
    assert {place.asked is None for place in places} == {True, False}
    for place in places:
        cut = shortened(form, body, place.first, place.asked)
        assert {**cut, "messages": 0, "input": 0} == {**body, "messages": 0, "input": 0}
        kept = conversation_of(form, cut)
        assert begins_turn(kept[0])
        assert kept[-1] == conversation[-1]
        assert calls_of(kept) == results_of(kept) <= calls_of(conversation)
        assert len(conversation_of(form, body)) == len(conversation)  # the body itself is as it was


def calls_of(conversation: list[Json]) -> set[str]:
    calls = {c["id"] for m in conversation for c in m.get("tool_calls", ())}
    calls |= {m["call_id"] for m in conversation if m.get("type") == "function_call"}
    return calls | {b["id"] for b in blocks_of(conversation) if b.get("type") == "tool_use"}


def results_of(conversation: list[Json]) -> set[str]:
    results = {m["tool_call_id"] for m in conversation if "tool_call_id" in m}
    results |= {m["call_id"] for m in conversation if m.get("type") == "function_call_output"}
    blocks = blocks_of(conversation)
    return results | {b["tool_use_id"] for b in blocks if b.get("type") == "tool_result"}


def blocks_of(conversation: list[Json]) -> list[Json]:
    contents = (m.get("content") for m in conversation)
    return [block for content in contents if isinstance(content, list) for block in content]


def test_what_stands_before_the_first_question_moves_to_the_first_that_is_kept() -> None:
    body = claude_code_body()
    (docs,) = (i for i, m in enumerate(body["messages"]) if m["content"] == "Now the docs.")
    cut = shortened(Route.MESSAGES, body, docs, None)["messages"]
    surroundings = body["messages"][0]["content"][:-1]
    assert cut[0]["content"] == [*surroundings, cc.text("Now the docs.")]
    assert shortened(Route.MESSAGES, body, docs + 1, docs)["messages"] == cut
    in_first_turn = shortened(Route.MESSAGES, body, 3, 0)["messages"]
    assert in_first_turn == [body["messages"][0], *body["messages"][3:]]


def test_message_is_counted_by_what_templates_render_of_it() -> None:
    used = cc.use("toolu_1", "Read", {"target": "a.py"})
    answer = {"role": "assistant", "content": [cc.thinking(1), cc.text("So."), used]}
    assert rendered_text(answer) == 'So.\nRead\n{"target":"a.py"}'
    call: Json = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": []}
    call["tool_calls"] = [oc.call("call_1", "read", '{"path": "a.py"}')]
    assert rendered_text(call) == 'read\n{"path": "a.py"}'
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert rendered_text({"role": "user", "content": [image]}) == ""


def test_answer_limit_is_read_in_each_form() -> None:
    for body, n_wanted in (
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_output_tokens": 7}, 7),
        ({"n_predict": -1}, -1),
        ({"max_tokens": None}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": "5"}, None),
    ):
        assert wanted_tokens(body) == n_wanted
