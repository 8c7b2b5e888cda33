"""Writes answers to clients, and buffers the part that a client has not read yet.

llama-server itself buffers unread answers without a limit, while their slots serve the next requests. So
the proxy reads every answer to its end, and a lease ends when llama-server is done. The unread part of an
answer waits here: in bounded memory, and for a limited time.
"""

import asyncio
import fcntl
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress

from aiohttp import HttpVersion11, web

from proxy.log import get_logger
from proxy.metrics import Metrics
from proxy.serving.request import do_nothing

HALF_CLOSED_SECONDS = 0.25
"""How long a client that has closed its sending side may wait for its answer. Such clients are rare. One
that hangs up looks the same until something is written to it, and llama-server works on meanwhile."""
KEEP_SECONDS = 15.0
"""The time before the first comment in a stream that has not begun, and between two comments."""
COMMENT = b": waiting\n\n"
OF_EVENTS = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
"""The headers of a stream of events that no proxy in between may hold back."""
MAX_ANSWER_BYTES = 32 << 20
"""The most unread bytes of one answer, 128,000 tokens of a stream (an event has about 250 bytes).

At this limit llama-server has to wait."""
MAX_BYTES = 256 << 20
"""The same for all answers together."""
STALLED_SECONDS = 300.0
"""A client that reads no byte for so long is disconnected. Clients themselves give up after 300 s;
llama-server would keep the answer in its memory for an hour (--timeout)."""
STALLED_FULL_SECONDS = 10.0
"""The same when the buffer is full, because llama-server and requests for its slot would have to wait, and
while the proxy is stopping."""
LOOK_SECONDS = 1.0
PIECE_BYTES = 32 << 10
"""Half of what asyncio lets a transport buffer before a writer has to wait."""


def for_any_page(client: web.Request) -> dict[str, str]:
    """Return the header by which llama-server lets a page of any site read its answers, errors too."""
    return {"Access-Control-Allow-Origin": client.headers.get("Origin", "")}


class Connection(asyncio.Protocol):
    """A client's connection, which stays open for a while after the client has closed its sending side.

    aiohttp's own protocol would close the connection at once, and the client would get no answer.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        self.data_received = protocol.data_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._protocol.connection_made(transport)

    def eof_received(self) -> bool:
        # Harmless if the connection has ended by then.
        asyncio.get_running_loop().call_later(HALF_CLOSED_SECONDS, self._transport.close)
        return True


class Unread:
    """The bytes of all answers that wait for their clients."""

    def __init__(self, metrics: Metrics) -> None:
        self.n_bytes = 0
        self.is_stopping = False
        """Whether the shorter limit holds: the proxy stops when all clients have read their answers."""
        self.n_stalled = metrics.stalled_clients
        metrics.unread_bytes.set_function(lambda: self.n_bytes)


class ClientWriter:
    """Writes one answer to one client, and buffers what the client has not read.

    While the client keeps up, data is written at once. Otherwise a task writes as the client reads.
    `response` is the answer that was begun; it must be set before anything is written. `on_room` is called
    when buffered data has been written.
    """

    def __init__(self, client: web.Request, unread: Unread) -> None:
        self._client = client
        self._unread = unread
        self._rest = bytearray()
        self._is_whole = False
        self._task: asyncio.Task[None] | None = None
        self._n_written_bytes = 0
        self._keeping: asyncio.Task[None] | None = None
        self.response: web.StreamResponse | None = None
        self.on_room: Callable[[], None] = do_nothing

    async def begin(self, response: web.StreamResponse) -> None:
        """Send the head of the answer."""
        if self._client.version < HttpVersion11 and "Content-Length" not in response.headers:
            response.force_close()  # only that ends it, and aiohttp leaves the connection open
        await response.prepare(self._client)
        self.response = response

    def keep(self) -> None:
        """Send comments until the answer begins: clients give up after minutes without a byte.

        A request may be queued, restored and evaluated for long before llama-server sends its headers.
        From then on llama-server itself sends comments while it evaluates (--sse-ping-interval).
        """
        self._keeping = asyncio.ensure_future(self._keep())

    def stop_keeping(self) -> None:
        """Stop the comments; a second call is harmless.

        None is cut in two: `write` of aiohttp gives all of it to the transport before it waits, and
        `prepare` waits for nothing, as the proxy has no on_response_prepare.
        """
        task, self._keeping = self._keeping, None  # its traceback would refer to this writer
        if task is not None:
            task.cancel()

    async def _keep(self) -> None:
        with suppress(ConnectionResetError):  # the client left; its handler will learn it too
            while True:
                await asyncio.sleep(KEEP_SECONDS)
                if self.response is None:
                    # For JSON the browser of a page has asked llama-server first (--cors-origins).
                    is_json = self._client.content_type == "application/json"
                    headers = OF_EVENTS | (for_any_page(self._client) if is_json else {})
                    await self.begin(web.StreamResponse(headers=headers))
                assert self.response is not None
                await self.response.write(COMMENT)

    def write(self, data: bytes) -> None:
        """Write *data* after the data that waits; raises ConnectionResetError if the client is gone.

        Ask `is_full` first.
        """
        transport = self._client.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if len(data) <= PIECE_BYTES and self._is_keeping_up:
            return self._write_now(transport, data)
        self._rest += data
        self._unread.n_bytes += len(data)
        self._deliver()

    async def end(self) -> None:
        """Write the end of the answer after the data that waits; raises as `write` does."""
        assert self.response is not None
        if self._is_keeping_up:
            return await self.response.write_eof()
        self._is_whole = True
        self._deliver()

    async def delivered(self) -> None:
        """Wait until the client's socket has taken all data, or the client is gone."""
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Drop the data that still waits."""
        self.stop_keeping()
        if self._task is not None:
            self._task.cancel()
            self._take(len(self._rest))  # a task that never began does not do it

    @property
    def is_full(self) -> bool:
        """Whether the client must read first; other clients do not hold up one that has read everything."""
        is_full = len(self._rest) >= MAX_ANSWER_BYTES or self._unread.n_bytes >= MAX_BYTES
        return bool(self._rest) and is_full

    @property
    def _is_keeping_up(self) -> bool:
        """Whether no data waits for the client; if the client is gone, the next write raises."""
        transport = self._client.transport
        is_idle = self._task is None or self._task.done()
        return is_idle and (transport is None or not transport.get_write_buffer_size())

    def _deliver(self) -> None:
        """Start a task that writes the data that waits, unless one runs."""
        if (transport := self._client.transport) and (self._task is None or self._task.done()):
            self._task = asyncio.ensure_future(self._write_rest(transport))

    async def _write_rest(self, transport: asyncio.Transport) -> None:
        assert self.response is not None
        drain = self._client.writer.drain
        transport.set_write_buffer_limits(high=0)  # drain() then waits until nothing is buffered
        watch = asyncio.ensure_future(self._watch(transport))
        try:
            with suppress(ConnectionError):  # the client is gone; its handler is cancelled
                await drain()
                while self._rest and not transport.is_closing():
                    self._write_now(transport, self._take(PIECE_BYTES))
                    self.on_room()
                    await drain()
                if self._is_whole:
                    await self.response.write_eof()
                transport.set_write_buffer_limits()
        finally:
            watch.cancel()
            self._take(len(self._rest))
            self.on_room()

    def _take(self, n_bytes: int) -> bytes:
        piece = bytes(self._rest[:n_bytes])
        del self._rest[:n_bytes]
        self._unread.n_bytes -= len(piece)
        return piece

    def _write_now(self, transport: asyncio.Transport, data: bytes) -> None:
        """Give *data* to the transport directly: aiohttp would run four coroutines for it."""
        assert self.response is not None
        if "Transfer-Encoding" in self.response.headers:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        transport.write(data)
        self._n_written_bytes += len(data)

    async def _watch(self, transport: asyncio.Transport) -> None:
        """Disconnect the client if it reads nothing for too long."""
        n_read, read_at = -1, time.monotonic()
        while True:
            n_read, n_before = self._n_written_bytes - _n_buffered(transport), n_read
            if n_read != n_before:
                read_at = time.monotonic()
            is_urgent = self.is_full or self._unread.is_stopping
            seconds = time.monotonic() - read_at
            if seconds >= (STALLED_FULL_SECONDS if is_urgent else STALLED_SECONDS):
                self._unread.n_stalled.inc()
                get_logger("front").warning(
                    "client disconnected: it does not read its answer",
                    path=self._client.path,
                    seconds=round(seconds, 1),
                    unread_bytes=len(self._rest),
                )
                return transport.abort()
            await asyncio.sleep(LOOK_SECONDS)


def _n_buffered(transport: asyncio.Transport) -> int:
    """Return how many bytes wait for the client to read them, in the transport and in the kernel.

    The kernel reports room only once a third of its megabytes is free. By that alone, a slow reader would
    look like one that has stopped.
    """
    n_buffered = transport.get_write_buffer_size()
    client_socket = transport.get_extra_info("socket")
    with suppress(OSError, ValueError):  # not on every system, and not of a closed socket
        n_unacked = fcntl.ioctl(client_socket.fileno(), termios.TIOCOUTQ, bytes(4))
        n_buffered += int.from_bytes(n_unacked, sys.byteorder)
    return n_buffered
