"""The usage that clients show, made true: what the proxy evaluated at a stop just before is not cached.

Owns: where each API says it, in an answer or in a line of a stream. All else of the answer, `timings`
included, stays llama-server's byte for byte, and no total is reduced. Quotes inside a JSON string are
escaped, so that what a model says never looks like a field; a tool call's input in a Messages answer that
comes whole is no string, so there only what follows the last "usage" counts.
"""

import re

from proxy.upstream.routes import ErrorShape, error_shape

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
