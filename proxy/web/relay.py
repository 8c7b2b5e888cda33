"""Keeps a client that waits for its stream: clients give up after minutes without a byte.

A request may be queued, restored and evaluated for long before llama-server sends its headers. From then
on llama-server itself sends comments while it evaluates (--sse-ping-interval).
"""

import asyncio
import io
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from types import TracebackType

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from proxy.errors import (
    ProxyError,
    UpstreamEnded,
    UpstreamGone,
    UpstreamNotReached,
    UpstreamPerhapsReached,
)
from proxy.llama.answers import MAX_BUFFERED_BYTES, AnswerReader, TrueUsage
from proxy.llama.client import Heard, LlamaServer, reason_of
from proxy.llama.routes import Target, generation_route, is_anthropic
from proxy.serving.request import Answer
from proxy.web.errors import anthropic_error, anthropic_event, error_event, error_event_of
from proxy.web.writer import ClientWriter, Unread

# Keeps a client that waits for its stream: clients give up after minutes without a byte.
#
# A request may be queued, restored and evaluated for long before llama-server sends its headers. From
# then on llama-server itself sends comments while it evaluates (--sse-ping-interval).


KEEP_SECONDS = 15.0
"""How long a client waits for the first sign of life, and for each one after that."""
COMMENT = b": waiting\n\n"


class Keeper:
    """Begins the client's stream with comments if llama-server's answer does not begin soon.

    `response` is that stream, None as long as nothing had to be sent.
    """

    def __init__(self, client: web.Request) -> None:
        self._client = client
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.response: web.StreamResponse | None = None

    async def __aenter__(self) -> "Keeper":
        self._task = asyncio.ensure_future(self._keep())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Send nothing any more; again is harmless."""
        task, self._task = self._task, None
        if task is None:
            return
        if self._sending.locked():
            async with self._sending:  # a comment is not cut in two
                pass
        task.cancel()

    def resume(self, response: web.StreamResponse) -> None:
        """Keep the client again, in a stream that has brought it nothing but comments so far."""
        self.response = response
        self._task = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        try:
            while True:
                await asyncio.sleep(KEEP_SECONDS)
                async with self._sending:
                    await self._send_comment()
        except ConnectionResetError:
            pass  # the client left; whoever serves it is told so too

    async def _send_comment(self) -> None:
        if self.response is None:
            headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
            if origin := self._client.headers.get("Origin"):
                headers["Access-Control-Allow-Origin"] = origin  # as llama-server does
            response = web.StreamResponse(headers=headers)
            await response.prepare(self._client)
            self.response = response
        await self.response.write(COMMENT)

    async def end(self, event: bytes) -> None:
        """End the stream with a last event."""
        assert self.response is not None
        await self.response.write(event)
        await self.response.write_eof()


# What the proxy changes in an answer that passes by: usage, and errors for clients of Anthropic's API.


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

    @property
    def body(self) -> bytes:
        """What came, if it was read whole to know how long it is; else nothing."""
        return self._read[0] if self._read is not None else b""

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

    *n_found* is as in serving's Send.
    """
    headers = answer.headers
    is_ours = answer.method != "HEAD" and "Content-Encoding" not in headers
    if is_ours and headers.get("Content-Type", "").startswith("text/event-stream"):
        return EditedAnswer(answer, edit_of_stream(path, n_found), None)
    if is_ours and answer.status == 500 and "Content-Length" not in headers:
        return EditedAnswer(answer, None, lambda body: body)  # what a router says of a dead child
    is_small = int(headers.get("Content-Length", MAX_BUFFERED_BYTES + 1)) <= MAX_BUFFERED_BYTES
    if is_ours and is_small and headers.get("Content-Type", "").startswith("application/json"):
        return EditedAnswer(answer, None, edit_of_answer(path, answer.status, n_found))
    return EditedAnswer(answer, None, None)


def edit_of_stream(path: str, n_found: int | None) -> LineEdit | None:
    """Return how a stream is edited, None if it passes as it is."""
    usage = TrueUsage(path, n_found)
    if is_anthropic(path):
        return LineEdit(_AnthropicLines(usage))
    return LineEdit(usage.of_line) if usage.is_needed else None


def edit_of_answer(path: str, status: int, n_found: int | None) -> Edit | None:
    """Return how an answer that comes whole is edited, None if it passes as it is."""
    if status == 200:
        usage = TrueUsage(path, n_found)
        return usage.of_answer if usage.is_needed else None
    if status >= 400 and is_anthropic(path):
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


# Relays one exchange with llama-server: headers, then the body chunk by chunk as it comes.


Body = bytes | AsyncIterable[bytes] | None

_HOP_BY_HOP = frozenset(
    (
        "connection",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        # llama-server would go on generating after the client is gone, in a slot that we give back.
        "x-conversation-id",
    )
)

_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


def end_to_end(
    headers: Mapping[str, str], *, without: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """Return the headers that a proxy passes on."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    dropped = _HOP_BY_HOP | without | named
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in dropped)


class Exchange:
    """One request to llama-server whose answer goes to one client."""

    def __init__(self, client: web.Request, path: str, unread: Unread) -> None:
        """*path* is the client's, as a llama-server would see it."""
        self._client = client
        self._path = path
        self._keeper = Keeper(client)
        self._has_begun = False
        self.writer = ClientWriter(client, unread)
        self.is_answered = False
        """Whether llama-server's answer has come to its end, be it an error's."""

    @property
    def response(self) -> web.StreamResponse | None:
        """What the client has been sent so far, None if nothing."""
        return self.writer.response or self._keeper.response

    def _require_end(self, answer: aiohttp.ClientResponse, reader: AnswerReader) -> None:
        """Raise ClientPayloadError if a stream ended early: llama-swap ends one as if it were whole."""
        is_generation = generation_route(self._client.method, self._path) is not None
        if is_generation and _is_stream(answer) and not reader.is_complete:
            raise aiohttp.ClientPayloadError("its stream ended before its last event")

    def kept(self) -> Keeper:
        """Return a context in which a client that asked for a stream is kept while it waits."""
        return self._keeper

    async def send(
        self,
        upstream: LlamaServer,
        body: Body,
        headers: CIMultiDict[str],
        on_start: Callable[[], None] = lambda: None,
        n_found: int | None = None,
    ) -> Answer:
        """Send the client's request with *body*, relay the answer, return what was seen of it.

        Returns when llama-server is done; what the client has not read by then waits in `writer`.
        *on_start* is called when a stream begins: then llama-server has begun to work on it. *n_found* is
        for the usage, as in serving's Send. Raises UpstreamGone if there is no answer, UpstreamEnded if
        llama-server ended over it, UpstreamNotReached if the request was not even sent; then it may be sent
        again. An answer that breaks off ends in an error event.
        """
        try:
            async with await self._answer_to(upstream, body, headers) as answer:
                if _is_stream(answer):
                    on_start()
                elif upstream.target.speaks_plainly and answer.content_type == "text/plain":
                    raise await _gone(upstream.target, answer)
                with upstream.heard(answer.close) as heard:
                    return await self._relay(upstream.target, answer, heard, n_found)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if self._has_begun:
                raise  # the client is gone, or _relay has told it
            message = f"llama-server at {upstream.target.base_url}: {reason_of(error)}"
            raise _kind_of(error)(message) from error

    async def _answer_to(
        self, upstream: LlamaServer, body: Body, headers: CIMultiDict[str]
    ) -> aiohttp.ClientResponse:
        """Send the request and return the answer once its headers are there."""
        async with upstream.waiting():
            return await upstream.session.request(
                self._client.method,
                upstream.url(self._client.raw_path),
                # aiohttp writes a large body from a file in pieces, and warns of one in bytes.
                data=io.BytesIO(body) if isinstance(body, bytes) else body,
                headers=headers,
                allow_redirects=False,
            )

    async def end_kept(self, error: ProxyError) -> bool:
        """End a stream that was begun for a client to wait in; return False if there is none."""
        await self._keeper.stop()
        if self._has_begun or self._keeper.response is None:
            return False
        await self._keeper.end(error_event(self._path, error))
        return True

    async def _relay(
        self,
        target: Target,
        answer: aiohttp.ClientResponse,
        heard: Heard,
        n_found: int | None,
    ) -> Answer:
        await self._keeper.stop()
        if self._keeper.response is not None and not (answer.status == 200 and _is_stream(answer)):
            return await self._refuse_in_stream(answer)
        route = generation_route(self._client.method, self._path) if answer.status == 200 else None
        reader = AnswerReader(answer.headers.get("Content-Type", ""), route)
        edited = edited_answer(self._path, answer, n_found)
        n_bytes = await _n_bytes(edited, target)
        self._has_begun = True
        self.writer.response = self._keeper.response or await self._begin(answer, n_bytes)
        first_token_at: float | None = None
        try:
            async for chunk, passed_on in edited.chunks():
                heard.note()
                if target.says_gone(chunk):
                    raise aiohttp.ClientPayloadError("its process has ended")
                reader.feed(chunk)
                if first_token_at is None and reader.has_token:
                    first_token_at = time.monotonic()
                if passed_on:
                    await self.writer.write(passed_on)
            self._require_end(answer, reader)
            await self.writer.end()
        except (asyncio.CancelledError, ConnectionResetError):
            if not reader.is_complete:
                raise
            # Many clients hang up at [DONE], before the stream's last bytes: the request is served.
            if task := asyncio.current_task():
                task.uncancel()
        except aiohttp.ClientError as error:
            await self._break_off(answer, heard, error, has_token=reader.has_token)
            return Answer(answer.status, None, first_token_at, is_broken=True)
        self.is_answered = True
        return Answer(answer.status, reader.timings(), first_token_at, calls=reader.calls())

    async def _refuse_in_stream(self, answer: aiohttp.ClientResponse) -> Answer:
        """Tell a client whose stream has begun already what llama-server said instead of one."""
        body = await answer.read()
        self._has_begun = True
        await self._keeper.end(error_event_of(self._path, answer.status, body))
        self.is_answered = True
        return Answer(answer.status, None)

    async def _begin(
        self, answer: aiohttp.ClientResponse, n_bytes: int | None
    ) -> web.StreamResponse:
        headers = end_to_end(answer.headers)
        if n_bytes is not None:
            headers["Content-Length"] = str(n_bytes)
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        if "Content-Length" not in headers and answer.status not in (204, 304):
            if self._client.version >= aiohttp.HttpVersion11 and self._client.method != "HEAD":
                response.enable_chunked_encoding()
        await response.prepare(self._client)
        return response

    async def _break_off(
        self,
        answer: aiohttp.ClientResponse,
        heard: Heard,
        error: Exception,
        *,
        has_token: bool,
    ) -> None:
        """Tell the client that llama-server went away in the middle of its answer.

        An event is what llama-server itself sends when a generation fails midway; clients report it,
        where a cut connection makes some of them continue from half an answer. Who got no token of a
        stream can wait on in it: then this raises UpstreamGone or UpstreamEnded.
        """
        told = f"llama-server went away in mid-answer: {error}"
        response = self.writer.response
        if response is None or not _is_stream(answer):
            if self._client.transport is not None:
                self._client.transport.close()
        elif has_token:
            await self.writer.write(error_event(self._path, UpstreamGone(told)))
            await self.writer.end()
        else:
            await self.writer.delivered()
            self.writer.response, self._has_begun = None, False
            self._keeper.resume(response)
            raise (UpstreamGone if heard.is_cut else UpstreamEnded)(told) from error


async def _n_bytes(edited: EditedAnswer, target: Target) -> int | None:
    """Return how long an answer is when it is passed on; raises UpstreamEnded if a host says in it
    that llama-server has ended.
    """
    n_bytes = await edited.n_bytes()
    if target.says_gone(edited.body):
        raise UpstreamEnded(f"{target.name} has ended")
    return n_bytes


def _kind_of(error: Exception) -> type[UpstreamGone]:
    """Return what a failed connection says of llama-server."""
    if isinstance(error, _NOT_CONNECTED):
        return UpstreamNotReached
    # What is cut off was told to end (`Heard` in llama/client.py).
    return UpstreamGone if isinstance(error, TimeoutError) else UpstreamEnded


async def _gone(target: Target, answer: aiohttp.ClientResponse) -> UpstreamGone:
    """Return what a host says of a llama-server that it could not reach, or that did not answer."""
    body = await answer.read()
    kind = UpstreamGone
    if target.says_gone(body):
        kind = UpstreamEnded
    elif target.says_unreached(answer.status, body):
        kind = UpstreamNotReached if target.tells_unreached else UpstreamPerhapsReached
    return kind(f"{target.name}: {body[:200].decode(errors='replace')}")


def _is_stream(answer: aiohttp.ClientResponse) -> bool:
    return answer.headers.get("Content-Type", "").startswith("text/event-stream")
