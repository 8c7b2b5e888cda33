"""What the proxy changes in an answer that passes by: usage, and errors for clients of Anthropic's API."""

from collections.abc import AsyncIterator, Callable

import aiohttp

from proxy.front.error_bodies import anthropic_error, anthropic_event
from proxy.upstream.answers import MAX_BUFFERED_BYTES
from proxy.upstream.routes import ErrorShape, error_shape
from proxy.upstream.usage import TrueUsage

Edit = Callable[[bytes], bytes]


class LineEdit:
    """Edits a stream line by line, in chunks cut anywhere; a line is passed on once it is whole."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        self._rest += chunk
        if len(self._rest) > MAX_BUFFERED_BYTES:
            return self.finish()
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return b"".join(self._edit(line) + b"\n" for line in lines)

    def finish(self) -> bytes:
        """Return what is left when the stream ends in the middle of a line."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest


class EditedAnswer:
    """An answer of llama-server as it comes, and as it is passed on."""

    def __init__(
        self, answer: aiohttp.ClientResponse, lines: LineEdit | None, whole: Edit | None
    ) -> None:
        self._answer = answer
        self._lines = lines
        self._whole = whole
        self._read: tuple[bytes, bytes] | None = None

    async def n_bytes(self) -> int | None:
        """Return how long it is when it is passed on, None if it is as long as it comes."""
        if self._whole is None:
            return None
        body = await self._answer.read()
        self._read = body, self._whole(body)
        return len(self._read[1])

    async def chunks(self) -> AsyncIterator[tuple[bytes, bytes]]:
        """Yield what has come, and what of it can be passed on now."""
        if self._read is not None:
            yield self._read
            return
        async for chunk in self._answer.content.iter_any():
            yield chunk, chunk if self._lines is None else self._lines.feed(chunk)
        if self._lines is not None:
            yield b"", self._lines.finish()


def edited_answer(path: str, answer: aiohttp.ClientResponse, n_found: int | None) -> EditedAnswer:
    """Return the answer to a request of a *path* with what has to be changed in it.

    *n_found* is as in driver's Send.
    """
    headers = answer.headers
    is_ours = answer.method != "HEAD" and "Content-Encoding" not in headers
    if is_ours and headers.get("Content-Type", "").startswith("text/event-stream"):
        return EditedAnswer(answer, edit_of_stream(path, n_found), None)
    is_small = int(headers.get("Content-Length", MAX_BUFFERED_BYTES + 1)) <= MAX_BUFFERED_BYTES
    if is_ours and is_small and headers.get("Content-Type", "").startswith("application/json"):
        return EditedAnswer(answer, None, edit_of_answer(path, answer.status, n_found))
    return EditedAnswer(answer, None, None)


def edit_of_stream(path: str, n_found: int | None) -> LineEdit | None:
    """Return how a stream is edited, None if it passes as it is."""
    usage = TrueUsage(path, n_found)
    if error_shape(path) is ErrorShape.ANTHROPIC:
        return LineEdit(_AnthropicLines(usage))
    return LineEdit(usage.of_line) if usage.is_needed else None


def edit_of_answer(path: str, status: int, n_found: int | None) -> Edit | None:
    """Return how an answer that comes whole is edited, None if it passes as it is."""
    if status == 200:
        usage = TrueUsage(path, n_found)
        return usage.of_answer if usage.is_needed else None
    if status >= 400 and error_shape(path) is ErrorShape.ANTHROPIC:
        return lambda body: anthropic_error(status, body)
    return None


class _AnthropicLines:
    """Edits the lines of a Messages stream: its usage, and llama-server's own shape of error events."""

    def __init__(self, usage: TrueUsage) -> None:
        self._usage = usage
        self._is_error = False

    def __call__(self, line: bytes) -> bytes:
        if line.startswith(b"event:"):
            self._is_error = line[6:].strip() == b"error"
        elif self._is_error and line.startswith(b"data:"):
            return b"data: " + anthropic_event(line[5:].strip())
        return self._usage.of_line(line)
