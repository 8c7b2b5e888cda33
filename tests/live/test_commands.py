"""The commands as operators use them, on a real llama-server."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.__main__ import main
from proxy.core.eviction import Removal
from proxy.core.model import SlotId
from tests.lab.conversation import agent_requests, answer, system, tools, user
from tests.lab.models import least_model
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer
from tests.lab.waiting import until
from tests.live.conftest import StartRig

CHAT = "/v1/chat/completions"
MESSAGES = agent_requests(2, 1, header=[system(150)])
TOOLS = tools(2)


async def command(*arguments: object) -> tuple[int, str]:
    """Run a command; return its exit status and all that it printed."""
    invoke = CliRunner().invoke
    result = await asyncio.to_thread(invoke, main, [str(argument) for argument in arguments])
    return result.exit_code, result.output


async def asked(*arguments: object) -> Any:
    """Run a command that must succeed, with --json; return what it printed.

    The proxy in this process may have logged meanwhile.
    """
    status, output = await command(*arguments, "--json")
    assert status == 0, output
    return json.JSONDecoder().raw_decode(output[output.index("{\n") :])[0]


async def test_connect_says_that_the_proxy_saves_nothing(start_rig: StartRig) -> None:
    async with start_rig("hybrid", has_slot_save_path=False) as rig:
        status, printed = await command("connect", "opencode", "--admin", rig.admin_url)
    assert status == 0 and "llama-server was started without --slot-save-path: nothing" in printed


@pytest.mark.parametrize("name", ["opencode", "claude-code", "codex"])
async def test_client_is_connected_and_its_way_is_cached(
    start_rig: StartRig, tmp_path: Path, name: str
) -> None:
    """One for each API that clients ask."""
    file = tmp_path / ("config.toml" if name == "codex" else "config.json")
    async with start_rig("hybrid", n_slots=1) as rig:
        where = ("--admin", rig.admin_url)
        status, printed = await command("connect", name, *where)
        assert status == 0 and rig.base_url in printed and "hybrid-least" in printed
        process = rig.running.server.process
        assert process is not None and str(process.n_ctx) in printed
        done, output = await command(
            *("connect", name, *where, "--write", "--yes", "--json", "--file", file)
        )
        assert done == 0, output
        tried = json.JSONDecoder().raw_decode(output[output.rindex("{\n") :])[0]
        assert tried["n_cached"] > tried["n_prompt"] * 0.9
        assert rig.base_url in file.read_text()
        today = (await asked("stats", "--admin", rig.admin_url))["today"]
        assert not today["n_requests"], "what connect tries out is no request of a client"
        await rig.running.pool.drain(60.0)
        assert rig.running.store is not None and len(rig.running.store) == 0, "nor is it stored"
        for other, wins in (('{"$schema": "x"}', False), ('{"model": "x"}', True)):
            file.with_suffix(".jsonc").write_text(other)
            status, printed = await command("connect", name, *where, "--file", file)
            assert ("config.jsonc is read too, and wins" in printed) is wins
        await rig.chat([{"role": "user", "content": "another prompt takes the slot " * 200}])
        again = ("connect", name, *where, "--write", "--yes", "--file", file)
        assert (await command(*again))[0] == 0
        status, _ = await command("explain", "miss", "--admin", rig.admin_url)
        assert status == 1, "what connect asks is new each time"
        status, _ = await command("connect", name, "--undo", "--yes", "--file", file)
        assert status == 0 and not file.exists()
        status, said = await command("connect", "open-webui", *where, "--write")
        assert status == 2 and "no file to write" in said


async def test_session_is_carried_to_another_directory_and_served_from_there(
    start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, file = tmp_path / "slots", tmp_path / "second", tmp_path / "session.lpc"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    async with start_rig("hybrid") as rig:
        await rig.chat(MESSAGES[0], tools=TOOLS)
        await rig.settled()
        admin = ("--admin", rig.admin_url)
        checkpoints = (await asked("ls", *admin))["checkpoints"]
        ids = sorted(checkpoint["id"] for checkpoint in checkpoints)
        assert {c["kind"] for c in checkpoints} == {"header", "conversation"}
        assert {c["model"] for c in checkpoints} == {"hybrid-least"}
        _, header, session = max(c["parent"] for c in checkpoints).split("/")
        status, output = await command("ls", header[:6], *admin)
        assert status == 0 and session[:8] in output and "worth" in output
        stats = await asked("stats", *admin)
        assert stats["store"]["n_checkpoints"] == len(ids) and stats["state"] == "caching"
        today = stats["today"]
        assert today["n_prompt"] > 1000 and not today["n_missed"] and not today["saved_seconds"]
        status, output = await command("stats", *admin)
        assert status == 0 and "is caching since" in output
        assert sorted((await asked("pin", header[:8], *admin))["changed"]) == ids
        status, output = await command("rm", ids[0], *admin)
        assert status == 1 and "pinned" in output
        for held in (("check",), ("ls",)):
            status, output = await command(*held, "--slot-save-path", first)
            whose = (
                f"another llama-prefix-cache uses {first} (process {os.getpid()}): stop it first"
            )
            assert status == 69 and whose in output
        # The proxy runs, and a request is served, while its states are exported.
        exported, _ = await asyncio.gather(
            asked("export", header[:8], "-o", file, "--slot-save-path", first),
            rig.chat(MESSAGES[1], tools=TOOLS),
        )
        # What the request adds may be saved before the states are listed.
        assert set(exported["exported"]) >= {*ids} and file.stat().st_mode & 0o077 == 0
        await rig.settled()
        ids = await exported_again(file, "export", header[:8], "--slot-save-path", first, "-o")
        await rig.stop_proxy()
        assert (await command("ls", *admin))[0] == 69
        assert (await asked("check", "--slot-save-path", first))["problems"] == []
        await rig.start_proxy()
    assert (await asked("import", file))["imported"], "on a new machine `run` finds it"
    assert (tmp_path / "new" / "cache" / "llama-prefix-cache").stat().st_mode & 0o077 == 0
    second.mkdir(mode=0o700)
    imported = await asked("import", file, "--slot-save-path", second)
    assert len(imported["imported"]) == len(ids) and imported["is_new_model"]
    again = await asked("import", file, "--slot-save-path", second)
    assert again["imported"] == [] and again["n_already_there"] == len(ids)
    model = least_model("hybrid")
    async with Rig(LlamaServer(model, second, n_slots=2, n_ctx=65536), second) as rig:
        before = await rig.evaluated()
        assert {f"{c.id:016x}" for c in rig.running.store or ()} == set(imported["imported"])
        reply = await rig.chat(MESSAGES[1], tools=TOOLS)
        n_prompt = reply["usage"]["prompt_tokens"]
        assert reply["timings"]["cache_n"] > n_prompt - 300 > 1000
        assert await rig.evaluated() - before < 400
        deleted = await asked("rm", "--everything", "--yes", "--admin", rig.admin_url)
        assert deleted["deleted"] and not list(second.glob("lpc-*"))


async def exported_again(file: Any, *export: object) -> list[str]:
    """Export to a file that is there already, and to a directory that is not; return the ids."""
    before, (status, output) = file.stat(), await command(*export, file)
    assert status == 2 and f"{file} is there already. Replace it? Nothing was done: --yes" in output
    assert file.stat() == before
    ids: list[str] = (await asked(*export, file, "--yes"))["exported"]
    assert file.stat() != before
    status, output = await command(*export, file.with_name("nowhere") / "x.lpc")
    assert status == 1 and f"{file.with_name('nowhere')} does not exist" in output
    return ids


async def test_warmed_header_serves_the_first_user(start_rig: StartRig, tmp_path: Path) -> None:
    body = {"messages": MESSAGES[1], "tools": TOOLS, "max_tokens": 999, "stream": True}
    (tmp_path / "request.json").write_text(json.dumps(body))
    async with start_rig("hybrid") as rig:
        warm = ("warm", tmp_path / "request.json", "--admin", rig.admin_url)
        first = await asked(*warm, "--pin")
        assert not first["was_kept"] and first["n_usable"] >= first["n_header_tokens"] > 1000
        assert first["n_prompt_tokens"] - first["n_header_tokens"] < 30
        _, listed = await command("ls", "--admin", rig.admin_url)
        assert "warmed header, " in listed and '"."' not in listed
        again = await asked(*warm)
        assert again["was_kept"] and again["id"] == first["id"]
        assert "stored already, and pinned" in (await command(*warm))[1]
        assert "until the room is needed; --pin keeps" in (await command(*warm, "--whole"))[1]
        whole = await asked(*warm, "--whole")
        assert whole["was_kept"] and whole["n_usable"] > whole["n_prompt_tokens"] - 20
        assert whole["n_usable"] > first["n_usable"] + 100
        [kept] = [c for c in rig.running.store or () if c.is_pinned]
        assert f"{kept.id:016x}" == first["id"] and kept.kind == "header"
        await rig.restart()
        before = await rig.evaluated()
        reply = await rig.chat(MESSAGES[0], tools=TOOLS)
        assert reply["timings"]["cache_n"] >= first["n_header_tokens"]
        assert await rig.evaluated() - before < 300
        (tmp_path / "request.json").write_text('{"nothing": 1}')
        status, output = await command(*warm[:3], rig.admin_url)
        assert status == 1 and "no request" in output
        (tmp_path / "request.json").write_text('{"prompt": [1, 2, 3]}')
        status, output = await command(*warm[:3], rig.admin_url, "--whole")
        said = "the prompt is too short (tokens: 3; needed: more than 16)\n"
        assert status == 1 and output.endswith(said)


async def test_request_that_llama_server_refused_is_no_miss(start_rig: StartRig) -> None:
    async with start_rig("hybrid") as rig:
        body = {"messages": MESSAGES[0], "max_tokens": "many"}
        async with rig.client.post(rig.base_url + CHAT, json=body) as reply:
            assert reply.status == 400
        _, output = await command("explain", "--admin", rig.admin_url)
        assert "refused (status 400)  " in output and "llama-server refused the request" in output
        assert "error: Field 'max_tokens': " in output
        assert (await command("explain", "miss", "--admin", rig.admin_url))[0] == 1


async def test_warming_that_llama_server_refuses_leaves_the_slot_as_it_was(
    start_rig: StartRig, tmp_path: Path
) -> None:
    refused = {"messages": [*MESSAGES[0], answer(0), user(1, 100)], "grammar": "("}
    (tmp_path / "request.json").write_text(json.dumps(refused))
    async with start_rig("hybrid", n_slots=1) as rig:
        await rig.chat(MESSAGES[0])
        await rig.settled()
        process = rig.running.server.process
        assert process is not None
        held = process.slots[SlotId(0)].content
        status, output = await command(
            "warm", tmp_path / "request.json", "--whole", "--admin", rig.admin_url
        )
        assert status == 1 and "llama-server answered 400: Failed to init" in output
        await rig.settled()
        assert process.slots[SlotId(0)].content == held
        assert rig.sample("requests_total", outcome="refused") == 1


async def test_stats_tell_of_a_request_that_is_being_answered(start_rig: StartRig) -> None:
    async with start_rig("hybrid") as rig:
        body = {"messages": MESSAGES[0], "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        async with rig.client.post(rig.base_url + CHAT, json=body) as answer:
            await answer.content.readline()
            _, output = await command("stats", "--admin", rig.admin_url)
        assert re.search(r"(?s)in flight .*: answers", output)


async def lose_states(rig: Rig) -> None:
    """Lose what is in slots and in files; the proxy goes on."""
    await rig.settled()
    for checkpoint in list(rig.running.store or ()):
        assert rig.running.store is not None
        await rig.running.store.remove(checkpoint, Removal.OPERATOR)
    session = rig.running.server.process
    await asyncio.to_thread(rig.server.stop)
    await asyncio.to_thread(rig.server.start)
    await until(lambda: rig.running.server.process not in (session, None))


async def test_header_of_an_earlier_request_is_warmed_for_whoever_sent_it(
    start_rig: StartRig,
) -> None:
    other = [*MESSAGES[0][:-1], {"role": "user", "content": "Something else."}]
    body = {"messages": MESSAGES[0], "tools": TOOLS, "max_tokens": 2}
    ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    async with start_rig("hybrid", share_between_api_keys=False) as rig:
        await rig.post(CHAT, body, headers=ann)
        await lose_states(rig)
        warm = ("warm", "--from-request", "last", "--admin", rig.admin_url)
        first = await asked(*warm)
        assert not first["was_kept"] and first["n_usable"] > 1000
        assert (await asked(*warm))["id"] == first["id"]
        evaluated = [await rig.evaluated()]
        for headers in (bob, ann):
            reply = await rig.post(CHAT, {**body, "messages": other}, headers=headers)
            evaluated.append(await rig.evaluated())
        assert evaluated[1] - evaluated[0] > 1000 and evaluated[2] - evaluated[1] < 100
        assert reply["timings"]["cache_n"] >= first["n_usable"]
        whole = await asked(*warm, "--whole")
        assert whole["n_usable"] > reply["usage"]["prompt_tokens"] - 20
        alone = [{"role": "user", "content": "Tell me a long story. " * 40}]
        await rig.post(CHAT, {"messages": alone, "max_tokens": 2}, headers=ann)
        status, output = await command(*warm)
        said = "the header (tools and system prompt) is too short (tokens: 1; needed: more"
        assert status == 1 and said in output


async def test_llama_server_that_is_away_is_named(start_rig: StartRig, tmp_path: Path) -> None:
    trace, body = tmp_path / "trace.jsonl", tmp_path / "request.json"
    trace.write_text('{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[0]}')
    body.write_text(json.dumps({"messages": MESSAGES[0]}))
    async with start_rig("full", upstream_wait_seconds=0.0) as rig:
        before = trace.read_text()
        status, output = await command("trace", "export", trace, "--yes", "--admin", rig.admin_url)
        assert status == 1 and "was not written" in output and trace.read_text() == before
        await asyncio.to_thread(rig.server.stop)
        away = "llama-server cannot be reached"
        for arguments, said in (
            (("trace", "replay", trace, rig.base_url), f"{away}\n"),
            (
                ("warm", body, "--admin", rig.admin_url),
                f"{away}: `stats` says why, and what helps\n",
            ),
        ):
            status, output = await command(*arguments)
            assert status and output.endswith(f"llama-prefix-cache: {said}"), output
