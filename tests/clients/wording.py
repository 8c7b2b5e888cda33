"""An answer of llama-server with other words: its usage and timings stay, what it says is scripted."""

import json
import secrets
from collections.abc import Iterator
from typing import Any

from tests.clients.script import Answer, Call
from tests.lab.apis import events_of

Event = dict[str, Any]


def reworded(path: str, stream: bytes, answer: Answer) -> bytes:
    """Return a whole stream of the Messages or chat API that says *answer*."""
    events = events_of(stream)
    if path == "/v1/messages":
        said = (f"event: {e['type']}\ndata: {_line(e)}\n\n" for e in _messages(events, answer))
        return "".join(said).encode()
    lines = [_line(e) for e in _chat(events, answer)]
    return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()


def _line(event: Event) -> str:
    """Return an event as llama-server writes it, without spaces."""
    return json.dumps(event, separators=(",", ":"))


def _messages(events: list[Event], answer: Answer) -> Iterator[Event]:
    yield from (e for e in events if e["type"] == "message_start")
    for i, (block, deltas) in enumerate(_blocks(answer)):
        yield {"type": "content_block_start", "index": i, "content_block": block}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}
    for event in events:
        if event["type"] == "message_delta":
            reason = "tool_use" if answer.calls else "end_turn"
            yield {**event, "delta": {**event["delta"], "stop_reason": reason}}
        if event["type"] == "message_stop":
            yield event


def _blocks(answer: Answer) -> Iterator[tuple[Event, list[Event]]]:
    if answer.thinking:
        thought = {"type": "thinking_delta", "thinking": answer.thinking}
        signed = {"type": "signature_delta", "signature": ""}
        yield {"type": "thinking", "thinking": "", "signature": ""}, [thought, signed]
    if answer.text:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": answer.text}]
    for call in answer.calls:
        block = {"type": "tool_use", "id": _new_id("toolu_"), "name": call.name, "input": {}}
        yield block, [{"type": "input_json_delta", "partial_json": call.arguments}]


def _chat(events: list[Event], answer: Answer) -> Iterator[Event]:
    base = {k: v for k, v in events[0].items() if k not in ("choices", "usage", "timings")}
    yield {**base, "choices": [_choice({"role": "assistant", "content": None})]}
    for delta in _deltas(answer):
        yield {**base, "choices": [_choice(delta)]}
    reason = "tool_calls" if answer.calls else "stop"
    for event in events:
        choices = event["choices"]
        if choices and choices[0]["finish_reason"]:
            yield {**event, "choices": [{**choices[0], "finish_reason": reason}]}
        elif not choices:
            yield event


def _deltas(answer: Answer) -> Iterator[Event]:
    if answer.thinking:
        yield {"reasoning_content": answer.thinking}
    if answer.text:
        yield {"content": answer.text}
    for i, call in enumerate(answer.calls):
        yield {"tool_calls": [_tool_call(i, call)]}


def _tool_call(index: int, call: Call) -> Event:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": index, "id": _new_id("call_"), "type": "function", "function": function}


def _choice(delta: Event) -> Event:
    return {"index": 0, "delta": delta, "finish_reason": None}


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
