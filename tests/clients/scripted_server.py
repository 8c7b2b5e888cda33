"""A real llama-server that says what a script tells it to.

A random model calls no tools. So requests go to the real server, which evaluates them in its slots and
counts their tokens, but only for one token; the words of the answer are the script's. Everything else
(templates, tokens, saves, restores, metrics) passes through. Requests are recorded in memory as they
leave the proxy, with what llama-server had evaluated in all when it answered them.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from tests.clients.script import Script
from tests.clients.wording import reworded
from tests.lab.server import LlamaServer, find_free_port

ANSWERED = ("/v1/messages", "/v1/chat/completions")
MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True)
class Recorded:
    """A request as it left the proxy."""

    path: str
    body: dict[str, Any]
    n_evaluated_so_far: int
    """What llama-server had evaluated since its start, this request included."""

    @property
    def has_tools(self) -> bool:
        """Whether it is part of a conversation; titles and summaries are asked for without tools."""
        return bool(self.body.get("tools"))


class ScriptedServer(LlamaServer):
    """The real server behind a listener of ours."""

    script = Script()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.recorded: list[Recorded] = []
        self._front_port = find_free_port()
        self._stack = AsyncExitStack()

    @property
    def front_url(self) -> str:
        return f"http://127.0.0.1:{self._front_port}"

    async def __aenter__(self) -> "ScriptedServer":
        """Begin to listen; the llama-server behind may be started and stopped meanwhile."""
        # llama-server closes idle connections at any time, and a POST on one of those fails.
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=600),
            connector=aiohttp.TCPConnector(force_close=True),
        )
        self._client = await self._stack.enter_async_context(session)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", self._front_port).start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        is_scripted = request.method == "POST" and request.path in ANSWERED
        body = json.loads(raw) if is_scripted else {}
        if not body.get("stream"):
            status, content_type, answer = await self._ask(request, raw)
            return web.Response(status=status, content_type=content_type, body=answer)
        one_token = json.dumps({**body, "max_tokens": 1, "max_completion_tokens": 1}).encode()
        status, content_type, answer = await self._ask(request, one_token)
        if status != 200:
            return web.Response(status=status, content_type=content_type, body=answer)
        n_evaluated = await asyncio.to_thread(self.evaluated_tokens)
        self.recorded.append(Recorded(request.path, body, n_evaluated))
        said = reworded(request.path, answer, self.script.next_answer(body))
        # In chunks, as llama-server streams: the proxy may change how long it is.
        stream = web.StreamResponse(headers={"Content-Type": content_type})
        await stream.prepare(request)
        await stream.write(said)
        await stream.write_eof()
        return stream

    async def _ask(self, request: web.Request, raw: bytes) -> tuple[int, str, bytes]:
        headers = {"Content-Type": "application/json"}
        url = self.base_url + request.raw_path
        try:
            async with self._client.request(
                request.method, url, data=raw, headers=headers
            ) as reply:
                return reply.status, reply.content_type, await reply.read()
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway(text=str(error)) from error
