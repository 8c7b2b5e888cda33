"""Reads llama-server's answers while they pass by, without holding them up or changing a byte."""

import msgspec

from proxy.upstream.replies import Timings

MAX_BUFFERED_BYTES = 64 << 20
"""A JSON answer larger than this goes unread (and so unconfirmed); lines of a stream likewise."""


class _Timed(msgspec.Struct):
    timings: Timings | None = None


class AnswerReader:
    """Finds the `timings` object of a JSON answer, or of the last stream event that has one."""

    def __init__(self, content_type: str) -> None:
        self._is_stream = content_type.startswith("text/event-stream")
        self._buffer = bytearray()
        self._timed = b""
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
                self.has_token = self.has_token or b'"prompt_progress"' not in line
                if b'"timings"' in line:
                    self._timed = line[5:]
            # OpenAI's streams end with [DONE], native ones with an event that says stop.
            if line.startswith(b"data: [DONE]") or b'"stop":true' in line:
                self._has_ended = True
        del self._buffer[: end + 1]

    def timings(self) -> Timings | None:
        """Return what the answer said of reuse and evaluation, once it has passed."""
        data = self._timed if self._is_stream else bytes(self._buffer)
        try:
            return msgspec.json.decode(data, type=_Timed).timings if data else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
