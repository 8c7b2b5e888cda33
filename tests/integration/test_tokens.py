"""Prompts that llama-server reads otherwise than it told, or would not tell: served, counted, named."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.serving import prompts
from proxy.serving.process import Process
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, COMPLETION, next_question, question, text
from tests.lab.run import slots_in
from tests.lab.waiting import until

QUESTION = [{"role": "user", "content": "".join(f" q{i}" for i in range(300))}]
TOOL_LOOP: list[dict[str, Any]] = [
    *QUESTION,
    {"role": "assistant", "content": " a call"},
    {"role": "tool", "content": " a result"},
]


def one_more(body: dict[str, Any], tokens: list[int]) -> list[int]:
    """A token that /tokenize does not report, in requests that end with the user's message."""
    ends_with_user = body["messages"][-1]["role"] == "user"
    return [*tokens, 17] if ends_with_user else tokens


def others(body: dict[str, Any], tokens: list[int]) -> list[int]:
    """As many tokens as /tokenize reports, but not the same."""
    return [token + 1 for token in tokens]


async def test_other_number_of_tokens_disables_that_shape_only(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        rig.server.faults.retokenize = one_more
        with capture_logs() as logs:
            assert (await rig.chat(QUESTION)).status == 200
        (line,) = [x for x in logs if x["event"].startswith("tokenization disagreement")]
        assert (line["n_predicted"], line["n_really"]) == (309, 310)
        (record,) = rig.running.shared.journal.latest(1)
        assert (record.n_prompt, record.confirmed, record.evaluated) == (310, 0, 310)
        assert rig.sample("tokenization_disagreements_total") == 1
        await rig.chat(QUESTION)
        assert rig.sample("requests_total", outcome="bypass") == 1
        await rig.chat(TOOL_LOOP)
        await rig.post(COMPLETION, {"prompt": " some words"})
        assert rig.sample("requests_total", outcome="bypass") == 1
        assert rig.sample("tokenization_disagreements_total") == 1


async def test_header_is_found_again_after_the_date_in_it_has_changed(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss and Llama 3 have today's date in their templates."""
    monkeypatch.setattr(prompts, "_REMEMBERED_SECONDS", 0.1)
    async with start_rig(n_slots=1, memory=Memory.RESTORE_POINTS) as rig:
        render = rig.server._render
        for day in ("Friday", "Saturday"):
            monkeypatch.setattr(
                rig.server, "_render", lambda body, day=day: f"{day} {render(body)}"
            )
            for name in "ab":
                system = {"role": "system", "content": text("rule")}
                reply = await rig.chat([system, *question(f"{day}-{name}")])
                await rig.settled()
            assert reply.headers["X-Prefix-Cache"].startswith("reused=30")
            await asyncio.sleep(0.1)


async def test_new_message_of_a_known_conversation_is_tokenized_once(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.RESTORE_POINTS) as rig:
        messages = QUESTION
        for _ in range(
            2
        ):  # the first text that is known in part is also tokenized whole, as a check
            messages = next_question(messages, await rig.chat(messages))
            await rig.settled()
        before = len(rig.server.seen_at("tokenize"))
        messages[-1]["content"] = " some new words"
        assert (await rig.chat(messages)).status == 200
        await rig.settled()
        assert len(rig.server.seen_at("tokenize")) == before + 1


async def test_disagreeing_prompt_is_never_committed_as_predicted(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.retokenize = one_more
        first = await rig.chat(QUESTION)
        await rig.settled()
        # What the slot's file says is true, whatever was predicted: that may be kept.
        assert rig.checkpoints == [("conversation", first.n_prompt + 3)]


async def test_same_number_of_other_tokens_is_found_in_the_file_saved_for_the_request(
    start_rig: StartRig,
) -> None:
    async with start_rig(memory=Memory.RESTORE_POINTS) as rig:
        rig.server.faults.retokenize = others
        await rig.chat(QUESTION)
        await until(lambda: rig.sample("saves_total", result="failed"))
        assert rig.sample("tokenization_disagreements_total") == 1
        await rig.chat(QUESTION)
        assert rig.sample("requests_total", outcome="bypass") == 1
        assert rig.temporary_files() == []


@pytest.mark.parametrize("place", ["apply-template", "tokenize"])
@pytest.mark.parametrize("fault", ["refuse", "drop"])
async def test_prompt_that_cannot_be_read_is_served_uncached(
    start_rig: StartRig, place: str, fault: str
) -> None:
    async with start_rig(n_slots=1) as rig:
        if fault == "refuse":
            rig.server.faults.refuse[place] = 500
        else:
            rig.server.faults.drop.add(place)
        for _ in range(2):
            assert (await rig.chat(QUESTION)).status == 200
        assert rig.sample("cache_faults_total", stage="tokenize") == 2
        assert rig.sample("requests_total", outcome="bypass") == 2
        rig.server.faults.refuse.clear()
        rig.server.faults.drop.clear()
        assert (await rig.chat(QUESTION)).n_reused > 300
        assert rig.sample("requests_total", outcome="bypass") == 2


async def test_request_that_extends_a_slot_and_cannot_be_read_is_not_told_as_its_plan(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        reply = await rig.chat(QUESTION)
        await rig.settled()
        rig.server.faults.drop.add("apply-template")
        await rig.chat(next_question(QUESTION, reply))
        await rig.running.pool.accounted()
        (record,) = rig.running.shared.journal.latest(1)
        assert (record.outcome, record.why) == ("bypass", "the prompt could not be tokenized")
        assert (record.n_prompt, record.confirmed, record.chosen) == (None, None, None)
        today = rig.running.shared.journal.today()
        for source, n_tokens in (("reused", today.n_reused), ("evaluated", today.n_new)):
            assert rig.sample("prompt_tokens_total", source=source) == n_tokens


async def test_slow_template_is_waited_for(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        rig.server.faults.slow_seconds["apply-template"] = 0.1
        assert (await rig.chat(QUESTION)).status == 200
        assert rig.sample("requests_total", outcome="miss") == 1


async def test_slow_template_of_one_client_holds_up_no_other(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("apply-template", n_calls=1)
        slow = rig.begin_chat("slow")
        await gate.reached()
        assert (await rig.chat("quick")).status == 200
        gate.open()
        assert (await slow).status == 200


async def test_drift_is_counted_and_the_slot_becomes_unknown(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        prompt = [200 + i for i in range(600)]
        await rig.post(COMPLETION, {"prompt": prompt[:300]})
        # Somebody goes round the proxy, and leaves more in the slot than it knows of.
        async with rig.client.post(
            rig.server.base_url + COMPLETION, json={"prompt": prompt[:500], "id_slot": 0}
        ) as reply:
            assert reply.status == 200
        through = await rig.post(COMPLETION, {"prompt": prompt})
        assert (through.status, through.n_reused) == (200, 500)
        assert rig.sample("drift_total") == 1
        assert slots_in(await rig.health()) == {"unknown": 1}


async def test_slot_that_holds_less_than_believed_is_counted(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        async with rig.client.post(rig.server.base_url + "/slots/0?action=erase") as reply:
            assert reply.status == 200
        reply_after = await rig.chat("a")
        assert (reply_after.status, reply_after.n_reused) == (200, 0)
        assert rig.sample("live_reuse_short_total") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETION, {"prompt": " word" * 300}), (CHAT, {"messages": question("b")})],
    ids=["read", "not read"],
)
@pytest.mark.parametrize(("status", "slots"), [(400, {"known": 1}), (500, {"unknown": 1})])
async def test_request_that_was_refused_leaves_the_table_true(
    start_rig: StartRig, status: int, slots: dict[str, int], path: str, body: dict[str, Any]
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        rig.server.faults.refuse |= {"generate": status, "apply-template": status}
        assert (await rig.post(path, body)).status == status
        assert slots_in(await rig.health()) == slots
        rig.server.faults.refuse.clear()
        assert (await rig.chat("a")).n_reused == 308
        assert rig.sample("drift_total") == 0


@pytest.mark.parametrize("fields", [{"lora": [{"id": 0, "scale": 1.0}]}, {"n_cache_reuse": 256}])
async def test_state_that_is_more_than_its_tokens_is_continued_by_its_like_only(
    start_rig: StartRig, fields: dict[str, Any]
) -> None:
    """llama-server itself goes on from the tokens, whichever adapter or shift they were made with."""
    async with start_rig(n_slots=1) as rig:
        await rig.chat("a", **fields)
        await rig.settled()
        assert rig.checkpoints == []
        assert (await rig.chat("a", **fields)).n_reused
        assert (await rig.chat("a")).n_reused == 0


async def test_request_whose_slot_was_taken_before_its_prompt_could_be_read_is_left_to_llama_server(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig() as rig:
        reply = await rig.chat(QUESTION)
        await rig.settled()
        monkeypatch.setattr(Process, "can_extend", lambda *_: False)
        rig.server.faults.refuse["apply-template"] = 403  # as if the key were not taken
        reply = await rig.post(CHAT, {"messages": next_question(QUESTION, reply)})
        assert reply.status == 200
        assert len(rig.requests_seen()) == 2
