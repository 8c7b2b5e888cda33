"""Two API keys share nothing: no slot, no checkpoint, not even how long an answer takes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.core.model import SlotId
from proxy.core.slots import Unknown
from proxy.errors import StoreFault
from proxy.store.known_models import known_tenants
from tests.fakes.faults import Faults, Gate
from tests.integration.conftest import StartRig
from tests.integration.rig import (
    CHAT,
    KEYS,
    MESSAGES_FORMS,
    SALTS,
    TENANTS,
    Form,
    Rig,
    hang_up,
    question,
    with_image,
)
from tests.lab.waiting import HANG_SECONDS, until
from tests.store.test_store import hold_writer

Tenants = dict[str, Any]


def last_sent(rig: Rig) -> dict[str, Any]:
    return rig.requests_seen()[-1].fields


@TENANTS
async def test_slot_of_another_tenant_is_erased_first(
    start_rig: StartRig, tenants: Tenants
) -> None:
    async with start_rig(n_slots=1, **tenants) as rig:
        await rig.chat("a", key="alice")
        await rig.settled()
        n_erased = len(rig.server.seen_at("erase"))
        assert (await rig.chat("a", key="bob")).n_reused == 0
        assert len(rig.server.seen_at("erase")) == n_erased + 1
        assert last_sent(rig)["cache_prompt"] is True


@TENANTS
async def test_first_request_of_a_tenant_waits_for_no_file_that_is_written(
    start_rig: StartRig, tenants: Tenants
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=HANG_SECONDS, **tenants) as rig:
        store = rig.running.store
        assert store is not None
        go_on = hold_writer(store)
        try:
            await rig.chat("a", key="alice")
        finally:
            go_on.set()
        process = await rig.attached()
        await until(lambda: process.tenants <= known_tenants(store.index, process.model_namespace))


@TENANTS
async def test_slot_of_the_same_tenant_is_not_erased(start_rig: StartRig, tenants: Tenants) -> None:
    async with start_rig(n_slots=1, **tenants) as rig:
        await rig.chat("a", key="alice")
        n_erased = len(rig.server.seen_at("erase"))
        assert (await rig.chat("a", key="alice")).n_reused == 308
        assert len(rig.server.seen_at("erase")) == n_erased


async def test_key_is_the_same_in_either_header(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, **KEYS) as rig:
        await rig.chat("a", key="alice")
        headers = {"X-Api-Key": "alice"}
        assert (await rig.post(CHAT, {"messages": question("a")}, headers=headers)).n_reused == 308


@TENANTS
async def test_displaced_work_of_another_tenant_is_saved_for_him(
    start_rig: StartRig, tenants: Tenants
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0, **tenants) as rig:
        await rig.chat("a", key="alice")
        assert (await rig.chat("a", key="bob")).n_reused == 0
        await until(lambda: rig.checkpoints == [("conversation", 312)])
        assert (await rig.chat("a", key="alice")).n_reused == 308


@TENANTS
async def test_checkpoint_of_another_tenant_is_not_restored(
    start_rig: StartRig, tenants: Tenants
) -> None:
    async with start_rig(n_slots=1, **tenants) as rig:
        await rig.chat("a", key="alice")
        await rig.settled()
        rig.server.replace_process()
        await rig.attached()
        assert (await rig.chat("a", key="bob")).n_reused == 0
        assert (await rig.chat("a", key="carol")).n_reused == 0
        assert rig.sample("restores_total", result="done") == 0


async def test_shared_keys_share_everything(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, share_between_api_keys=True, **KEYS) as rig:
        await rig.chat("a", key="alice")
        assert (await rig.chat("a", key="bob")).n_reused == 308


@TENANTS
async def test_leaving_before_the_slot_is_prepared_leaves_it_to_its_tenant(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, tenants: Tenants
) -> None:
    async with start_rig(n_slots=1, **tenants) as rig:
        for key, name in (("bob", "b"), ("alice", "a")):
            await rig.chat(name, key=key)
            process = await rig.settled()
        gate, content = Gate(), process.slots[0].content

        async def verify(*_: object, **__: object) -> None:
            await gate.arrive()

        with monkeypatch.context() as patch:
            patch.setattr(process.store, "verify", verify)
            asked = rig.begin_chat("b", key="bob")
            await gate.reached()
            await hang_up(asked)
            await rig.settled()
        assert process.slots[0].content is content
        assert (await rig.chat("a", key="bob")).n_reused == 0


@TENANTS
async def test_tenant_whose_name_cannot_be_written_is_served(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tenants: Tenants
) -> None:
    async def write(*_: object) -> None:
        raise StoreFault("no space left on device")

    async with start_rig(n_slots=1, shared_store=f"file://{tmp_path}/shared", **tenants) as rig:
        process = await rig.attached()
        assert process.tier is not None
        monkeypatch.setattr(process.tier.remote, "write", write)
        await rig.chat("a", key="alice")
        assert rig.sample("cache_faults_total", stage="remember") == 1


@TENANTS
@pytest.mark.parametrize("status", [500, 501])
async def test_slot_that_cannot_be_erased_is_not_reused(
    start_rig: StartRig, tenants: Tenants, status: int
) -> None:
    async with start_rig(n_slots=1, **tenants) as rig:
        await rig.chat("a", key="alice")
        await rig.settled()
        rig.server.faults.refuse["erase"] = status
        assert (await rig.chat("a", key="bob")).n_reused == 0
        assert last_sent(rig)["cache_prompt"] is False
        assert rig.sample("cache_faults_total", stage="erase") == 1
        assert rig.sample("requests_total", outcome="degraded") == 1
        # What the slot holds now is Bob's, and his alone.
        assert (await rig.chat("a", key="bob")).n_reused == 308
        # Alice's own state takes its place, and is hers alone.
        assert (await rig.chat("a", key="alice")).n_reused == 308
        assert (await rig.chat("a", key="carol")).n_reused == 0


@TENANTS
@pytest.mark.parametrize("status", [401, 500, 501])
async def test_slot_whose_restore_is_refused_is_erased_before_another_tenant_uses_it(
    start_rig: StartRig, tenants: Tenants, status: int
) -> None:
    """A refusal that llama-server's slot never saw leaves the slot as it was."""
    async with start_rig(n_slots=1, **tenants) as rig:
        await rig.chat("a", key="alice")
        await rig.settled()
        await rig.chat("a", key="bob")
        await rig.settled()
        rig.server.faults.refuse["restore"] = status
        n_erased = len(rig.server.seen_at("erase"))
        assert (await rig.chat("a", key="alice")).n_reused == 0
        assert len(rig.server.seen_at("erase")) == n_erased + 1


@TENANTS
@pytest.mark.parametrize("fields", [{"cache_prompt": True, "n_cache_reuse": 8}, {"n": 2}])
async def test_slot_that_cannot_be_erased_is_not_reused_by_an_uncached_request(
    start_rig: StartRig, tenants: Tenants, fields: dict[str, Any]
) -> None:
    async with start_rig(n_slots=2, **tenants) as rig:
        for name in "ab":
            await rig.chat(name, key="alice")
        await rig.settled()
        rig.server.faults.refuse["erase"] = 501
        reply = await rig.chat("a", key="bob", **fields)
        assert (reply.status, reply.n_reused) == (200, 0)


@TENANTS
@MESSAGES_FORMS
async def test_messages_request_finds_nothing_of_another_tenant(
    start_rig: StartRig, tenants: Tenants, form: Form
) -> None:
    async with start_rig(n_slots=2, **tenants) as rig:
        for name in "ab":
            await rig.chat(name, key="alice")
        await rig.settled()
        n_before = rig.server.n_evaluated
        body = {"messages": form(question("a"))}
        assert (await rig.post("/v1/messages", body, key="bob")).status == 200
        assert rig.server.n_evaluated - n_before >= 309


@TENANTS
async def test_server_without_slot_actions_keeps_tenants_apart(
    start_rig: StartRig, tenants: Tenants
) -> None:
    faults = Faults(refuse={"save": 501, "restore": 501, "erase": 501})
    async with start_rig(n_slots=1, faults=faults, **tenants) as rig:
        await rig.chat("a", key="alice")
        assert (await rig.chat("a", key="alice")).n_reused == 308
        assert (await rig.chat("a", key="bob")).n_reused == 0


@TENANTS
@pytest.mark.parametrize("fields", [{}, {"cache_prompt": False}])
async def test_leaving_before_the_slot_is_erased_does_not_make_its_tokens_ones_own(
    start_rig: StartRig, tenants: Tenants, fields: dict[str, Any]
) -> None:
    async with start_rig(n_slots=1, **tenants) as rig:
        await rig.chat("a", key="alice")
        await rig.settled()
        rig.server.faults.forgets_dropped_actions = True
        gate = rig.server.hold("erase", n_calls=1)
        leaving = asyncio.ensure_future(rig.chat("b", key="bob", **fields))
        await gate.reached()
        await hang_up(leaving)
        await until(lambda: rig.sample("unanswered_requests_total", reason="client left") == 1)
        gate.open()
        await rig.settled()
        assert len(rig.checkpoints) == 1
        assert (await rig.chat("a", key="bob")).n_reused == 0


SALT_REFUSED = "llama-prefix-cache: cache_salt must be a non-empty string"


# What `cache_salt`, vLLM's name, adds to the key.


async def test_salt_splits_what_a_key_shares_and_llama_server_never_sees_it(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, **KEYS) as rig:
        seen = []
        for key, salt in (("alice", "x"), ("alice", None), ("bob", "x"), ("alice", "y")):
            seen.append((await rig.chat("a", key=key, cache_salt=salt)).n_reused)
            await rig.settled()
        assert seen == [0, 0, 0, 0]
        rig.server.replace_process()
        await rig.attached()
        assert (await rig.chat("a", key="bob", cache_salt="y")).n_reused == 0
        assert (await rig.chat("a", key="alice", cache_salt="x")).n_reused == 308
        assert not [r for r in rig.server.seen if b"cache_salt" in r.body]


async def test_salt_splits_what_all_keys_share(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, share_between_api_keys=True, **KEYS) as rig:
        assert (await rig.chat("a", key="alice", cache_salt="x")).n_reused == 0
        assert (await rig.chat("a", key="bob")).n_reused == 0
        assert (await rig.chat("a", key="bob", cache_salt="x")).n_reused == 308


async def test_tenants_of_a_salt_are_known_to_the_next_proxy(start_rig: StartRig) -> None:
    """What slots hold at its start may be of any of them, so that nobody is given it."""
    async with start_rig(n_slots=1, idle_save_seconds=60.0, **SALTS) as rig:
        await rig.chat("a", key="x")
        await rig.stop_proxy()
        await rig.start_proxy()
        for salt in (None, "y"):
            assert (await rig.chat("a", key=salt)).n_reused == 0
        assert rig.process is not None and len(rig.process.tenants) == 3


@TENANTS
@MESSAGES_FORMS
async def test_slot_that_another_tenant_leaves_behind_is_not_joined(
    start_rig: StartRig, tenants: Tenants, form: Form
) -> None:
    """Whoever's prompt is never read is a tenant, too."""
    async with start_rig(n_slots=2, **tenants) as rig:
        n_before = rig.server.n_evaluated
        gate = rig.server.hold("generate", n_calls=1)
        body = {"messages": form(question("a"))}
        first = asyncio.ensure_future(rig.post("/v1/messages", body, key="alice"))
        await gate.reached()
        second = asyncio.ensure_future(rig.post("/v1/messages", body, key="bob"))
        if form is with_image:
            await rig.waiting(1)
        gate.open()
        assert [reply.status for reply in await asyncio.gather(first, second)] == [200, 200]
        assert rig.server.n_evaluated - n_before >= 2 * 309


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("salt", ["", 1, ["x"], {}, True])
async def test_salt_of_a_wrong_type_is_refused(
    start_rig: StartRig, path: str, salt: object
) -> None:
    async with start_rig() as rig:
        n_seen = len(rig.requests_seen())
        reply = await rig.post(path, {"messages": question("a"), "cache_salt": salt})
        assert reply.status == 400
        assert reply.content["error"]["message"] == SALT_REFUSED
        assert (reply.content.get("type") == "error") is (path == "/v1/messages")
        assert len(rig.requests_seen()) == n_seen


async def test_salt_of_a_wrong_type_is_refused_by_warm_too(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        body = {"messages": question("a"), "cache_salt": 1}
        async with rig.client.post(rig.admin_url + "/warm", json=body) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"] in SALT_REFUSED


async def test_salt_in_a_body_that_is_too_deep_is_refused(start_rig: StartRig) -> None:
    """llama-server would take such a body, and nobody would know whose tokens its slot holds."""
    async with start_rig() as rig:
        deep = b'{"prompt": "a", "x": ' + b"[" * 200_000 + b"]" * 200_000
        assert (await rig.post("/completion", deep + b', "cache_salt": "x"}')).status == 400


async def test_salts_are_noted_where_the_ram_cache_may_share_them(start_rig: StartRig) -> None:
    async with start_rig(**SALTS) as rig:
        await rig.chat("a")
        assert await rig.reasons() == []
        await rig.chat("a", key="x")
        assert await rig.reasons() == ["several API keys"]


# Who llama-server refuses.

BEYOND = {"messages": question("b"), "n": 2}
"""A request that would take both slots."""


async def test_refused_request_neither_waits_nor_touches_a_slot(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0, **KEYS) as rig:
        await rig.chat("a", key="alice")
        n_saved = len(rig.server.seen_at("save"))
        gate = rig.server.hold("generate", n_calls=1)
        running = asyncio.ensure_future(rig.chat("a", key="alice"))
        await gate.reached()
        for path, body in ((CHAT, BEYOND), (CHAT, b"no JSON"), ("/v1/embeddings", {"input": "b"})):
            assert (await rig.post(path, body, key="mallory")).status == 401
            assert (await rig.post(path, body)).status == 401
        gate.open()
        assert (await running).n_reused == 308
        assert len(rig.server.seen_at("save")) == n_saved


async def test_key_is_asked_about_once_for_each_process(start_rig: StartRig) -> None:
    async with start_rig(**KEYS) as rig:

        def n_asked(key: str) -> int:
            asked = rig.server.seen_at("props")
            return sum(r.headers.get("Authorization") == f"Bearer {key}" for r in asked)

        for _ in range(3):
            await rig.chat("a", key="alice")
            await rig.post(CHAT, BEYOND, key="mallory")
        assert (n_asked("alice"), n_asked("mallory")) == (1, 1)
        rig.server.replace_process()
        rig.server.api_keys = ("own", "bob")
        await rig.attached()
        assert (await rig.post(CHAT, BEYOND, key="alice")).status == 401


async def test_request_that_is_answered_though_its_key_seemed_wrong_leaves_slots_unknown(
    start_rig: StartRig,
) -> None:
    """Where something before llama-server lets clients generate, but not look."""
    async with start_rig(n_slots=1, idle_save_seconds=60.0, **KEYS) as rig:
        rig.server.keys_that_may_not_look = ("alice",)
        process = rig.process
        assert process is not None
        assert (await rig.chat("a", key="alice")).n_reused == 0
        assert isinstance(process.slots[SlotId(0)].content, Unknown)
        await rig.chat("a", key="alice")
        assert (await rig.chat("a", key="alice")).n_reused == 308


@TENANTS
async def test_reply_does_not_tell_what_another_tenant_has_sent(
    start_rig: StartRig, tenants: Tenants
) -> None:
    async with start_rig(n_slots=2, **tenants) as rig:
        await rig.chat("a", key="alice")
        await rig.settled()
        told = [
            (await rig.chat(name, key="bob")).headers["X-Prefix-Cache"].rpartition(" ")[2]
            for name in "ab"
        ]
        assert told == ["cause=first-sight"] * 2
