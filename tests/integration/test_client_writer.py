"""Clients that read slowly or not at all, before a real server and sockets; no llama-server is needed."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from aiohttp import web

from proxy.metrics import Metrics
from proxy.serving.request import do_nothing
from proxy.web import writer as client_writer
from proxy.web.writer import ClientWriter, Unread
from tests.lab.raw_client import RawClient
from tests.lab.waiting import until

KIB = 1 << 10
MIB = 1 << 20

Write = Callable[[ClientWriter], Awaitable[None]]


class Server:
    """Answers every request by one function that writes, at most 16 KiB at once."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.unread = Unread(self.metrics)
        self.n_answered = 0
        self.n_written = 0
        self.base_url = ""

    @asynccontextmanager
    async def answering(self, answer: Write) -> AsyncIterator["Server"]:
        async def handle(request: web.Request) -> web.StreamResponse:
            writer = ClientWriter(request, self.unread)
            writer.response = response = web.StreamResponse()
            response.enable_chunked_encoding()
            await response.prepare(request)
            try:
                await answer(writer)
                await writer.end()
                self.n_answered += 1
                await writer.delivered()
                return response
            finally:
                writer.close()

        async def stop(_: web.Application) -> None:
            self.unread.is_stopping = True

        app = web.Application()
        app.router.add_post("/", handle)
        app.on_shutdown.append(stop)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=60.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    async def write(self, writer: ClientWriter, data: bytes) -> None:
        for begin in range(0, len(data), 16 * KIB):
            piece = data[begin : begin + 16 * KIB]
            await until(lambda: not writer.is_full)
            writer.write(piece)
            self.n_written += len(piece)

    @property
    def n_stalled(self) -> float:
        value = self.metrics.registry.get_sample_value("llama_prefix_cache_stalled_clients_total")
        return value or 0.0


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_writer, "LOOK_SECONDS", 0.02)


@pytest.fixture
def server() -> Server:
    return Server()


async def test_client_that_reads_by_fits_and_starts_gets_every_byte_in_order(
    server: Server,
) -> None:
    chance = random.Random(12)
    pieces = [chance.randbytes(chance.choice([1, 300, 5000, 100 * KIB])) for _ in range(400)]

    async def answer(writer: ClientWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            if chance.random() < 0.1:
                await asyncio.sleep(0.001)

    async with server.answering(answer):
        with RawClient(server.base_url, "/", {}) as client:
            while len(client.answer) < 4 * MIB:
                await client.read(chance.choice([100, 20 * KIB, MIB]))
                if chance.random() < 0.05:
                    await asyncio.sleep(0.01)
            assert await client.read_to_end() == b"".join(pieces)
        assert (server.unread.n_bytes, server.n_stalled) == (0, 0)


async def test_answer_that_fits_is_over_before_anybody_reads_it(server: Server) -> None:
    data = random.Random(1).randbytes(8 * MIB)
    async with server.answering(lambda writer: server.write(writer, data)):
        with RawClient(server.base_url, "/", {}) as client:
            await until(lambda: server.n_answered)
            assert server.unread.n_bytes > MIB
            assert await client.read_to_end() == data
        await until(lambda: server.unread.n_bytes == 0)


async def test_connection_serves_the_next_request_after_a_late_reader(server: Server) -> None:
    data = random.Random(1).randbytes(8 * MIB)
    async with server.answering(lambda writer: server.write(writer, data)):
        with RawClient(server.base_url, "/", {}) as client:
            await until(lambda: server.n_answered == 1)
            assert await client.read_to_end() == data
            client.ask()
            await until(lambda: server.n_answered == 2)
            assert await client.read_to_end() == data


async def test_answers_that_nobody_reads_take_bounded_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_writer, "MAX_ANSWER_BYTES", MIB)
    monkeypatch.setattr(client_writer, "MAX_BYTES", 3 * MIB)
    data = bytes(16 * MIB)
    async with server.answering(lambda writer: server.write(writer, data)):
        with ExitStack() as clients:
            clients.enter_context(RawClient(server.base_url, "/", {}))
            await until(lambda: server.unread.n_bytes >= MIB)
            assert server.unread.n_bytes <= MIB + 16 * KIB
            for _ in range(5):
                clients.enter_context(RawClient(server.base_url, "/", {}))
            await until(lambda: server.unread.n_bytes >= 3 * MIB)
            assert server.unread.n_bytes <= 3 * MIB + 6 * 16 * KIB
            with RawClient(server.base_url, "/", {}) as reader:
                assert await reader.read_to_end() == data
            assert server.n_answered == 1
        await until(lambda: server.unread.n_bytes == 0)


async def test_client_that_reads_nothing_is_disconnected(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_writer, "STALLED_SECONDS", 0.2)
    data = bytes(8 * MIB)
    async with server.answering(lambda writer: server.write(writer, data)):
        with RawClient(server.base_url, "/", {}) as client:
            await until(lambda: server.n_stalled)
            await until(lambda: server.unread.n_bytes == 0)
            assert server.n_answered == 1
            with pytest.raises(ConnectionError):
                await client.read_to_end()


async def test_client_that_others_wait_for_is_disconnected_sooner(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_writer, "STALLED_FULL_SECONDS", 0.2)
    monkeypatch.setattr(client_writer, "MAX_ANSWER_BYTES", MIB)
    data = bytes(16 * MIB)
    async with server.answering(lambda writer: server.write(writer, data)):
        with RawClient(server.base_url, "/", {}):
            await until(lambda: server.n_stalled)
            await until(lambda: server.unread.n_bytes == 0)
            assert server.n_answered == 0
            assert server.n_written < len(data)


async def test_client_that_reads_slowly_is_not_disconnected(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes nothing new for longer than that while it still has megabytes to send.

    It lets the server know of what was read only once that is some 90 KiB. The clock is the test's own:
    a busy machine may stand still between two reads.
    """
    now = 0.0
    monkeypatch.setattr(client_writer, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(client_writer, "STALLED_SECONDS", 1.0)
    data = bytes(8 * MIB)
    async with server.answering(lambda writer: server.write(writer, data)):
        with RawClient(server.base_url, "/", {}) as client:
            for _ in range(30):
                await client.read(96 * KIB)
                now += 0.3
                await asyncio.sleep(0.05)
            assert await client.read_to_end() == data
        assert server.n_stalled == 0


async def test_stop_waits_for_who_reads_and_not_for_who_does_not(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the test's own: a busy machine may stand still while a client reads."""
    now = 0.0
    monkeypatch.setattr(client_writer, "time", SimpleNamespace(monotonic=lambda: now))
    data = random.Random(1).randbytes(8 * MIB)

    def has_stalled() -> bool:
        """Time goes on in steps: late bytes that the dead client's kernel takes count as read."""
        nonlocal now
        now += client_writer.STALLED_FULL_SECONDS / 10
        return server.n_stalled > 0

    async def read(client: RawClient) -> bytes:
        answer = await client.read_to_end()
        await until(has_stalled)
        return answer

    with ExitStack() as clients:
        async with server.answering(lambda writer: server.write(writer, data)):
            dead = clients.enter_context(RawClient(server.base_url, "/", {}))
            alive = clients.enter_context(RawClient(server.base_url, "/", {}))
            await until(lambda: server.n_answered == 2)
            reading = asyncio.ensure_future(read(alive))
        assert await reading == data
        assert server.n_stalled == 1
        with pytest.raises(ConnectionError):
            await dead.read_to_end()


async def test_nothing_more_is_written_to_a_client_that_has_left(server: Server) -> None:
    leave, n_tried = do_nothing, 0

    def note() -> None:
        nonlocal n_tried
        n_tried += 1

    async def answer(writer: ClientWriter) -> None:
        writer.on_room = note
        writer.write(b"begun")
        leave()  # with bytes that were not read: the next write fails
        writer.write(bytes(4 * MIB))

    async with server.answering(answer):
        with RawClient(server.base_url, "/", {}) as client:
            leave = partial(client.__exit__)
            await until(lambda: server.n_answered == 1 and not server.unread.n_bytes)
    assert n_tried <= 2
