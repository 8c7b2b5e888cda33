"""Messages and Responses on a real llama-server: cached like chat completions, whatever the slot."""

import asyncio
from typing import Any

import pytest

from proxy.core.slots import TAINTED, Empty
from proxy.llama.client import Saved
from proxy.serving.saver import SavedSlot, Saver
from tests.lab.apis import CHAT, MESSAGES, RESPONSES, Api
from tests.lab.conversation import Message, answer, system, tool_call, tool_result, user
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import ONE_KIND, StartRig, in_long
from tests.live.ledger import SLACK_TOKENS, TOOLS, ApiLedger

HEADER = [system(150)]
NEVER_IDLE: dict[str, Any] = {"idle_save_seconds": 3600.0}
"""Nothing is saved but for a reason that the test gives."""

N_WORDS = 150
"""Of each message: enough that evaluating it again is never cheaper than a restore."""


def conversation(seed: int) -> list[list[Message]]:
    """Return the messages of each request of two turns, with a call in each."""
    messages = list(HEADER)
    requests = []
    for step in (seed, seed + 1):
        messages.append(user(step, N_WORDS))
        requests.append(list(messages))
        messages += [tool_call(step), tool_result(step, N_WORDS)]
        requests.append(list(messages))
        messages.append(answer(step))
    return requests


async def accounted(rig: Rig) -> None:
    """Wait until no slot is leased: clients have their answers a moment before they are counted."""
    await until(lambda: not is_leased(rig))


def is_leased(rig: Rig) -> bool:
    return any(slot.is_leased for process in rig.running.pool.processes for slot in process.slots)


async def assert_as_foreseen(rig: Rig) -> None:
    """Everything was cached, confirmed, and ran in the slot that was made ready for it."""
    await accounted(rig)
    assert rig.sample("drift_total") == 0
    assert rig.sample("restore_ineffective_total") == 0
    assert rig.sample("tokenization_disagreements_total") == 0
    for outcome in ("bypass", "degraded"):
        assert rig.sample("requests_total", outcome=outcome) == 0
    health = await rig.health()
    assert (health["state"], health["reasons"]) == ("caching", [])


class Confirmed:
    """Asks, and holds what the proxy confirmed against llama-server's own counters."""

    def __init__(self, ledger: ApiLedger) -> None:
        self._ledger = ledger

    async def ask(self, messages: list[Any]) -> None:
        rig, before = self._ledger.rig, self._counted()
        n_new, n_evaluated, n_prompt = await self._ledger.ask(messages)
        assert n_evaluated <= n_new + SLACK_TOKENS
        reused, evaluated = (a - b for a, b in zip(self._counted(), before, strict=True))
        assert (evaluated, reused) == (n_evaluated, n_prompt - n_evaluated)
        await assert_as_foreseen(rig)

    def _counted(self) -> tuple[float, float]:
        rig = self._ledger.rig
        return (
            rig.sample("prompt_tokens_total", source="reused"),
            rig.sample("prompt_tokens_total", source="evaluated"),
        )


N_BEHIND_HEADER = 100


@pytest.mark.parametrize(
    ("api", "kind", "stream", "n_slots"),
    [
        (MESSAGES, "hybrid", True, 2),
        (RESPONSES, "hybrid", False, 1),
        *in_long((MESSAGES, "full", False, 1), (RESPONSES, "swa", True, 2)),
        *in_long((MESSAGES, "recurrent", True, 2), (MESSAGES, "hybrid", False, 1)),
    ],
)
async def test_conversations_by_turns_and_a_restart_evaluate_only_what_is_new(
    start_rig: StartRig, api: Api, kind: str, stream: bool, n_slots: int
) -> None:
    conversations = [conversation(100), conversation(200)]
    async with start_rig(kind, n_slots=n_slots) as rig:
        confirmed = Confirmed(ApiLedger(rig, api, stream=stream))
        for step, requests in enumerate(zip(*conversations, strict=True)):
            if step == 2:
                await rig.restart()
            for messages in requests:
                await confirmed.ask(messages)


@pytest.mark.parametrize(
    ("api", "kind", "n_slots"),
    [
        (MESSAGES, "hybrid", 4),
        *in_long((RESPONSES, "hybrid", 1), (MESSAGES, "full", 2)),
        *in_long((RESPONSES, "swa", 2), (MESSAGES, "recurrent", 2)),
    ],
)
async def test_conversations_at_once_evaluate_only_what_is_new(
    start_rig: StartRig, api: Api, kind: str, n_slots: int
) -> None:
    conversations = [conversation(100 * i) for i in range(3)]
    async with start_rig(kind, n_slots=n_slots, **NEVER_IDLE) as rig:
        ledger = ApiLedger(rig, api, stream=True)
        await ledger.send([*HEADER, user(9)])  # the header is known, and nothing else in common
        for requests in zip(*conversations, strict=True):
            n_new = sum([await ledger.enter(messages) for messages in requests])
            before = rig.sample("prompt_tokens_total", source="evaluated")
            await asyncio.gather(*(ledger.send(messages) for messages in requests))
            await accounted(rig)
            n_evaluated = rig.sample("prompt_tokens_total", source="evaluated") - before
            assert n_evaluated <= n_new + SLACK_TOKENS * len(requests)
            await assert_as_foreseen(rig)


@pytest.mark.parametrize(
    ("api", "kind", "n_slots"),
    [(MESSAGES, "hybrid", 2), *in_long((MESSAGES, "full", 4), (RESPONSES, "hybrid", 4))],
)
async def test_equal_prompts_at_once_are_all_served_where_they_should(
    start_rig: StartRig, api: Api, kind: str, n_slots: int
) -> None:
    requests = conversation(1)
    async with start_rig(kind, n_slots=n_slots, **NEVER_IDLE) as rig:
        ledger = ApiLedger(rig, api)
        for messages in requests:
            usages = await asyncio.gather(*(ledger.send(messages) for _ in range(4)))
            assert {usage.n_prompt for usage in usages} == {len(await ledger.tokens(messages))}
            await assert_as_foreseen(rig)


async def test_prompt_that_another_slot_is_answering_is_placed_beside_it(
    start_rig: StartRig,
) -> None:
    """When the first answer ends, its slot is at least as similar as the one made ready."""
    messages = conversation(1)[0]
    async with start_rig("hybrid", n_slots=2, **NEVER_IDLE) as rig:
        ledger = ApiLedger(rig, MESSAGES)
        await ledger.send([*HEADER, user(9)])
        for n_generated in (1, 2, 5, 10, 40, 100):
            longer = ledger.send(messages, stream=True, max_tokens=n_generated)
            async with asyncio.TaskGroup() as group:
                first = group.create_task(longer)
                await asyncio.sleep(0.02)
                others = [group.create_task(ledger.send(messages)) for _ in range(3)]
            assert len({task.result().n_prompt for task in (first, *others)}) == 1
            await assert_as_foreseen(rig)


@pytest.mark.parametrize("kind", ["hybrid", *in_long("full")])
async def test_requests_of_all_apis_at_once_do_not_take_each_others_slots(
    start_rig: StartRig, kind: str
) -> None:
    conversations = [conversation(100 * i) for i in range(6)]
    async with start_rig(kind, n_slots=3) as rig:
        ledgers = [
            ApiLedger(rig, api, stream=stream)
            for api in (MESSAGES, RESPONSES, CHAT)
            for stream in (False, True)
        ]
        for step in range(4):
            asked = [requests[step] for requests in conversations]
            sent = zip(ledgers, asked, strict=True)
            await asyncio.gather(*(ledger.send(messages) for ledger, messages in sent))
            await assert_as_foreseen(rig)


@pytest.mark.parametrize(
    ("api", "kind", "n_words"),
    [
        (RESPONSES, "hybrid", 2500),
        *in_long((MESSAGES, "full", 2500), (RESPONSES, "swa", 3000), (MESSAGES, "recurrent", 6000)),
    ],
)
async def test_request_sent_again_after_it_was_left_finds_what_was_evaluated(
    start_rig: StartRig, api: Api, kind: str, n_words: int
) -> None:
    messages = [system(n_words), user(1)]
    async with start_rig(kind, n_slots=2) as rig:
        ledger = ApiLedger(rig, api, stream=True)
        n_new = await ledger.enter(messages)
        before = await rig.evaluated()
        # A long answer: the request cannot end before its client leaves.
        leaving = asyncio.ensure_future(ledger.send(messages, **api.limit(20_000)))
        await until(lambda: rig.server.evaluated_tokens() - before >= 2048)
        assert not leaving.done()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await ledger.send(messages)
        n_evaluated = await rig.evaluated() - before
        # Waiting for the slot that is let go may cost more than evaluating what follows the header again.
        assert n_evaluated <= n_new + SLACK_TOKENS + N_BEHIND_HEADER
        assert rig.sample("unanswered_requests_total", reason="client left") == 1


@ONE_KIND
async def test_request_sent_again_after_its_answer_was_left_waits_until_its_slot_is_known(
    start_rig: StartRig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server has written the slot's file, and its slot is free; the proxy has not read it yet."""
    may_check, check = asyncio.Event(), Saver.check

    async def held(saver: Saver, name: str, reply: Saved, seconds: float) -> SavedSlot:
        await may_check.wait()
        return await check(saver, name, reply, seconds)

    messages = [system(1), user(1, 1000)]
    async with start_rig(kind, n_slots=2) as rig:
        ledger = ApiLedger(rig, CHAT, stream=True)
        n_new, before = await ledger.enter(messages), await rig.evaluated()
        body = CHAT.ask(messages, TOOLS, stream=True, **CHAT.limit(20_000))
        async with rig.client.post(rig.base_url + CHAT.path, json=body) as reply:
            await reply.content.readany()
            monkeypatch.setattr(Saver, "check", held)
        await accounted(rig)
        (process,) = rig.running.pool.processes
        again = asyncio.ensure_future(ledger.send(messages))
        await until(lambda: process.queue.n_waiting or is_leased(rig))
        may_check.set()
        await again
        assert await rig.evaluated() - before <= n_new + SLACK_TOKENS


async def test_slot_that_other_traffic_made_more_similar_is_told_and_erased(
    start_rig: StartRig,
) -> None:
    first, after_call, *_ = conversation(1)
    async with start_rig("hybrid", n_slots=2, **NEVER_IDLE) as rig:
        ledger = ApiLedger(rig, MESSAGES)
        await ledger.send(first)
        assert rig.running.server.process
        table = rig.running.server.process.queue.table
        (other,) = [slot.id for slot in table if isinstance(slot.content, Empty)]
        prompt = list(await ledger.tokens(after_call))
        stray = {"prompt": prompt, "n_predict": 1, "id_slot": other}
        await asyncio.to_thread(rig.server.request, "POST", "/completion", stray)
        usage = await ledger.send(after_call)
        await accounted(rig)
        assert usage.n_cached > len(prompt) - SLACK_TOKENS
        assert [r["kind"] for r in (await rig.health())["reasons"]] == ["placed elsewhere"]
        assert rig.sample("drift_total") == 1
        assert table[other].content == TAINTED
        await ledger.send(after_call)
        await accounted(rig)
        assert (await rig.health())["reasons"] == []


async def post(
    rig: Rig, base_url: str, path: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    async with rig.client.post(base_url + path, json=body) as reply:
        return reply.status, await reply.json()


async def test_messages_errors_of_llama_server_have_anthropics_shape(start_rig: StartRig) -> None:
    hello = [user(1)]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", {"max_tokens": 1}),
        ("/v1/messages/count_tokens", {"max_tokens": 1}),
        ("/v1/messages", {"messages": hello, "max_tokens": -5}),
        ("/v1/messages", {"messages": [{"role": "user", "content": 5}]}),
        ("/v1/messages", {"messages": [user(1, 20_000)], "stream": True}),
        ("/v1/messages", {"messages": [user(1, 20_000)]}),
    ]
    async with start_rig("hybrid", n_slots=2, n_ctx=16384) as rig:
        for path, body in cases:
            status, direct = await post(rig, rig.server.base_url, path, body)
            proxied = await post(rig, rig.base_url, path, body)
            error = proxied[1]["error"]
            assert (proxied[0], proxied[1]["type"]) == (status, "error")
            assert error["type"] == ("invalid_request_error" if status == 400 else "api_error")
            assert direct["error"]["message"] in error["message"]
        assert (status, direct["error"]["type"]) == (400, "exceed_context_size_error")
        assert error["message"].startswith("prompt is too long: ")


async def test_counting_takes_no_slot_and_waits_for_none(start_rig: StartRig) -> None:
    messages = conversation(1)[0]
    async with start_rig("full", n_slots=1) as rig:
        answering = asyncio.ensure_future(
            ApiLedger(rig, MESSAGES, n_generated=20_000).send(messages)
        )
        await until(lambda: is_leased(rig))
        for api in (MESSAGES, RESPONSES, CHAT):
            body = api.ask(messages, TOOLS)
            counts = await asyncio.gather(*(rig.post(api.count_path, body) for _ in range(10)))
            assert len({count["input_tokens"] for count in counts}) == 1
        assert not answering.done()
        answering.cancel()
        await rig.settled()
        assert rig.sample("requests_total", outcome="bypass") == 0
        assert (await rig.health())["n_waiting"] == 0
