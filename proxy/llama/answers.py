"""llama-server's answers, read while they pass by, and the usage that clients are shown."""

import re

import msgspec

from proxy.llama.client import Timings
from proxy.llama.routes import ErrorShape, error_shape

# Reads llama-server's answers while they pass by, without holding them up or changing a byte.
#
# All APIs but two say in `timings` what was reused, evaluated and generated. Messages has only
# Anthropic's usage, in two halves when it streams: message_start has the prompt's tokens, message_delta
# those that were generated. A Responses answer that comes whole has only OpenAI's.


MAX_BUFFERED_BYTES = 64 << 20
"""A JSON answer larger than this goes unread (and so unconfirmed); lines of a stream likewise."""

# OpenAI's streams end with [DONE], the others with an event that says so. No text can look like one:
# quotes inside a JSON string are escaped.
_LAST_EVENTS = (
    b'"stop":true',
    b'"type":"message_stop"',
    b'"type":"response.completed"',
    b'"type":"response.incomplete"',
    b'"type":"response.failed"',
    b'"error":{',
)
"""What the last event of a stream has in it, an error's included."""


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    """Anthropic's `input_tokens` is without what was cached, OpenAI's with it."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _Carrier(msgspec.Struct):
    usage: _Usage | None = None


class _Said(msgspec.Struct):
    """A JSON answer or an event, as far as it tells of tokens; `message` is message_start's."""

    timings: Timings | None = None
    usage: _Usage | None = None
    message: _Carrier | None = None
    response: _Carrier | None = None


class AnswerReader:
    """Finds what a JSON answer, or the last stream events that tell of it, say of tokens."""

    def __init__(self, content_type: str) -> None:
        self._is_stream = content_type.startswith("text/event-stream")
        self._buffer = bytearray()
        self._told: dict[bytes, bytes] = {}
        self._has_ended = False
        self.has_token = False
        """Whether a stream has brought its first token.

        The first event does, with the role or the block that it opens (server-task.cpp, to_json_*);
        comments that keep the connection alive and reports of progress come before it.
        """

    @property
    def is_complete(self) -> bool:
        """Whether llama-server has said all: the end of the stream, or a whole JSON object."""
        return self._has_ended if self._is_stream else self.timings() is not None

    def feed(self, chunk: bytes) -> None:
        self._buffer += chunk
        if len(self._buffer) > MAX_BUFFERED_BYTES:
            self._buffer.clear()
        if not self._is_stream:
            return
        end = self._buffer.rfind(b"\n")
        if end < 0:
            return
        for line in bytes(self._buffer[:end]).split(b"\n"):
            if line.startswith(b"data:"):
                self._read_event(line[5:])
        del self._buffer[: end + 1]

    def _read_event(self, data: bytes) -> None:
        self.has_token = self.has_token or b'"prompt_progress"' not in data
        for key in (b'"timings"', b'"message_start"', b'"usage"'):
            if key in data:
                self._told[key] = data
                break
        if data.startswith(b" [DONE]") or any(event in data for event in _LAST_EVENTS):
            self._has_ended = True

    def timings(self) -> Timings | None:
        """Return what the answer said of reuse and evaluation, once it has passed."""
        told = self._told.values() if self._is_stream else (bytes(self._buffer),)
        said = [_decode(data) for data in told]
        timings = [one.timings for one in said if one.timings is not None]
        if timings:
            return timings[-1]
        # Before the end of a stream its usage does not say yet how much was generated.
        is_final = self._has_ended or not self._is_stream
        return _timings_of_usage(said) if is_final else None


def _decode(data: bytes) -> _Said:
    try:
        return msgspec.json.decode(data, type=_Said)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Said()


def _timings_of_usage(said: list[_Said]) -> Timings | None:
    """Return the same from usages; llama-server's times are not in them."""
    carriers = [one for event in said for one in (event, event.message, event.response)]
    usages = [one.usage for one in carriers if one is not None and one.usage is not None]
    n_generated = [usage.output_tokens for usage in usages if usage.output_tokens is not None]
    for usage in usages:
        if usage.input_tokens is None or not n_generated:
            continue
        if usage.input_tokens_details is not None:
            n_cached = usage.input_tokens_details.cached_tokens
            return Timings(n_cached, usage.input_tokens - n_cached, predicted_n=max(n_generated))
        if usage.cache_read_input_tokens is not None:
            n_cached = usage.cache_read_input_tokens
            return Timings(n_cached, usage.input_tokens, predicted_n=max(n_generated))
    return None


# The usage that clients show, made true: what the proxy evaluated at a stop just before is not cached.
#
# Owns: where each API says it, in an answer or in a line of a stream. All else of the answer, `timings`
# included, stays llama-server's byte for byte, and no total is reduced. Quotes inside a JSON string are
# escaped, so that what a model says never looks like a field; a tool call's input in a Messages answer
# that comes whole is no string, so there only what follows the last "usage" counts.


_READ = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d+)')
_CREATED = re.compile(rb'("cache_creation_input_tokens"\s*:\s*)(\d+)')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')


class TrueUsage:
    """Corrects one answer; *n_found* tokens were there before the proxy evaluated any for it.

    None says that it evaluated none.
    """

    def __init__(self, path: str, n_found: int | None) -> None:
        self._is_anthropic = error_shape(path) is ErrorShape.ANTHROPIC
        self._n_found = n_found

    @property
    def is_needed(self) -> bool:
        """Whether an answer may need it; Anthropic's always says what is newly cached, if only 0."""
        return self._is_anthropic or self._n_found is not None

    def of_answer(self, body: bytes) -> bytes:
        """Return a JSON answer that came whole."""
        if not self._is_anthropic:
            return self._openai(body)
        start = body.rfind(b'"usage"')
        return body if start < 0 else body[:start] + self._anthropic(body[start:])

    def of_line(self, line: bytes) -> bytes:
        """Return one line of a stream."""
        if not line.startswith(b"data:"):
            return line
        if not self._is_anthropic:
            return self._openai(line)
        return self._anthropic(line) if b'"message_start"' in line else line

    def _anthropic(self, data: bytes) -> bytes:
        found = _READ.search(data)
        if found is None:
            return data
        n_read, n_new = self._split(int(found[1]))
        usage = b'"cache_read_input_tokens":%d' % n_read
        rest = data[found.end() :]
        if _CREATED.search(data):
            data = data[: found.start()] + usage + rest
            return _CREATED.sub(lambda m: m[1] + b"%d" % (int(m[2]) + n_new), data, count=1)
        usage += b',"cache_creation_input_tokens":%d' % n_new
        return data[: found.start()] + usage + rest

    def _openai(self, data: bytes) -> bytes:
        found = list(_CACHED.finditer(data))
        if not found:
            return data
        n_read, _ = self._split(int(found[-1][1]))
        return data[: found[-1].start(1)] + b"%d" % n_read + data[found[-1].end(1) :]

    def _split(self, n_cached: int) -> tuple[int, int]:
        """Return how many of the cached tokens were there before, and how many are new."""
        n_read = n_cached if self._n_found is None else min(n_cached, self._n_found)
        return n_read, n_cached - n_read
