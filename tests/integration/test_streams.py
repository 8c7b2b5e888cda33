"""Answers that break off, come slowly or not at all: the client is told, the slot is not lost."""

import json
from typing import Any

import pytest

from proxy.explain.causes import Cause
from proxy.explain.views import in_words
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, COMPLETION, Rig, question
from tests.lab.waiting import until

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": question("a"), "max_tokens": 10},
    COMPLETION: {"prompt": " word" * 300, "n_predict": 10},
    "/v1/messages": {"messages": question("a"), "max_tokens": 10},
}


async def events(rig: Rig, path: str) -> list[dict[str, Any]]:
    """Return the events of a stream, its end mark left out."""
    reply = await rig.post(path, {**BODIES[path], "stream": True})
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/event-stream")
    data = [line[5:] for line in reply.body.splitlines() if line.startswith(b"data:")]
    return [json.loads(event) for event in data if event != b" [DONE]"]


@pytest.mark.parametrize("path", BODIES)
async def test_connection_closed_before_headers_is_a_bad_gateway(
    start_rig: StartRig, path: str
) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.drop.add("generate")
        reply = await rig.post(path, BODIES[path])
        assert (reply.status, reply.headers["Retry-After"]) == (502, "2")
        assert (reply.content.get("type") == "error") == (path == "/v1/messages")
        assert "llama-server at" in reply.content["error"]["message"]
        rig.server.faults.drop.clear()
        assert (await rig.post(path, BODIES[path])).status == 200


@pytest.mark.parametrize("n_chunks", [0, 1, 5])
@pytest.mark.parametrize("path", BODIES)
async def test_broken_stream_ends_in_an_error_event(
    start_rig: StartRig, path: str, n_chunks: int
) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.dies_after_chunks = n_chunks
        *whole, last = await events(rig, path)
        assert len(whole) == n_chunks
        told = last["error"]["message"]
        assert "went away in mid-answer" in told and told.endswith("(status 502)")
        rig.server.faults.dies_after_chunks = None
        assert len(await events(rig, path)) > 10
        assert rig.sample("drift_total") == 0


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_answer_that_speaks_of_an_exceeded_context_is_no_failure(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, path: str, is_stream: bool
) -> None:
    said = '{"message":"Context size has been exceeded."}'
    async with start_rig(n_slots=1) as rig:
        monkeypatch.setattr("tests.fakes.llama_server.generate", lambda *_: [said])
        n_before = len(rig.server.seen_at("generate"))
        reply = await rig.post(path, {**BODIES[path], "stream": is_stream})
        assert reply.status == 200 and json.dumps(said).encode() in reply.body
        assert len(rig.server.seen_at("generate")) == n_before + 1


@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("n_failures", [1, 2])
@pytest.mark.parametrize("path", BODIES)
async def test_request_that_llama_server_fails_for_want_of_cells_is_sent_again_once(
    start_rig: StartRig, path: str, n_failures: int, is_attached: bool
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        if not is_attached:
            rig.server.faults.refuse["props"] = 404
            rig.running.server.poke()
            await until(lambda: rig.running.server.process is None)
        rig.server.faults.n_out_of_cells = n_failures
        n_saves = len(rig.server.seen_at("save"))
        reply = await rig.post(path, BODIES[path])
        assert reply.status == (500 if n_failures == 2 else 200)
        assert (b"Context size has been exceeded" in reply.body) == (n_failures == 2)
        assert rig.server.faults.n_out_of_cells == 0
        assert len(rig.server.seen_at("save")) == n_saves, "the slot is known to be empty"


async def test_broken_answer_is_not_taken_for_a_whole_one(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.dies_after_chunks = 1
        assert (await rig.post(CHAT, {"messages": question("a")})).status == 502
        rig.server.faults.dies_after_chunks = None
        assert (await rig.chat("a")).status == 200


async def test_broken_stream_leaves_the_slot_to_be_learned_from_a_save(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.dies_after_chunks = 3
        await events(rig, CHAT)
        rig.server.faults.dies_after_chunks = None
        await rig.settled()
        assert rig.checkpoints == [("conversation", 311)]
        assert (await rig.chat("a")).n_reused == 308


async def test_chunks_are_relayed_as_they_come(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("chunk")
        body = {**BODIES[CHAT], "stream": True}
        async with rig.client.post(rig.base_url + CHAT, json=body) as reply:
            for _ in range(8):
                assert await reply.content.readuntil(b"\n\n")  # the next one is not sent yet
                last, gate = gate, rig.server.hold("chunk")
                last.open()
            gate.open()
            assert b"[DONE]" in await reply.read()


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
async def test_error_of_the_server_reaches_the_client_as_it_is(
    start_rig: StartRig, status: int
) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.refuse["generate"] = status
        async with rig.client.post(rig.server.base_url + CHAT, json=BODIES[CHAT]) as direct:
            expected = direct.status, await direct.read()
        reply = await rig.post(CHAT, BODIES[CHAT])
        assert (reply.status, reply.body) == expected
        assert reply.status == status


async def test_answer_without_counts_is_not_said_to_be_not_cached(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.cut_short.add("generate")
        await rig.post(CHAT, BODIES[CHAT])
        await until(lambda: rig.n_occupied() == 0)
        (record,) = rig.running.shared.journal.latest(1)
        assert record.cause is Cause.NOT_ANSWERED
        assert "not cached" not in in_words(record)
