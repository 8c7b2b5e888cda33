"""Connections to llama-server: those of aiohttp's client, and a shorter way for most requests.

Until a request is sent, aiohttp's client runs for 0.7 ms on a processor that was idle before, and `send`
for 0.3 ms.
"""

import asyncio
import re
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import aiohttp
import uvloop
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from multidict import CIMultiDict

_HOP_BY_HOP = frozenset(
    "connection expect host keep-alive proxy-authenticate proxy-authorization te trailer "
    "transfer-encoding upgrade".split()
)
CONNECT_SECONDS = 5.0
_MAX_LINE_BYTES = 65536
_LITERAL = re.compile(r"http://(((?:\d{1,3}\.){3}\d{1,3}|\[[\da-fA-F:]+\])(?::(\d+))?)(/.*)?")


def end_to_end(
    headers: Mapping[str, str], *, without: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """Return the headers that a proxy passes on."""
    kept = CIMultiDict(headers)
    for name in (*_HOP_BY_HOP, *without, *headers.get("Connection", "").split(",")):
        kept.popall(name.strip(), None)
    return kept


class EventLoop(uvloop.Loop):
    """uvloop's event loop, but without a thread for a literal address.

    uvloop's `sock_connect`, which aiohttp calls, names no type of socket, and without a type uvloop has a
    thread resolve even such an address.
    """

    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> Any:
        return await super().getaddrinfo(host, port, **{"type": socket.SOCK_STREAM, **hints})


def new_session() -> aiohttp.ClientSession:
    """Return the client session for traffic to llama-server; no connection is used again.

    llama-server closes idle connections at any time, and few requests can be repeated safely.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=_MAX_LINE_BYTES,
        max_field_size=_MAX_LINE_BYTES,
    )


class CannotConnect(aiohttp.ClientConnectionError):
    """There was no connection, so nothing was sent."""


NOT_CONNECTED = (CannotConnect, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Address(NamedTuple):
    """A literal IP address and a port, together `name`; `path` comes before the path of each request."""

    name: str
    host: str
    port: int
    path: str


def literal_address(base_url: str) -> Address | None:
    """Return the address in a URL; None if there is a name in it, or more than an address."""
    found = _LITERAL.fullmatch(base_url)
    if found is None:
        return None
    return Address(found[1], found[2].strip("[]"), int(found[3] or 80), found[4] or "")


class Reply:
    """An answer, with those names of aiohttp's ClientResponse that a relay needs."""

    def __init__(
        self,
        method: str,
        connection: ResponseHandler,
        head: RawResponseMessage,
        content: aiohttp.StreamReader,
    ) -> None:
        self.method, self.connection, self.content = method, connection, content
        self.status, self.reason, self.headers = head.code, head.reason, head.headers

    async def read(self) -> bytes:
        """Return the rest of the answer; raises aiohttp.ClientError."""
        return await self.content.read()

    def close(self) -> None:
        if self.connection.transport is not None:
            self.connection.transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def send(
    address: Address, method: str, path: str, headers: CIMultiDict[str], body: bytes
) -> Reply:
    """Send a GET or a POST on a connection of its own; return the answer once its head has come.

    Raises CannotConnect, or another aiohttp.ClientError.
    """
    loop = asyncio.get_running_loop()
    # With a host, uvloop's create_connection would have a thread resolve even a literal address.
    connected = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    try:
        connected.setblocking(False)
        there = address.host, address.port
        # On one host the connection is made at once, which only a second call tells.
        if connected.connect_ex(there) and connected.connect_ex(there):
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.sock_connect(connected, there)
        protocol = partial(ResponseHandler, loop)
        transport, connection = await loop.create_connection(protocol, sock=connected)
    except BaseException as error:
        connected.close()
        if isinstance(error, OSError):
            raise CannotConnect(f"cannot connect to {address.host}:{address.port}") from error
        raise
    try:
        connection.set_response_params(
            read_until_eof=True,
            auto_decompress=False,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
        )
        target = (address.path + path).partition("#")[0]
        if method == "POST":
            headers["Content-Length"] = str(len(body))  # in place of the client's own
        lines = [f"{method} {target} HTTP/1.1", f"Host: {address.name}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append("\r\n")
        # As aiohttp does, leave out bytes that are no UTF-8.
        transport.writelines(("\r\n".join(lines).encode(errors="ignore"), body))
        head, content = await connection.read()
        while head.code < 200:  # llama-server goes on
            head, content = await connection.read()
    except BaseException as error:
        transport.abort()
        if isinstance(error, HttpProcessingError):
            raise aiohttp.ClientError(error.message) from error
        raise
    return Reply(method, connection, head, content)


class Tap(asyncio.Protocol):
    """Stands between a connection and aiohttp's protocol; tells when that has taken what has come."""

    def __init__(self, protocol: asyncio.BaseProtocol, on_change: Callable[[], None]) -> None:
        assert isinstance(protocol, ResponseHandler)
        self.protocol = protocol
        self._on_change = on_change
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]

    def data_received(self, data: bytes) -> None:
        self.protocol.data_received(data)
        self._on_change()

    def connection_lost(self, error: Exception | None) -> None:
        self.protocol.connection_lost(error)
        self._on_change()
