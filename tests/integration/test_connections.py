"""The connections of the proxy to llama-server: which are used again, and how they are made."""

import asyncio
import errno
import os
import select
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict

from proxy import app
from proxy.core.model import SlotId
from proxy.errors import UpstreamLost, UpstreamUnreachable, in_words
from proxy.llama import connection
from proxy.llama.client import LlamaServer, Target
from proxy.llama.connection import CannotConnect, EventLoop, literal_address, new_session, read_most
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


@pytest.mark.parametrize("address", [":0", "[::]:0"])
async def test_listener_everywhere_takes_both_kinds_of_addresses(address: str) -> None:
    async with await app._bind(asyncio.Protocol, address) as listener:
        assert {s.family for s in listener.sockets} == {socket.AF_INET, socket.AF_INET6}


async def test_no_connection_is_used_again(peer: Peer) -> None:
    async with new_session() as session:
        upstream = LlamaServer(session, Target(peer.url.rstrip("/")), None)
        by_name = upstream.at(Target(peer.url.rstrip("/").replace("127.0.0.1", "localhost")))
        numbers = []
        for asked, method in ((upstream, "GET"), (upstream, "POST"), (by_name, "POST")):
            body = b"{}" if method == "POST" else None
            async with await asked.forward(method, "/", CIMultiDict(), body) as answer:
                numbers.append((answer.status, await read_most(answer.content)))
        assert numbers == [(200, b"0"), (200, b"1"), (200, b"2")]


class BsdSocket(socket.socket):
    """Tells of a connection that was made as macOS and BSD do: a further call fails with EISCONN."""

    n_early = 0
    """How many further calls come before the connection is made."""
    has_begun = False

    def connect_ex(self, address: Any) -> int:
        if not self.has_begun:
            self.has_begun = True
            return super().connect_ex(address)
        if self.n_early:
            self.n_early -= 1
            return errno.EALREADY
        select.select([], [self], [], HANG_SECONDS)
        assert super().connect_ex(address) == 0  # on Linux
        return errno.EISCONN

    def connect(self, address: Any) -> None:
        if error := self.connect_ex(address):
            raise OSError(error, os.strerror(error))


@pytest.mark.parametrize("n_early", [0, 1, 2])
async def test_connection_is_made_as_macos_tells_of_it(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, n_early: int
) -> None:
    async with new_session() as session:
        upstream = LlamaServer(session, Target(peer.url.rstrip("/")), None)
        monkeypatch.setattr(BsdSocket, "n_early", n_early)
        monkeypatch.setattr("proxy.llama.connection.socket.socket", BsdSocket)
        async with await upstream.forward("POST", "/", CIMultiDict(), b"{}") as answer:
            assert (answer.status, await read_most(answer.content)) == (200, b"0")


async def test_post_without_a_body_tells_its_length_once(peer: Peer) -> None:
    async with new_session() as session:
        upstream = LlamaServer(session, Target(peer.url.rstrip("/")), None)
        headers = CIMultiDict({"content-length": "0"})  # as the client sent it
        async with await upstream.forward("POST", "/", headers, None) as answer:
            assert answer.status == 200


async def test_client_that_leaves_while_a_connection_is_made_ends_it_once(peer: Peer) -> None:
    """uvloop 0.22 had closed the descriptor already, which was another file's by then."""
    address = literal_address(peer.url.removesuffix("/"))
    assert address is not None
    sending = asyncio.ensure_future(connection.send(address, "GET", "/", CIMultiDict(), b""))
    await asyncio.sleep(0)  # it is connected, and uvloop has yet to say so
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_nothing_was_sent_where_nobody_listens() -> None:
    async with new_session() as session:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))  # nobody else can have this port now
            port = silent.getsockname()[1]
            upstream = LlamaServer(session, Target(f"http://127.0.0.1:{port}"), None)
            with pytest.raises(CannotConnect, match=f"cannot connect to 127.0.0.1:{port}"):
                await upstream.forward("POST", "/", CIMultiDict(), b"{}")


async def test_call_says_that_llama_server_has_no_tls(peer: Peer) -> None:
    """Else it would only be said to be away, and somebody would try to start it."""
    async with new_session() as session:
        url = peer.url.rstrip("/").replace("http://", "https://")
        with pytest.raises(
            UpstreamUnreachable, match="cannot connect to .*: no TLS, .*wrong version"
        ):
            await LlamaServer(session, Target(url), None).erase(SlotId(0))


def test_certificate_that_nobody_vouches_for_is_named() -> None:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] ... (_ssl.c:1006)")
    error.reason, error.verify_message = "CERTIFICATE_VERIFY_FAILED", "self-signed certificate"
    assert in_words(error).startswith(
        "self-signed certificate; start this command with SSL_CERT_FILE"
    )


async def test_call_that_gets_no_descriptor_was_not_sent(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else llama-server would seem to have ended over it."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with new_session() as session:
        upstream = LlamaServer(session, Target(peer.url.rstrip("/")), None)
        with monkeypatch.context() as patched:
            patched.setattr("proxy.llama.connection.socket.socket", refuse)
            with pytest.raises(UpstreamUnreachable, match="too many open files") as raised:
                await upstream.erase(SlotId(0))
        assert not isinstance(raised.value, UpstreamLost)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://127.0.0.1:8080", ""),
        ("http://10.0.0.1", ""),
        ("http://[::1]:8080/behind", "/behind"),
        ("http://localhost:8080", None),
        ("https://127.0.0.1:8080", None),
        ("http://user:word@127.0.0.1:8080", None),
    ],
)
def test_address_is_literal_only_without_names(url: str, path: str | None) -> None:
    address = literal_address(url)
    assert (address.path if address else None) == path


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
