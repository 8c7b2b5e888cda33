"""Leaving: what runs is finished, what is dirty is saved, and nothing waits forever."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from proxy.cli.serve import _serve_until_stopped
from proxy.core.slots import TAINTED, Empty
from proxy.log import configure_logging
from proxy.servers import server as lifecycle
from proxy.settings import Settings
from proxy.tasks import Tasks
from proxy.web.clients import Front
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, Rig, hang_up, question, with_image
from tests.lab.raw_bytes import RawConnection, chat, post
from tests.lab.samples import sample
from tests.lab.waiting import HANG_SECONDS, until

LITTLE_SECONDS = 0.5
"""With less, aiohttp's own limit would come just behind the proxy's; aiohttp fails if both come at once."""


async def begin_stream(rig: Rig, n_tokens: int) -> "asyncio.Task[bytes]":
    """Begin a stream of *n_tokens* and return a task that reads it to its end."""
    body = {"messages": question("a"), "stream": True, "max_tokens": n_tokens}

    async def read() -> bytes:
        async with rig.client.post(rig.base_url + CHAT, json=body) as reply:
            return await reply.read()

    task = asyncio.ensure_future(read())
    await until(lambda: rig.server.slots[0].is_processing)
    return task


async def test_running_stream_finishes_at_shutdown(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        rig.server.faults.chunk_seconds = 0.01
        stream = await begin_stream(rig, 20)
        await rig.stop_proxy()
        assert (await stream).endswith(b"data: [DONE]\n\n")
        await rig.start_proxy()
        assert rig.checkpoints == [("conversation", 328)]


@pytest.mark.parametrize("drain_seconds", [0.0, LITTLE_SECONDS])
async def test_endless_stream_ends_in_an_error_when_the_time_is_up(
    start_rig: StartRig, drain_seconds: float
) -> None:
    async with start_rig(n_slots=1, drain_seconds=drain_seconds) as rig:
        rig.server.faults.chunk_seconds = 0.01
        stream = await begin_stream(rig, 10_000)
        running = rig.running
        await rig.stop_proxy()
        assert b"the proxy stopped before the answer was whole" in await stream
        assert sample(running.metrics, "unanswered_requests_total", reason="proxy stopped") == 1
        await until(lambda: not rig.server.slots[0].lock.locked())
        await rig.start_proxy()


async def test_client_that_still_sends_at_shutdown_is_told_that_the_proxy_stops(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, read = asyncio.Event(), Front._read_body

    async def told(front: Front, incoming: web.Request) -> bytes:
        is_reading.set()
        return await read(front, incoming)

    monkeypatch.setattr(Front, "_read_body", told)
    async with start_rig(drain_seconds=1.0) as rig:
        connection = await RawConnection.open(rig.base_url)
        connection.send(post(CHAT.encode(), chat())[:-1])
        await is_reading.wait()
        running = rig.running
        await rig.stop_proxy()
        assert await connection.status() == 503
        await connection.close()
        assert sample(running.metrics, "unanswered_requests_total", reason="proxy stopped") == 1
        await rig.start_proxy()


async def test_stream_ends_in_an_error_at_the_second_signal(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, drain_seconds=600.0) as rig:
        rig.server.faults.chunk_seconds = 0.01
        stream = await begin_stream(rig, 10_000)
        running = rig.running
        stopping = asyncio.ensure_future(rig.stop_proxy())
        await asyncio.sleep(0.1)
        stopping.cancel()  # as a second signal does
        assert b"the proxy stopped before the answer was whole" in await stream
        await asyncio.wait({stopping})
        assert sample(running.metrics, "unanswered_requests_total", reason="proxy stopped") == 1
        await rig.start_proxy()


async def test_answer_goes_on_for_drain_seconds_and_no_longer(start_rig: StartRig) -> None:
    """The answer itself measures: a busy machine sends fewer chunks, not more."""
    async with start_rig(n_slots=1, drain_seconds=1.0) as rig:
        rig.server.faults.chunk_seconds = 0.02
        body = {"messages": question("a"), "stream": True, "max_tokens": 10_000}
        chunks = list[bytes]()

        async def read() -> None:
            async with rig.client.post(rig.base_url + CHAT, json=body) as reply:
                async for line in reply.content:
                    chunks.append(line)

        reading = asyncio.ensure_future(read())
        await until(lambda: bool(chunks))
        n_before = len(chunks)
        await rig.stop_proxy()
        await reading
        assert b"the proxy stopped" in chunks[-2] and chunks[-1] == b"\n"
        assert sum(map(bool, map(bytes.strip, chunks[n_before:]))) < 75
        await rig.start_proxy()


async def test_dirty_slots_are_saved_at_shutdown(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        for name in "ab":
            await rig.chat(name)
        assert rig.checkpoints == []
        await rig.stop_proxy()
        await rig.start_proxy()
        assert rig.checkpoints == [("conversation", 312)] * 2


async def test_slots_are_saved_at_shutdown_though_another_is_not_erased_in_time(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        process = await rig.attached()
        other = next(slot.id for slot in process.slots if isinstance(slot.content, Empty))
        process.slots.set_content(other, TAINTED)
        rig.server.hold("erase")
        await rig.running.pool.drain(LITTLE_SECONDS)
        assert process.saves.under_way or rig.checkpoints
        rig.server.release("erase")
        await until(lambda: rig.checkpoints == [("conversation", 312)])


async def test_next_proxy_stores_nothing_of_a_request_that_is_not_to_be_stored(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2) as rig:
        await rig.chat("a", cache={"no_store": True})
        await rig.stop_proxy()
        await rig.start_proxy()
        assert rig.checkpoints == []


async def meet_again(rig: Rig) -> None:
    """Have the proxy lose sight of llama-server, and attach to the same process anew."""
    before = rig.running.server.process
    rig.server.faults.refuse["props"] = 503
    await until(lambda: rig.running.server.process is None)
    rig.server.faults.refuse.clear()
    await until(lambda: rig.process not in (None, before))


async def test_process_that_is_met_again_has_nothing_stored_that_is_not_to_be_stored(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=4, idle_save_seconds=60.0) as rig:
        await rig.chat("a", cache={"no_store": True})
        await rig.chat("b")
        await rig.chat("c")
        process = await rig.attached()
        newest = max(process.slots, key=lambda slot: slot.used_at)
        process.slots.set_content(newest.id, TAINTED)
        gate = rig.server.hold("generate", n_calls=1)
        running = rig.begin_chat("d", cache={"no_store": True})
        await gate.reached()
        await meet_again(rig)
        gate.open()
        await running
        await rig.attached()
        await meet_again(rig)
        assert rig.checkpoints == [("conversation", 312)]
        assert (await rig.chat("b")).n_reused == 308


async def test_save_under_way_is_finished_at_shutdown(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("save", n_calls=1)
        await rig.chat("a")
        await gate.reached()
        stopping = asyncio.ensure_future(rig.stop_proxy())
        await asyncio.sleep(0.05)
        gate.open()
        await stopping
        await rig.start_proxy()
        assert rig.checkpoints == [("conversation", 312)]


async def test_prompt_of_a_client_that_left_is_saved_at_shutdown(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save begins when the proxy waits for what runs already."""
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        gate, is_waiting = rig.server.hold("chunk"), asyncio.Event()
        streaming = await begin_stream(rig, 10)
        await gate.reached()
        await hang_up(streaming)
        drain = Tasks.drain

        async def told(tasks: Tasks, seconds: float) -> None:
            is_waiting.set()
            await drain(tasks, seconds)

        monkeypatch.setattr(Tasks, "drain", told)
        stopping = asyncio.ensure_future(rig.stop_proxy())
        await is_waiting.wait()
        rig.server.release("chunk")
        await stopping
        rig.server.replace_process()  # else its slots would be saved at the start
        await rig.start_proxy()
        assert [kind for kind, _ in rig.checkpoints] == ["conversation"]


@pytest.mark.parametrize("idle_save_seconds", [0.04, 60.0])
async def test_hanging_save_does_not_hold_up_shutdown(
    start_rig: StartRig, idle_save_seconds: float
) -> None:
    async with start_rig(
        n_slots=1, drain_seconds=LITTLE_SECONDS, idle_save_seconds=idle_save_seconds
    ) as rig:
        gate = rig.server.hold("save")
        await rig.chat("a")
        if idle_save_seconds < 1:
            await gate.reached()
        async with asyncio.timeout(HANG_SECONDS):
            await rig.stop_proxy()
        rig.server.release("save")
        await until(lambda: not rig.server.slots[0].lock.locked())
        await rig.start_proxy()


async def test_look_that_hangs_does_not_hold_up_shutdown(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two llama-servers whose machines are switched off, one is always being looked at."""
    monkeypatch.setattr(lifecycle, "SILENT_SECONDS", HANG_SECONDS)
    drain, n_awaited = Tasks.drain, list[int]()

    async def note(tasks: Tasks, seconds: float) -> None:
        n_awaited.append(len(tasks) if seconds else 0)
        await drain(tasks, seconds)

    async with start_rig(drain_seconds=LITTLE_SECONDS) as rig:
        await rig.attached()
        gate = rig.server.hold("props")
        await gate.reached()
        monkeypatch.setattr(Tasks, "drain", note)
        await rig.stop_proxy()
        assert n_awaited and not any(n_awaited)
        rig.server.release("props")
        await rig.start_proxy()


async def test_request_in_the_queue_is_served_at_shutdown(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        asked = [rig.begin_chat("a")]
        await gate.reached()
        asked.append(rig.begin_chat("b"))
        await rig.waiting(1)
        stopping = asyncio.ensure_future(rig.stop_proxy())
        await asyncio.sleep(0.05)
        gate.open()
        assert [(await reply).status for reply in asked] == [200, 200]
        await stopping
        await rig.start_proxy()
        assert rig.checkpoints == [("conversation", 312)] * 2


async def test_requests_that_the_time_does_not_suffice_for_get_an_error(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, drain_seconds=LITTLE_SECONDS) as rig:
        gate = rig.server.hold("generate")
        asked = [
            asyncio.ensure_future(rig.post(CHAT, {"messages": question(name)})) for name in "ab"
        ]
        await gate.reached()
        await rig.waiting(1)
        await rig.stop_proxy()
        for reply in await asyncio.gather(*asked):
            assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
        rig.server.release("generate")
        await rig.start_proxy()


async def test_nothing_is_written_behind_an_answer_that_was_whole_when_the_time_is_up(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, drain_seconds=LITTLE_SECONDS) as rig:
        rig.server.hold("chunk")
        body = {"messages": with_image(question("a")), "stream": True, "max_tokens": 4}
        raw = json.dumps(body).encode()
        head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.running.port)
        writer.write(head.encode() + raw)
        await until(lambda: any(slot.is_processing for slot in rig.server.slots))
        gate = rig.server.hold("slots")
        slots = rig.running.pool.processes[0].slots
        await until(lambda: gate.n_reached or any(slot.is_running for slot in slots))
        rig.server.release("chunk")
        told = await reader.readuntil(b"\r\n0\r\n\r\n")
        await rig.stop_proxy()
        assert b"message_stop" in told
        assert await reader.read() == b""
        writer.close()
        rig.server.release_all()
        await rig.start_proxy()


async def test_shutdown_after_the_server_is_gone_is_quick(start_rig: StartRig) -> None:
    async with start_rig(idle_save_seconds=600.0, drain_seconds=600.0) as rig:
        await rig.chat("a")
        await rig.server.crash()
        async with asyncio.timeout(HANG_SECONDS):
            await rig.stop_proxy()
        await rig.server.restart()
        await rig.start_proxy()
        assert (await rig.chat("a")).status == 200


async def test_second_signal_counts_that_comes_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def run_proxy(*_: object, **__: object) -> AsyncIterator[Any]:
        try:
            journal = SimpleNamespace(in_flight=[1])
            shared = SimpleNamespace(journal=journal)
            pool = SimpleNamespace(processes=[])
            yield SimpleNamespace(port=1234, admin_port=2, shared=shared, pool=pool)
        finally:
            await asyncio.sleep(30.0)

    monkeypatch.setattr("proxy.app.run_proxy", run_proxy)
    settings = Settings(slot_save_path=str(tmp_path), listen=":0")
    with configure_logging("info", "console"):
        serving = asyncio.ensure_future(_serve_until_stopped(settings, None, None))
        await asyncio.sleep(0.1)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait({serving})
    assert serving.cancelled()
    told = capfd.readouterr().err
    assert "clients http://127.0.0.1:1234/v1" in told
    assert "finishing requests (1): at most 30 s; Ctrl-C again" in told, "there is nothing to save"


async def test_llama_server_is_not_called_ready_behind_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_stopping, are_ready = asyncio.Event(), list[bool]()

    async def are_met() -> bool:
        return True

    async def run_server(is_ready: Callable[[], Awaitable[bool]], _: str) -> str:
        are_ready.append(await is_ready())
        signal.raise_signal(signal.SIGINT)
        await is_stopping.wait()
        are_ready.append(await is_ready())
        return ""

    @asynccontextmanager
    async def run_proxy(*_: object, **__: object) -> AsyncIterator[Any]:
        shared = SimpleNamespace(journal=SimpleNamespace(in_flight=[]))
        pool = SimpleNamespace(are_met=are_met, processes=[])
        yield SimpleNamespace(port=1234, admin_port=2, shared=shared, pool=pool)
        is_stopping.set()
        await until(lambda: len(are_ready) == 2)

    monkeypatch.setattr("proxy.app.run_proxy", run_proxy)
    await _serve_until_stopped(Settings(slot_save_path=str(tmp_path)), run_server, None)
    assert are_ready == [True, False]
