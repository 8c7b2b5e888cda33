"""The usage in answers: only what was there before counts as cached, and no total is reduced."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.apis import CHAT, MESSAGES, RESPONSES, Api, events_of
from tests.unit.edits import edit_of_answer, edit_of_stream

# What a model may say; in a Messages answer that comes whole, a call's input is not escaped.
LIES = {
    "usage": {"cache_read_input_tokens": 7},
    "prompt_tokens_details": {"cached_tokens": 7},
    "input_tokens_details": {"cached_tokens": 7},
    "said": 'he said "cached_tokens":7, "cache_read_input_tokens":7, "type":"message_start"',
}
TIMINGS = {"cache_n": 1996, "prompt_n": 5}
OPENAI = {"prompt_tokens": 2001, "prompt_tokens_details": {"cached_tokens": 1996}}
INPUT = {"input_tokens": 2001, "input_tokens_details": {"cached_tokens": 1996}}
ANTHROPIC = {"cache_read_input_tokens": 1996, "input_tokens": 5, "output_tokens": 0}
MESSAGE = {"content": [{"type": "tool_use", "input": LIES}], "usage": ANTHROPIC}
CALL = {"type": "function_call", "arguments": json.dumps(LIES)}

WHOLE: dict[str, tuple[Api, Any]] = {
    "chat": (CHAT, {"choices": [{"text": json.dumps(LIES)}], "usage": OPENAI, "timings": TIMINGS}),
    "messages": (MESSAGES, MESSAGE),
    "responses": (RESPONSES, {"output": [CALL], "usage": INPUT}),
}
STREAMS: dict[str, tuple[Api, list[Any]]] = {
    "chat": (
        CHAT,
        [
            {"choices": [{"delta": {"content": json.dumps(LIES)}}]},
            {"choices": [], "usage": OPENAI, "timings": TIMINGS},
        ],
    ),
    "messages": (
        MESSAGES,
        [
            {"type": "message_start", "message": {"model": "m", "usage": ANTHROPIC}},
            {"type": "content_block_delta", "delta": {"partial_json": json.dumps(LIES)}},
            {"type": "message_delta", "usage": {"output_tokens": 8}},
            {"type": "message_stop"},
        ],
    ),
    "responses": (
        RESPONSES,
        [
            {"type": "response.output_item.done", "item": CALL},
            {"type": "response.completed", "response": {"usage": INPUT}, "timings": TIMINGS},
        ],
    ),
}


def encoded(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def stream_of(events: list[Any]) -> bytes:
    lines = (b"event: %s\ndata: %s\n\n" % (e.get("type", "").encode(), encoded(e)) for e in events)
    return b"".join(lines)


def without_cached(content: bytes) -> list[Any]:
    """Return an answer's objects with the fields that may change left out."""

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(part) for part in value]
        if not isinstance(value, dict) or value == LIES:
            return value
        changed = {"cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"}
        changed |= {"cache_creation", "cache_write_tokens"}
        return {key: clean(part) for key, part in value.items() if key not in changed}

    return [clean(event) for event in events_of(content)]


@pytest.mark.parametrize("name", WHOLE)
@given(n_found=st.integers(0, 3000))
def test_whole_answer_says_what_was_cached_before(name: str, n_found: int) -> None:
    api, content = WHOLE[name]
    edit = edit_of_answer(api.path, 200, n_found)
    assert edit is not None
    edited = edit(encoded(content))
    assert api.read(edited).n_cached == min(1996, n_found)
    assert api.read(edited).n_prompt == 2001
    assert without_cached(edited) == without_cached(encoded(content))


@pytest.mark.parametrize("name", STREAMS)
@given(data=st.data(), n_found=st.integers(0, 3000))
def test_stream_cut_anywhere_says_what_was_cached_before(
    name: str, data: st.DataObject, n_found: int
) -> None:
    api, events = STREAMS[name]
    stream, edit = stream_of(events), edit_of_stream(api.path, n_found)
    assert edit is not None
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    chunks = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]
    edited = b"".join([edit.feed(chunk) for chunk in chunks]) + edit.finish()
    assert api.read(edited).n_cached == min(1996, n_found)
    assert api.read(edited).n_prompt == 2001
    assert without_cached(edited) == without_cached(stream)


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_answer_for_which_nothing_was_evaluated_before_passes_as_it_is(name: str) -> None:
    api, _ = WHOLE[name]
    assert edit_of_answer(api.path, 200, None) is None
    assert edit_of_stream(api.path, None) is None


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_answer_that_is_true_already_stays_byte_for_byte(name: str) -> None:
    (api, whole), (_, events) = WHOLE[name], STREAMS[name]
    edit, lines = edit_of_answer(api.path, 200, 1996), edit_of_stream(api.path, 2500)
    assert edit is not None and lines is not None
    assert edit(encoded(whole)) == encoded(whole)
    assert lines.feed(stream_of(events)) == stream_of(events)


@pytest.mark.parametrize("n_found", [None, 1996, 1000])
def test_messages_always_says_what_is_newly_cached(n_found: int | None) -> None:
    edit, lines = (
        edit_of_answer(MESSAGES.path, 200, n_found),
        edit_of_stream("/v1/messages", n_found),
    )
    assert edit is not None and lines is not None
    n_new = 1996 - (1996 if n_found is None else n_found)
    usage: dict[str, Any] = {**ANTHROPIC, "cache_read_input_tokens": 1996 - n_new}
    usage["cache_creation_input_tokens"] = n_new
    by_time = {"ephemeral_5m_input_tokens": n_new, "ephemeral_1h_input_tokens": 0}
    usage["cache_creation"] = by_time
    assert json.loads(edit(encoded(MESSAGE)))["usage"] == usage
    start = events_of(lines.feed(stream_of(STREAMS["messages"][1])))[0]
    assert start["message"]["usage"] == usage


def test_messages_usage_that_has_the_field_already_keeps_its_own() -> None:
    edit = edit_of_answer(MESSAGES.path, 200, 1000)
    assert edit is not None
    usage = {"cache_creation_input_tokens": 4, **ANTHROPIC}
    edited = json.loads(edit(encoded({"usage": usage})))["usage"]
    assert edited == {**usage, "cache_read_input_tokens": 1000, "cache_creation_input_tokens": 1000}


@pytest.mark.parametrize("path", [MESSAGES.path, MESSAGES.count_path, CHAT.path, RESPONSES.path])
@given(body=st.binary())
def test_answer_without_usage_passes_as_it_is(path: str, body: bytes) -> None:
    edit = edit_of_answer(path, 200, 5)
    assert edit is not None
    assert edit(body) == body


@given(chunks=st.lists(st.binary()))
def test_stream_of_any_bytes_passes_as_it_is(chunks: list[bytes]) -> None:
    edit = edit_of_stream(MESSAGES.path, 5)
    assert edit is not None
    passed = b"".join([edit.feed(chunk) for chunk in chunks]) + edit.finish()
    assert passed == b"".join(chunks)


def test_long_line_takes_little_time() -> None:
    edit = edit_of_stream(MESSAGES.path, 5)
    assert edit is not None
    began = time.thread_time()
    for _ in range(16 << 10):
        assert edit.feed(b"x" * 1024) == b""
    assert time.thread_time() - began < 1
    assert edit.feed(b"\n") == b"x" * (16 << 20) + b"\n"


def test_line_larger_than_the_buffer_passes_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = edit_of_stream(MESSAGES.path, 5)
    assert edit is not None
    monkeypatch.setattr("proxy.web.errors.MAX_BUFFERED_BYTES", 10)
    assert edit.feed(b"data: " + b"x" * 20) == b"data: " + b"x" * 20
