"""llama-server's answers, read while they are relayed, and the usage in them, corrected for clients.

Reading neither delays an answer nor changes a byte. In all APIs but two, `timings` tells how many tokens
were reused, evaluated and generated. Messages has only Anthropic's usage, in two halves in a stream:
message_start has the prompt's tokens, message_delta the generated ones. A Responses answer that is not a
stream has only OpenAI's usage.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import msgspec

from proxy.core.messages import (
    CONVERSATIONS,
    Route,
    error_text,
    list_of,
    member,
    object_in,
    text_of,
)
from proxy.llama.client import Count, Timings
from proxy.llama.connection import MAX_BUFFERED_BYTES
from proxy.llama.requests import is_anthropic

Json = dict[str, Any]
T = TypeVar("T")

_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
"""The types of the last events of streams; OpenAI's chat streams end with [DONE] instead."""
_TEXT_EVENTS = (
    *(b'"delta":{"content":"', b'"delta":{"reasoning_content":"'),
    *(b'"type":"text_delta"', b'"type":"thinking_delta"', b'"type":"response.output_text.delta"'),
    b'"stop":false',
)
"""Found in every event that brings text; quotes inside a JSON string are escaped."""
_SAYS_MORE = re.compile(
    rb'"(?:timings"|usage"|tool_calls"|finish_reason":"|prompt_progress"|error"|stop":true)'
)
"""Found in events that are read although they bring text."""
_QUOTES = re.compile(
    r'(?<!Error): [\'"{]|: \[(?!json)|[{\n;]|,?(?: but)? got\b| at (?:#|pos )'
    r"|(?<=tool_choice): |(?<=format): |(?<=(?:part|tool|call) type): |(?<=allowed): "
)
"""Behind this, llama-server's messages quote the request, and no word of a prompt is logged."""
_COMPLAINT_CHARACTERS = 200
_MOST_OF_OTHERS_BYTES = 1 << 20
"""So much is kept of an answer that may be an error, but tells no counts: embeddings may be long."""


class _Usage(msgspec.Struct):
    """Anthropic's `input_tokens` leaves out cached tokens, OpenAI's includes them."""

    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    input_tokens_details: dict[str, Count] | None = None


@dataclass(frozen=True, slots=True)
class CallMade:
    """One tool call as the model made it; a call without arguments has an empty object."""

    call_id: str
    name: str
    raw_arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Facts of llama-server's answer, read while it was relayed; `timings` is None if it has none.

    `first_token_at` is of the monotonic clock; None if the answer was not a stream. `is_broken` says that
    llama-server went away in the middle. `calls` are the tool calls of the answer, `said` returns its text
    if it belongs to a conversation. `complaint` is llama-server's error in a few words, if it has one.
    """

    status: int
    timings: Timings | None
    first_token_at: float | None = None
    is_broken: bool = False
    calls: tuple[CallMade, ...] = ()
    said: Callable[[], str] = str
    complaint: str = ""

    @property
    def is_refusal(self) -> bool:
        """Whether the request has not touched its slot (server-context.cpp, send_error at launch)."""
        return self.timings is None and 400 <= self.status < 500


class AnswerReader:
    """Finds the token counts and the tool calls in an answer.

    Events that are not understood are ignored. In a stream that was cut, only complete calls are found.
    """

    def __init__(self, content_type: str, route: Route | None = None, n_ends: int = 1) -> None:
        """*route* tells whether an answer has counts, and where its calls; conversations keep their text.

        *n_ends* is how many completions the answer has: a native stream tells the end of each.
        """
        self._is_stream = content_type.startswith("text/event-stream")
        self._route = route
        self._buffer = bytearray()
        self._timings: Timings | None = None
        self._usages: list[_Usage] = []
        self._calls: list[CallMade] = []
        self._growing: dict[Any, list[str]] = {}
        """The id, the name and the parts of the arguments of calls that are not complete yet."""
        self._text_lines: list[bytes] = []
        """The lines of a stream that bring text: 250 bytes a token."""
        self._n_ends = n_ends
        self._has_ended = False
        self.has_token = False
        """Whether a stream has brought its first token.

        The first event brings it, with a role or the start of a block (server-task.cpp, to_json_*). Only
        keep-alive comments and reports of progress come before that event.
        """

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete: the end of the stream, or a whole JSON object, has come."""
        return self._has_ended if self._is_stream else self.facts()[0] is not None

    def feed(self, chunk: bytes) -> None:
        has_counts = self._route not in (None, Route.UNPINNED)
        most_bytes = MAX_BUFFERED_BYTES if has_counts else _MOST_OF_OTHERS_BYTES
        if len(self._buffer) + len(chunk) > most_bytes:
            self._buffer.clear()  # so its hit is not confirmed
        elif not self._is_stream or b"\n" not in chunk:
            self._buffer += chunk
        else:
            *lines, rest = (bytes(self._buffer) + chunk).split(b"\n")
            self._buffer = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    self._read_line(line)

    def _read_line(self, line: bytes) -> None:
        # Nearly all lines are such, and parsing them would cost more than relaying them.
        if _has_any(_TEXT_EVENTS, line):
            if self._route in CONVERSATIONS:  # others may have no end, and 65 KB a token (n_probs)
                self._text_lines.append(line)
            if not _SAYS_MORE.search(line):
                self.has_token = True
                return
        data = line[5:].strip()
        event = object_in(data) or {}
        self.has_token = self.has_token or "prompt_progress" not in event
        self._read_event(event, data)

    def _read_event(self, event: Json, data: bytes = b"") -> None:
        self._timings = _converted(event.get("timings"), Timings) or self._timings
        for carrier in (event, event.get("message"), event.get("response")):
            if usage := _converted(member(carrier, "usage"), _Usage):
                self._usages.append(usage)
        # A client may ask for native answers without it (response_fields): then the end of each has none.
        # Before the first of several, llama-server sends a null.
        is_native = self._route in (Route.COMPLETION, Route.PINNED) and "choices" not in event
        self._n_ends -= event.get("stop", is_native and bool(event)) is True
        is_last = self._n_ends <= 0 or event.get("type") in _LAST_EVENTS
        # Messages streams have no object around an error. llama-server may have emptied the slot for it.
        if is_error := isinstance(event.get("error"), dict) or event.keys() >= {"code", "message"}:
            self._timings, self._usages = None, []
        self._has_ended |= is_last or is_error or data == b"[DONE]"
        with suppress(KeyError, TypeError, AttributeError, IndexError):
            match self._route:
                case Route.MESSAGES:
                    self._calls += self._calls_of_messages(event)
                case Route.CHAT:
                    self._calls += self._calls_of_chat(event)
                case Route.RESPONSES:
                    self._calls += _calls_of_responses(event)

    def facts(self) -> tuple[Timings | None, tuple[CallMade, ...]]:
        """Return the counts of tokens and the complete calls, once the answer has passed.

        Usages do not have llama-server's times, nor, before the end of a stream, the generated tokens.
        """
        if not self._is_stream:
            self._timings, self._usages, self._calls = None, [], []
            self._read_event(object_in(bytes(self._buffer)) or {})
        timings = self._timings
        if timings is None and (self._has_ended or not self._is_stream):
            timings = _timings_of(self._usages)
        return timings, tuple(self._calls)

    def answer(self, status: int, first_token_at: float | None = None) -> Answer:
        """Return what is known of an answer that has passed; errors are no streams."""
        timings, calls = self.facts()
        complaint = complaint_in(bytes(self._buffer)) if status >= 400 else ""
        return Answer(status, timings, first_token_at, False, calls, self.said, complaint)

    def said(self) -> str:
        """Return the answer's text without its reasoning, once the answer has passed."""
        lines = (line[5:] for line in self._text_lines) if self._is_stream else [self._buffer]
        events = (object_in(bytes(line)) or {} for line in lines)
        return "".join(chain.from_iterable(map(_texts_of, events)))

    # The calls in an event, or in an answer that is not a stream.

    def _calls_of_messages(self, event: Json) -> Iterator[CallMade]:
        kind, index = event.get("type"), event.get("index")
        for block in event.get("content", []):
            if block["type"] == "tool_use":
                raw_arguments = msgspec.json.encode(block["input"]).decode()
                yield CallMade(block["id"], block["name"], raw_arguments)
        if kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            block = event["content_block"]
            self._growing[index] = [block["id"], block["name"]]
        elif kind == "content_block_delta" and index in self._growing:
            self._growing[index].append(event["delta"]["partial_json"])
        elif kind == "content_block_stop" and index in self._growing:
            yield _complete(self._growing.pop(index))

    def _calls_of_chat(self, event: Json) -> Iterator[CallMade]:
        for choice in event.get("choices", []):
            is_whole = "message" in choice
            message = choice["message" if is_whole else "delta"]
            for number, call in enumerate(message.get("tool_calls") or []):
                key = choice.get("index"), number if is_whole else call["index"]
                function = call.get("function", {})
                if "id" in call:
                    self._growing[key] = [call["id"], function["name"]]
                if key in self._growing:
                    self._growing[key].append(function.get("arguments") or "")
            if is_whole or choice.get("finish_reason"):
                done, self._growing = self._growing, {}
                yield from map(_complete, done.values())


def _has_any(marks: tuple[bytes, ...], line: bytes) -> bool:
    for mark in marks:  # takes a third of the time of any()
        if mark in line:
            return True
    return False


def _texts_of(event: Json) -> Iterator[str]:
    """Yield the texts of an event, or of an answer that is not a stream, in any API but completions."""
    for choice in list_of(event.get("choices")):
        yield text_of(member(choice, "delta", member(choice, "message")), "content")
    yield text_of(event, "delta") or text_of(event.get("delta"), "text")
    items = (list_of(member(item, "content")) for item in list_of(event.get("output")))
    for part in chain(list_of(event.get("content")), *items):
        if text_of(part, "type") in ("text", "output_text"):
            yield text_of(part, "text")


def _calls_of_responses(event: Json) -> Iterator[CallMade]:
    is_done = event.get("type") == "response.output_item.done"
    for item in [event["item"]] if is_done else event.get("output", []):
        if item["type"] == "function_call":
            yield CallMade(item["call_id"], item["name"], item["arguments"])


def _converted(value: Any, kind: type[T]) -> T | None:
    with suppress(msgspec.ValidationError):
        return None if value is None else msgspec.convert(value, kind)
    return None


def _timings_of(usages: list[_Usage]) -> Timings | None:
    generated = [u.output_tokens for u in usages if u.output_tokens is not None]
    for usage in usages:
        n_input, n_cached = usage.input_tokens, usage.cache_read_input_tokens
        if usage.input_tokens_details is not None and n_input is not None:
            n_cached = usage.input_tokens_details.get("cached_tokens", 0)
            n_input -= n_cached
        if generated and n_input is not None and n_cached is not None:
            return Timings(n_cached, n_input, predicted_n=max(generated))
    return None


def complaint_in(body: bytes) -> str:
    """Return what llama-server's error says, shortened, and without what it quotes of the request."""
    # A template's own error stands behind a piece of the template.
    told = error_text(object_in(body)).rpartition("\nError: ")[2][:_COMPLAINT_CHARACTERS]
    return _QUOTES.split(told, 1)[0].strip()


def _complete(growing: list[str]) -> CallMade:
    call_id, name, *parts = growing
    return CallMade(call_id, name, "".join(parts) or "{}")


# The usage is corrected for clients: tokens that the proxy evaluated at a stop for this request do not
# count as cached. Diagnostics are added if the client asks for them. The rest of the answer, `timings`
# included, stays as llama-server sent it, and no total is reduced. Quotes inside a JSON string are escaped,
# so a model's text never looks like a field. But a tool call's input in a whole Messages answer is no
# string: there only the text after the last "usage" counts.


_READ = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d+)')
_CREATED = re.compile(rb'("cache_creation_input_tokens"\s*:\s*)(\d+)')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_LAST_RESPONSES = tuple(b'"%b"' % kind.encode() for kind in _LAST_EVENTS[1:])


def empty_answer(path: str, body: bytes) -> bytes:
    """Return the answer to a request that only warms: llama-server's, but without generated tokens."""
    whole = object_in(body)
    if whole is None:
        return body
    usage = {**member(whole, "usage", {}), "output_tokens": 0}
    if is_anthropic(path):
        return msgspec.json.encode(
            {**whole, "usage": usage, "content": [], "stop_reason": "max_tokens"}
        )
    usage["total_tokens"] = usage.get("input_tokens", 0)
    return msgspec.json.encode({**whole, "usage": usage, "output": [], "status": "completed"})


class TrueUsage:
    """Corrects one answer; *n_found* tokens were in the slot before the proxy evaluated any for it.

    *n_found* is None if the proxy evaluated none. *diagnostics*, in JSON, are added unless they are empty.
    """

    def __init__(self, path: str, n_found: int | None, diagnostics: bytes = b"") -> None:
        self.is_anthropic = is_anthropic(path)
        self._n_found = n_found
        self._diagnostics = diagnostics

    def of_answer(self, body: bytes) -> bytes:
        """Return a whole JSON answer, corrected."""
        if not self.is_anthropic:
            return self._openai(body, b"{")
        start = body.rfind(b'"usage"')
        edited = body if start < 0 else body[:start] + self._anthropic(body[start:])
        return self._diagnosed(edited, b"{")

    def of_line(self, line: bytes) -> bytes:
        """Return one line of a stream, corrected."""
        if not line.startswith(b"data:"):
            return line
        if not self.is_anthropic:
            return self._openai(line, b'"response":{' if _has_any(_LAST_RESPONSES, line) else b"")
        if b'"message_start"' not in line:
            return line
        return self._diagnosed(self._anthropic(line), b'"message":{')

    def _anthropic(self, data: bytes) -> bytes:
        found = _READ.search(data)
        if found is None:
            return data
        n_read, n_new = self._split(int(found[1]))
        usage = b'"cache_read_input_tokens":%d' % n_read
        if not _CREATED.search(data):
            usage += b',"cache_creation":{"ephemeral_5m_input_tokens":%d' % n_new
            usage += b',"ephemeral_1h_input_tokens":0},"cache_creation_input_tokens":0'
        data = data[: found.start()] + usage + data[found.end() :]
        return _CREATED.sub(lambda m: m[1] + b"%d" % (int(m[2]) + n_new), data, count=1)

    def _openai(self, data: bytes, opens: bytes) -> bytes:
        found = list(_CACHED.finditer(data))
        if not found:
            return data
        n_read, n_new = self._split(int(found[-1][1]))
        told = b"%d" % n_read
        if (n_new or self._diagnostics) and b'"cache_write_tokens"' not in data:
            told += b',"cache_write_tokens":%d' % n_new
        data = data[: found[-1].start(1)] + told + data[found[-1].end(1) :]
        return self._diagnosed(data, opens)

    def _diagnosed(self, data: bytes, opens: bytes) -> bytes:
        """Return an answer with its diagnostics right behind *opens*, where its message begins."""
        if not self._diagnostics or not opens:
            return data
        name = b"diagnostics" if self.is_anthropic else b"prompt_cache_diagnostics"
        told = b'%b"%b":%b,' % (opens, name, self._diagnostics)
        return data.replace(opens, told, 1)

    def _split(self, n_cached: int) -> tuple[int, int]:
        """Return how many of the cached tokens were cached before, and how many the proxy evaluated."""
        n_read = n_cached if self._n_found is None else min(n_cached, self._n_found)
        return n_read, n_cached - n_read
