"""The queue for slots: served in arrival order but for warm fits, left without a trace."""

import asyncio
from typing import Any

import aiohttp
import pytest

from proxy import app
from proxy.core.model import SlotId
from proxy.core.rates import Rates
from proxy.core.slots import TAINTED, Known
from proxy.servers import background
from tests.fakes.llama_server import Seen
from tests.integration.conftest import StartRig, evaluate_ahead_at_once
from tests.integration.rig import CHAT, MESSAGES_FORMS, Form, Rig, hang_up, next_question, question
from tests.lab.waiting import until


def who(request: Seen) -> str:
    """Return the name of the conversation that a request belongs to."""
    content = request.fields["messages"][0]["content"]
    text: str = content if isinstance(content, str) else content[0]["text"]
    return text.split()[0].rstrip("0123456789")


def served(rig: Rig) -> list[str]:
    return [who(request) for request in rig.requests_seen()]


async def occupy(rig: Rig) -> tuple[Any, Any]:
    """Have the only slot used by a request that goes on until its gate is opened."""
    gate = rig.server.hold("generate", n_calls=1)
    first = rig.begin_chat("first")
    await gate.reached()
    return gate, first


async def order_of_service(rig: Rig, *names: str) -> list[str]:
    """Have requests of these names come one after the other while the only slot is in use."""
    gate, first = await occupy(rig)
    asked = [first]
    for n_waiting, name in enumerate(names, 1):
        asked.append(rig.begin_chat(name))
        await rig.waiting(n_waiting)
    assert (await rig.health())["n_waiting"] == len(names)
    gate.open()
    await asyncio.gather(*asked)
    return served(rig)


async def test_requests_are_served_in_arrival_order(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        names = ["b", "c", "a", "d"]
        assert await order_of_service(rig, *names) == ["first", *names]


async def test_request_that_goes_on_with_what_the_slot_holds_comes_first(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        order = await order_of_service(rig, "b", "c", "first", "d")
        assert order == ["first", "first", "b", "c", "d"]


async def test_client_that_leaves_the_queue_frees_its_place(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        gate, first = await occupy(rig)
        leaving, staying = rig.begin_chat("leaving"), None
        await rig.waiting(1)
        staying = rig.begin_chat("staying")
        await rig.waiting(2)
        await hang_up(leaving)
        await rig.waiting(1)
        gate.open()
        await asyncio.gather(first, staying)
        assert served(rig) == ["first", "staying"]


async def test_request_that_is_granted_a_slot_as_it_leaves_gives_it_back(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        gate, first = await occupy(rig)
        leaving = [rig.begin_chat(f"leaving{'x' * i}") for i in range(5)]
        await rig.waiting(5)
        gate.open()
        await asyncio.gather(*map(hang_up, leaving))
        await first
        assert (await rig.chat("next")).status == 200


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, "unavailable_error"), ("/v1/messages", "overloaded_error")]
)
async def test_full_house_is_answered_with_retry_after(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    monkeypatch.setattr(app, "MAX_REQUESTS", 2)
    async with start_rig(n_slots=1) as rig:
        gate, first = await occupy(rig)
        second = rig.begin_chat("second")
        await rig.waiting(1)
        third = await rig.post(path, {"messages": question("third"), "max_tokens": 3})
        assert (third.status, third.headers["Retry-After"]) == (503, "2")
        assert third.content["error"]["type"] == kind
        assert rig.sample("unanswered_requests_total", reason="queue full") == 1
        await hang_up(second)
        await until(lambda: len(rig.running.shared.journal.in_flight) == 1)
        fourth = rig.begin_chat("fourth")
        await rig.waiting(1)
        gate.open()
        await asyncio.gather(first, fourth)


async def test_long_queue_runs_dry(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2) as rig:
        rig.server.faults.slow_seconds["generate"] = 0.002
        asked = [rig.begin_chat(f"c{'abc'[i % 3]}") for i in range(30)]
        replies = await asyncio.gather(*asked)
        assert [reply.status for reply in replies] == [200] * 30
        assert len(rig.requests_seen()) == 30


async def test_request_waiting_for_its_own_slot_reuses_it(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        gate, first = await occupy(rig)
        second = rig.begin_chat("first")
        await rig.waiting(1)
        gate.open()
        assert (await first).n_reused == 0
        assert (await second).n_reused == 308


async def begin_two_prompts(rig: Rig, evaluation_seconds: float) -> tuple[Any, list[Any]]:
    """Have one prompt evaluated until the gate is opened, and another one wait for it, or not."""
    process = await rig.attached()
    process.rates = Rates().after_evaluation(0, 3000, evaluation_seconds)
    gate = rig.server.hold("generate", n_calls=1)
    first = asyncio.ensure_future(rig.chat(question("first", 3000)))
    await gate.reached()
    second = asyncio.ensure_future(rig.chat(question("second", 3000)))
    await until(lambda: rig.n_occupied() == 2 or second.done())
    return gate, [first, second]


async def test_prompts_are_evaluated_one_after_the_other_but_a_short_one_at_once(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=3) as rig:
        gate, asked = await begin_two_prompts(rig, evaluation_seconds=3000)
        await rig.chat("short")
        assert served(rig) == ["first", "short"]
        gate.open()
        await asyncio.gather(*asked)
        assert served(rig) == ["first", "short", "second"]


async def test_prompt_that_takes_longer_than_predicted_holds_up_no_other(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2) as rig:
        gate, (first, second) = await begin_two_prompts(rig, evaluation_seconds=0.003)
        await second
        assert served(rig) == ["first", "second"] and not first.done()
        gate.open()
        await first


async def test_waiting_prompt_goes_on_when_the_one_before_is_abandoned(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2) as rig:
        gate, (first, second) = await begin_two_prompts(rig, evaluation_seconds=3000)
        await hang_up(first)
        await second
        gate.open()
        assert served(rig) == ["first", "second"]


async def test_prompt_whose_process_ends_while_it_waits_is_planned_anew(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=2, n_ctx=4096, idle_save_seconds=60.0) as rig:
        _, (first, second) = await begin_two_prompts(rig, evaluation_seconds=3000)
        rig.server.replace_process()
        reply = await second
        (held,) = (s.content for s in (await rig.attached()).slots if isinstance(s.content, Known))
        assert len(held.tokens) == reply.n_prompt
        await asyncio.wait([first])
        assert first.exception() is not None


async def test_slot_that_changes_while_its_process_is_asked_for_is_not_gone_on_with(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1) as rig:
        messages = next_question(question("a"), await rig.chat("a"))
        process = await rig.settled()
        await rig.unwatched(monkeypatch)
        gate = rig.server.hold("props", n_calls=1)
        asked = asyncio.ensure_future(rig.chat(messages))
        await gate.reached()
        process.slots.set_content(SlotId(0), TAINTED)  # as a request that came first would
        gate.open()
        assert (await asked).n_reused == 312


@MESSAGES_FORMS
async def test_messages_request_waits_its_turn_too(start_rig: StartRig, form: Form) -> None:
    async with start_rig(n_slots=1) as rig:
        gate, first = await occupy(rig)
        body = {"messages": form(question("claude")), "max_tokens": 3}
        messages = asyncio.ensure_future(rig.post("/v1/messages", body))
        await rig.waiting(1)
        last = rig.begin_chat("last")
        await rig.waiting(2)
        gate.open()
        await asyncio.gather(first, messages, last)
        assert served(rig) == ["first", "claude", "last"]


@MESSAGES_FORMS
async def test_messages_request_gives_back_the_slots_it_did_not_get(
    start_rig: StartRig, form: Form
) -> None:
    async with start_rig(n_slots=2) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        body = {"messages": form(question("claude")), "max_tokens": 3}
        messages = asyncio.ensure_future(rig.post("/v1/messages", body))
        await gate.reached()
        await until(lambda: rig.n_occupied() == 1)
        assert (await rig.chat("other")).status == 200
        gate.open()
        assert (await messages).content["type"] == "message"


async def test_several_completions_wait_for_as_many_slots(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2) as rig:
        gate, first = await occupy(rig)
        both = rig.begin_chat("both", n=2)
        await rig.waiting(1)
        gate.open()
        await asyncio.gather(first, both)
        (sent,) = [request for request in rig.requests_seen() if who(request) == "both"]
        assert "id_slot" not in sent.fields


async def test_prompt_that_never_fits_neither_waits_nor_empties_a_slot(start_rig: StartRig) -> None:
    """llama-server refuses it."""
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        (await rig.attached()).has_run_out_of_cells = True
        for name in "ab":
            await rig.chat(name)
        n_erased = len(rig.server.seen_at("erase"))
        gate = rig.server.hold("generate", n_calls=1)
        running = rig.begin_chat("a")
        await gate.reached()
        rig.server.faults.refuse["generate"] = 400
        too_long = {"messages": question("c", 3000)}
        assert (await rig.post(CHAT, too_long)).status == 400
        rig.server.faults.refuse.clear()
        gate.open()
        await running
        rig.server.faults.refuse["generate"] = 400
        assert (await rig.post(CHAT, too_long)).status == 400
        assert len(rig.server.seen_at("erase")) == n_erased


async def test_slots_are_emptied_only_for_cells_and_while_llama_server_chooses_none(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=4, idle_save_seconds=60.0) as rig:
        process = await rig.attached()
        process.has_run_out_of_cells = True
        for name in "ab":
            await rig.chat(question(name, 500))
        n_erased = len(rig.server.seen_at("erase"))
        gate = rig.server.hold("save", n_calls=1)
        asked = asyncio.ensure_future(rig.chat(question("c", 1100)))
        await gate.reached()
        with await process.queue.hold():
            gate.open()
            await until(lambda: len(rig.server.seen_at("erase")) == n_erased + 1)
            await asyncio.sleep(0.1)
            assert len(rig.server.seen_at("erase")) == n_erased + 1
        await asked
        assert len(rig.server.seen_at("erase")) == n_erased + 2


async def test_client_of_several_completions_does_not_wait_for_their_copies_to_end(
    start_rig: StartRig,
) -> None:
    async with start_rig() as rig:
        (await rig.attached()).shares_cells = False
        gate = rig.server.hold("evaluate")
        body = {"messages": question("a"), "n": 2}
        connector = aiohttp.TCPConnector(limit=1)  # the second request comes on the same connection
        async with aiohttp.ClientSession(connector=connector) as client:
            async with client.post(rig.base_url + CHAT, json=body) as reply:
                await reply.read()
            await gate.reached()
            async with client.get(rig.base_url + "/health") as reply:
                assert reply.status == 200
        rig.server.release("evaluate")
        await rig.chat("b")


async def test_nothing_is_evaluated_ahead_while_a_request_is_read(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came while another request ran, so that nothing was evaluated ahead that could give way."""
    lease_if_idle, looks = background._lease_if_idle, list[Any]()

    def look(*about: Any) -> Any:
        looks.append(about)
        return lease_if_idle(*about)

    monkeypatch.setattr(background, "_lease_if_idle", look)
    how = evaluate_ahead_at_once(monkeypatch)
    async with start_rig(n_slots=1, **how) as rig:
        gate, first = await occupy(rig)
        reading = rig.server.hold("tokenize", n_calls=1)
        asked = rig.begin_chat("a")
        await reading.reached()
        n_before = len(rig.server.seen)
        gate.open()
        await first
        await until(lambda: looks)
        reading.open()
        await asked
        places = [seen.place for seen in rig.server.seen[n_before:]]
        assert "evaluate" not in places[: places.index("generate")]


async def test_request_does_not_wait_for_evaluating_ahead_that_waits_until_all_is_idle(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun behind another conversation's answer is not over yet."""
    how = evaluate_ahead_at_once(monkeypatch)
    async with start_rig(n_slots=2, **how) as rig:
        save = rig.server.hold("save", n_calls=1)
        await rig.chat("a", prompt_cache_key="a")
        await save.reached()
        reply = await rig.chat("b", prompt_cache_key="b")
        goes_on = next_question(question("b"), reply)
        assert (await rig.chat(goes_on, prompt_cache_key="b")).status == 200
        save.open()
