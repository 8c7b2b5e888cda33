"""The admin listener's view of the store: checkpoints as a list and as a tree, pinned and deleted."""

import asyncio
from typing import Any

import pytest

from proxy.cli.command import RunningProxy
from tests.integration.conftest import StartRig
from tests.integration.rig import Rig


async def ask(rig: Rig, method: str, path: str, **headers: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{rig.running.admin_port}{path}"
    async with rig.client.request(method, url, headers=headers) as reply:
        is_json = reply.content_type == "application/json"
        return reply.status, await (reply.json() if is_json else reply.text())


async def listed(rig: Rig) -> list[dict[str, Any]]:
    status, content = await ask(rig, "GET", "/checkpoints")
    assert status == 200
    checkpoints: list[dict[str, Any]] = content["checkpoints"]
    return checkpoints


async def test_checkpoints_are_listed_the_most_valuable_first(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        assert await listed(rig) == []
        for n_tokens in (500, 900):
            prompt = [n_tokens + i % 97 for i in range(n_tokens)]
            await rig.post("/completion", {"prompt": prompt, "n_predict": 0})
            await rig.settled()
        found = await listed(rig)
        assert [(c["n_tokens"], c["kind"]) for c in found] == [
            (900, "conversation"),
            (500, "conversation"),
        ]
        assert found[0]["value_seconds"] > found[1]["value_seconds"] > 0
        assert all(c["size_bytes"] > 0 and not c["is_pinned"] for c in found)
        assert all(c["created_at"] <= c["last_used_at"] for c in found)


async def test_pinned_checkpoint_outlives_a_full_store_and_a_restart(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000, max_store_bytes=1 << 20) as rig:
        for first in range(6):
            tokens = [100 * first + i % 97 for i in range(6000)]
            await rig.post("/completion", {"prompt": tokens, "n_predict": 0})
            await rig.settled()
            if first == 0:
                [pinned] = await listed(rig)
                path = f"/checkpoints/{pinned['id']}/pin"
                status, reply = await ask(rig, "PUT", path)
                assert (status, reply["id"], reply["is_pinned"]) == (200, pinned["id"], True)
        assert rig.sample("evictions_total", reason="budget") > 0
        assert pinned["id"] in [c["id"] for c in await listed(rig)]
        await rig.stop_proxy()
        await rig.start_proxy()
        assert [c["id"] for c in await listed(rig) if c["is_pinned"]] == [pinned["id"]]
        status, reply = await ask(rig, "DELETE", path)
        assert (status, reply["is_pinned"]) == (200, False)
        assert not any(c["is_pinned"] for c in await listed(rig))


async def test_pin_of_a_checkpoint_that_is_not_there_is_404(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        for checkpoint_id in ("0123456789abcdef", "nonsense", "-1", "f" * 40):
            status, _ = await ask(rig, "PUT", f"/checkpoints/{checkpoint_id}/pin")
            assert status == 404


async def test_pages_of_other_sites_are_refused(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        await rig.chat("a")
        await rig.settled()
        [stored] = await listed(rig)
        path = f"/checkpoints/{stored['id']}/pin"
        for method in ("PUT", "DELETE"):
            for origin in ("http://example.org", "null", f"http://localhost:{rig.running.port}"):
                assert (await ask(rig, method, path, Origin=origin))[0] == 403
        assert (await ask(rig, "POST", "/warm?request=last", Origin="null"))[0] == 403
        for checked in ("/requests", "/requests/last", "/tree", "/checkpoints"):
            assert (await ask(rig, "GET", checked, Host="rebound.example.org"))[0] == 403
            assert (await ask(rig, "GET", checked, Host="llm.internal"))[0] == 200
        rebound = {"Host": "rebound.example.org", "Origin": "http://rebound.example.org"}
        assert (await ask(rig, "PUT", path, **rebound))[0] == 403
        assert (await ask(rig, "POST", "/warm?request=last", **rebound))[0] == 403
        assert not (await listed(rig))[0]["is_pinned"]
        for scraped in ("/metrics", "/health"):
            assert (await ask(rig, "GET", scraped, Host="proxy.example.org:9090"))[0] == 200
        own = {"Host": "proxy:9090", "Origin": "http://proxy:9090"}
        assert (await ask(rig, "PUT", path, **own))[0] == 200


async def test_request_whose_prompt_is_not_known_is_not_warmed(start_rig: StartRig) -> None:
    async with start_rig(explain_keep="none") as rig:
        status, reply = await ask(rig, "POST", "/warm?request=last")
        assert status == 404 and "no request has ended" in reply["error"]
        await rig.chat("a")
        _, reply = await ask(rig, "POST", "/warm?request=last")
        assert reply["error"] == "no prompts are kept: explain_keep is none"
    async with start_rig() as rig:
        await rig.chat("a", cache_prompt=False)
        _, reply = await ask(rig, "POST", "/warm?request=last")
        assert "was never read: cache_prompt is false" in reply["error"]


async def test_checkpoints_without_a_store_are_503(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        await rig.stop_proxy()
        (rig.server.directory / "index").rename(rig.server.directory / "old")
        (rig.server.directory / "index").write_bytes(b"")
        await rig.start_proxy()
        assert (await ask(rig, "GET", "/checkpoints"))[0] == 503


async def test_store_is_shown_as_a_tree(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        header = [{"role": "system", "content": "you help " * 100}]
        for first in ("first " * 30, "second " * 30):
            messages = [*header, {"role": "user", "content": first}]
            reply = await rig.chat(messages)
            await rig.settled()
            answer = reply.content["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": "more " * 40}]
            await rig.chat(messages)
            await rig.settled()
        store, namespace, head, *sessions = (await ask(rig, "GET", "/tree"))[1]["nodes"]
        assert store["level"] == "store" and store["n_checkpoints"] == len(await listed(rig))
        assert namespace["size_bytes"] == store["size_bytes"]
        assert head["n_tokens"] > 0 and head["parent"] == namespace["id"]
        assert head["client"].startswith("Python 3")
        assert sorted(session["title"][:6] for session in sessions) == ["first ", "second"]
        for session in sessions:
            query = f"/checkpoints?under={session['id']}"
            turns = (await ask(rig, "GET", query))[1]["checkpoints"]
            assert session["n_tokens"] == max(turn["n_tokens"] for turn in turns)
            assert all(turn["parent"] == session["id"] for turn in turns)
            assert {turn["title"] for turn in turns} == {session["title"]} != {""}
        few = (await ask(rig, "GET", "/tree?limit=3"))[1]
        assert few["nodes"] == [store, namespace, head] and few["n_left_out"] == len(sessions)
        assert (await ask(rig, "GET", "/checkpoints?under=nonsense"))[1]["checkpoints"] == []


@pytest.mark.parametrize("keep", ["tokens", "none"])
async def test_no_words_are_kept_where_no_text_is(start_rig: StartRig, keep: str) -> None:
    async with start_rig(explain_keep=keep) as rig:
        await rig.chat([{"role": "user", "content": "my secret plan " * 100}])
        await rig.settled()
        for path in ("/tree", "/checkpoints", "/requests", "/overview"):
            _, content = await ask(rig, "GET", path)
            assert "Python" in str(content) and "secret" not in str(content)
        assert not any(b"secret" in f.read_bytes() for f in rig.server.directory.rglob("*.meta"))


async def test_tree_refuses_what_it_does_not_know(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        for query, expected in (("limit=-1", 400), ("limit=x", 400)):
            assert (await ask(rig, "GET", f"/tree?{query}"))[0] == expected
        assert (await ask(rig, "GET", "/tree", Origin="http://example.org"))[0] == 403
        status, empty = await ask(rig, "GET", "/tree?limit=99999999")
        assert status == 200 and len(empty["nodes"]) == 1 and empty["n_left_out"] == 0


async def test_checkpoints_are_deleted_and_pinned_ones_only_if_that_is_said(
    start_rig: StartRig,
) -> None:
    async with start_rig(max_store_bytes=1 << 30) as rig:
        for first in range(4):
            prompt = [1000 * first + i % 97 for i in range(500)]
            await rig.post("/completion", {"prompt": prompt, "n_predict": 0})
            await rig.settled()
        one, pinned, *others = await listed(rig)
        await ask(rig, "PUT", f"/checkpoints/{pinned['id']}/pin")

        async def delete(what: str) -> tuple[int, Any]:
            return await ask(rig, "DELETE", f"/checkpoints{what}")

        assert (await delete("/0123456789abcdef"))[0] == 404
        assert (await delete(f"/{pinned['id']}"))[0] == 409
        status, reply = await delete(f"/{one['id']}")
        assert (status, reply) == (200, {"id": one["id"], "size_bytes": one["size_bytes"]})
        for other in others:
            assert (await delete(f"/{other['id']}"))[0] == 200
        assert [c["id"] for c in await listed(rig)] == [pinned["id"]]
        assert (await delete(f"/{pinned['id']}?pinned=maybe"))[0] == 400
        assert (await delete(f"/{pinned['id']}?pinned=true"))[0] == 200
        assert await listed(rig) == []
        assert rig.sample("evictions_total", reason="operator") == 4
        assert list(rig.server.directory.glob("lpc-*")) == []
        # The slots still hold it all, and go on as before.
        assert (await rig.post("/completion", {"prompt": prompt, "n_predict": 0})).n_reused > 0


async def test_store_full_of_pins_saves_nothing_and_says_why(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, n_ctx=32_000, max_store_bytes=1 << 20) as rig:
        for first in range(5):
            tokens = [100 * first + i % 97 for i in range(6000)]
            reply = await rig.post("/completion", {"prompt": tokens, "n_predict": 0})
            assert reply.status == 200
            await rig.settled()
            for checkpoint in await listed(rig):
                await ask(rig, "PUT", f"/checkpoints/{checkpoint['id']}/pin")
        kept = await listed(rig)
        assert kept and all(c["is_pinned"] for c in kept)
        assert sum(c["size_bytes"] for c in kept) <= 1 << 20
        [reason] = [r for r in (await rig.health())["reasons"] if r["kind"] == "no room for states"]
        assert "are pinned" in reason["reason"]


async def test_what_changes_between_listing_and_deleting_is_told(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        for first in (1, 200, 400):
            prompt = [first + i % 97 for i in range(900)]
            await rig.post("/completion", {"prompt": prompt, "n_predict": 0})
            await rig.settled()
        access = RunningProxy(f"127.0.0.1:{rig.running.admin_port}")
        gone, pinned, left = await asyncio.to_thread(access.checkpoints)
        assert (await ask(rig, "DELETE", f"/checkpoints/{gone.id}"))[0] == 200
        assert (await ask(rig, "PUT", f"/checkpoints/{pinned.id}/pin"))[0] == 200
        replies = [
            await asyncio.to_thread(access.delete, checkpoint, with_pinned=False)
            for checkpoint in (gone, pinned, left)
        ]
        assert replies == [True, False, True]
        assert [c["id"] for c in await listed(rig)] == [pinned.id]
