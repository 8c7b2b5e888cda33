"""Prompts that come together are answered as alone."""

import asyncio
import json
import random
from functools import partial
from typing import Any

import pytest

from proxy.core.conditions import DegradationKind
from proxy.llama.answers import Answer
from proxy.serving import placement
from proxy.serving.placement import SimilarRequest
from tests.lab.rig import Rig
from tests.lab.waiting import HANG_SECONDS, until
from tests.live.conftest import StartRig, in_long
from tests.live.test_window_repair import WRONG_BAR, distance

COMPLETION = "/completion"
LONG, SHORT = 4200, 300
"""Three of llama-server's batches, and a part of one."""
LEFT = 6000
N_TRIALS = 2


def prompt(n_tokens: int, seed: int) -> dict[str, Any]:
    tokens = random.Random(seed).choices(range(100, 3000), k=n_tokens)
    return {"prompt": tokens, "n_predict": 4, "temperature": 0, "n_probs": 10}


async def alone(rig: Rig, body: dict[str, Any]) -> dict[str, Any]:
    """Return llama-server's own answer once nothing else runs."""
    fresh = body | {"cache_prompt": False, "id_slot": 0}
    status, reply = await asyncio.to_thread(rig.server.request, "POST", COMPLETION, fresh)
    assert status == 200
    return dict(reply)


@pytest.mark.parametrize("lengths", [(LONG, SHORT), (SHORT, LONG), (180, 200)])
@pytest.mark.parametrize("kind", ["hybrid", *in_long("recurrent", "full")])
async def test_prompts_of_any_length_at_once_are_answered_as_alone(
    start_rig: StartRig, kind: str, lengths: tuple[int, int]
) -> None:
    async with start_rig(kind) as rig:
        for trial in range(N_TRIALS):
            bodies = [prompt(n, seed=10 * trial + i) for i, n in enumerate(lengths)]
            replies = await asyncio.gather(*(rig.post(COMPLETION, body) for body in bodies))
            await rig.settled()
            for body, reply in zip(bodies, replies, strict=True):
                assert distance(reply, await alone(rig, body)) <= WRONG_BAR


async def test_prompts_of_one_request_run_at_once(start_rig: StartRig) -> None:
    prompts = [prompt(SHORT, seed)["prompt"] for seed in range(2)]
    body = {"prompt": prompts, "n_predict": 30, "stream": True, "ignore_eos": True}
    async with start_rig("hybrid") as rig:
        async with rig.client.post(rig.base_url + COMPLETION, json=body) as reply:
            events = [json.loads(line[5:]) for line in (await reply.read()).split(b"\n\n")[:-1]]
        told = [event for event in events if event]  # llama-server also sends a null
        numbers = [event["index"] for event in told]
        assert numbers != sorted(numbers) and sum(event["stop"] for event in told) == 2


async def test_prompt_in_a_list_of_one_is_cached(start_rig: StartRig) -> None:
    async with start_rig("hybrid") as rig:
        body = prompt(SHORT, seed=1)
        body["prompt"] = [body["prompt"]]
        await rig.post(COMPLETION, body)
        body["prompt"][0] += prompt(9, seed=2)["prompt"]
        await rig.post(COMPLETION, body)
        await rig.settled()
        assert rig.sample("requests_total", outcome="hit") == 1


async def test_prompt_whose_client_left_is_not_mixed_up_with_the_next_one(
    start_rig: StartRig,
) -> None:
    """llama-server goes on with a prompt for up to a second after its client has left, and it is saved."""
    async with start_rig("hybrid") as rig:
        process = rig.running.pool.processes[0]

        async def is_evaluating(asked: "asyncio.Future[Any]") -> bool:
            return asked.done() or any(s.is_processing for s in await process.slot_states())

        for trial in range(N_TRIALS):
            first, left = prompt(600, seed=trial), prompt(LEFT, seed=10 + trial)
            await rig.post(COMPLETION, first)
            await rig.settled()
            leaving = asyncio.ensure_future(rig.post(COMPLETION, left))
            await until(partial(is_evaluating, leaving))
            leaving.cancel()
            first["prompt"] += prompt(SHORT, seed=20 + trial)["prompt"]
            reply = await rig.post(COMPLETION, first)
            sent_again = await rig.post(COMPLETION, left)
            await rig.settled()
            assert distance(reply, await alone(rig, first)) <= WRONG_BAR
            assert distance(sent_again, await alone(rig, left)) <= WRONG_BAR


@pytest.mark.parametrize("kind", ["full", "hybrid", *in_long("swa")])
async def test_state_restored_after_several_completions_is_not_copied_over(
    start_rig: StartRig, kind: str
) -> None:
    """llama-server copies the prompt of several completions to their slots at its next evaluation only."""
    async with start_rig(kind) as rig:
        bodies = [prompt(1300, seed=1), prompt(1300, seed=2)]
        for body in bodies:
            await rig.post(COMPLETION, body)
            await rig.settled()
        several = {**prompt(2000, seed=3), "n_cmpl": 2, "n_predict": 1}
        async with rig.client.post(rig.base_url + COMPLETION, json=several) as told:
            assert len(await told.json()) == 2
        for body in bodies:
            body["prompt"] += prompt(80, seed=4)["prompt"]
        replies = await asyncio.gather(*(rig.post(COMPLETION, body) for body in bodies))
        await rig.settled()
        for body, reply in zip(bodies, replies, strict=True):
            assert reply["timings"]["cache_n"] >= 1200
            assert distance(reply, await alone(rig, body)) <= WRONG_BAR


@pytest.mark.parametrize("kind", ["full", *in_long("hybrid", "swa")])
async def test_several_completions_are_not_mixed_up_by_the_ram_cache(
    start_rig: StartRig, kind: str
) -> None:
    """llama-server restores prompts from its RAM cache too, and the last prompt's copy may be due."""
    async with start_rig(kind, extra_args=("--cache-ram", "1024")) as rig:
        first, second = prompt(1300, seed=1), prompt(2000, seed=2)
        longer = {**first, "prompt": first["prompt"] + prompt(80, seed=3)["prompt"]}
        for body in (first, second, longer):
            several = {**body, "n_cmpl": 2, "n_predict": 1}
            async with rig.client.post(rig.base_url + COMPLETION, json=several) as told:
                replies = await told.json()
            await rig.settled()
        assert replies[0]["timings"]["cache_n"] >= 1200
        right = await alone(rig, longer)
        assert all(distance(reply, right) <= WRONG_BAR for reply in replies)


async def test_request_that_starts_behind_several_completions_is_found_in_its_slot(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that is evaluated behind them begins a task in one of their slots."""
    async with start_rig("full", n_slots=4, n_ctx=16384) as rig:
        process = rig.running.pool.processes[0]
        send, is_ready = SimilarRequest._send_as_it_is, asyncio.Event()

        async def late(request: SimilarRequest) -> Answer:
            is_ready.set()
            await until(
                lambda: (
                    process.queue._choosing.n_waiting
                    or DegradationKind.PLACED_ELSEWHERE in process.degradations
                )
            )
            return await send(request)

        monkeypatch.setattr(SimilarRequest, "_send_as_it_is", late)
        monkeypatch.setattr(placement, "_START_SECONDS", HANG_SECONDS)
        several = {**prompt(300, seed=3), "n_cmpl": 2, "n_predict": 1000, "ignore_eos": True}
        first = asyncio.ensure_future(rig.client.post(rig.base_url + COMPLETION, json=several))
        await until(lambda: sum(slot.is_running for slot in process.slots) == 2)
        messages = [{"role": "user", "content": "tell me more " * 60}]
        asked = rig.post("/v1/messages", {"max_tokens": 4, "messages": messages})
        second = asyncio.ensure_future(asked)
        await is_ready.wait()
        assert not first.done()
        async with await first as told:
            assert len(await told.json()) == 2
        await second
        await rig.settled()
        assert DegradationKind.PLACED_ELSEWHERE not in process.degradations
