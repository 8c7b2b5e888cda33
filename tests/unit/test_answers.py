"""Finding the timings in answers that pass by in pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.upstream.answers import AnswerReader
from proxy.upstream.replies import Timings

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
    return reader.timings()


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
        b'data: {"timings": 5}\n\n',
        b'data: {"timings": {\xff}\n\n',
        b'{"content": "\xed\xa0", "timings": {}}',
        b"\xff\xfe not json",
    ],
)
def test_timings_of_an_answer_without_any_are_none(content_type: str, answer: bytes) -> None:
    assert read(content_type, answer) is None


def test_timings_of_an_answer_larger_than_the_buffer_are_none_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.upstream.answers.MAX_BUFFERED_BYTES", 100)
    assert read("application/json", b'{"a": "' + b"x" * 100, b'"}' + JSON_ANSWER[-90:]) is None


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


def test_first_token_of_an_answer_that_comes_whole_is_not_known() -> None:
    reader = AnswerReader("application/json")
    reader.feed(JSON_ANSWER)
    assert not reader.has_token
