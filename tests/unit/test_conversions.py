"""Messages and Responses bodies in the chat form; tests/live compares with the real server."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.messages import Route
from proxy.errors import UnknownShape
from proxy.llama.conversions import chat_of_messages, chat_of_responses
from proxy.llama.requests import GenerationBody, as_chat_body, parse_body
from tests.lab import messages_bodies, responses_bodies
from tests.lab.generated_bodies import values

CONVERSIONS = [
    (chat_of_messages, messages_bodies.ACCEPTED),
    (chat_of_responses, responses_bodies.ACCEPTED),
]


def body(fields: dict[str, Any]) -> GenerationBody:
    parsed = parse_body(json.dumps(fields).encode())
    assert parsed is not None
    return parsed


def messages_of(route: Route, fields: dict[str, Any]) -> list[Any]:
    return as_chat_body(route, body(fields)).messages


@pytest.mark.parametrize(("convert", "bodies"), CONVERSIONS)
def test_conversion_leaves_the_body_as_it_is(
    convert: Callable[[Any], Any], bodies: dict[str, Any]
) -> None:
    before = copy.deepcopy(bodies)
    assert all(convert(fields)["messages"] is not None for fields in bodies.values())
    assert bodies == before


@given(
    given_values=st.lists(values, min_size=3, max_size=3),
    keys=st.lists(
        st.sampled_from(("system", "tools", "content", "type", "role")), min_size=3, max_size=3
    ),
)
def test_conversion_of_anything_is_a_chat_body_or_a_named_reason(
    given_values: list[Any], keys: list[str]
) -> None:
    inner = dict(zip(keys, given_values, strict=True))
    for convert, key in ((chat_of_messages, "messages"), (chat_of_responses, "input")):
        for field in (inner, given_values, [inner], [{"role": "user", "content": [inner]}]):
            try:
                assert isinstance(convert({key: field, **inner})["messages"], list)
            except UnknownShape as reason:
                assert str(reason)


def test_chat_body_of_a_chat_is_the_same_object() -> None:
    chat = body({"messages": [{"role": "user", "content": "x"}]})
    assert as_chat_body(Route.CHAT, chat) is chat


def test_chat_body_has_only_what_is_rendered_and_keeps_its_order() -> None:
    fields = responses_bodies.asks(
        "x", tools=[responses_bodies.SHELL], metadata={}, stream=True, reasoning={"effort": "low"}
    )
    chat = as_chat_body(Route.RESPONSES, body(fields))
    assert set(chat.fields) == {"messages", "tools", "reasoning_effort"}
    assert chat.raw.index(b'"timeout_ms"') < chat.raw.index(b'"cmd"')
    assert json.loads(chat.raw) == chat.fields


def test_text_beside_tool_results_goes_in_front_of_them() -> None:
    given_blocks = (messages_bodies.result("t", "r"), messages_bodies.text("q"))
    converted = messages_of(Route.MESSAGES, messages_bodies.after_call({}, *given_blocks))
    assert [message["role"] for message in converted] == ["user", "assistant", "user", "tool"]
    assert converted[2]["content"] == [messages_bodies.text("q")]
    assert converted[3] == {"role": "tool", "tool_call_id": "t", "content": "r"}


def test_system_blocks_become_one_leading_message() -> None:
    chat = as_chat_body(Route.MESSAGES, body(messages_bodies.AGENT))
    system = chat.messages[0]
    assert system["content"].startswith("x-anthropic-billing-header: cc_version=2.1.329.cf6;")
    assert system["content"].endswith("cch=fffff;You are a coding agent.Rules.\n")


def test_output_items_in_a_row_become_one_message_of_the_assistant() -> None:
    converted = messages_of(Route.RESPONSES, responses_bodies.AGENT)
    roles = [
        "system",
        "developer",
        "user",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    assert [message["role"] for message in converted] == roles
    assert converted[4]["reasoning_content"] == "Look first."
    assert [call["id"] for call in converted[4]["tool_calls"]] == ["c1", "c2"]


def test_many_output_items_are_put_together_at_once() -> None:
    """One by one, each list would be a copy of the one before it: minutes, in which nobody is answered."""
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    said = {"type": "output_text", "text": "Done."}
    answer = {"type": "message", "role": "assistant", "content": [said]}
    (message,) = chat_of_responses({"input": [call, answer] * 200_000})["messages"]
    assert len(message["tool_calls"]) == len(message["content"]) == 200_000


def test_conversion_adds_nothing_to_lists_of_the_client() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    answer = {"type": "message", "role": "assistant", "content": [], "tool_calls": [{"id": "b"}]}
    (message,) = chat_of_responses({"input": [answer, call]})["messages"]
    assert [each["id"] for each in message["tool_calls"]] == ["b", "c"]
    assert answer["tool_calls"] == [{"id": "b"}]


@pytest.mark.parametrize(
    ("route", "fields", "reason"),
    [
        (Route.MESSAGES, {}, "messages are not a list of objects"),
        (Route.RESPONSES, {"input": 1}, "input is neither a string nor a list"),
        (Route.RESPONSES, {"input": [{"type": "item_reference"}]}, "of type 'item_reference'"),
        (Route.RESPONSES, {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
    ],
)
def test_reason_of_a_body_that_is_not_converted_is_named(
    route: Route, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnknownShape, match=reason):
        as_chat_body(route, body(fields))
