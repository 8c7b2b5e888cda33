"""Builds and models of other kinds: the rule is learned, and what is saved and cut follows from it."""

from pathlib import Path
from typing import Any

import pytest

from proxy.core import saving
from proxy.core.eviction import Removal
from proxy.core.model import CANARY_TOKENS, Rule, RuleKind
from proxy.llama import state_edits
from proxy.llama.state_edits import repair_window
from tests.fakes.llama_server import FakeLlamaServer
from tests.fakes.slot_files import read_slot_file
from tests.fakes.slots import WINDOW, Memory
from tests.fakes.tokenizer import render, tokenize
from tests.integration.conftest import StartRig
from tests.integration.rig import COMPLETION, Messages, Rig, hang_up, next_question, question, text
from tests.lab.waiting import until

HEADER = [{"role": "system", "content": text("rules", 400)}]


def conversation(name: str) -> list[dict[str, Any]]:
    return [*HEADER, *question(name)]


def message_end(messages: list[dict[str, Any]]) -> int:
    """Return how many tokens a prompt has before the generation prompt."""
    return len(tokenize(render({"messages": messages}, has_generation_prompt=False)))


def stops(rig: Rig) -> list[int]:
    """Return how many tokens each evaluation of a prefix had, first contact's left out."""
    lengths = (len(seen.fields["prompt"]) for seen in rig.server.seen_at("evaluate"))
    return [length for length in lengths if length > len(CANARY_TOKENS)]


def saved_tokens(server: FakeLlamaServer) -> list[list[int]]:
    """Return the tokens of each state file in the store, shortest first."""
    files = server.directory.glob("lpc-*.state")
    states = [read_slot_file(path, server.file_version) for path in files]
    return sorted((state.tokens for state in states), key=len)


@pytest.mark.parametrize(
    ("memory", "file_version", "rule"),
    [
        (Memory.ANY_PREFIX, 3, "any prefix"),
        (Memory.ANY_PREFIX, 4, "any prefix"),
        (Memory.ANY_PREFIX, 5, "end only"),  # what is not understood can be restored at its end
        (Memory.RESTORE_POINTS, 4, "restore points"),
        (Memory.END_ONLY, 3, "end only"),
        (Memory.END_ONLY, 4, "end only"),
        (Memory.END_ONLY, 5, "end only"),
    ],
)
async def test_rule_is_learned_and_the_conversation_restored_as_far_as_it_goes(
    start_rig: StartRig, memory: Memory, file_version: int, rule: str
) -> None:
    async with start_rig(n_slots=1, memory=memory, file_version=file_version) as rig:
        health = await rig.health()
        assert health["servers"][0]["rule"] == rule
        assert health["state"] == "caching"
        assert (await rig.attached()).n_kept_points == (32 if rule == "end only" else 16)
        messages = question("a")
        reply = await rig.chat(messages)
        await rig.settled()
        rig.server.replace_process()
        await rig.attached()
        after = await rig.chat(next_question(messages, reply))
        assert after.n_reused >= message_end(messages)
        assert rig.sample("restore_ineffective_total") == 0


@pytest.mark.parametrize("is_known_at_first", [True, False])
async def test_server_that_restores_nothing_is_asked_for_nothing(
    start_rig: StartRig, is_known_at_first: bool
) -> None:
    memory = Memory.NOTHING if is_known_at_first else Memory.END_ONLY
    async with start_rig(n_slots=1, memory=memory) as rig:
        rig.server.slots[0].memory = Memory.NOTHING
        for name in "xyxy":  # the restores of the third and fourth are not reused
            await rig.chat(name)
            await rig.settled()
        await until(lambda: rig.sample("rule", rule="nothing"))
        assert rig.sample("restores_total", result="done") == (0 if is_known_at_first else 2)
        await rig.settled()
        n_checkpoints = len(rig.checkpoints)
        n_actions = len(rig.server.seen_at("save") + rig.server.seen_at("restore"))
        messages = question("a")
        reply = await rig.chat(messages)
        assert (await rig.chat(next_question(messages, reply))).n_reused == 312
        await rig.settled()
        assert len(rig.server.seen_at("save") + rig.server.seen_at("restore")) == n_actions
        assert len(rig.checkpoints) == n_checkpoints


async def test_cut_window_of_version_3_is_repaired_and_continued_at_its_end(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, memory=Memory.CUT_WINDOW, file_version=3) as rig:
        process = await rig.settled()
        assert process.rule == Rule(RuleKind.END_ONLY, end_holds_from=2200)
        prompt = [500 + i % 1000 for i in range(2300)]
        await rig.post(COMPLETION, {"prompt": prompt})
        await rig.settled()
        rig.server.replace_process()
        await rig.attached()
        assert (await rig.post(COMPLETION, {"prompt": [*prompt, 7, 8]})).n_reused == 2299
        assert rig.sample("restore_ineffective_total") == 0


async def test_repaired_state_is_never_continued_before_its_end(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.CUT_WINDOW, file_version=3) as rig:
        prompt = [500 + i % 1000 for i in range(2300)]
        await rig.post(COMPLETION, {"prompt": prompt})
        await rig.settled()
        rig.server.replace_process()
        await rig.attached()
        before = rig.server.n_evaluated
        await rig.post(COMPLETION, {"prompt": [*prompt[:2290], 7, 8]})
        assert rig.server.n_evaluated - before == 2292
        assert rig.sample("restores_total", result="done") == 0


async def test_state_shorter_than_a_window_that_was_repaired_is_not_offered(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, memory=Memory.CUT_WINDOW, file_version=3) as rig:
        prompt = [500 + i for i in range(900)]
        await rig.post(COMPLETION, {"prompt": prompt})
        await rig.settled()
        rig.server.replace_process()
        await rig.attached()
        before = rig.server.n_evaluated
        await rig.post(COMPLETION, {"prompt": [*prompt, 7, 8]})
        assert rig.server.n_evaluated - before == 902
        assert rig.sample("restores_total", result="done") == 0
        assert rig.sample("restore_ineffective_total") == 0


async def test_cut_window_of_another_version_is_not_repaired(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.CUT_WINDOW, file_version=4) as rig:
        await rig.post(COMPLETION, {"prompt": [500 + i % 1000 for i in range(2300)]})
        await rig.settled()
        assert rig.running.store is not None
        (checkpoint,) = rig.running.store
        path = rig.running.store.files.path(checkpoint.file_name)
        state = read_slot_file(path, 4, has_window=True)
        assert state.window_from == checkpoint.n_tokens - WINDOW


async def test_committed_file_is_the_repaired_one(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.CUT_WINDOW, file_version=3) as rig:
        prompt = [500 + i % 1000 for i in range(2300)]
        await rig.post(COMPLETION, {"prompt": prompt})
        await rig.settled()
        assert rig.running.store is not None
        (checkpoint,) = rig.running.store
        files = rig.running.store.files
        state = read_slot_file(files.path(checkpoint.file_name), 3, has_window=True)
        assert state.window_from == checkpoint.n_tokens - WINDOW - 1
        assert checkpoint.size_bytes == files.path(checkpoint.file_name).stat().st_size
        assert files.is_intact(checkpoint.file_name, checkpoint.parts)
        assert not checkpoint.has_every_position


async def test_file_that_only_llama_server_may_change_is_copied_and_repaired(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for another uid: a file that was there when llama-server answered cannot be written."""
    refused: set[int] = set()

    def refuse_first_inode(path: Path) -> bool:
        inode = path.stat().st_ino
        if len(refused) < 1 or inode in refused:
            refused.add(inode)
            raise PermissionError(13, "Permission denied", str(path))
        return repair_window(path)

    monkeypatch.setattr(state_edits, "repair_window", refuse_first_inode)
    async with start_rig(n_slots=1, memory=Memory.CUT_WINDOW, file_version=3) as rig:
        assert (await rig.settled()).rule == Rule(RuleKind.END_ONLY, end_holds_from=2200)
        assert len(refused) == 1
        assert rig.temporary_files() == []


async def test_end_only_server_is_stopped_and_saved_at_each_cut(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        messages = conversation("a")
        reply = await rig.chat(messages)
        header, turn_start = stops(rig)
        assert turn_start == message_end(messages)
        assert message_end(HEADER) <= header <= message_end(HEADER) + 2
        await until(lambda: rig.checkpoints == [("header", header), ("turn start", turn_start)])
        prompt = tokenize(render({"messages": messages}))
        assert saved_tokens(rig.server) == [prompt[:header], prompt[:turn_start]]
        assert reply.n_prompt == len(prompt)


async def test_end_only_server_restores_the_header_for_another_conversation(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        await rig.chat(conversation("a"))
        await rig.settled()
        before = rig.server.n_evaluated
        await rig.chat(conversation("b"))
        await rig.settled()
        assert rig.server.n_evaluated - before <= 300 + 16
        assert rig.sample("restores_total", result="done") == 1


async def test_end_only_server_without_a_generation_prompt_is_cut_before_the_last_token(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY, has_generation_prompt=False) as rig:
        messages = question("a")
        reply = await rig.chat(messages)
        assert stops(rig) == [reply.n_prompt - 1]
        await rig.settled()
        rig.server.replace_process()
        await rig.attached()
        assert (await rig.chat(messages)).n_reused == reply.n_prompt - 1


async def test_end_only_bare_prompt_is_cut_before_its_last_token(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        prompt = [500 + i for i in range(400)]
        await rig.post(COMPLETION, {"prompt": prompt})
        await rig.settled()
        assert saved_tokens(rig.server) == [prompt[:-1]]
        rig.server.replace_process()
        await rig.attached()
        assert (await rig.post(COMPLETION, {"prompt": [*prompt, 7, 8]})).n_reused == 399


async def test_end_only_tool_loop_keeps_its_turn_start(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        messages = conversation("a")
        for i in range(3):
            reply = await rig.chat(messages)
            said = reply.content["choices"][0]["message"]
            messages = [*messages, said, {"role": "tool", "content": text(f"result{i}x", 150)}]
        await rig.settled()
        kinds = [kind for kind, _ in rig.checkpoints]
        assert kinds == ["conversation", "header", "turn start"]
        rig.server.replace_process()
        await rig.attached()
        before = rig.sample("restores_total", result="done")
        other_turn = [*conversation("a"), {"role": "assistant", "content": " x"}, *question("z")]
        assert (await rig.chat(other_turn)).status == 200
        assert rig.sample("restores_total", result="done") == before + 1


async def next_turn_without_a_file(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Messages:
    """Serve and save a first turn; return the messages of the next one, whose file will not pay."""
    messages = conversation("a")
    messages = [*next_question(messages, await rig.chat(messages)), *question("b", 50)]
    await rig.settled()
    monkeypatch.setattr(saving, "pays_again", lambda *_: False)
    return messages


async def test_end_only_question_whose_file_does_not_pay_is_sent_at_once(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        messages = await next_turn_without_a_file(rig, monkeypatch)
        n_seen, checkpoints = len(rig.server.seen), rig.checkpoints
        reply = await rig.chat(messages)
        seen = [request.place for request in rig.server.seen[n_seen:]]
        assert {"apply-template", "tokenize"}.isdisjoint(seen[: seen.index("generate")])
        assert reply.n_prompt - reply.n_reused <= 50 + 20
        await rig.settled()
        assert "evaluate" not in seen and rig.checkpoints == checkpoints


async def test_end_only_prompt_is_warmed_though_its_file_does_not_pay(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        messages = conversation("a")
        reply = await rig.chat(messages)
        await rig.settled()
        monkeypatch.setattr(saving, "pays_again", lambda *_: False)
        body = {"messages": [*next_question(messages, reply), *question("z", 50)]}
        async with rig.client.post(rig.admin_url + "/warm?whole=1", json=body) as warming:
            assert '"warmed"' in (await warming.text()).splitlines()[-1]


async def test_restore_points_plant_the_header_for_another_conversation(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, memory=Memory.RESTORE_POINTS) as rig:
        await rig.chat(conversation("a"))
        await rig.settled()
        rig.server.replace_process()
        await rig.attached()
        before = rig.server.n_evaluated
        await rig.chat(conversation("b"))
        assert rig.server.n_evaluated - before <= 300 + 20


async def test_stop_that_fails_costs_only_speed(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        rig.server.faults.drop.add("evaluate")
        assert (await rig.chat(conversation("a"))).status == 200
        assert rig.sample("cache_faults_total", stage="prepare") == 1
        assert rig.sample("requests_total", outcome="degraded") == 1
        rig.server.faults.drop.clear()
        await rig.settled()
        assert (await rig.chat(conversation("b"))).status == 200
        assert rig.sample("requests_total", outcome="degraded") == 1


async def test_leaving_during_a_stop_holds_the_slot_until_it_has_ended(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        gate = rig.server.hold("evaluate", n_calls=1)
        asked = rig.begin_chat("a")
        await gate.reached()
        await hang_up(asked)
        assert rig.n_occupied() == 1
        await rig.settled()
        assert not rig.server.slots[0].is_processing
        assert (await rig.chat("a")).status == 200


async def test_known_rule_is_not_derived_again(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        n_restores = len(rig.server.seen_at("restore"))
        assert n_restores == 2
        rig.server.replace_process()
        await rig.attached()
        assert (await rig.health())["servers"][0]["rule"] == "any prefix"
        assert len(rig.server.seen_at("restore")) == n_restores


async def test_end_only_conversation_whose_file_is_gone_gets_another_one(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        messages = await next_turn_without_a_file(rig, monkeypatch)
        assert (store := rig.running.store) is not None and rig.checkpoints
        for checkpoint in list(store):
            await store.remove(checkpoint, Removal.OPERATOR)
        assert not rig.checkpoints
        await rig.chat(messages)
        await rig.settled()
        assert rig.checkpoints
