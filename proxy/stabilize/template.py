"""What chat templates do, and what the model itself wrote: facts for stabilizers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from proxy.stabilize.drops import inline_reasoning
from proxy.stabilize.model import Form, Json, Marks, RequestFacts

# What a chat template does with late system messages and old reasoning, read from renderings.
#
# Owns: which bodies to render, and what their renderings mean. `BODIES` are chat bodies for /apply-
# template; a body that llama-server refuses has no rendering.


_ASKED = {"role": "user", "content": "Zaq asks"}
_ASKED_AGAIN = {"role": "user", "content": "Zaq asks again"}
_REASONING = "Zaq reasons"
_PADDED = f"\n {_REASONING}\n "
_TEXT = "Zaq answers"
_LATE = "Zaq commands"
_CALL = {
    "id": "call_0000",
    "type": "function",
    "function": {"name": "zaq", "arguments": "{}"},
}
_RESULT = {"role": "tool", "tool_call_id": "call_0000", "content": "Zaq returns"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "zaq",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


class TemplateProbe(StrEnum):
    """The renderings that tell what a template does."""

    LATE_SYSTEM = "late system"
    RUNNING_TEXT = "text of a running turn"
    RUNNING_CALL = "call of a running turn"
    RUNNING_PADDED = "padded reasoning of a running turn"
    RUNNING_BARE = "answer without reasoning of a running turn"
    OLD_TEXT = "text of an old turn"


def _answer(content: str, reasoning: str = _REASONING) -> list[Json]:
    answer: Json = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
    reasoned = {"reasoning_content": reasoning} if reasoning else {}
    return [_ASKED, {**answer, **reasoned}, _RESULT]


def _old(content: str, reasoning: str = _REASONING) -> list[Json]:
    closed = {"role": "assistant", "content": "Zaq ends"}
    return [*_answer(content, reasoning), closed, _ASKED_AGAIN]


_SYSTEM = {"role": "system", "content": "Zaq"}
_LATE_SYSTEM = [
    _SYSTEM,
    _ASKED,
    {"role": "assistant", "content": _TEXT},
    _ASKED_AGAIN,
    {"role": "system", "content": _LATE},
]
_MESSAGES: dict[TemplateProbe, list[Json]] = {
    TemplateProbe.LATE_SYSTEM: _LATE_SYSTEM,
    TemplateProbe.RUNNING_TEXT: _answer(_TEXT),
    TemplateProbe.RUNNING_CALL: _answer(""),
    TemplateProbe.RUNNING_PADDED: _answer(_TEXT, _PADDED),
    TemplateProbe.RUNNING_BARE: _answer(_TEXT, ""),
    TemplateProbe.OLD_TEXT: _old(_TEXT),
}
BODIES: dict[TemplateProbe, dict[str, Any]] = {
    probe: {"messages": messages, "tools": [_TOOL]} for probe, messages in _MESSAGES.items()
}


def read_facts(renderings: Mapping[TemplateProbe, str | None]) -> RequestFacts:
    """Return what is known of a template by the renderings of `BODIES`; None for those refused."""
    late = renderings.get(TemplateProbe.LATE_SYSTEM)
    return RequestFacts(
        # Rendered somewhere else than where it was said, it would change the beginning.
        accepts_late_system=late is not None and late.find(_LATE) > late.find("Zaq asks again"),
        reasoning_marks=_read_marks(renderings),
    )


def inlined_body(facts: RequestFacts) -> dict[str, Any] | None:
    """Return a body whose rendering shows whether the reasoning marks hold, if there are any."""
    old = {"messages": [*_old(""), *_old(_TEXT), *_old(_TEXT, "")], "tools": [_TOOL]}
    rewrite = inline_reasoning(Form.CHAT, old, facts)
    return None if rewrite is None else rewrite.body


def keeps_inlined(rendering: str | None, renderings: Mapping[TemplateProbe, str | None]) -> bool:
    """Return whether the rendering of `inlined_body` begins as the turn did while it was running."""
    marks = _read_marks(renderings)
    if rendering is None or marks is None or rendering.count(_REASONING) != 2:
        return False
    running = renderings[TemplateProbe.RUNNING_CALL] or ""
    bare = (renderings[TemplateProbe.RUNNING_BARE] or "").split(str(_ASKED["content"]), 1)[-1]
    has_bare = bare.split(str(_RESULT["content"]))[0] in rendering
    begins_alike = rendering.startswith(running[: running.find(str(_RESULT["content"]))])
    return begins_alike and (has_bare or not marks.writes_empty)


def _read_marks(renderings: Mapping[TemplateProbe, str | None]) -> Marks | None:
    """Return how reasoning is written, or None if it is kept anyway or cannot be told."""
    running = renderings.get(TemplateProbe.RUNNING_TEXT) or ""
    old = renderings.get(TemplateProbe.OLD_TEXT) or ""
    called = renderings.get(TemplateProbe.RUNNING_CALL) or ""
    padded = renderings.get(TemplateProbe.RUNNING_PADDED) or ""
    if _REASONING in old or not all(_REASONING in text for text in (running, called, padded)):
        return None
    if _TEXT not in old or _TEXT not in running:
        return None
    begins = old.index(_TEXT)
    begin, behind = running[begins:].split(_REASONING, 1)
    if running[:begins] != old[:begins]:
        return None
    before_calls = _before_calls(called, old)
    if before_calls is None:
        return None
    end = behind.split(_TEXT, 1)[0]
    bare = running.replace(begin + _REASONING + end, begin + end, 1)
    return Marks(
        begin,
        end,
        before_calls,
        strips=begin + _PADDED not in padded,
        writes_empty=bool(begin) and renderings.get(TemplateProbe.RUNNING_BARE) == bare,
    )


def _before_calls(called: str, old: str) -> str | None:
    """Return what stands behind reasoning that calls follow, less what the template adds to text."""
    behind_reasoning = called.split(_REASONING, 1)[1].split(str(_RESULT["content"]))[0]
    behind_text = old.split(_TEXT, 1)[1].split(str(_RESULT["content"]))[0]
    if not behind_reasoning.endswith(behind_text):
        return None
    return behind_reasoning.removesuffix(behind_text)


# The tool calls in llama-server's answers, read while they are relayed.
#
# Feed all bytes of a 200 answer; what is not understood is passed over. Only calls that are complete come
# out: a stream that was cut leaves nothing behind.


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
