"""The commands where there are several models or several llama-servers, on real ones."""

import asyncio
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.doctor.examination import examine
from proxy.doctor.findings import Setup, Severity, exit_status, findings_of, summary
from proxy.settings import Settings
from tests.documents.blocks import blocks_for
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.models import least_model
from tests.lab.processes import await_end, child_pids
from tests.lab.rig import Rig
from tests.lab.router import Router, link_models
from tests.lab.run import LLAMA_SERVER_ARGUMENTS, RunProcess
from tests.lab.server import LlamaServer
from tests.lab.swap import Swap
from tests.live.test_commands import asked, command

MESSAGES = agent_requests(2, 1, header=[system(150)])
TOOLS = tools(2)


@pytest.fixture
def router(tmp_path: Path, directory: Path) -> Router:
    models = link_models(tmp_path / "models", {"full": "full", "hybrid": "hybrid"})
    return Router(models, directory, log_path=tmp_path / "router.log")


async def setup_of(directory: Path, *urls: str, model: str = "", admin: str = "") -> Setup:
    settings = Settings(
        upstream=", ".join(urls), slot_save_path=str(directory), admin=admin or "127.0.0.1:9"
    )
    return await examine(settings, model=model)


def problems(setup: Setup) -> dict[str, str]:
    """Return about whom, and the text and cure of, all that is not well, by topic."""
    return {
        f.topic: f"{f.about}: {f.text} -> {f.cure}"
        for f in findings_of(setup)
        if f.severity is not Severity.OK
    }


async def test_doctor_at_a_router_loads_only_the_model_that_is_named(
    router: Router, directory: Path
) -> None:
    with router:
        setup = await setup_of(directory, router.base_url)
        assert set(router.statuses().values()) == {"unloaded"}
        assert "none is loaded" in problems(setup)["models"]
        assert "not everything" in summary(setup)
        setup = await setup_of(directory, router.base_url, model="hybrid")
        assert (problems(setup), summary(setup)) == ({}, "Caching will work.")
        assert [f.name for f in setup.llama_servers] == ["hybrid"]
        assert router.statuses() == {"full": "unloaded", "hybrid": "loaded"}
        slots = router.request("GET", "/slots?model=hybrid")[1]
        assert [slot.get("n_prompt_tokens", 0) for slot in slots] == [0, 0]
        assert os.listdir(directory) == []


async def test_commands_before_a_router_say_which_model(
    router: Router, directory: Path, tmp_path: Path
) -> None:
    body = {"model": "nosuch", "messages": MESSAGES[1], "tools": TOOLS}
    (tmp_path / "request.json").write_text(json.dumps(body))
    async with Rig(router, directory) as rig:
        admin = ("--admin", rig.admin_url)
        connect = ("connect", "opencode", "--url", rig.base_url, *admin)
        status, output = await command(*connect)
        assert status == 69 and "--model NAME` loads one of full, hybrid" in output
        connected = await asked(*connect, "--model", "hybrid")
        assert connected["model"] == "llamacpp/hybrid"
        status, output = await command(*connect, "--model", "hybird")
        assert status == 1 and "hybird" in output and "baseURL" not in output
        warm = ("warm", tmp_path / "request.json", *admin)
        status, output = await command(*warm)
        assert status == 1 and "no model 'nosuch'" in output
        (tmp_path / "request.json").write_text(json.dumps({**body, "model": "full"}))
        warmed = await asked(*warm)
        assert warmed["n_usable"] >= warmed["n_header_tokens"] > 0
        reply = await rig.chat(MESSAGES[0], tools=TOOLS, model="full")
        assert reply["timings"]["cache_n"] >= warmed["n_header_tokens"]
        status, output = await command("explain", *admin)
        assert status == 0 and "/v1/chat/completions  by full" in output
        stats = await asked("stats", *admin)
        assert [(s["name"], s["rule"]) for s in stats["servers"]] == [("full", "any prefix")]
        assert stats["today"]["n_reused"] >= warmed["n_header_tokens"]
        status, output = await command("stats", *admin)
        assert status == 0 and re.search(r"llama-server full +rule: any prefix; slots: ", output)
        await rig.settled()
        status, output = await command("ls", "full", *admin)
        assert status == 0 and re.search(r"^full .*  [0-9a-f]{8}$", output, re.M)
        assert (await asked("ls", "full", *admin)) == (await asked("ls", *admin))
        status, output = await command("ls", "hybrid", *admin)
        assert status == 1 and "no model is called 'hybrid'" in output
        setup = await setup_of(
            directory, router.base_url, model="hybrid", admin=rig.admin_url.removeprefix("http://")
        )
        assert (problems(setup), summary(setup)) == ({}, "Caching will work.")
        assert router.statuses() == {"full": "loaded", "hybrid": "unloaded"}


async def test_doctor_at_llama_swap_loads_a_model_by_any_of_its_names(
    tmp_path: Path, directory: Path
) -> None:
    kinds = {"full": "full", "author/hybrid": "hybrid"}
    options: dict[str, Any] = {"settings": {"full": {"aliases": ["nick"]}}}
    with Swap(tmp_path, kinds, directory, n_ctx=20480, **options) as swap:
        setup = await setup_of(directory, swap.base_url)
        assert swap.states() == {} and "none is loaded" in problems(setup)["models"]
        setup = await setup_of(directory, swap.base_url, model="nick")
        assert set(swap.states()) == {"full"}
        swap.request("GET", "/unload")
        setup = await setup_of(directory, swap.base_url, model="full")
        assert [f.name for f in setup.llama_servers] == ["full"]
    assert (problems(setup), summary(setup)) == ({}, "Caching will work.")


async def test_doctor_names_llama_servers_that_cannot_share(
    tmp_path: Path, directory: Path
) -> None:
    model, elsewhere = least_model("full"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    servers = [
        LlamaServer(model, path, n_slots=1, n_ctx=8192, extra_args=args, log_path=tmp_path / name)
        for path, args, name in (
            (directory, (), "first.log"),
            (directory, ("-ctk", "f32", "-ctv", "f32"), "second.log"),
            (elsewhere, (), "third.log"),
        )
    ]
    with servers[0], servers[1], servers[2]:
        setup = await setup_of(directory, *(server.base_url for server in servers))
    found = problems(setup)
    assert exit_status(findings_of(setup)) == 2
    assert set(found) == {"sharing", "another slot save path"}
    assert "cannot continue" in found["sharing"] and servers[1].base_url[7:] in found["sharing"]
    assert found["another slot save path"].startswith(f"{servers[2].base_url[7:]}: ")
    assert "not into slot_save_path" in found["another slot save path"]


@pytest.fixture
def new_run(tmp_path: Path, directory: Path) -> Iterator[RunProcess]:
    models = link_models(tmp_path / "models", {"full": "full", "hybrid": "hybrid"})
    preset = tmp_path / "presets.ini"
    preset.write_text("version = 1\n[hybrid]\nnp = 2\nctx-checkpoints = 6\n")
    guide = str(Path(__file__).with_name("test_models_guide.py"))
    (block,) = (block for block in blocks_for(guide) if block.words == "run")
    own, _, theirs = block.text.partition(" -- llama-server ")
    assert own == "llama-prefix-cache run"
    documented = shlex.split(theirs.replace("~/models", str(models)))
    arguments = (*documented, "--models-preset", str(preset), *LLAMA_SERVER_ARGUMENTS)
    run = RunProcess(tmp_path / "run.log", slot_save_path=directory, arguments=arguments)
    yield run
    run.kill()


async def test_run_starts_a_router_whose_models_are_cached_and_keep_their_presets(
    new_run: RunProcess,
) -> None:
    def ask() -> None:
        new_run.start_and_await_caching()
        for n_request in range(2):
            for model in ("full", "hybrid"):
                body = {"model": model, "messages": MESSAGES[n_request], "tools": TOOLS}
                usage = new_run.post("/v1/chat/completions", {**body, "max_tokens": 4})["usage"]
                n_cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert n_request == 0 or n_cached > usage["prompt_tokens"] / 2
        slots = {each["name"]: len(each["slots"]) for each in new_run.health()["servers"]}
        assert slots == {"hybrid": 2}
        assert new_run.stop() == 0

    await asyncio.to_thread(ask)
    assert "LLAMA_ARG_N_PARALLEL=1" in new_run.log_text()


async def test_router_whose_proxy_is_killed_ends_with_its_models(new_run: RunProcess) -> None:
    def load_and_kill() -> None:
        new_run.start_and_await_caching()
        body = {"model": "full", "messages": MESSAGES[0], "max_tokens": 1}
        new_run.post("/v1/chat/completions", body)
        (router,) = new_run.server_pids()
        models = child_pids(router)
        assert models
        new_run.kill()
        await_end([router, *models])

    await asyncio.to_thread(load_and_kill)
