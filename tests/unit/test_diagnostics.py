"""Cache diagnostics as the hosted APIs give them: the reason is right, and the newest SDKs read it."""

import json
from functools import cache
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from anthropic.types import Message, RawMessageStartEvent
from openai.types.responses import Response, ResponseCompletedEvent
from pydantic import TypeAdapter

from proxy.core.messages import Route
from proxy.explain.causes import Cause
from proxy.explain.compare import Rendering, find_change
from proxy.explain.judgement import NOT_JUDGED, Judgement, diagnostics
from proxy.explain.sketch import goes_on
from proxy.llama.requests import GenerationBody, as_chat_body, asked_comparison
from tests.lab.apis import MESSAGES, events_of
from tests.lab.mutations import MUTATIONS, OF_MESSAGES, OF_RESPONSES, Mutation, base
from tests.unit.edits import edit_of_answer, edit_of_stream

N_KNOWN = 2000
adapter_of = cache(TypeAdapter)
"""What reads a type; it takes longer to make than to use."""


def judged(mutation: Mutation, route: Route) -> Judgement:
    def rendered(body: dict[str, Any]) -> Rendering:
        return Rendering(as_chat_body(route, GenerationBody(b"", body)).fields)

    new, old = rendered(mutation.body()), rendered(base(mutation.api))
    if goes_on(new.sketch, old.sketch):
        return Judgement(Cause.HIT)
    cause, where = find_change(new, old, is_same=True)
    assert cause.is_miss
    return Judgement(cause, N_KNOWN, where.part, where.message)


def answered(mutation: Mutation) -> tuple[Any, Any]:
    """Return what the SDK reads in an answer that comes whole, and in a stream."""
    route = Route.MESSAGES if mutation.api is MESSAGES else Route.RESPONSES
    found = judged(mutation, route)
    n_cached = 0 if found.cause.is_miss else N_KNOWN
    told = msgspec.json.encode(diagnostics(route, found, n_cached))
    whole: dict[str, Any] = {"id": "m", "model": "m"}
    event: dict[str, Any] = {"type": "message_start", "message": whole}
    if mutation.api is MESSAGES:
        usage = {"cache_read_input_tokens": n_cached, "input_tokens": 9, "output_tokens": 0}
        whole |= {"type": "message", "role": "assistant", "content": [], "usage": usage}
        whole |= {"stop_reason": None, "stop_sequence": None}
    else:
        numbers = {"input_tokens": 2009, "output_tokens": 1, "total_tokens": 2010}
        details = {"output_tokens_details": {"reasoning_tokens": 0}}
        details["input_tokens_details"] = {"cached_tokens": n_cached}
        whole |= {"object": "response", "created_at": 1, "output": [], "usage": numbers | details}
        whole |= {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
        event = {"type": "response.completed", "response": whole, "sequence_number": 1}
    body = json.dumps(whole, separators=(",", ":")).encode()
    line = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n"
    edit = edit_of_answer(mutation.api.path, 200, None, told)
    stream = edit_of_stream(mutation.api.path, None, told)
    assert edit is not None and stream is not None
    (read,), (streamed,) = events_of(edit(body)), events_of(stream.feed(line))
    if mutation.api is MESSAGES:
        start = adapter_of(RawMessageStartEvent).validate_python(streamed)
        return adapter_of(Message).validate_python(read), start.message
    completed = adapter_of(ResponseCompletedEvent).validate_python(streamed)
    return adapter_of(Response).validate_python(read), completed.response


def test_set_has_40_mutations_and_the_newest_sdks_read_them() -> None:
    assert len(MUTATIONS) >= 40
    assert int(anthropic.__version__.partition(".")[0]) >= 2
    assert int(openai.__version__.partition(".")[0]) >= 3


@pytest.mark.parametrize("mutation", OF_MESSAGES, ids=lambda mutation: mutation.name)
def test_anthropic_s_sdk_reads_the_reason(mutation: Mutation) -> None:
    for message in answered(mutation):
        if mutation.reason is None:
            assert message.diagnostics is None
        else:
            assert message.diagnostics.cache_miss_reason.type == mutation.reason
        assert message.usage.cache_creation.ephemeral_5m_input_tokens == 0


@pytest.mark.parametrize("mutation", OF_RESPONSES, ids=lambda mutation: mutation.name)
def test_openai_s_sdk_reads_the_reason(mutation: Mutation) -> None:
    for response in answered(mutation):
        found = response.prompt_cache_diagnostics
        if mutation.reason is None:
            assert found.type == "cache_hit"
        else:
            assert (found.type, found.reason) == ("cache_miss", mutation.reason)
            assert found.cache_missed_tokens == found.comparison_reusable_tokens == N_KNOWN
        assert response.usage.input_tokens_details.cache_write_tokens == 0


@pytest.mark.parametrize(
    ("judgement", "of_messages", "of_responses"),
    [
        (
            Judgement(Cause.FIRST_SIGHT),
            "previous_message_not_found",
            "comparison_response_not_found",
        ),
        (Judgement(Cause.EVICTED, 900), "unavailable", "unavailable"),
        (NOT_JUDGED, "unavailable", "unavailable"),
    ],
)
def test_without_a_change_the_miss_is_not_called_one(
    judgement: Judgement, of_messages: str, of_responses: str
) -> None:
    told = diagnostics(Route.MESSAGES, judgement, 0)
    assert told == {"cache_miss_reason": {"type": of_messages}}
    assert diagnostics(Route.RESPONSES, judgement, 0) == {"type": of_responses}


@pytest.mark.parametrize(
    ("route", "fields", "expected"),
    [
        (Route.MESSAGES, {}, None),
        (Route.MESSAGES, {"diagnostics": {"previous_message_id": None}}, ""),
        (Route.MESSAGES, {"diagnostics": {"previous_message_id": "a"}}, "a"),
        (Route.MESSAGES, {"diagnostics": "a"}, None),
        (Route.RESPONSES, {"prompt_cache_options": {"mode": "implicit"}}, None),
        (Route.RESPONSES, {"prompt_cache_options": {"comparison_response_id": "a"}}, "a"),
        (Route.CHAT, {"prompt_cache_options": {"comparison_response_id": "a"}}, None),
    ],
)
def test_only_who_asks_is_told(route: Route, fields: Any, expected: str | None) -> None:
    assert asked_comparison(route, GenerationBody(b"", fields)) == expected
