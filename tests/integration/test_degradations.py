"""What /health and /metrics say while something is wrong, and that they stop saying it."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy import app
from proxy.core.conditions import DegradationKind
from tests.fakes.faults import Faults
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig
from tests.integration.rig import (
    CHAT,
    COMPLETION,
    KEYS,
    MESSAGES_FORMS,
    Form,
    Rig,
    hang_up,
    question,
)
from tests.lab.waiting import until


async def test_healthy_proxy_has_no_reasons(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        health = await rig.health()
        assert (health["state"], health["reasons"]) == ("caching", [])
        assert len(health["servers"]) == 1
        assert rig.sample("state", state="caching") == 1
        assert rig.sample("rule", rule="any prefix") == 1
        assert rig.sample("self_tests_total", result="any prefix") == 0
        assert rig.sample("slots", state="empty") == 2
        assert rig.sample("degraded", kind="attaching") == 0


async def test_llama_server_that_goes_away_has_refused_no_erase(start_rig: StartRig) -> None:
    """As where both are stopped at once: a slot that must not be saved is erased last."""
    async with start_rig(n_slots=1, idle_save_seconds=60.0, **KEYS) as rig:
        await rig.chat("alice", key="alice")
        rig.server.faults.drop = {"erase"}
        assert (await rig.chat("bob", key="bob")).status == 200
        assert rig.server.seen_at("erase")
        assert await rig.reasons() == ["several API keys"]


async def test_rule_that_allows_nothing_is_named(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY) as rig:
        assert (await rig.health())["servers"][0]["rule"] == "end only"
        rig.server.slots[0].memory = Memory.NOTHING
        for name in "abab":  # the restores of the third and fourth are not reused
            await rig.chat(name)
            await rig.settled()
        await until(lambda: rig.sample("rule", rule="nothing"))
        assert (await rig.health())["state"] == "forwarding"
        assert "nothing can be restored" in await rig.reasons()
        assert rig.sample("state", state="forwarding") == 1
        await until(lambda: rig.sample("self_tests_total", result="nothing") == 1)


async def test_rule_is_measured_again_after_two_refused_restores(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        for name in "ab":
            await rig.chat(name)
            await rig.settled()
        rig.server.faults.refuse["restore"] = 400
        for name in "ab":
            await rig.chat(name)
            await rig.settled()
        await until(lambda: rig.sample("rule", rule="nothing"))
        assert (await rig.health())["state"] == "forwarding"
        assert rig.sample("restores_total", result="refused") == 2
        assert rig.sample("self_tests_total", result="nothing") == 1


async def test_failed_self_test_is_counted_and_the_rule_stays(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        rig.server.faults.refuse["save"] = 500
        assert rig.process is not None
        rig.process.n_contradictions = rig.process.n_contradictions_allowed
        await until(lambda: rig.sample("self_tests_total", result="failed"))
        assert (await rig.health())["state"] == "caching"
        assert rig.sample("rule", rule="any prefix") == 1


async def test_failed_save_is_named_until_one_succeeds(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.refuse["save"] = 500
        with capture_logs() as logs:
            await rig.chat("a")
            await until(lambda: DegradationKind.SAVES_FAIL in rig.running.degradations)
        health = await rig.health()
        assert health["state"] == "degraded"
        assert [line["kind"] for line in logs if line["event"] == "degradation"] == ["saves fail"]
        (reason,) = health["reasons"]
        assert "scripted fault at save" in reason["reason"]
        assert reason["cure"] == DegradationKind.SAVES_FAIL.cure
        assert reason["since"].endswith("Z")
        assert rig.sample("degradations_total", kind="saves fail") == 1
        rig.server.faults.refuse.clear()
        await rig.chat("b")
        await rig.settled()
        assert (await rig.health())["reasons"] == []
        assert rig.sample("degraded", kind="saves fail") == 0


async def test_refused_restore_is_named_until_one_succeeds(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        for name in "abc":
            await rig.chat(name)
            await rig.settled()
        rig.server.faults.refuse["restore"] = 400
        await rig.chat("a")
        assert await rig.reasons() == ["restores refused"]
        rig.server.faults.refuse.clear()
        await rig.settled()
        await rig.chat("b")
        assert await rig.reasons() == []
        assert rig.sample("restored_bytes_total") > 0
        assert rig.sample("restored_tokens_total") == 308


async def test_restore_that_is_not_reused_is_named_until_one_is(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        for name in "abc":
            await rig.chat(name)
            await rig.settled()
        rig.server.faults.restores_are_inert = True
        await rig.chat("a")
        await rig.settled()
        assert await rig.reasons() == ["restores not reused"]
        rig.server.faults.restores_are_inert = False
        await rig.settled()
        await rig.chat("b")
        assert await rig.reasons() == []


async def test_shape_that_is_tokenized_otherwise_is_named(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.retokenize = lambda body, tokens: [*tokens, 7]
        await rig.chat("a")
        (reason,) = (await rig.health())["reasons"]
        assert reason["kind"] == "tokenized otherwise"
        assert CHAT in reason["reason"]


async def test_index_that_cannot_be_read_is_named(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1) as rig:
        store = rig.running.store

        def broken(*_: Any) -> Any:
            raise OSError("the index is gone")

        with monkeypatch.context() as patch:
            patch.setattr(store, "find", broken)
            await rig.chat("a")
            assert (await rig.reasons())[0] == "lookups fail"
        await rig.chat("a")
        assert "lookups fail" not in await rig.reasons()


@MESSAGES_FORMS
async def test_slots_that_are_not_shown_are_named(start_rig: StartRig, form: Form) -> None:
    async with start_rig(faults=Faults(refuse={"slots": 501})) as rig:
        assert await rig.reasons() == ["slots not shown"]  # before a request needs them
        body = {"messages": form(question("a")), "max_tokens": 3}
        await rig.post("/v1/messages", body)
        assert await rig.reasons() == ["slots not shown"]
        rig.server.faults.refuse.clear()
        await rig.post("/v1/messages", body)
        assert await rig.reasons() == []


async def test_directory_that_others_can_read_is_noted_and_cached_in(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        await rig.stop_proxy()
        os.chmod(rig.server.directory, 0o755)
        await rig.start_proxy()
        health = await rig.health()
        assert health["state"] == "caching"
        assert [r["kind"] for r in health["reasons"]] == ["directory is open to others"]
        assert "mode 0755" in health["reasons"][0]["reason"]


async def test_several_api_keys_are_noted(start_rig: StartRig) -> None:
    async with start_rig(**KEYS) as rig:
        await rig.chat("a", key="alice")
        assert await rig.reasons() == []
        await rig.chat("a", key="bob")
        assert await rig.reasons() == ["several API keys"]
        assert (await rig.health())["state"] == "caching"
        rig.server.replace_process()
        await rig.chat("a", key="bob")
        await rig.attached()
        assert await rig.reasons() == ["several API keys"]


async def test_several_api_keys_are_not_noted_where_the_ram_cache_is_known_to_be_off(
    start_rig: StartRig,
) -> None:
    async with start_rig(**KEYS) as rig:
        assert rig.process is not None
        rig.process.has_ram_cache = False  # as `run` tells of a llama-server that it has started
        for key in ("alice", "bob"):
            await rig.chat("a", key=key)
        assert await rig.reasons() == []


async def test_directory_that_has_gone_is_named_while_it_is_gone(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        directory = rig.server.directory
        away = directory.rename(directory.with_name("away"))
        await rig.chat("a")
        await until(lambda: DegradationKind.SAVES_FAIL in rig.running.degradations)
        (reason,) = (await rig.health())["reasons"]
        assert "No such file or directory" in reason["reason"]
        away.rename(directory)
        await rig.chat("b")
        await until(lambda: DegradationKind.SAVES_FAIL not in rig.running.degradations)


async def test_reasons_of_a_process_end_with_it(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.refuse["save"] = 500
        await rig.chat("a")
        await until(lambda: DegradationKind.SAVES_FAIL in rig.running.degradations)
        rig.server.faults.refuse.clear()
        rig.server.replace_process()
        await rig.attached()
        assert await rig.reasons() == []


# Metrics and the line of each request.

WEIRD: list[tuple[str, Any]] = [
    (CHAT, b"not json"),
    (CHAT, {"messages": [{"role": "nobody", "content": [{"type": "alien"}]}], "zzz": 1}),
    (COMPLETION, {"prompt": []}),
    (COMPLETION, {"prompt": ["a", "b"], "n": 3}),
    ("/v1/messages", {"messages": question("a")}),
    ("/no/such/place", {"prompt": "x"}),
    ("/v1/chat/completions/../../x", {}),
]


def series(rig: Rig) -> set[str]:
    exposition = rig.running.metrics.exposition().decode()
    return {line.rpartition(" ")[0] for line in exposition.splitlines() if line[0] != "#"}


async def test_whatever_clients_send_makes_no_new_series(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        before = series(rig)
        for path, body in WEIRD:
            await rig.post(path, body)
            await rig.post(path, body, key="somebody")
        assert series(rig) == before


async def test_each_request_is_one_line_that_says_what_was_chosen_and_why(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        with capture_logs() as logs:
            await rig.chat("a")
            await rig.settled()
            await rig.chat("b")
            await rig.settled()
            await rig.chat("a")
            await rig.post(CHAT, {"messages": question("c"), "n": 2})
            await until(lambda: rig.sample("requests_total", outcome="bypass"))
        lines = [line for line in logs if line["event"] == "request"]
        # The second finds no more in the slot than the tokens before its first word.
        assert [line["outcome"] for line in lines] == ["miss", "miss", "hit", "bypass"]
        hit = lines[2]
        assert (hit["chosen"], hit["expected"], hit["confirmed"]) == ("restore", 308, 308)
        assert hit["why"] == "a checkpoint holds more than any free slot"
        assert lines[0]["chosen"] == "nothing"
        assert lines[3]["why"] == "several completions"


async def test_request_that_is_not_answered_is_counted_by_its_reason(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_REQUESTS", 1)
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("generate", n_calls=1)
        first = asyncio.ensure_future(rig.post(CHAT, {"messages": question("a")}))
        await gate.reached()
        with capture_logs() as logs:
            assert (await rig.post(CHAT, {"messages": question("b")})).status == 503
        assert rig.sample("unanswered_requests_total", reason="queue full") == 1
        assert [line["why"] for line in logs if line["event"] == "request"] == ["queue full"]
        await hang_up(first)
        await until(lambda: rig.sample("unanswered_requests_total", reason="client left") == 1)
        gate.open()
        await rig.settled()
        rig.server.faults.drop.add("generate")
        assert (await rig.post(CHAT, {"messages": question("c")})).status == 502
        assert rig.sample("unanswered_requests_total", reason="llama-server gone") == 1


async def test_answer_that_breaks_off_is_counted_as_unanswered(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        rig.server.faults.dies_after_chunks = 1
        await rig.post(CHAT, {"messages": question("a"), "stream": True})
        await until(lambda: rig.sample("unanswered_requests_total", reason="llama-server gone"))
        outcomes = ("hit", "partial", "miss", "bypass", "degraded")
        assert [rig.sample("requests_total", outcome=o) for o in outcomes] == [0] * 5


async def test_time_to_first_token_is_measured_of_streams_only(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await rig.chat("a")
        assert rig.sample("first_token_seconds_count", outcome="miss") == 0
        rig.server.replace_process()
        body = {"messages": question("b"), "stream": True}
        assert (await rig.post(CHAT, body)).status == 200
        await until(lambda: rig.sample("first_token_seconds_count", outcome="miss") == 1)


async def test_index_that_is_gone_or_damaged_and_made_anew_is_told_of(
    start_rig: StartRig, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    async with start_rig(n_slots=1, shared_store=f"url = file://{shared}") as rig:
        await rig.chat("a")
        await rig.settled()
        await rig.stop_proxy()
        shutil.rmtree(tmp_path / "slots" / "index")
        (tmp_path / "slots" / "shared-index" / "data.mdb").write_bytes(b"nonsense" * 4096)
        with capture_logs() as logs:
            await rig.start_proxy()
        told = [line["says"] for line in logs if line["event"] == "index made anew"]
        assert ["1 entered again" in says for says in told] == [True, False]
        assert "shared store" in told[1]


async def test_shared_store_without_an_index_is_told_and_keeps_nobody_from_caching(
    start_rig: StartRig, tmp_path: Path
) -> None:
    (tmp_path / "slots" / "shared-index").write_text("no directory")
    (tmp_path / "shared").mkdir()
    async with start_rig(n_slots=1, shared_store=f"url = file://{tmp_path / 'shared'}") as rig:
        assert await rig.reasons() == ["shared store away"]
        await rig.chat("a")
        assert (await rig.chat("a")).n_reused > 300
