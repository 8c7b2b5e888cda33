"""Finding the timings in answers that pass by in pieces."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.messages import Route
from proxy.llama.answers import AnswerReader, complaint_in
from proxy.llama.client import Timings

TIMINGS = {"cache_n": 1996, "prompt_n": 5, "prompt_ms": 1.5, "predicted_n": 8, "new_field": 1}
JSON_ANSWER = json.dumps(
    {"choices": [{"message": {"content": 'a "timings" b'}}], "timings": TIMINGS}
).encode()
EVENTS = [
    {"choices": [{"delta": {"content": 'he said "timings": {"cache_n": 1}'}}]},
    {"choices": [], "timings": {**TIMINGS, "cache_n": 1}},
    {"choices": [], "timings": TIMINGS},
]
STREAM = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in EVENTS)
STREAM += b"data: [DONE]\n\n"


def read(content_type: str, *chunks: bytes) -> Timings | None:
    reader = AnswerReader(content_type)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.facts()[0]


def test_event_that_is_null_is_not_the_end_of_a_completion() -> None:
    reader = AnswerReader("text/event-stream", Route.COMPLETION, n_ends=2)
    reader.feed(b'data: null\n\ndata: {"index": 0, "content": "", "stop": true}\n\n')
    assert not reader.is_complete
    reader.feed(b'data: {"index": 1, "content": "", "stop": true}\n\n')
    assert reader.is_complete


def test_timings_of_a_json_answer_are_found() -> None:
    timings = read("application/json; charset=utf-8", JSON_ANSWER)
    assert timings == Timings(1996, 5, 1.5, 8)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_timings_of_a_stream_cut_at_any_byte_are_the_last_ones(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    for cut in range(len(stream) + 1):
        timings = read("text/event-stream", stream[:cut], stream[cut:])
        assert timings is not None
        assert (timings.cache_n, timings.prompt_n) == (1996, 5)


def test_timings_of_a_stream_that_comes_byte_by_byte_are_found() -> None:
    timings = read("text/event-stream; charset=utf-8", *(bytes([byte]) for byte in STREAM))
    assert timings is not None and timings.cache_n == 1996


def test_timings_without_a_space_after_data_are_found() -> None:
    timings = read("text/event-stream", STREAM.replace(b"data: ", b"data:"))
    assert timings is not None and timings.cache_n == 1996


def test_timings_of_a_stream_that_broke_off_before_them_are_none() -> None:
    assert read("text/event-stream", STREAM[: STREAM.index(b"\n\n") + 2]) is None


def test_timings_before_an_event_whose_text_mentions_them_are_found() -> None:
    event = json.dumps({"choices": [{"delta": {"content": 'of "timings": {}'}}]}).encode()
    timings = read("text/event-stream", STREAM + b"data: " + event + b"\n\n")
    assert timings is not None and timings.cache_n == 1996


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b'{"error": {"code": 400, "message": "no"}}',
        b"[1, 2]",
        b'{"timings": null}',
        b'{"timings": {"cache_n": "many", "prompt_n": 1}}',
        b'{"timings": {"cache_n": 1',
        b'{"timings": {"cache_n": 1, "prompt_n": 9999999999}}',
        b'{"usage": {"input_tokens": 9999999999, "output_tokens": 1, "cache_read_input_tokens": 1}}',
        b'data: {"timings": 5}\n\n',
        b'data: {"timings": {\xff}\n\n',
        b'{"content": "\xed\xa0", "timings": {}}',
        b"\xff\xfe not json",
    ],
)
def test_timings_of_an_answer_without_any_are_none(content_type: str, answer: bytes) -> None:
    assert read(content_type, answer) is None


@pytest.mark.parametrize(
    ("route", "limit"), [(Route.CHAT, "MAX_BUFFERED_BYTES"), (None, "_MOST_OF_OTHERS_BYTES")]
)
def test_timings_of_an_answer_larger_than_the_buffer_are_none_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, route: Route | None, limit: str
) -> None:
    monkeypatch.setattr(f"proxy.llama.answers.{limit}", 100)
    reader = AnswerReader("application/json", route)
    reader.feed(b'{"a": "' + b"x" * 100)
    reader.feed(b'"}' + JSON_ANSWER[-90:])
    assert reader.facts()[0] is None


@pytest.mark.parametrize(("route", "is_kept"), [(Route.CHAT, True), (Route.UNPINNED, False)])
def test_long_answer_that_tells_no_counts_is_not_kept(route: Route, is_kept: bool) -> None:
    reader = AnswerReader("application/json", route)
    reader.feed(JSON_ANSWER[:-1])
    reader.feed(b" " * (1 << 20) + JSON_ANSWER[-1:])
    assert (reader.facts()[0] is not None) is is_kept


@given(st.sampled_from(["application/json", "text/event-stream"]), st.lists(st.binary()))
def test_timings_of_any_bytes_raise_nothing(content_type: str, chunks: list[bytes]) -> None:
    assert read(content_type, *chunks) is None


PING = b":\n\n"
PROGRESS = b'data: {"choices":[{"delta":{"role":"assistant"}}],"prompt_progress":{"total":9}}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"says \\"prompt_progress\\""}}]}\n\n'


def test_first_token_comes_after_comments_and_progress() -> None:
    reader = AnswerReader("text/event-stream")
    reader.feed(PING + PROGRESS + PING + PROGRESS)
    assert not reader.has_token
    reader.feed(TOKEN[:20])
    assert not reader.has_token
    reader.feed(TOKEN[20:] + PROGRESS)
    assert reader.has_token


def test_stream_of_several_completions_ends_with_the_last_of_them() -> None:
    reader = AnswerReader("text/event-stream", Route.COMPLETION, 2)
    end = b'data: {"index":%d,"content":"","stop":true}\n\n'
    reader.feed(end % 1)
    assert not reader.is_complete
    reader.feed(end % 0)
    assert reader.is_complete


def test_first_token_of_an_answer_that_comes_whole_is_not_known() -> None:
    reader = AnswerReader("application/json")
    reader.feed(JSON_ANSWER)
    assert not reader.has_token


def events(*contents: dict[str, Any], named: bool = True) -> bytes:
    """Return a stream as llama-server writes it."""
    lines = [
        (f"event: {content['type']}\n" if named else "") + f"data: {json.dumps(content)}\n\n"
        for content in contents
    ]
    return "".join(lines).replace('": ', '":').encode()


QUOTED = {"text": 'of "usage":{"input_tokens":1}, "type":"message_stop", "timings":{}'}
ANTHROPIC_USAGE = {"cache_read_input_tokens": 1996, "input_tokens": 5, "output_tokens": 8}
MESSAGE = {"type": "message", "content": [{"type": "text", **QUOTED}], "usage": ANTHROPIC_USAGE}
MESSAGES_STREAM = events(
    {"type": "message_start", "message": {"usage": {**ANTHROPIC_USAGE, "output_tokens": 0}}},
    {"type": "content_block_delta", "index": 0, "delta": QUOTED},
    {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 3}},
    {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 8}},
    {"type": "message_stop"},
)
OPENAI_USAGE = {
    "input_tokens": 2001,
    "output_tokens": 8,
    "total_tokens": 2009,
    "input_tokens_details": {"cached_tokens": 1996},
}
RESPONSE = {"object": "response", "output": [QUOTED], "usage": OPENAI_USAGE}
RESPONSES_STREAM = events(
    {"type": "response.created", "response": {"status": "in_progress"}},
    {"type": "response.output_text.delta", "delta": QUOTED["text"]},
    {"type": "response.completed", "response": RESPONSE, "timings": TIMINGS},
)
STREAMS = {
    "chat": STREAM,
    "messages": MESSAGES_STREAM,
    "responses": RESPONSES_STREAM,
    "responses without timings": RESPONSES_STREAM.replace(b'"timings"', b'"other"'),
}


@pytest.mark.parametrize("answer", [MESSAGE, RESPONSE])
def test_usage_of_a_json_answer_without_timings_is_read(answer: dict[str, Any]) -> None:
    timings = read("application/json; charset=utf-8", json.dumps(answer).encode())
    assert timings == Timings(1996, 5, 0.0, 8)


@pytest.mark.parametrize("api", STREAMS)
@given(data=st.data())
def test_stream_of_any_api_cut_anywhere_says_the_same(api: str, data: st.DataObject) -> None:
    stream = STREAMS[api]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    chunks = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]
    timings = read("text/event-stream", *chunks)
    assert timings is not None
    assert (timings.cache_n, timings.prompt_n, timings.predicted_n) == (1996, 5, 8)


@pytest.mark.parametrize("api", STREAMS)
def test_stream_of_any_api_is_complete_with_its_last_event_only(api: str) -> None:
    reader = AnswerReader("text/event-stream")
    *before, last = STREAMS[api].rstrip(b"\n").split(b"\n\n")
    reader.feed(b"\n\n".join(before) + b"\n\n")
    assert not reader.is_complete
    reader.feed(last + b"\n")
    assert reader.is_complete
    assert reader.facts()[0] is not None


@pytest.mark.parametrize("event", ["response.incomplete", "response.failed"])
def test_response_that_ends_early_is_complete(event: str) -> None:
    reader = AnswerReader("text/event-stream")
    reader.feed(events({"type": event, "response": {"usage": OPENAI_USAGE}}))
    assert reader.is_complete
    assert reader.facts()[0] == Timings(1996, 5, 0.0, 8)


def test_messages_stream_that_breaks_off_confirms_nothing() -> None:
    cut = MESSAGES_STREAM.index(b"event: message_delta")
    assert read("text/event-stream", MESSAGES_STREAM[:cut]) is None


def test_messages_stream_without_its_start_confirms_nothing() -> None:
    """llama-server leaves it out when the first token is half a character."""
    cut = MESSAGES_STREAM.index(b"event: content_block_delta")
    assert read("text/event-stream", MESSAGES_STREAM[cut:]) is None


def text_event(**more: Any) -> bytes:
    """Return an event of a chat as llama-server writes nearly all of them, with more fields."""
    choice = {"finish_reason": None, "index": 0, "delta": {"content": "a"}}
    event = {"choices": [choice], "id": "chatcmpl-1", "object": "chat.completion.chunk", **more}
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def test_event_that_brings_only_text_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr("proxy.llama.answers.object_in", decoded.append)
    reader = AnswerReader("text/event-stream", Route.CHAT)
    reader.feed(text_event())
    assert reader.has_token and decoded == []
    reader.feed(text_event(timings=TIMINGS))
    assert len(decoded) == 1


def test_text_is_kept_of_conversations_only() -> None:
    """A native stream may have no end, and with n_probs thousands of bytes for each token."""
    for route, event, said in (
        (Route.CHAT, text_event(), "a"),
        (Route.COMPLETION, b'data: {"content":"a","stop":false}\n\n', ""),
    ):
        reader = AnswerReader("text/event-stream", route)
        reader.feed(event)
        assert reader.has_token and reader.said() == said
        assert bool(reader._text_lines) == bool(said)


def test_event_that_brings_text_and_timings_is_read() -> None:
    timings = read("text/event-stream", text_event(), text_event(timings=TIMINGS), text_event())
    assert timings == Timings(1996, 5, 1.5, 8)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("request (9 tokens) exceeds the context size", "request (9 tokens) exceeds the context size"),
        ("'messages' is required", "'messages' is required"),
        (
            "Field 'n': [json.exception.type_error.302] type must be number, but is string",
            "Field 'n': [json.exception.type_error.302] type must be number, but is string",
        ),
        ("Failed to parse messages: Missing 'role' in message: {\"content\":\"SECRET\"}",
         "Failed to parse messages: Missing 'role' in message"),
        ("Expected 'tools' to be an array, got \"SECRET\"; tools = \"SECRET\"",
         "Expected 'tools' to be an array"),
        ("missing closing quote; last read: '\"SECRET'", "missing closing quote"),
        ("JSON schema error at #: unrecognized type SECRET", "JSON schema error"),
        ("type must be \"text\", but got: SECRET", 'type must be "text"'),
        ("Unknown reasoning format: SECRET", "Unknown reasoning format"),
        ("Unsupported content part type: SECRET", "Unsupported content part type"),
        ("Unsupported tool type: SECRET", "Unsupported tool type"),
        ("Invalid 'content' type: expected string or array, got 1",
         "Invalid 'content' type: expected string or array"),
        ("Invalid diff: 'SECRET' not found at start of 'SECRET, TOO'", "Invalid diff"),
        ("Failed to parse input at pos 12: SECRET", "Failed to parse input"),
        ("file path is not allowed: /SECRET", "file path is not allowed"),
        ("Field 'lora': Error: 'lora' must be an array of objects",
         "Field 'lora': Error: 'lora' must be an array of objects"),
        (
            "\n----\nWhile executing CallExpression at line 18 in source:\n... raise_exception(\n"
            "Error: Jinja Exception: No user query found in messages.",
            "Jinja Exception: No user query found in messages.",
        ),
        ("x" * 1000, "x" * 200),
    ],
)  # fmt: skip
def test_error_is_told_without_what_it_quotes(message: str, complaint: str) -> None:
    """The messages are llama-server's own."""
    assert (
        complaint_in(json.dumps({"error": {"code": 400, "message": message}}).encode()) == complaint
    )
    assert complaint_in(b"<html>") == complaint_in(b'{"error": "no model"}') == ""
    told_by_llama_swap = b'{"src": "llama-swap", "error": "no router for requested model"}'
    assert complaint_in(told_by_llama_swap) == "no router for requested model"
