"""Clients that do not read their streams, before a real llama-server: only they are the worse for it."""

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from proxy.core.model import Outcome
from proxy.web import writer as client_writer
from tests.lab.raw_client import RawClient
from tests.lab.rig import Rig
from tests.lab.waiting import HANG_SECONDS, until
from tests.live.conftest import StartRig

N_TOKENS = 400
QUESTION = [{"role": "user", "content": "hello"}]


def long_stream(number: int = 0) -> dict[str, Any]:
    """Return a request whose answer of 9 MB does not fit the buffers of its sockets."""
    prompt = [300 + number, *range(1000, 1050)]
    body = {"prompt": prompt, "n_predict": N_TOKENS, "ignore_eos": True, "stream": True}
    return {**body, "n_probs": 250}


def n_answered(rig: Rig) -> float:
    return sum(rig.sample("requests_total", outcome=outcome) for outcome in Outcome)


async def answered(rig: Rig, n_requests: int) -> None:
    """Wait until so many requests were served."""
    await until(lambda: n_answered(rig) >= n_requests)


async def test_clients_that_never_read_leave_the_slots_to_others(start_rig: StartRig) -> None:
    async with start_rig("full", n_slots=2) as rig:
        with ExitStack() as stack:
            clients = [
                stack.enter_context(RawClient(rig.base_url, "/completion", long_stream(i)))
                for i in range(4)
            ]
            await answered(rig, 4)
            await rig.settled()
            assert rig.sample("unread_bytes") > 0
            assert (await rig.chat(QUESTION))["choices"]
            bodies = [await client.read_to_end() for client in clients]
        for body in bodies:
            *events, last = body.strip().split(b"\n\n")
            assert len(events) == N_TOKENS
            assert b'"stop":true' in last
        await until(lambda: rig.sample("unread_bytes") == 0)


async def test_answer_without_room_gives_its_slot_up_when_nobody_reads(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_writer, "MAX_ANSWER_BYTES", 64 << 10)
    monkeypatch.setattr(client_writer, "STALLED_FULL_SECONDS", 0.5)
    async with start_rig("full", n_slots=1) as rig:
        with RawClient(rig.base_url, "/completion", long_stream()):
            assert (await rig.chat(QUESTION))["choices"]
            assert rig.sample("stalled_clients_total") == 1
        await until(lambda: rig.sample("unanswered_requests_total", reason="client left") == 1)


async def test_stopping_does_not_wait_long_for_who_does_not_read(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_writer, "STALLED_FULL_SECONDS", 0.5)
    async with start_rig("full", n_slots=1, drain_seconds=600.0) as rig:
        with RawClient(rig.base_url, "/completion", long_stream()):
            await answered(rig, 1)
            async with asyncio.timeout(HANG_SECONDS):
                await rig.stop_proxy()
            assert rig.sample("stalled_clients_total") == 1
            # llama-server was done with it: that is no request without an answer.
            assert rig.sample("unanswered_requests_total", reason="client left") == 0
