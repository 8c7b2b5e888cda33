"""The connections of the proxy to llama-server: which are used again, and how they are made."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.llama.connection import EventLoop, new_session
from tests.lab.waiting import HANG_SECONDS


class Peer:
    """Answers every request with the number of its connection."""

    def __init__(self) -> None:
        self.opened: list[asyncio.Transport] = []
        self.url = ""
        self.has_lost_one = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        if request.transport not in self.opened:
            self.opened.append(request.transport)
        return web.Response(text=str(self.opened.index(request.transport)))

    async def begin(self, request: web.Request) -> web.StreamResponse:
        """Begin an answer that never ends."""
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            await asyncio.Event().wait()
        finally:
            self.has_lost_one.set()
        return answer

    async def ask(self, session: aiohttp.ClientSession, method: str) -> str:
        async with session.request(method, self.url) as answer:
            return await answer.text()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer, app = Peer(), web.Application()
    app.router.add_route("*", "/", peer.handle)
    app.router.add_route("*", "/unfinished", peer.begin)
    async with TestServer(app, handler_cancellation=True) as server:
        peer.url = str(server.make_url("/"))
        yield peer


async def test_only_a_get_uses_a_connection_again(peer: Peer) -> None:
    async with new_session() as session:
        numbers = [await peer.ask(session, m) for m in ("GET", "POST", "POST", "GET")]
        assert numbers == ["0", "1", "2", "0"]


async def test_get_on_a_connection_that_was_closed_is_sent_again(peer: Peer) -> None:
    async with new_session() as session:
        await peer.ask(session, "GET")
        peer.opened[0].abort()
        assert await peer.ask(session, "GET") == "1"


async def test_literal_address_needs_no_thread() -> None:
    loop = EventLoop()
    try:
        with pytest.raises(StopIteration):  # nothing was waited for
            loop.getaddrinfo("127.0.0.1", 80).send(None)
    finally:
        loop.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_closed_session_leaves_no_answer_open(peer: Peer, method: str) -> None:
    session = new_session()
    answer = await session.request(method, peer.url + "unfinished")
    await session.close()
    async with asyncio.timeout(HANG_SECONDS):
        await peer.has_lost_one.wait()
    answer.close()
