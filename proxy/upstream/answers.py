"""Reads llama-server's answers while they pass by, without holding them up or changing a byte.

All APIs but two say in `timings` what was reused, evaluated and generated. Messages has only Anthropic's
usage, in two halves when it streams: message_start has the prompt's tokens, message_delta those that were
generated. A Responses answer that comes whole has only OpenAI's.
"""

import msgspec

from proxy.upstream.replies import Timings

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
