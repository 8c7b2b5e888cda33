"""Cache diagnostics as the hosted APIs give them: the reason is right, and the newest SDKs read it."""

import json
from array import array
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStartEvent
from openai.types.responses import Response, ResponseCompletedEvent
from pydantic import TypeAdapter

from proxy.core.messages import Route
from proxy.core.model import Prompt
from proxy.core.tokens import Namespace, token_ids
from proxy.explain.causes import Cause
from proxy.explain.compare import Rendering
from proxy.explain.known import KnownPrompt
from proxy.explain.report import MAX_NAMED, Journal
from proxy.explain.sketch import (
    Compared,
    Named,
    Sketch,
    anthropic_diagnostics,
    named,
    openai_diagnostics,
    sketch_of,
)
from proxy.explain.views import RequestRecord
from proxy.llama.requests import GenerationBody, as_chat_body, asked_comparison
from tests.lab.apis import MESSAGES, events_of
from tests.lab.mutations import MUTATIONS, OF_MESSAGES, OF_RESPONSES, Mutation, base
from tests.unit.edits import edit_of_answer, edit_of_stream

N_KNOWN = 2000
TENANT = b""
"""Of a client without a key."""


def named_of(mutation: Mutation, body: dict[str, Any]) -> Named:
    route = Route.MESSAGES if mutation.api is MESSAGES else Route.RESPONSES
    chat = as_chat_body(route, GenerationBody(b"", body))
    return named("a", body, sketch_of(chat.fields))


def compared(mutation: Mutation) -> Compared:
    journal = Journal()
    journal.note_named(TENANT, named_of(mutation, base(mutation.api)), "before")
    found = journal.compare(TENANT, "before", named_of(mutation, mutation.body()), None)
    assert found is not None
    share = found.n_common / found.n_known
    return found._replace(n_known=N_KNOWN, n_common=int(share * N_KNOWN))


def answered(mutation: Mutation) -> tuple[Any, Any]:
    """Return what the SDK reads in an answer that comes whole, and in a stream."""
    found, n_cached = compared(mutation), N_KNOWN - 6 if mutation.is_reused else 0
    told = anthropic_diagnostics(found)
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

    def diagnose(n_reused: int) -> Any:
        if mutation.api is MESSAGES:
            return told
        assert n_reused == n_cached
        return openai_diagnostics(found, n_reused)

    body = json.dumps(whole, separators=(",", ":")).encode()
    line = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n"
    edit = edit_of_answer(mutation.api.path, 200, None, diagnose)
    stream = edit_of_stream(mutation.api.path, None, diagnose)
    assert edit is not None and stream is not None
    (read,), (streamed,) = events_of(edit(body)), events_of(stream.feed(line))
    if mutation.api is MESSAGES:
        start = TypeAdapter(RawMessageStartEvent).validate_python(streamed)
        return TypeAdapter(Message).validate_python(read), start.message
    completed = TypeAdapter(ResponseCompletedEvent).validate_python(streamed)
    return TypeAdapter(Response).validate_python(read), completed.response


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
        elif mutation.reason == "unavailable":
            assert found.type == "unavailable"
        else:
            assert (found.type, found.reason) == ("cache_miss", mutation.reason)
            assert 0 < found.cache_missed_tokens <= found.comparison_reusable_tokens == N_KNOWN
        assert response.usage.input_tokens_details.cache_write_tokens == 0


UNKNOWN = named("b", {}, None)
SHORT = Sketch(array("Q"), array("Q"), "u", array("Q", [1]), 0, (400,))


def test_request_is_found_by_its_own_client_only_and_the_oldest_are_forgotten() -> None:
    journal = Journal()
    new = named("a", {"model": "m"}, SHORT)
    for number in range(MAX_NAMED + 1):
        journal.note_named(TENANT, new, f"id-{number}")
    assert journal.compare(TENANT, "id-0", new, None) is None
    assert journal.compare(b"another key", "id-1", new, None) is None
    assert journal.compare(TENANT, "id-1", new, None) == Compared(frozenset(), 100, 100)
    assert anthropic_diagnostics(None) == {
        "cache_miss_reason": {"type": "previous_message_not_found"}
    }
    assert openai_diagnostics(None, 5) == {"type": "comparison_response_not_found"}


def test_request_that_was_not_read_cannot_be_compared() -> None:
    journal = Journal()
    journal.note_named(TENANT, UNKNOWN, "id")
    found = journal.compare(TENANT, "id", named("c", {}, SHORT), None)
    assert anthropic_diagnostics(found) == {"cache_miss_reason": {"type": "unavailable"}}


def test_tokens_in_common_are_counted_where_both_prompts_are_known() -> None:
    journal, namespace = Journal(), Namespace(b"one")
    tokens, others = token_ids(range(900)), token_ids([*range(600), *range(1000, 1400)])
    known = KnownPrompt(namespace, tokens, Rendering({}), ("", 0), 0.0, ("a",))
    journal.prompts.add(known, ())
    facts: dict[str, Any] = {"at": 1.0, "path": "", "outcome": "miss", "seconds": 1.0}
    journal.add(RequestRecord(id="a", cause=Cause.HIT, n_prompt=900, **facts))
    old = named("a", {"model": "m"}, SHORT)
    journal.note_named(TENANT, old, "id")
    new = named("b", {"model": "n"}, SHORT)
    found = journal.compare(TENANT, "id", new, Prompt(others, namespace))
    assert found == Compared(frozenset({"model"}), 900, 600)
    other = journal.compare(TENANT, "id", new, Prompt(tokens, Namespace(b"two")))
    assert other == Compared(frozenset({"model"}), 900, 0)


@pytest.mark.parametrize(
    ("route", "fields", "expected"),
    [
        (Route.MESSAGES, {}, (False, "")),
        (Route.MESSAGES, {"diagnostics": {"previous_message_id": None}}, (True, "")),
        (Route.MESSAGES, {"diagnostics": {"previous_message_id": "a"}}, (True, "a")),
        (Route.MESSAGES, {"diagnostics": "a"}, (False, "")),
        (Route.RESPONSES, {"prompt_cache_options": {"mode": "implicit"}}, (False, "")),
        (Route.RESPONSES, {"prompt_cache_options": {"comparison_response_id": "a"}}, (True, "a")),
        (Route.CHAT, {"prompt_cache_options": {"comparison_response_id": "a"}}, (False, "a")),
    ],
)
def test_only_who_asks_is_told(route: Route, fields: Any, expected: tuple[bool, str]) -> None:
    assert asked_comparison(route, GenerationBody(b"", fields)) == expected
