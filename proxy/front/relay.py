"""Relays one exchange with llama-server: headers, then the body chunk by chunk as it comes."""

import asyncio
import io
import time
from collections.abc import AsyncIterable, Callable, Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from proxy.driver.requests import Answer
from proxy.driver.serving.stabilizing import FORMS
from proxy.errors import ProxyError, UpstreamGone, UpstreamNotReached
from proxy.front.edits import edited_answer
from proxy.front.error_bodies import error_event, error_event_of
from proxy.front.keeper import Keeper
from proxy.stabilize.calls_made import CallMade, CallsMade
from proxy.upstream.answers import AnswerReader
from proxy.upstream.llama_server import LlamaServer, reason_of
from proxy.upstream.routes import generation_route
from proxy.upstream.target import Target

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


class Heard:
    """An answer that is being relayed: cut off, it ends in an error, as if llama-server had died."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.heard_at = time.monotonic()

    def note(self) -> None:
        self.heard_at = time.monotonic()

    def cut(self) -> None:
        self._answer.close()


class Exchange:
    """One request to llama-server whose answer goes to one client."""

    def __init__(self, client: web.Request, path: str) -> None:
        """*path* is the client's, as a llama-server would see it."""
        self._client = client
        self._path = path
        self._keeper = Keeper(client)
        self._has_begun = False
        self._relayed: web.StreamResponse | None = None
        self.is_answered = False
        """Whether the client has the whole answer, be it an error's."""

    @property
    def response(self) -> web.StreamResponse | None:
        """What the client has been sent so far, None if nothing."""
        return self._relayed or self._keeper.response

    def _require_end(self, reader: AnswerReader) -> None:
        """Raise ClientPayloadError if a stream ended early: llama-swap ends one as if it were whole."""
        is_generation = generation_route(self._client.method, self._path) is not None
        if is_generation and reader.has_token and not reader.is_complete:
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

        *on_start* is called when a stream begins: then llama-server has begun to work on it. *n_found* is
        for the usage, as in driver's Send. Raises UpstreamGone if there is no answer, UpstreamNotReached
        if the request was not even sent; an answer that breaks off ends in an error event.
        """
        try:
            async with await self._answer_to(upstream, body, headers) as answer:
                if _is_stream(answer):
                    on_start()
                elif upstream.target.speaks_plainly and answer.content_type == "text/plain":
                    raise await _gone(upstream.target, answer)
                heard = Heard(answer)
                with upstream.pending.noted(heard):
                    return await self._relay(upstream.target, answer, heard, n_found)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if self._has_begun:
                raise  # the client is gone, or _relay has told it
            is_unsent = isinstance(error, _NOT_CONNECTED)
            raise (UpstreamNotReached if is_unsent else UpstreamGone)(
                f"llama-server at {upstream.target.base_url}: {reason_of(error)}"
            ) from error

    async def _answer_to(
        self, upstream: LlamaServer, body: Body, headers: CIMultiDict[str]
    ) -> aiohttp.ClientResponse:
        """Send the request and return the answer once its headers are there."""
        async with upstream.pending.call():
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
        reader = AnswerReader(answer.headers.get("Content-Type", ""))
        calls = self._calls_of(answer)
        made: list[CallMade] = []
        edited = edited_answer(self._path, answer, n_found)
        n_bytes = await edited.n_bytes()
        self._has_begun = True
        response = self._relayed = self._keeper.response or await self._begin(answer, n_bytes)
        first_token_at: float | None = None
        try:
            async for chunk, passed_on in edited.chunks():
                heard.note()
                if target.says_gone(chunk):
                    raise aiohttp.ClientPayloadError("its process has ended")
                reader.feed(chunk)
                made += calls.feed(chunk) if calls else ()
                if first_token_at is None and reader.has_token:
                    first_token_at = time.monotonic()
                if passed_on:
                    await response.write(passed_on)
            self._require_end(reader)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionResetError):
            if not reader.is_complete:
                raise
            # Many clients hang up at [DONE], before the stream's last bytes: the request is served.
            if task := asyncio.current_task():
                task.uncancel()
        except aiohttp.ClientError as error:
            await self._break_off(answer, response, error)
            return Answer(answer.status, None, first_token_at, is_broken=True)
        self.is_answered = True
        made += calls.finish() if calls else ()
        return Answer(answer.status, reader.timings(), first_token_at, calls=tuple(made))

    async def _refuse_in_stream(self, answer: aiohttp.ClientResponse) -> Answer:
        """Tell a client whose stream has begun already what llama-server said instead of one."""
        body = await answer.read()
        self._has_begun = True
        await self._keeper.end(error_event_of(self._path, answer.status, body))
        self.is_answered = True
        return Answer(answer.status, None)

    def _calls_of(self, answer: aiohttp.ClientResponse) -> CallsMade | None:
        """Return what reads the tool calls of an answer; clients will not send them back as they were."""
        route = generation_route(self._client.method, self._path)
        form = FORMS.get(route) if route else None
        is_read = form is not None and answer.status == 200
        return CallsMade(form, is_stream=_is_stream(answer)) if is_read and form else None

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
        self, answer: aiohttp.ClientResponse, response: web.StreamResponse, error: Exception
    ) -> None:
        """Tell the client that llama-server went away in the middle of its answer.

        An event is what llama-server itself sends when a generation fails midway; clients report it,
        where a cut connection makes some of them continue from half an answer.
        """
        if _is_stream(answer):
            gone = UpstreamGone(f"llama-server went away in mid-answer: {error}")
            await response.write(error_event(self._path, gone))
            await response.write_eof()
        elif self._client.transport is not None:
            self._client.transport.close()


async def _gone(target: Target, answer: aiohttp.ClientResponse) -> UpstreamGone:
    """Return what a host says of a llama-server that it could not reach, or that did not answer."""
    body = await answer.read()
    kind = UpstreamNotReached if target.says_unreached(answer.status, body) else UpstreamGone
    return kind(f"{target.name}: {body[:200].decode(errors='replace')}")


def _is_stream(answer: aiohttp.ClientResponse) -> bool:
    return answer.headers.get("Content-Type", "").startswith("text/event-stream")
