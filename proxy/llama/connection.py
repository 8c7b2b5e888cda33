"""Connections to llama-server: those of aiohttp's client, and a shorter way for most requests.

Until a request is sent, aiohttp's client runs for 0.7 ms on a processor that was idle before, and `send`
for 0.3 ms.
"""

import asyncio
import errno
import re
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import uvloop
from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from multidict import CIMultiDict

from proxy.errors import ServerAway, in_words

_HOP_BY_HOP = frozenset(
    "connection expect host keep-alive proxy-authenticate proxy-authorization te trailer "
    "transfer-encoding upgrade".split()
)
CONNECT_SECONDS = 5.0
_MAX_LINE_BYTES = 65536
MAX_BUFFERED_BYTES = 64 << 20
"""The most that is kept of an answer, or of a line of a stream."""
_LITERAL = re.compile(r"http://(((?:\d{1,3}\.){3}\d{1,3}|\[[\da-fA-F:]+\])(?::(\d+))?)(/.*)?")


def end_to_end(headers: Mapping[str, str], *, without: Collection[str] = ()) -> CIMultiDict[str]:
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


class ReplyHandler(ResponseHandler):
    """aiohttp's protocol, but when a connection ends, or is given up, so do its answer and its socket.

    aiohttp lets a reader wait for ever behind a malformed chunk. After a reset, aiohttp takes an answer
    without a length for whole. And it keeps a socket until its server has read all that was sent.
    `on_change` is called when data of the answer, or its end, has come.
    """

    on_change: Callable[[], None] = staticmethod(lambda: None)
    _has_ended = False

    def close(self) -> None:
        self.set_exception(aiohttp.ClientConnectionError("it was cut"))
        self.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if data:  # a reader that makes room passes none, and reads on by itself
            self.on_change()

    def eof_received(self) -> None:
        self._has_ended = True
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, error: BaseException | None) -> None:
        if isinstance(error, OSError):
            self.set_exception(aiohttp.ClientOSError(*error.args))
        super().connection_lost(error)
        self.on_change()
        self.on_change = ReplyHandler.on_change

    def set_exception(self, *errors: BaseException) -> None:
        # After the end aiohttp may still be writing, which fails; whether all came is told elsewhere.
        if self._payload is not None and not (self._has_ended or self._payload.is_eof()):
            self._payload.set_exception(aiohttp.ClientPayloadError("it broke off"))
        super().set_exception(*errors)


def read_now(content: StreamReader) -> bytes:
    """Return what has come; raises what broke the answer off once all that came before it is read."""
    if content.exception() and content._buffer:  # here aiohttp would raise at once
        return content._read_nowait(-1)
    return content.read_nowait()


async def read_most(content: StreamReader) -> bytes:
    """Return a whole body; of one over MAX_BUFFERED_BYTES its beginning, which is over that limit, too."""
    read = bytearray()
    while len(read) <= MAX_BUFFERED_BYTES and (data := await content.readany()):
        read += data
    return bytes(read)


def new_session() -> aiohttp.ClientSession:
    """Return the client session for traffic to llama-server; no connection is used again.

    llama-server closes idle connections at any time, and few requests can be repeated safely.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    connector._factory = partial(ReplyHandler, asyncio.get_running_loop())  # type: ignore[assignment]
    return aiohttp.ClientSession(
        connector=connector,
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


async def _connect(connecting: socket.socket, there: tuple[str, int]) -> None:
    """Connect a socket that does not block; raises OSError.

    On one host the connection is made at once, which only a second call tells: with 0 on Linux, with
    EISCONN on macOS and BSD.
    """
    if any(connecting.connect_ex(there) in (0, errno.EISCONN) for _ in range(2)):
        return
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(connecting, there)
    except OSError as error:
        if error.errno != errno.EISCONN:  # it was made since the second call
            raise


class Reply(AbstractAsyncContextManager["Reply"]):
    """An answer, with those names of aiohttp's ClientResponse that a relay needs."""

    def __init__(
        self, method: str, connection: ReplyHandler, head: RawResponseMessage, content: StreamReader
    ) -> None:
        self.method, self.connection, self.content = method, connection, content
        self.status, self.reason, self.headers = head.code, head.reason, head.headers
        self.close = connection.close

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def send(
    address: Address, method: str, path: str, headers: CIMultiDict[str], body: bytes
) -> Reply:
    """Send a GET or a POST on a connection of its own; return the answer once its head has come.

    Raises CannotConnect, or another aiohttp.ClientError.
    """
    loop = asyncio.get_running_loop()
    try:  # with a host, uvloop's create_connection would have a thread resolve even a literal address
        connected = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    except OSError as error:  # no file descriptor is left
        raise CannotConnect(in_words(error)) from error
    try:
        connected.setblocking(False)
        await _connect(connected, (address.host, address.port))
        protocol = partial(ReplyHandler, loop)
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
        if method == "POST":
            headers["Content-Length"] = str(len(body))  # in place of the client's own
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        begin = f"{method} {address.path}{path} HTTP/1.1\r\nHost: {address.name}\r\n{fields}\r\n"
        # As aiohttp does, leave out bytes that are no UTF-8.
        transport.writelines((begin.encode(errors="ignore"), body))
        if transport.is_closing():  # it was reset before, so nothing was written
            raise CannotConnect(f"{address.host}:{address.port} closed the connection")
        head, content = await connection.read()
        while 100 <= head.code < 200 and head.code != 101:  # llama-server goes on
            head, content = await connection.read()
    except BaseException as error:
        transport.abort()
        if isinstance(error, HttpProcessingError):
            raise aiohttp.ClientError(" ".join(error.message.split())) from error
        raise
    return Reply(method, connection, head, content)


def reason_of(error: Exception) -> str:
    """Return why a connection failed, in words for a person."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {in_words(error.os_error)}"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer broke off"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return in_words(error)


def away(error: Exception, base_url: str) -> ServerAway:
    """Return what it means for a request that it could not be forwarded to a URL, or got no answer."""
    was_sent = not isinstance(error, NOT_CONNECTED)
    # A call is cut off because its llama-server was told to end.
    has_ended = was_sent and not isinstance(error, TimeoutError)
    why = f"llama-server at {base_url}: {reason_of(error)}"
    return ServerAway(why, was_sent=was_sent, has_ended=has_ended)
