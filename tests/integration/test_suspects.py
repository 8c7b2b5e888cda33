"""llama-server dies over a saved state, or over a request: neither is tried for ever."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.core.model import Checkpoint, Quarantine
from proxy.servers import server as lifecycle
from proxy.shared.transfers import Uploads
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, Rig, question, text
from tests.lab.waiting import until

SUSPECT = "a state ended llama-server"


async def save_a(rig: Rig) -> None:
    """Have the only slot hold another conversation than the saved one."""
    await rig.chat("a")
    await rig.settled()
    await rig.chat("b")
    await rig.settled()


def quarantined(rig: Rig) -> list[int]:
    """Return how many tokens the states have that are quarantined for good."""
    assert rig.running.store is not None
    return sorted(c.n_tokens for c in rig.running.store if c.quarantine)


@pytest.mark.parametrize("has_gateway", [False, True], ids=["direct", "gateway"])
@pytest.mark.parametrize("place", ["restore", "answer"])
async def test_state_that_ends_llama_server_is_used_once(
    start_rig: StartRig, place: str, *, has_gateway: bool
) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.has_gateway = has_gateway
        rig.server.faults.dies_at[place] = 1
        assert (await rig.chat("a")).n_reused == 0
        assert (rig.server.n_processes, len(quarantined(rig))) == (2, 1)
        (reason,) = (await rig.health())["reasons"]
        assert reason["kind"] == SUSPECT
        assert f"checkpoint {_id_of_quarantined(rig)} of " in reason["reason"]
        assert (await rig.health())["state"] == "caching"
        n_restores = len(rig.server.seen_at("restore"))
        await rig.settled()
        await rig.chat("b")
        await rig.chat("a")  # its new state is another one
        assert len(rig.server.seen_at("restore")) == n_restores + 2
        assert rig.server.n_processes == 2


def _id_of_quarantined(rig: Rig) -> str:
    assert rig.running.store is not None
    (found,) = (c for c in rig.running.store if c.quarantine)
    return f"{found.id:016x}"


async def test_quarantine_outlives_the_proxy_and_ends_with_the_checkpoint(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.dies_at["restore"] = 1
        await rig.chat("a")
        await rig.settled()
        before = quarantined(rig)
        await rig.stop_proxy()
        await rig.start_proxy()
        assert (quarantined(rig), await rig.reasons()) == (before, [SUSPECT])
        async with rig.client.get(rig.admin_url + "/checkpoints") as reply:
            listed = (await reply.json())["checkpoints"]
        (why,) = [c["quarantine"]["why"] for c in listed if c["quarantine"]]
        assert "llama-server ended" in why
        path = f"/checkpoints/{_id_of_quarantined(rig)}"
        async with rig.client.delete(rig.admin_url + path) as reply:
            assert reply.status == 200
        assert await rig.reasons() == []


@pytest.mark.parametrize("is_met_again", [False, True])
async def test_state_in_use_when_only_a_gateway_is_restarted_is_used_again(
    start_rig: StartRig, *, is_met_again: bool
) -> None:
    """Also if the proxy has met llama-server again before it hears of the broken connection."""
    async with start_rig(n_slots=2) as rig:
        for name in "abc":
            await rig.chat(name)
            await rig.settled()
        before = await rig.attached()
        gate = rig.server.hold("generate", n_calls=1)
        asked = asyncio.ensure_future(rig.post(CHAT, {"messages": question("a")}))
        await gate.reached()
        await rig.server.shut_down()
        await until(lambda: before.queue.is_closed)
        if is_met_again:
            await rig.server.listen()
            await until(lambda: rig.process)
        rig.server.faults.drop.add("generate")
        gate.open()
        await until(lambda: asked.done() if is_met_again else quarantined(rig))
        rig.server.faults.drop.clear()
        if not is_met_again:
            await rig.server.listen()
        assert (await asked).status == (502 if is_met_again else 200)
        assert (quarantined(rig), await rig.reasons()) == ([], [])
        await rig.settled()
        assert (await rig.chat("a")).n_reused
        assert rig.server.n_processes == 1


@asynccontextmanager
async def answering(rig: Rig) -> AsyncIterator["asyncio.Future[Any]"]:
    """Yield a request that is being answered from a restored state."""
    for name in "abc":
        await rig.chat(name)
        await rig.settled()
    gate = rig.server.hold("generate", n_calls=1)
    asked = asyncio.ensure_future(rig.post(CHAT, {"messages": question("a")}))
    await gate.reached()
    yield asked


@pytest.mark.parametrize("really_ends", [True, False])
async def test_llama_server_that_was_met_again_during_an_answer_ends_or_is_away_again(
    start_rig: StartRig, *, really_ends: bool
) -> None:
    async with start_rig(n_slots=2) as rig, answering(rig) as asked:
        await rig.server.shut_down()
        await until(lambda: not rig.process)
        await rig.server.listen()
        await until(lambda: rig.process)
        await rig.server.crash()
        await until(lambda: quarantined(rig))
        if not really_ends:  # the same process answers again
            rig.server.process.gone.clear()
        await (rig.server.restart if really_ends else rig.server.listen)()
        assert (await asked).status == 200
        assert len(quarantined(rig)) == int(really_ends)


async def test_state_over_which_another_llama_server_has_ended_is_not_acquitted_here(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2) as rig, answering(rig) as asked:
        assert (store := rig.running.store) is not None
        assert rig.process and (sources := [s for slot in rig.process.slots for s in slot.sources])
        quarantine = Quarantine("another has ended", 1.0)
        await store.change_on_disk(*(each.id for each in sources), quarantine=quarantine)
        await rig.server.crash()
        await until(lambda: not rig.process)
        rig.server.process.gone.clear()
        await rig.server.listen()
        assert (await asked).status == 200
        assert len(quarantined(rig)) == len(sources)


async def test_quarantined_state_is_taken_from_other_machines_at_once(
    start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[str]()

    def note(_: Uploads, checkpoint: Checkpoint) -> None:
        refused.append(f"{checkpoint.id:016x}")

    monkeypatch.setattr(Uploads, "withdraw", note)
    async with start_rig(n_slots=1, shared_store=f"url = file://{tmp_path / 'shared'}") as rig:
        await save_a(rig)
        rig.server.faults.dies_at["restore"] = 1
        await rig.chat("a")
        await until(lambda: refused)
        assert refused == [_id_of_quarantined(rig)]


async def test_stream_whose_server_dies_before_the_first_token_goes_on_in_the_same_answer(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.dies_at["stream"] = 1
        reply = await rig.post(CHAT, {"messages": question("a"), "stream": True})
        assert reply.status == 200
        assert b"error" not in reply.body and reply.body.endswith(b"data: [DONE]\n\n")
        assert (rig.server.n_processes, len(quarantined(rig))) == (2, 1)


async def test_stream_whose_server_dies_within_the_first_event_is_not_tried_again(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.dies_at["event"] = 1
        gate = rig.server.hold("event")
        n_before = len(rig.requests_seen())
        body = {"messages": question("a"), "stream": True}
        async with rig.client.post(rig.base_url + CHAT, json=body) as reply:
            begun = await reply.content.readany()
            gate.open()
            rest, last, end = (await reply.read()).split(b"\n\n")
        assert begun.startswith(b'data: {"choices"') and rest == end == b""
        assert b"went away in mid-answer" in last
        assert len(rig.requests_seen()) == n_before + 1
        assert (await rig.chat("a")).n_reused


async def test_state_that_llama_server_dies_over_at_a_stop_is_quarantined(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, memory=Memory.RESTORE_POINTS) as rig:
        first = await rig.chat("a")
        await rig.settled()
        await rig.chat("b")
        await rig.settled()
        said = first.content["choices"][0]["message"]
        more = {"role": "user", "content": text("more", 2500)}  # long enough for a stop inside
        rig.server.faults.dies_at["evaluate"] = 1
        await rig.chat([*question("a"), said, more])
        assert (rig.server.n_processes, len(quarantined(rig))) == (2, 1)


async def test_state_that_cannot_be_saved_again_is_quarantined(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.dies_at["save"] = 1
        await rig.chat([*question("a"), *question("more")])
        await until(lambda: rig.server.n_processes == 2)
        await rig.attached()
        await until(lambda: len(quarantined(rig)) == 1)


async def test_state_is_still_suspect_after_only_a_connection_broke(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.drop.add("save")
        await rig.chat([*question("a"), *question("more")])
        await rig.settled()
        rig.server.faults.drop.clear()
        rig.server.faults.dies_at["save"] = 1
        await rig.chat([*question("a"), *question("more"), *question("again")])
        await until(lambda: rig.server.n_processes == 2)
        await rig.attached()
        await until(lambda: len(quarantined(rig)) == 1)


async def test_server_that_is_told_to_end_makes_nothing_suspect(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        gate = rig.server.hold("generate")
        asked = asyncio.ensure_future(rig.post(CHAT, {"messages": question("a")}))
        await gate.reached()
        await rig.server.shut_down()
        assert (await asked).status == 502
        rig.server.replace_process()
        rig.server.release("generate")
        await rig.server.listen()
        await rig.attached()
        assert quarantined(rig) == []
        assert (await rig.chat("a")).n_reused


async def test_server_that_dies_in_mid_answer_makes_nothing_suspect(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.dies_after_chunks = 1
        for _ in range(lifecycle.MAX_DEATHS + 1):
            reply = await rig.post(CHAT, {"messages": question("a"), "stream": True})
            assert (reply.status, b"mid-answer" in reply.body) == (200, True)
        assert quarantined(rig) == []
        rig.server.faults.dies_after_chunks = None
        await rig.settled()


@pytest.mark.parametrize("has_gateway", [False, True], ids=["direct", "gateway"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_request_that_ends_llama_server_twice_is_refused(
    start_rig: StartRig, path: str, monkeypatch: pytest.MonkeyPatch, *, has_gateway: bool
) -> None:
    body = {"messages": question("a"), "max_tokens": 3}
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.has_gateway = has_gateway
        rig.server.faults.dies_at["answer"] = 2
        for _ in range(2):
            assert (await rig.post(path, body)).status == 502
            await rig.attached()
        for _ in range(2):
            n_processes = rig.server.n_processes
            reply = await rig.post(path, {**body, "max_tokens": 4})
            assert (reply.status, reply.content["error"]["type"]) == (422, "invalid_request_error")
            assert "llama-server ended 2 times in a row" in reply.content["error"]["message"]
            assert rig.server.n_processes == n_processes == 3
            await rig.stop_proxy()
            await rig.start_proxy()
        assert (await rig.post(path, {**body, "messages": question("b")})).status == 200
        monkeypatch.setattr(lifecycle, "FORGET_SECONDS", 0.0)
        assert (await rig.post(path, body)).status == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_gateway_that_fails_while_llama_server_lives_makes_nothing_suspect(
    start_rig: StartRig, *, is_stream: bool
) -> None:
    """As where it took a connection that llama-server was just closing."""
    body = {"messages": question("a"), "stream": is_stream}
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        process = rig.running.server.process
        rig.server.faults.refuse["generate"] = 502
        n_sent = len(rig.server.seen_at("generate"))
        for n in range(1, 4):
            assert (await rig.post(CHAT, body)).status == 502
            assert len(rig.server.seen_at("generate")) == n_sent + n, "sent once"
        rig.server.faults.refuse.clear()
        assert (await rig.post(CHAT, body)).status == 200
        assert (quarantined(rig), await rig.reasons()) == ([], [])
        assert rig.running.server.process is process


async def test_clock_that_is_set_back_refuses_a_request_no_longer(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": question("a"), "max_tokens": 3}
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.dies_at["answer"] = 2
        for _ in range(2):
            assert (await rig.post(CHAT, body)).status == 502
            await rig.attached()
        monkeypatch.setattr("time.time", lambda now=time.time: now() - 86400)
        assert (await rig.post(CHAT, body)).status == 200


async def test_request_that_is_answered_begins_a_new_count(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        for _ in range(lifecycle.MAX_DEATHS + 1):
            rig.server.faults.dies_at["answer"] = 1
            assert (await rig.post(CHAT, {"messages": question("a")})).status == 502
            await rig.attached()
            await rig.chat("a")


async def test_request_whose_preparation_ends_llama_server_twice_is_refused(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        for name in "xyz":  # none of these states covers another
            await rig.chat([*question("a"), *question(name)])
            await rig.settled()
        rig.server.faults.dies_at["restore"] = 3
        reply = await rig.post(CHAT, {"messages": [*question("a"), *question("x")]})
        assert (reply.status, rig.server.n_processes, len(quarantined(rig))) == (422, 3, 2)
        rig.server.faults.dies_at.clear()
        assert (await rig.chat([*question("a"), *question("y")])).n_reused


async def test_request_in_the_queue_is_not_to_blame(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        first = asyncio.ensure_future(rig.post(CHAT, {"messages": question("a")}))
        await gate.reached()
        waiting = rig.begin_chat("b")
        await rig.waiting(1)
        rig.server.replace_process()
        assert (await first).status == 502
        assert (await waiting).status == 200
        assert rig.running.store is not None
        blamed = rig.running.store.index.value("fatal requests", dict[str, Any])
        assert blamed is not None and len(blamed) == 1
