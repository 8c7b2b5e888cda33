"""Reading tool calls out of relayed answers, however they are cut."""

import json
from typing import Any

import pytest

from proxy.core.messages import Route
from proxy.llama.answers import AnswerReader, CallMade

RAW = '{"path": "a.py", "limit": 1.0}'
CALL = CallMade("c1", "read", RAW)


def chat_delta(**call: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **call}]}}]}


CHAT: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]},
    chat_delta(id="c1", type="function", function={"name": "read", "arguments": RAW[:9]}),
    chat_delta(function={"arguments": RAW[9:]}),
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {}},
]
ANTHROPIC: list[dict[str, Any]] = [
    {"type": "message_start", "message": {}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "So"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "c1", "name": "read", "input": {}},
    },
    *(
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": part},
        }
        for part in (RAW[:5], RAW[5:])
    ),
    {"type": "content_block_stop", "index": 1},
]
RESPONSES: list[dict[str, Any]] = [
    {"type": "response.output_item.added", "item": {"type": "function_call", "arguments": ""}},
    {
        "type": "response.output_item.done",
        "item": {"type": "function_call", "call_id": "c1", "name": "read", "arguments": RAW},
    },
]
STREAMS = {Route.CHAT: CHAT, Route.MESSAGES: ANTHROPIC, Route.RESPONSES: RESPONSES}


def stream(events: list[dict[str, Any]]) -> bytes:
    lines = (f"event: x\ndata: {json.dumps(event)}\n\n" for event in events)
    return (": comment\n\n" + "".join(lines) + "data: [DONE]\n\n").encode()


def read(route: Route, data: bytes, *, size: int, is_stream: bool = True) -> list[CallMade]:
    reader = AnswerReader("text/event-stream" if is_stream else "application/json", route)
    for i in range(0, len(data), size):
        reader.feed(data[i : i + size])
    return list(reader.facts()[1])


@pytest.mark.parametrize("route", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_call_is_read_from_a_stream_cut_anywhere(route: Route, size: int) -> None:
    assert read(route, stream(STREAMS[route]), size=size) == [CALL]


@pytest.mark.parametrize("route", STREAMS)
def test_stream_that_ends_early_has_no_calls(route: Route) -> None:
    assert read(route, stream(STREAMS[route][:-2]), size=64) == []


def test_call_without_arguments_has_empty_ones() -> None:
    events = [*ANTHROPIC[4:5], ANTHROPIC[-1]]
    assert read(Route.MESSAGES, stream(events), size=64) == [CallMade("c1", "read", "{}")]


@pytest.mark.parametrize(
    ("route", "answer"),
    [
        (
            Route.CHAT,
            {
                "choices": [
                    {
                        "message": {
                            "tool_calls": [
                                {"id": "c1", "function": {"name": "read", "arguments": RAW}}
                            ]
                        }
                    }
                ]
            },
        ),
        (
            Route.RESPONSES,
            {
                "output": [
                    {"type": "message", "content": []},
                    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": RAW},
                ]
            },
        ),
    ],
)
def test_call_is_read_from_an_answer_that_is_not_streamed(route: Route, answer: Any) -> None:
    assert read(route, json.dumps(answer).encode(), size=13, is_stream=False) == [CALL]


def test_anthropic_arguments_keep_their_order_and_numbers() -> None:
    block = {"type": "tool_use", "id": "c1", "name": "read", "input": json.loads(RAW)}
    answer = {"content": [{"type": "text", "text": ""}, block]}
    calls = read(Route.MESSAGES, json.dumps(answer).encode(), size=13, is_stream=False)
    assert calls == [CallMade("c1", "read", '{"path":"a.py","limit":1.0}')]


@pytest.mark.parametrize("route", STREAMS)
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"data: {\n\n",
        b"data: []\n\ndata: 1\n\n",
        b'data: {"choices": [1], "type": "content_block_start"}\n\n',
        b'{"content": [1], "choices": 3, "output": [{}]}',
        b'data: {"choices": 3}\n\n',
        b'data: {"type": "response.output_item.done", "item": {"type": "function_call"}}\n\n',
        b"\xff\xfe\n",
    ],
)
def test_answer_that_is_not_understood_has_no_calls(
    route: Route, is_stream: bool, data: bytes
) -> None:
    assert read(route, data, size=5, is_stream=is_stream) == []


def test_answer_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.llama.answers.MAX_BUFFERED_BYTES", 100)
    assert read(Route.CHAT, b" " * 200 + stream(CHAT), size=10, is_stream=False) == []
