"""The tool calls in llama-server's answers, read while they are relayed.

Feed all bytes of a 200 answer; what is not understood is passed over. Only calls that are complete
come out: a stream that was cut leaves nothing behind.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.stabilize.model import Form, Json

MAX_BYTES = 8 << 20
"""Of one event or one answer that is not streamed; a larger one is not read."""


@dataclass(frozen=True, slots=True)
class CallMade:
    """One tool call as the model made it."""

    call_id: str
    name: str
    raw_arguments: str


@dataclass(slots=True)
class _Growing:
    """A call of which more may follow."""

    call_id: str
    name: str
    raw_arguments: list[str] = field(default_factory=list)


class CallsMade:
    """Reads one answer, in chunks cut anywhere."""

    def __init__(self, form: Form, *, is_stream: bool) -> None:
        self._form = form
        self._is_stream = is_stream
        self._unread = bytearray()
        self._is_too_large = False
        self._growing: dict[Any, _Growing] = {}

    def feed(self, chunk: bytes) -> list[CallMade]:
        """Return the calls that are complete with this chunk; for a stream, of whole events only."""
        if self._is_too_large:
            return []
        self._unread += chunk
        calls = list(self._read_lines()) if self._is_stream else []
        if len(self._unread) > MAX_BYTES:
            self._unread.clear()
            self._is_too_large = True
        return calls

    def finish(self) -> list[CallMade]:
        """Return the calls of an answer that is not streamed, once all of it is fed."""
        answer = {} if self._is_stream else _decode(bytes(self._unread))
        self._unread.clear()
        return list(_calls_of_answer(self._form, answer))

    def _read_lines(self) -> Iterator[CallMade]:
        *lines, rest = self._unread.split(b"\n")
        self._unread = rest
        for line in lines:
            if line.startswith(b"data:"):
                event = _decode(bytes(line[5:]))
                try:
                    yield from _READ_EVENT[self._form](self, event)
                except (KeyError, TypeError, AttributeError, IndexError):
                    continue

    def _read_anthropic(self, event: Json) -> Iterator[CallMade]:
        kind, index = event.get("type"), event.get("index")
        if kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            block = event["content_block"]
            self._growing[index] = _Growing(block["id"], block["name"])
        elif kind == "content_block_delta" and index in self._growing:
            self._growing[index].raw_arguments.append(event["delta"]["partial_json"])
        elif kind == "content_block_stop" and index in self._growing:
            yield _complete(self._growing.pop(index))

    def _read_chat(self, event: Json) -> Iterator[CallMade]:
        for choice in event.get("choices", []):
            for delta in choice["delta"].get("tool_calls") or []:
                key = choice.get("index"), delta["index"]
                function = delta.get("function", {})
                if "id" in delta:
                    self._growing[key] = _Growing(delta["id"], function["name"])
                if key in self._growing:
                    self._growing[key].raw_arguments.append(function.get("arguments") or "")
            if choice.get("finish_reason"):
                done, self._growing = self._growing, {}
                yield from map(_complete, done.values())

    def _read_responses(self, event: Json) -> Iterator[CallMade]:
        if event.get("type") == "response.output_item.done":
            yield from _calls_of_items([event["item"]])


_READ_EVENT = {
    Form.ANTHROPIC: CallsMade._read_anthropic,
    Form.CHAT: CallsMade._read_chat,
    Form.RESPONSES: CallsMade._read_responses,
}


def _complete(call: _Growing) -> CallMade:
    # A call without arguments streams no fragment of them.
    return CallMade(call.call_id, call.name, "".join(call.raw_arguments) or "{}")


def _decode(data: bytes) -> Json:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _calls_of_answer(form: Form, answer: Json) -> Iterator[CallMade]:
    try:
        if form is Form.ANTHROPIC:
            for block in answer.get("content", []):
                if block["type"] == "tool_use":
                    raw = msgspec.json.encode(block["input"]).decode()
                    yield CallMade(block["id"], block["name"], raw)
        elif form is Form.CHAT:
            for choice in answer.get("choices", []):
                for call in choice["message"].get("tool_calls") or []:
                    function = call["function"]
                    yield CallMade(call["id"], function["name"], function["arguments"])
        else:
            yield from _calls_of_items(answer.get("output", []))
    except (KeyError, TypeError, AttributeError):
        return


def _calls_of_items(items: list[Json]) -> Iterator[CallMade]:
    for item in items:
        if item["type"] == "function_call":
            yield CallMade(item["call_id"], item["name"], item["arguments"])
