"""Relays one exchange with llama-server: headers, then the body chunk by chunk as it comes."""

import asyncio
import time
from contextlib import suppress
from functools import partial

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from proxy.errors import OutOfCells, ProxyError, ServerAway
from proxy.explain.report import Report, Told
from proxy.llama.answers import Answer, AnswerReader
from proxy.llama.client import Body, Heard, LlamaServer, Target, error_message
from proxy.llama.connection import Reply, away, end_to_end, read_most, read_now, reason_of
from proxy.llama.requests import generation_route
from proxy.serving.request import OnStart, Request, do_nothing
from proxy.web.errors import StreamEdit, edits_of, error_event, error_event_of, error_response
from proxy.web.writer import PIECE_BYTES, ClientWriter, Unread, for_any_page

_NO_CELLS = b'"message":"Context size has been exceeded'
"""In llama-server's error; in the text of an answer the quotes are escaped."""
_REBUILT = ("content-length", "accept-encoding")
"""Not passed on with a generation: its body is a new one, and its answer is read here."""


class Exchange:
    """One client's request, passed to llama-server, and llama-server's answer, relayed to the client.

    `incoming` is the client's HTTP request, `path` its path as a llama-server would see it, and `request`
    the generation that is served. `_answer` is the answer that is relayed now, from `_target`; `_reader`
    reads it. Once `_has_begun`, the client may have some of it, and half an event if `_is_in_event`.
    `is_answered` says that llama-server's answer, or its error, has come to its end.
    """

    _answer: Reply | aiohttp.ClientResponse
    _is_stream = False  # whether that is a stream of events
    _heard: Heard
    _target: Target
    _reader: AnswerReader

    def __init__(self, incoming: web.Request, path: str, unread: Unread, report: Report) -> None:
        self.incoming = incoming
        self.path = path
        self.route = generation_route(incoming.method, path)
        self.request: Request | None = None
        self.writer = ClientWriter(incoming, unread)
        self._report = report
        self._told = Told()
        self.is_answered = False
        self._has_begun = self._is_in_event = False
        self._has_run_out_of_cells = False
        self._first_token_at: float | None = None

    def withdraw(self) -> None:
        """Give up the answer if no token of it has come yet; `send` then raises ServerAway."""
        if self.request and not self.request.answering.is_set():
            self._heard.cut()

    async def send(
        self,
        upstream: LlamaServer,
        body: Body,
        on_start: OnStart = do_nothing,
        headers: CIMultiDict[str] | None = None,
    ) -> Answer:
        """Send the client's request with *body* and relay the answer; return facts of the answer.

        Returns when llama-server is done; the unread rest waits in `writer`. *on_start* is called when a
        stream begins, which is when llama-server begins to work on it. *headers* are those of a generation
        unless given. Raises ServerAway if there is no answer. An answer that breaks off ends in an error
        event.
        """
        incoming = self.incoming
        try:
            async with upstream.waiting():
                headers = headers or end_to_end(incoming.headers, without=_REBUILT)
                if self.request and self.request.body:
                    headers["Content-Type"] = "application/json"  # llama-swap believes it
                answer = await upstream.forward(incoming.method, incoming.raw_path, headers, body)
            async with answer:
                content_type = answer.headers.get("Content-Type", "")
                self._is_stream = content_type.startswith("text/event-stream")
                if self._is_stream:
                    on_start()
                elif upstream.target.host or (self.request and self.request.namespace):
                    # Where no llama-server is attached, 502 may be anything's own answer.
                    if upstream.target.may_be_lost(answer.status, answer.headers):
                        raise await _gone(upstream.target, answer)
                with upstream.heard(answer.close) as heard:
                    self._answer, self._heard, self._target = answer, heard, upstream.target
                    return await self._relay()
        except OutOfCells:
            await self._keep_waiting()
            raise
        except (aiohttp.ClientError, OSError) as error:
            if self._has_begun:
                raise  # the client is gone, or _relay has told it
            raise away(error, upstream.target.base_url) from error

    async def refuse(self, error: ProxyError) -> web.StreamResponse:
        """Answer the client with an error; a stream that was begun ends in it, any other answer is cut."""
        self.writer.stop_keeping()
        response = self.writer.response
        if response is None:
            return error_response(self.path, error, for_any_page(self.incoming))
        with suppress(ConnectionResetError):
            if not self.is_answered:
                await self._end_in(error)
            await self.writer.delivered()
        return response

    async def _relay(self) -> Answer:
        answer, target = self._answer, self._target
        request, route = (self.request, self.route) if answer.status == 200 else (None, None)
        self.writer.stop_keeping()
        is_begun = self.writer.response is not None  # by comments: only events may follow
        is_refusal = is_begun and not (answer.status == 200 and self._is_stream)
        self._told = self._report.told(request) if request else Told()
        stream_edit, edit = edits_of(self.path, answer, request, self._told)
        if is_refusal:
            edit = partial(error_event_of, self.path, answer.status)
        body, edited = b"", None  # what was read of it; what the client gets, if that was all
        # A small answer is read whole, and goes to the client along with its headers.
        is_plain = answer.status == 200 and answer.method != "HEAD" and not self._is_stream
        if edit or (is_plain and 0 < int(answer.headers.get("Content-Length", 0)) <= PIECE_BYTES):
            body = await read_most(answer.content)
            if target.host and target.lost(answer.status, body) == "after":
                raise ServerAway(f"{target.name} has ended", has_ended=True)
            if answer.status == 500:
                self._look_for_cells(body)
            edited = (edit or bytes)(body) if is_refusal or answer.content.at_eof() else None
        self._has_begun = True
        if not is_begun:
            await self._begin(edited)
        # Tool calls are read because clients do not send them back unchanged.
        content_type = answer.headers.get("Content-Type", "")
        self._reader = AnswerReader(content_type, route, request.n_completions if request else 1)
        return await self._pass_on(stream_edit, body, edited)

    async def _pass_on(self, edit: StreamEdit | None, body: bytes, edited: bytes | None) -> Answer:
        """Write the answer to the client, and read facts from it."""
        answer, reader = self._answer, self._reader
        try:
            if edited is not None:
                has_it = isinstance(self.writer.response, web.Response)  # and writes it in end()
                self._pass_on_now(body if self.route else b"", b"" if has_it else edited)
            else:
                self._pass_on_now(body, body)
                await self._pass_on_as_it_comes(edit)
                # llama-server ends a stream like that if a client has stopped it (DELETE /v1/stream), and
                # llama-swap if it broke off.
                may_be_stopped = "X-Conversation-Id" in self.incoming.headers
                is_stopped = may_be_stopped and self._target.host != "llama-swap"
                is_whole = self.route is None or not self._is_stream or reader.is_complete
                if not (is_whole or is_stopped):
                    raise aiohttp.ClientPayloadError("its stream ended before its last event")
            await self.writer.end()
        except (asyncio.CancelledError, ConnectionResetError):
            if not reader.is_complete:
                raise
            # Many clients hang up at [DONE], before the stream's last bytes: the request is served.
            if task := asyncio.current_task():
                task.uncancel()
        except aiohttp.ClientError as error:
            if not (reader.is_complete and self._is_stream):
                await self._break_off(error, is_over=reader.has_token or self._is_in_event)
                return Answer(answer.status, None, self._first_token_at, is_broken=True)
            await self.writer.end()
        self.is_answered = True
        return reader.answer(answer.status, self._first_token_at)

    async def _pass_on_as_it_comes(self, edit: StreamEdit | None) -> None:
        """Return when all is written; raises aiohttp.ClientError if it breaks off.

        The connection's own callback passes data on: waking a task for each event would take longer than
        all else. While there is no room for more, data stays unread.
        """
        answer, content, writer = self._answer, self._answer.content, self.writer
        target, is_of_host = self._target, self._target.host is not None
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def advance() -> None:
            if passed.done():
                return
            try:
                while not writer.is_full and (chunk := read_now(content)):
                    if is_of_host and target.lost(answer.status, chunk) == "after":
                        raise aiohttp.ClientPayloadError("its process has ended")
                    if self._first_token_at is None and not self._is_in_event:
                        self._look_for_cells(chunk)
                    self._pass_on_now(chunk, chunk if edit is None else edit.feed(chunk))
                if content.at_eof():
                    self._pass_on_now(b"", b"" if edit is None else edit.finish())
                    passed.set_result(None)
            except Exception as error:
                passed.set_exception(error)

        writer.on_room = advance
        if answer.connection is not None and (transport := answer.connection.transport):
            transport.get_protocol().on_change = advance  # type: ignore[attr-defined]
        advance()
        try:
            await passed
        finally:
            writer.on_room = do_nothing

    def _pass_on_now(self, chunk: bytes, passed_on: bytes) -> None:
        """Write *passed_on* to the client in place of a chunk of the answer, then read the chunk."""
        self._heard.heard_at = time.monotonic()
        try:
            if passed_on:
                self._is_in_event = not passed_on.endswith(b"\n\n")
                self.writer.write(passed_on)
        finally:
            self._reader.feed(chunk)
            if self._first_token_at is None and self._reader.has_token:
                self._first_token_at = self._heard.heard_at
                if self.request:
                    self.request.answering.set()

    def _look_for_cells(self, body: bytes) -> None:
        """Raise OutOfCells the first time that llama-server fails before a token: it can be asked again."""
        if _NO_CELLS in body and self.route and not self._has_run_out_of_cells:
            self._has_run_out_of_cells = True
            raise OutOfCells("llama-server: Context size has been exceeded")

    async def _begin(self, edited: bytes | None) -> None:
        answer, headers = self._answer, end_to_end(self._answer.headers)
        if self._told.header:
            headers["X-Prefix-Cache"] = self._told.header
        if edited is not None:
            headers["Content-Length"] = str(len(edited))
        elif self._is_stream:
            headers.popall("Content-Length", None)  # edits and an error at the end make it another
        body = edited if edited is not None and len(edited) <= PIECE_BYTES else None
        kind = web.StreamResponse if body is None else partial(web.Response, body=body)
        await self.writer.begin(kind(status=answer.status, reason=answer.reason, headers=headers))

    async def _break_off(self, error: Exception, *, is_over: bool) -> None:
        """Tell the client that llama-server went away in the middle of its answer.

        An event is what llama-server itself sends when a generation fails midway; clients report it,
        where a cut connection makes some of them continue from half an answer. Raises ServerAway unless the
        stream *is_over*: a client that got neither a token nor half an event can wait on in its stream.
        """
        told = f"llama-server went away in mid-answer: {reason_of(error)}"
        if is_over or not self._is_stream:
            return await self._end_in(ServerAway(told))
        await self._keep_waiting()
        raise ServerAway(told, has_ended=not self._heard.is_cut) from error

    async def _keep_waiting(self) -> None:
        """Let a client that wants a stream wait for the answer to another try."""
        await self.writer.delivered()
        self._has_begun = False
        if self.request and self.request.wants_stream:
            self.writer.keep()

    async def _end_in(self, error: ProxyError) -> None:
        """End a stream of events, or of comments, in an error; cut any other answer."""
        if self._is_stream or not self._has_begun:
            self.writer.write(b"\n\n" * self._is_in_event + error_event(self.path, error))
            await self.writer.end()
        elif self.incoming.transport is not None:
            self.incoming.transport.close()


async def _gone(target: Target, answer: Reply | aiohttp.ClientResponse) -> ServerAway:
    """Return what a host or gateway says of a llama-server that it could not reach, or that is gone."""
    body = await read_most(answer.content)
    why = error_message(body) or f"a gateway or host answers {answer.status} for llama-server"
    message = f"{target.name}: {why}"
    lost = target.lost(answer.status, body)
    return ServerAway(message, was_sent=lost != "before", has_ended=lost == "after")
