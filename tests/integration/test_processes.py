"""llama-server starts, dies, is replaced or wants a key: requests go on, and the reason is told."""

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.app import run_proxy
from proxy.core.slots import TAINTED
from proxy.errors import UpstreamUnreachable
from proxy.llama.client import QUICK_SECONDS, LlamaServer, Props
from proxy.servers import server as lifecycle
from proxy.servers.background import is_due
from proxy.settings import Settings
from proxy.store.store import CheckpointStore
from tests.fakes.faults import Faults, Gate
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, COMPLETION, Rig, question, text
from tests.lab.waiting import HANG_SECONDS, until


async def occupy(rig: Rig, name: str = "first") -> Any:
    """Have a slot used by a request that llama-server will not finish."""
    gate = rig.server.hold("generate", n_calls=1)
    asked = asyncio.ensure_future(rig.post(CHAT, {"messages": question(name)}))
    await gate.reached()
    return asked


async def test_loading_server_is_named_and_waited_for(start_rig: StartRig) -> None:
    async with start_rig(faults=Faults(is_loading=True)) as rig:
        asked = rig.begin_chat("a")
        await until(lambda: rig.running.server.n_queued == 1)
        assert (await rig.health())["state"] == "forwarding"
        assert await rig.reasons() == ["llama-server is loading"]
        rig.server.faults.is_loading = False
        assert (await asked).status == 200
        await rig.attached()
        assert rig.sample("prompt_tokens_total", source="reused") == 0
        assert (await rig.health())["state"] == "caching"
        assert (await rig.chat("a")).n_reused == 308


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_loading_for_too_long_is_told_in_the_shape_of_the_api(
    start_rig: StartRig, path: str
) -> None:
    async with start_rig(faults=Faults(is_loading=True), upstream_wait_seconds=0.1) as rig:
        reply = await rig.post(path, {"messages": question("a"), "max_tokens": 3})
        assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
        error = reply.content["error"]
        assert error["message"] == "llama-prefix-cache: llama-server is still loading its model"
        kind = "overloaded_error" if path == "/v1/messages" else "unavailable_error"
        assert (error["type"], rig.running.server.n_queued) == (kind, 0)


async def test_replaced_process_is_noticed_by_the_next_request(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig() as rig:
        await rig.chat("a")
        await rig.settled()
        await rig.unwatched(monkeypatch)
        rig.server.replace_process()
        assert (await rig.chat("a")).n_reused == 308
        assert rig.sample("restores_total", result="done") == 1
        assert rig.sample("live_reuse_short_total") == 0


@pytest.mark.parametrize("is_by_request", [False, True])
async def test_failure_during_a_look_is_followed_by_another_look(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, is_by_request: bool
) -> None:
    async with start_rig() as rig:
        await rig.attached()
        await rig.unwatched(monkeypatch)
        gate = rig.server.hold("props", n_calls=1)
        if is_by_request:
            rig.running.server.services.tasks.start(rig.running.server.look())
        else:
            rig.running.server.poke()
        await gate.reached()
        rig.running.server.poke()  # llama-server's answer may be from before what went wrong
        n_looks = len(rig.server.seen_at("props"))
        gate.open()
        await until(lambda: len(rig.server.seen_at("props")) > n_looks)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_request_that_goes_on_in_its_slot_looks_at_llama_server_once(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        messages = question("a")
        for n_turns in range(4):
            answer = (await rig.chat(messages)).content["choices"][0]["message"]
            await rig.running.pool.accounted()
            messages += [answer, {"role": "user", "content": f" go on, for time {n_turns}"}]
        await rig.unwatched(monkeypatch)
        n_before = len(rig.server.seen)
        await rig.chat(messages, stream=is_stream)
        await rig.running.pool.accounted()
        places = Counter(seen.place for seen in rig.server.seen[n_before:])
        assert (places["props"], places["apply-template"], places["generate"]) == (1, 1, 1)
        assert places.total() <= 5


async def test_requests_in_the_queue_are_served_by_the_new_process(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        first = await occupy(rig)
        waiting = [rig.begin_chat(name) for name in "bcd"]
        await rig.waiting(3)
        rig.server.replace_process()
        assert (await first).status == 502
        assert [(await reply).status for reply in waiting] == [200] * 3
        assert [seen.n_process for seen in rig.requests_seen()] == [1, 2, 2, 2]


async def test_request_whose_process_is_replaced_during_a_save_is_planned_anew(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        before = await rig.attached()
        for name in "ab":
            await rig.chat(name)
        gate = rig.server.hold("save", n_calls=1)
        asked = rig.begin_chat("a")
        await gate.reached()
        rig.server.replace_process(ends_calls=False)
        await until(lambda: rig.process not in (None, before))
        gate.open()
        assert (await asked).n_reused == 308
        assert rig.sample("cache_faults_total", stage="prepare") == 0


async def test_request_whose_process_is_replaced_between_two_stops_evaluates_nothing_in_the_next(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, memory=Memory.END_ONLY, idle_save_seconds=60.0) as rig:
        before, gate = await rig.attached(), rig.server.hold("save", n_calls=1)
        messages = [{"role": "system", "content": text("system")}, *question("a")]
        asked = asyncio.ensure_future(rig.chat(messages))
        await gate.reached()
        rig.server.replace_process(ends_calls=False)
        await until(lambda: rig.process not in (None, before))
        n_before = len(rig.server.seen_at("evaluate"))
        gate.open()
        assert (await asked).status == 200
        stops = rig.server.seen_at("evaluate")[n_before:]
        assert [len(seen.fields["prompt"]) for seen in stops] == [307, 611]


@pytest.mark.parametrize("is_over_at_once", [True, False])
async def test_slot_that_a_gateway_gives_no_time_to_save_at_first_contact_is_given_up(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, is_over_at_once: bool
) -> None:
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.05)
    async with start_rig(n_slots=2) as rig:
        for name in "abc":
            await rig.chat([{"role": "system", "content": text(name)}, *question(name)])
            await rig.settled()
        await rig.stop_proxy()
        n_before = len(rig.server.seen_at("save"))
        rig.server.faults.refuse["save"] = 504
        gate = rig.server.hold("erase", n_calls=1)
        starting = asyncio.ensure_future(rig.start_proxy())
        await gate.reached()
        assert len(rig.server.seen_at("save")) == n_before + 2
        if not is_over_at_once:  # the proxy's own short save fails as well
            gate.open()
            await until(lambda: len(rig.server.seen_at("save")) > n_before + 5)
            (reason,) = [r for r in (await rig.health())["reasons"] if "attaching" in r["kind"]]
            assert "answers 504" in reason["reason"] and "proxy_read_timeout" in reason["reason"]
        rig.server.faults.refuse.clear()
        gate.open()
        await starting
        await until(lambda: rig.process is not None and rig.process.can_cache)
        assert await rig.reasons() == ["saves fail"]
        await rig.chat("d")
        await rig.settled()
        assert await rig.reasons() == []


async def test_state_is_not_restored_into_the_next_process(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        before = await rig.attached()
        for name in "ab":
            await rig.chat(name)
        verify, gate = CheckpointStore.verify, Gate(n_calls=1)

        async def verify_slowly(store: Any, checkpoint: Any, **how: Any) -> None:
            await verify(store, checkpoint, **how)
            if not how:  # just before the restore
                await gate.arrive()

        monkeypatch.setattr(CheckpointStore, "verify", verify_slowly)
        asked = rig.begin_chat("a")
        await gate.reached()
        rig.server.replace_process()
        await until(lambda: rig.process not in (None, before))
        reading = rig.server.hold("apply-template")
        gate.open()
        await reading.reached()  # it begins anew
        assert not rig.server.slots[0].tokens
        rig.server.release("apply-template")
        assert (await asked).n_reused == 308


async def test_dead_server_is_named_and_its_successor_used(start_rig: StartRig) -> None:
    async with start_rig(upstream_wait_seconds=0) as rig:
        await rig.chat("a")
        await rig.settled()
        await rig.server.crash()
        reply = await rig.post(CHAT, {"messages": question("a")})
        assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
        assert reply.content["error"]["src"] == "llama-prefix-cache"
        assert (await rig.health())["state"] == "forwarding"
        assert await rig.reasons() == ["llama-server unreachable"]
        await rig.server.restart()
        await rig.attached()
        assert (await rig.chat("a")).n_reused == 308


async def test_requests_in_the_queue_of_a_dead_server_are_told_so(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, upstream_wait_seconds=0.2) as rig:
        first = await occupy(rig)
        waiting = asyncio.ensure_future(rig.post(CHAT, {"messages": question("b")}))
        await rig.waiting(1)
        await rig.server.crash()
        assert [(await first).status, (await waiting).status] == [502, 503]
        assert rig.sample("unanswered_requests_total", reason="llama-server gone") == 2


async def test_process_dying_while_it_is_attached_is_left_for_the_next(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        gate = rig.server.hold("lora-adapters")
        rig.server.replace_process()
        await gate.reached()
        await rig.server.crash()
        rig.server.release("lora-adapters")
        await rig.server.restart()
        await until(lambda: rig.process is not None and rig.process.can_cache)
        await rig.attached()
        assert (await rig.chat("a")).status == 200
        assert (await rig.health())["state"] == "caching"


async def test_process_dying_at_first_contact_leaves_it_to_the_next(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        await rig.stop_proxy()
        shutil.rmtree(rig.server.directory / "index")  # and with it the rule of this build
        gate = rig.server.hold("evaluate")
        starting = asyncio.ensure_future(rig.start_proxy())
        await gate.reached()
        rig.server.replace_process()
        rig.server.release("evaluate")
        await starting
        assert (await rig.attached()).rule.can_restore
        assert (await rig.health())["reasons"] == []


async def test_requests_wait_for_an_attachment_but_not_forever(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "ATTACH_WAIT_SECONDS", 0.1)
    async with start_rig() as rig:
        gate = rig.server.hold("lora-adapters")
        rig.server.replace_process()
        await gate.reached()
        reply = await rig.chat("a")
        assert "id_slot" not in rig.requests_seen()[-1].fields
        assert rig.sample("requests_total", outcome="degraded") == 1
        rig.server.release("lora-adapters")
        await rig.attached()
        assert (await rig.chat("a")).n_prompt == reply.n_prompt


async def test_slots_where_requests_ran_during_the_attachment_are_not_taken_for_empty(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "ATTACH_WAIT_SECONDS", 0.1)
    async with start_rig(n_slots=3) as rig:
        attaching = rig.server.hold("generate", n_calls=1)  # in the first slot
        rig.server.replace_process()
        await attaching.reached()
        rig.server.hold("chunk")
        asked = [rig.begin_chat(name, stream=True) for name in "ab"]
        await until(lambda: rig.server.n_chunks_sent == 2)
        rig.server.release("chunk")
        await asyncio.gather(*asked)
        rig.server.release("generate")
        process = await rig.attached()
        assert rig.server.slots[2].tokens and process.slots[2].content is TAINTED


@pytest.mark.parametrize("fault", ["refuse", "drop"])
async def test_process_whose_start_time_cannot_be_asked_is_followed_on(
    start_rig: StartRig, fault: str
) -> None:
    """With LLAMA_MEDIA_MARKER fixed, only /metrics tells one process from another."""
    async with start_rig(media_marker="<media>") as rig:
        if fault == "refuse":
            rig.server.faults.refuse["metrics"] = 500
        else:
            rig.server.faults.drop.add("metrics")
        assert (await rig.chat("a")).status == 200
        n_looks = len(rig.server.seen_at("metrics"))
        await until(lambda: len(rig.server.seen_at("metrics")) > n_looks + 2)
        assert (await rig.chat("a")).status == 200
        rig.server.faults = Faults()
        await until(lambda: rig.process is not None and rig.process.can_cache)
        rig.server.replace_process()
        await rig.settled()
        assert (await rig.chat("a")).n_reused == 308


async def test_server_with_a_fixed_marker_is_told_from_its_successor(start_rig: StartRig) -> None:
    async with start_rig(media_marker="<media>") as rig:
        await rig.chat("a")
        first = await rig.settled()
        rig.server.replace_process()
        assert (await rig.chat("a")).n_reused == 308
        assert await rig.attached() is not first


async def test_successor_without_a_name_has_the_slots_that_it_says(start_rig: StartRig) -> None:
    """With LLAMA_MEDIA_MARKER fixed and no --metrics, nothing tells one process from another."""
    unnamed = Faults(refuse={"metrics": 501})
    async with start_rig(n_slots=4, media_marker="<media>", faults=unnamed) as rig:
        assert (await rig.chat("a")).status == 200
        server = rig.running.server
        await rig.server.crash()
        await until(lambda: server.process is None)
        rig.server.n_slots = 1
        await rig.server.restart()
        await until(lambda: server.process is not None)
        assert server.process is not None and len(server.process.slots) == 1


async def test_missing_api_key_is_named_and_clients_use_their_own(start_rig: StartRig) -> None:
    async with start_rig(api_keys=("secret",)) as rig:
        assert (await rig.chat("a", key="secret")).status == 200
        assert (await rig.post(CHAT, {"messages": question("a")})).status == 401
        health = await rig.health()
        assert health["state"] == "forwarding"
        assert "upstream_api_key" in health["reasons"][0]["cure"]


async def test_wrong_client_key_is_refused_by_the_server_and_costs_nobody_anything(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, api_keys=("own", "alice"), upstream_api_key="own") as rig:
        assert (await rig.health())["state"] == "caching"
        await rig.chat("a", key="alice")
        await rig.settled()
        n_erased = len(rig.server.seen_at("erase"))
        refused = await rig.post(CHAT, {"messages": question("a")}, key="mallory")
        assert (refused.status, refused.content["error"]["type"]) == (401, "authentication_error")
        assert len(rig.server.seen_at("erase")) == n_erased
        assert (await rig.chat("a", key="alice")).n_reused == 308
        assert rig.sample("restores_total", result="done") == 0


async def test_server_without_slots_endpoint_is_cached_all_the_same(start_rig: StartRig) -> None:
    async with start_rig(faults=Faults(refuse={"slots": 501})) as rig:
        await rig.chat("a")
        body = {"messages": question("claude"), "max_tokens": 3}
        assert (await rig.post("/v1/messages", body)).status == 200
        await rig.settled()
        rig.server.replace_process()
        assert (await rig.chat("a")).n_reused == 308


REFUSED_ATTACHMENTS: dict[str, tuple[Callable[[Faults], Any], str]] = {
    "no slot actions": (
        lambda faults: faults.refuse.update(save=501, restore=501, erase=501),
        "no slot save path",
    ),
    "disk full": (lambda faults: faults.refuse.update(save=500), "attaching failed"),
    "no models": (lambda faults: faults.refuse.update(models=404), "attaching failed"),
    "no restores": (lambda faults: faults.refuse.update(restore=400), "nothing can be restored"),
    "wrong file": (lambda faults: setattr(faults, "saves_other_tokens", True), "attaching failed"),
    "no slots": (lambda faults: faults.props.update(total_slots=0), "not a llama-server"),
    "more slots than there can be": (
        lambda faults: faults.props.update(total_slots=10_000),
        "not a llama-server",
    ),
}


@pytest.mark.parametrize("fault", REFUSED_ATTACHMENTS)
async def test_server_that_cannot_be_cached_is_forwarded_to_and_says_why(
    start_rig: StartRig, fault: str
) -> None:
    spoil, reason = REFUSED_ATTACHMENTS[fault]
    faults = Faults()
    spoil(faults)
    with capture_logs() as logs:
        async with start_rig(faults=faults) as rig:
            await _is_forwarded_to(rig, reason)
    assert not [log for log in logs if str(log.get("says")).startswith("caching ")]


async def _is_forwarded_to(rig: Rig, reason: str) -> None:
    assert (await rig.chat("a")).status == 200
    assert (await rig.chat("a")).status == 200
    health = await rig.health()
    assert (health["state"], rig.checkpoints) == ("forwarding", [])
    assert reason in await rig.reasons()
    assert rig.sample("state", state="forwarding") == 1


@pytest.mark.parametrize("call", ["save", "restore"])
async def test_attachment_that_failed_is_tried_again(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The restore comes when the model is known, but not its rule."""
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.06)
    async with start_rig(faults=Faults(refuse={call: 500})) as rig:
        assert (await rig.health())["state"] == "forwarding"
        await until(lambda: not any(slot.tokens for slot in rig.server.slots))
        rig.server.faults.refuse.clear()
        await until(lambda: rig.process and rig.process.rule.can_restore)
        assert (await rig.health())["state"] == "caching"


async def test_nothing_is_saved_or_restored_where_first_contact_fails_in_its_last_call(
    start_rig: StartRig,
) -> None:
    """Without the namespace of its model, a state would be found by any other model."""
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.stop_proxy()
        rig.server.faults.refuse["erase"] = 500  # the rule is known: only the last call erases
        await rig.start_proxy()
        assert (await rig.health())["state"] == "forwarding"
        await rig.chat("a")
        assert (process := rig.process) is not None
        (slot,) = process.slots
        await until(lambda: not slot.is_leased)
        assert (slot.content.can_be_adopted, is_due(process, slot, 0.0)) == (True, False)


async def test_slots_are_adopted_once_a_process_can_cache_but_for_what_must_not_be_stored(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.06)
    options: dict[str, Any] = {"n_slots": 4, "idle_save_seconds": 60.0}
    async with start_rig(faults=Faults(refuse={"save": 500}), **options) as rig:
        await rig.chat("a", cache={"no_store": True})
        await rig.chat("b", lora=[{"id": 0, "scale": 0.5}])
        await rig.chat("c")
        rig.server.faults.refuse.clear()
        await until(lambda: rig.process and rig.process.rule.can_restore)
        assert rig.checkpoints == [("conversation", 312)]
        assert (await rig.chat("c")).n_reused == 308


async def test_server_of_another_directory_gets_no_file_at_each_try(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would stay there, for nobody knows where that is."""
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.06)
    async with start_rig(faults=Faults(saves_nothing=True)) as rig:
        (reason,) = (await rig.health())["reasons"]
        (save,) = rig.server.seen_at("save")
        assert save.fields["filename"] in reason["reason"]
        n_looks = len(rig.server.seen_at("props"))
        await until(lambda: len(rig.server.seen_at("props")) > n_looks + 2)
        assert rig.server.seen_at("save") == [save]


async def test_slots_found_full_are_adopted(start_rig: StartRig) -> None:
    async with start_rig(idle_save_seconds=60.0) as rig:
        await rig.stop_proxy()
        for slot_id, seed in enumerate((5, 6)):
            prompt = [seed * 1000 + i for i in range(400)]
            body = {"prompt": prompt, "id_slot": slot_id, "n_predict": 0}
            async with rig.client.post(rig.server.base_url + COMPLETION, json=body) as reply:
                assert reply.status == 200
        await rig.start_proxy()
        assert rig.checkpoints == [("conversation", 400)] * 2
        assert rig.sample("saves_total", result="done") == 2
        assert rig.sample("saved_bytes_total") == rig.sample("checkpoint_bytes")
        for seed in (5, 6):
            prompt = [seed * 1000 + i for i in range(410)]
            assert (await rig.post(COMPLETION, {"prompt": prompt})).n_reused == 400


async def test_busy_slot_is_left_alone_at_first_contact(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2, idle_save_seconds=60.0) as rig:
        await rig.stop_proxy()
        gate = rig.server.hold("generate", n_calls=1)
        url = rig.server.base_url + COMPLETION
        body = {"prompt": [5] * 300, "id_slot": 0}
        stranger = asyncio.ensure_future(rig.client.post(url, json=body))
        await gate.reached()
        await rig.start_proxy(waits=False)
        await until(lambda: rig.process and rig.process.rule.can_restore)
        assert (await rig.chat("a")).status == 200
        gate.open()
        async with await stranger as reply:
            assert reply.status == 200


@pytest.mark.parametrize("refuse", [{"save": 501, "erase": 501}, {"models": 404}], ids=str)
async def test_attachment_that_fails_again_leaves_the_slots_as_they_are(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, refuse: dict[str, int]
) -> None:
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.06)
    async with start_rig(faults=Faults(refuse=refuse), n_slots=1) as rig:
        await rig.chat("a")
        place = next(iter(refuse))
        n_tries = len(rig.server.seen_at(place))
        await until(lambda: len(rig.server.seen_at(place)) > n_tries + 2)
        monkeypatch.setattr(lifecycle, "RETRY_SECONDS", HANG_SECONDS)
        assert (await rig.chat("a")).n_reused == 308


async def test_directory_that_is_of_no_use_costs_slots_nothing(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in a read-only directory is seen before a restart."""
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.02)
    async with start_rig(n_slots=1) as rig:
        await rig.chat("b")
        await rig.settled()
        await rig.stop_proxy()
        rig.server.faults.props = {"model_path": "/nowhere/another.gguf"}
        rig.server.faults.meta = {"n_params": 2}
        rig.server.replace_process()
        monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
        await rig.start_proxy()
        assert "nothing can be read or saved" in await rig.reasons()
        await rig.chat("a")
        n_looks = len(rig.server.seen_at("props"))
        await until(lambda: len(rig.server.seen_at("props")) > n_looks + 3)
        assert (await rig.chat("a")).n_reused == 308


async def test_attachment_that_goes_on_failing_is_tried_ever_less_often(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try has llama-server write what a slot holds, for nothing if the file is of no use."""
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.02)
    async with start_rig(faults=Faults(n_bytes_lost=1), n_slots=1) as rig:
        await rig.chat("a")
        (server,) = rig.running.pool.servers
        await until(lambda: server._retry_at - time.monotonic() > 10 * lifecycle.RETRY_SECONDS)


async def test_slot_that_a_failed_attachment_has_emptied_counts_as_empty(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.06)
    async with start_rig(faults=Faults(refuse={"restore": 500}), n_slots=1) as rig:
        await rig.chat("a")
        n_tries = len(rig.server.seen_at("restore"))
        await until(lambda: len(rig.server.seen_at("restore")) > n_tries + 2)
        monkeypatch.setattr(lifecycle, "RETRY_SECONDS", HANG_SECONDS)
        await rig.settled()
        reply = await rig.chat("a")
        assert reply.n_reused == 0 and "reused=0" in reply.headers["X-Prefix-Cache"]


async def test_several_processes_at_one_address_are_left_alone_until_one_answers(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1) as rig:
        answers, n_saved = ["", "other"], len(rig.server.seen_at("save"))

        async def process_id(self: LlamaServer, props: Props) -> str:
            answers.append(answers.pop(0))
            return answers[0] or props.media_marker

        monkeypatch.setattr(LlamaServer, "process_id", process_id)

        async def are_told() -> bool:
            return await rig.reasons() == ["several llama-servers"]

        await until(are_told)
        assert (await rig.chat("a")).n_reused == 0
        assert len(rig.server.seen_at("save")) == n_saved
        answers[:] = [""]
        await rig.attached()
        assert await rig.reasons() == []


async def test_process_that_is_lost_during_a_look_is_not_attached(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host unloads a model while the proxy asks it what it is; then loads it again."""
    async with start_rig() as rig:
        server = rig.running.server
        upstream = server.upstream
        asked, answered = asyncio.Event(), asyncio.Event()
        ask = upstream.props

        async def ask_slowly(seconds: float = QUICK_SECONDS) -> Props:
            props = await ask(seconds)
            asked.set()
            await answered.wait()
            return props

        monkeypatch.setattr(upstream, "props", ask_slowly)
        process = server.process
        assert process is not None
        server.lose()
        with pytest.raises(UpstreamUnreachable, match="is not loaded"):
            server.require_loaded()
        server.appear()
        look = asyncio.ensure_future(server.is_still(process))
        await asked.wait()
        server.lose()
        answered.set()
        await look
        assert server.process is None and await rig.reasons() == []
        server.appear()
        assert (await rig.chat("a")).status == 200
        assert server.process is not None


async def test_taken_port_is_refused_before_llama_server_is_asked_anything(
    start_rig: StartRig, tmp_path: Path
) -> None:
    async with start_rig() as rig:
        directory = tmp_path / "of another"
        directory.mkdir(mode=0o700)
        settings = Settings(
            upstream=rig.server.base_url,
            slot_save_path=str(directory),
            listen=rig.base_url.removeprefix("http://"),
            admin="127.0.0.1:0",
        )
        n_saves = len(rig.server.seen_at("save"))
        with pytest.raises(OSError, match="in use"):
            async with run_proxy(settings):
                pass
        assert len(rig.server.seen_at("save")) == n_saves
