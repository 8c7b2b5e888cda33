"""Every row of the table of faults, played: what the client gets, what is counted, and that all heals."""

import asyncio
import json
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.llama.client import LlamaServer
from tests.fakes.faults import Faults
from tests.fakes.llama_server import FakeLlamaServer
from tests.integration.conftest import StartRig
from tests.integration.fault_matrix import PATIENCE_SECONDS, ROWS, Client, Row
from tests.integration.rig import CHAT, Reply, Rig, question
from tests.lab.waiting import until

FIRST, SECOND, THIRD = question("a"), question("b"), question("c")


def be_short_of_patience(monkeypatch: pytest.MonkeyPatch, server: FakeLlamaServer) -> None:
    """Do not wait for a helper call that is held as long as a large state on a slow disk may need."""
    read = LlamaServer._read

    async def impatient(
        upstream: Any, method: str, path: str, body: Any, headers: Any, seconds: float | None
    ) -> Any:
        is_held = any(place in path for place in server.held)
        patience_seconds = PATIENCE_SECONDS if seconds and is_held else seconds
        return await read(upstream, method, path, body, headers, patience_seconds)

    monkeypatch.setattr(LlamaServer, "_read", impatient)


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_fault(start_rig: StartRig, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the slot holds is saved when another request takes the slot.
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        be_short_of_patience(monkeypatch, rig.server)
        answers = [await _asked(rig, messages) for messages in (FIRST, SECOND)]
        row.script(rig.server)
        with capture_logs() as logs:
            await _play(rig, row, answers[0])
            await until(lambda: _outcomes(logs))
        assert _outcomes(logs) == [row.outcome]
        _end(rig)
        process = await rig.attached()
        again = [await _asked(rig, messages) for messages in (FIRST, SECOND, THIRD)]
        assert again[:2] == answers
        reply = await rig.chat(FIRST)
        assert (reply.content["choices"], reply.n_reused) == (answers[0], reply.n_prompt - 1)
        await until(lambda: not process.saves.under_way)
        assert await rig.reasons() == []


async def _asked(rig: Rig, messages: Any) -> Any:
    """Return the answer to a chat, once the slot is free again and what it displaced is committed."""
    reply = await rig.chat(messages)
    await until(lambda: rig.n_occupied() == 0)
    await until(lambda: rig.process and not rig.process.saves.under_way)
    return reply.content["choices"]


def _outcomes(logs: Any) -> list[str]:
    return [line["outcome"] for line in logs if line["event"] == "request"]


async def _play(rig: Rig, row: Row, answer: Any) -> None:
    """Ask for the first conversation, and hold what comes against the row."""
    body = {"messages": FIRST, "stream": row.wants_stream}
    asked = asyncio.ensure_future(rig.post(CHAT, body))
    if row.client is Client.LATER:
        n_sent = len(rig.server.seen_at("generate"))
        await until(lambda: _is_named(rig, row) if row.says else _has_more(rig, n_sent))
        assert not asked.done()
        _end(rig)
    _check(await asked, row, answer)
    if row.client is not Client.LATER:
        await until(lambda: _is_named(rig, row))


async def _is_named(rig: Rig, row: Row) -> bool:
    return await rig.reasons() == [row.says] if row.says else await rig.reasons() == []


def _has_more(rig: Rig, n_sent: int) -> bool:
    return len(rig.server.seen_at("generate")) > n_sent


def _check(reply: Reply, row: Row, answer: Any) -> None:
    match row.client:
        case Client.ANSWER | Client.LATER if row.wants_stream:
            assert reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n")
            pieces = [json.loads(data)["choices"] for data in reply.body.split(b"data: ")[1:-1]]
            said = "".join(p[0]["delta"].get("content") or "" for p in pieces if p)
            assert said == answer[0]["message"]["content"]
        case Client.ANSWER | Client.LATER:
            assert (reply.status, reply.content["choices"]) == (200, answer)
        case Client.SAME_ERROR:
            assert row.fault == f"answers {reply.status}"
            assert reply.content["error"]["message"] == "scripted fault at generate"
        case Client.BAD_GATEWAY:
            assert reply.status == 502
        case Client.EVENT:
            assert (reply.status, reply.body.count(b'"error"')) == (200, 1)
        case Client.HALF:
            assert (reply.status, reply.body[-1:]) == (200, reply.body.strip(b"}")[-1:])
        case _:
            pytest.fail(f"{reply.status}: {reply.body!r}")


def _end(rig: Rig) -> None:
    """End the fault."""
    rig.server.faults = Faults(forgets_dropped_actions=True)
    rig.server.release_all()


@pytest.mark.parametrize("jump_seconds", [-2 * 86400.0, 2 * 86400.0, 40 * 86400.0], ids=str)
async def test_clock_that_jumps_costs_nothing(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, jump_seconds: float
) -> None:
    clock = time.time
    async with start_rig(n_slots=1, max_write_bytes_per_day=1 << 40) as rig:
        answers = [await _asked(rig, messages) for messages in (FIRST, SECOND)]
        await rig.settled()
        monkeypatch.setattr(time, "time", lambda: clock() + jump_seconds)
        for _ in range(2):
            assert [await _asked(rig, messages) for messages in (FIRST, SECOND)] == answers
        monkeypatch.undo()
        await rig.stop_proxy()
        await rig.start_proxy()
        reply = await rig.chat(FIRST)
        assert (reply.content["choices"], reply.n_reused) == (answers[0], reply.n_prompt - 1)
        assert await rig.reasons() == []
        async with rig.client.get(rig.admin_url + "/history") as told:
            assert (await told.json())["today"]["n_requests"] >= 1


async def test_model_that_is_swapped_for_another_gets_nothing_of_the_first(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await _asked(rig, FIRST)
        await rig.settled()
        rig.server.faults.props = {"model_path": "/nowhere/another.gguf"}
        rig.server.faults.meta = {"n_params": 2}
        rig.server.replace_process()
        await rig.attached()
        reply = await rig.chat(FIRST)
        assert reply.n_reused == 0
