"""doctor before a real llama-server: healthy ones, and every way of setting one up wrongly."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from proxy.__main__ import main
from proxy.core.model import RuleKind
from proxy.doctor.examination import examine
from proxy.doctor.findings import (
    LlamaServerFacts,
    Setup,
    Severity,
    exit_status,
    findings_of,
    summary,
)
from proxy.run.process import has_amx
from proxy.settings import Settings
from proxy.store.files import StateFiles
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.models import least_model
from tests.lab.older_builds import rewriting, strip_context_checkpoints
from tests.lab.server import REPOSITORY, LlamaServer
from tests.live.conftest import StartRig, in_long

NOBODY = 65534
WIDE_WINDOW = ("--override-kv", "gemma3.attention.sliding_window=int:8192")

NewServer = Callable[..., LlamaServer]


@dataclass(frozen=True)
class Diagnosis:
    """What doctor found, in the forms that the tests ask for."""

    setup: Setup

    @property
    def facts(self) -> LlamaServerFacts:
        (facts,) = self.setup.llama_servers
        return facts

    @property
    def exit_status(self) -> int:
        return exit_status(findings_of(self.setup))

    @property
    def summary(self) -> str:
        return summary(self.setup)

    def problems(self) -> dict[str, str]:
        """Return text and cure of all that is not well, by topic."""
        return {
            f.topic: f"{f.text} -> {f.cure}"
            for f in findings_of(self.setup)
            if f.severity is not Severity.OK
        }


@pytest.fixture
def new_server(tmp_path: Path, directory: Path) -> NewServer:
    """Return a function that describes a llama-server with a tiny model."""

    def describe(kind: str, *extra_args: str, **options: Any) -> LlamaServer:
        options = {"slot_save_path": directory, **options}
        model = least_model(kind)
        log_path = tmp_path / "llama-server.log"
        return LlamaServer(model, extra_args=extra_args, log_path=log_path, **options)

    return describe


async def diagnose(server: LlamaServer, directory: Path, **options: Any) -> Diagnosis:
    settings = Settings(
        upstream=server.base_url,
        slot_save_path=str(directory),
        max_store_bytes=options.pop("max_store_bytes", 64 << 20),
        upstream_api_key=options.pop("api_key", None),
        admin=options.pop("admin", "127.0.0.1:9"),
    )
    return Diagnosis(await examine(settings, **options))


def tokens_held(server: LlamaServer) -> list[int]:
    _, slots = server.request("GET", "/slots")
    return [slot.get("n_prompt_tokens", 0) for slot in slots]


def hold(server: LlamaServer, slot_id: int, n_tokens: int = 300) -> None:
    """Put work into a slot."""
    body = {"prompt": list(range(100, 100 + n_tokens)), "n_predict": 0, "id_slot": slot_id}
    status, reply = server.request("POST", "/completion", body)
    assert status == 200, reply


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("full", RuleKind.ANY_PREFIX),
        ("hybrid", RuleKind.RESTORE_POINTS),
        *in_long(("swa", RuleKind.RESTORE_POINTS), ("recurrent", RuleKind.RESTORE_POINTS)),
    ],
)
async def test_healthy_server_is_approved_and_left_as_it_was(
    new_server: NewServer, directory: Path, kind: str, rule: RuleKind
) -> None:
    with new_server(kind) as server:
        found = await diagnose(server, directory)
        assert found.problems() == {}
        assert (found.exit_status, found.summary) == (0, "Caching will work.")
        assert tokens_held(server) == [0, 0]
    assert os.listdir(directory) == []
    facts = found.facts
    assert facts.rule is not None and facts.rule.kind is rule
    assert facts.state_bytes > 0
    assert min(facts.save_seconds, facts.restore_seconds, facts.evaluate_seconds) > 0
    assert facts.has_ram_cache is False


async def test_server_with_one_slot_is_approved(new_server: NewServer, directory: Path) -> None:
    with new_server("hybrid", n_slots=1) as server:
        found = await diagnose(server, directory)
    assert (found.problems(), found.exit_status) == ({}, 0)


async def test_missing_slot_save_path_is_named(new_server: NewServer, directory: Path) -> None:
    with new_server("hybrid", slot_save_path=None) as server:
        found = await diagnose(server, directory)
    assert found.exit_status == 2
    assert f"--slot-save-path {directory}" in found.problems()["no slot save path"]


async def test_another_directory_is_named_with_the_probe_that_lies_there(
    new_server: NewServer, directory: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with new_server("hybrid", slot_save_path=elsewhere) as server:
        found = await diagnose(server, directory)
    (probe,) = elsewhere.iterdir()
    problem = found.problems()["another slot save path"]
    assert found.exit_status == 2
    assert "not into slot_save_path" in problem and probe.name in problem
    assert f"start llama-server with --slot-save-path {directory}" in problem


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users can reach; pytest's own are closed to them."""
    path = Path(tempfile.mkdtemp(dir="/tmp", prefix="lpc-doctor-"))
    yield path
    path.chmod(0o700)
    shutil.rmtree(path)


@contextmanager
def another_user() -> Iterator[None]:
    """Be nobody for a while; whoever is not root is nobody enough."""
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(uid)


async def test_unusable_directory_is_named(new_server: NewServer, open_directory: Path) -> None:
    os.chmod(open_directory, 0o555)
    with new_server("hybrid", slot_save_path=open_directory) as server:
        with another_user():
            found = await diagnose(server, open_directory)
    problem = found.problems()["directory"]
    assert found.exit_status == 2
    assert "permission denied" in problem
    assert f"chown -R USER {open_directory}" in problem and "chmod 2770" in problem


async def test_unreadable_state_files_are_named(
    new_server: NewServer, open_directory: Path
) -> None:
    os.chmod(open_directory, 0o777)
    server = new_server("hybrid", slot_save_path=open_directory)
    umask = os.umask(0o477)  # for llama-server: files that not even their owner may read
    try:
        server.start()
    finally:
        os.umask(umask)
    with another_user():
        found = await diagnose(server, open_directory)
    server.stop()
    problem = found.problems()["files unreadable"]
    assert found.exit_status == 2
    assert "mode 200" in problem and "Permission denied" in problem
    assert "umask 007" in problem and f"chmod 2770 {open_directory}" in problem
    assert os.listdir(open_directory) == []


async def test_directory_open_to_all_is_named(new_server: NewServer, directory: Path) -> None:
    os.chmod(directory, 0o755)
    with new_server("hybrid") as server:
        found = await diagnose(server, directory)
    assert found.exit_status == 1
    assert list(found.problems()) == ["directory is open to others"]
    assert f"({directory} has mode " in found.problems()["directory is open to others"]


@pytest.mark.parametrize("kind", ["hybrid", *in_long("full")])
async def test_default_flags_that_clear_idle_slots_are_named(
    new_server: NewServer, directory: Path, kind: str
) -> None:
    with new_server(kind, "--cache-ram", "8192", n_slots=-1) as server:
        found = await diagnose(server, directory)
    assert (found.exit_status, found.summary) == (1, "Caching will work, with limits.")
    problem = found.problems()["idle slots are cleared"]
    assert "-np 4 --cache-ram 0" in problem and "--no-cache-idle-slots" in problem


async def test_cleared_slots_are_seen_with_one_empty_slot_too(
    new_server: NewServer, directory: Path
) -> None:
    with new_server("hybrid", "-kvu", "--cache-ram", "8192") as server:
        hold(server, 0)
        found = await diagnose(server, directory)
    assert found.exit_status == 1
    assert "--no-cache-idle-slots" in found.problems()["idle slots are cleared"]


async def test_slots_that_are_not_shown_are_named(new_server: NewServer, directory: Path) -> None:
    with new_server("full", "--no-slots") as server:
        found = await diagnose(server, directory)
    assert (found.exit_status, list(found.problems())) == (1, ["slots not shown"])
    assert os.listdir(directory) == []


@pytest.mark.parametrize("extra_args", [(), ("--no-cache-idle-slots",)])
async def test_ram_cache_is_named(
    new_server: NewServer, directory: Path, extra_args: tuple[str, ...]
) -> None:
    with new_server("hybrid", "--cache-ram", "64", *extra_args) as server:
        found = await diagnose(server, directory)
    assert found.exit_status == 1
    assert "--cache-ram 0" in found.problems()["RAM cache"]


async def test_disk_that_is_nearly_full_is_named(
    new_server: NewServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=1 << 16)
    with new_server("hybrid") as server:
        with monkeypatch.context() as patch:
            patch.setattr("proxy.doctor.examination.disk_usage", lambda _: usage)
            full = await diagnose(server, directory)
        monkeypatch.setattr(StateFiles, "reserve_bytes", lambda _: 1 << 60)
        reserved = await diagnose(server, directory)
    assert reserved.exit_status == 2
    assert "are left free" in reserved.problems()["disk space"]
    assert full.exit_status == 2
    assert "64.0 KiB free" in full.problems()["disk space"]
    assert "use another disk" in full.problems()["disk space"]


async def test_checkpoints_are_told_from_those_of_another_model(
    start_rig: StartRig, new_server: NewServer, directory: Path
) -> None:
    async with start_rig("hybrid") as rig:
        await rig.chat(agent_requests(2, 1, header=[system(150)])[0], tools=tools(2))
        await rig.settled()
    with new_server("hybrid") as server:
        own = await diagnose(server, directory)
    with new_server("hybrid", n_slots=3) as server:
        other_layout = await diagnose(server, directory)
    with new_server("hybrid", "--ctx-checkpoints", "0") as server:
        other_flags = await diagnose(server, directory)
    with new_server("full") as server:
        foreign = await diagnose(server, directory)
    assert own.problems() == {}
    assert own.facts.n_usable == own.setup.n_checkpoints > 0
    assert list(other_flags.problems()) == ["memory rule"]
    assert other_layout.exit_status == foreign.exit_status == 1
    assert "another cache layout" in other_layout.problems()["checkpoints"]
    problem = foreign.problems()["checkpoints"]
    assert "of another model" in problem
    assert (
        "a --slot-save-path of its own" in problem
        and f"rm --everything --slot-save-path {directory}" in problem
    )


async def test_missing_swa_full_is_named_where_it_matters(
    new_server: NewServer, directory: Path
) -> None:
    # A window that no probe outgrows and no context checkpoints: what builds before 0.7.0 make of it.
    arguments = (*WIDE_WINDOW, "--ctx-checkpoints", "0")
    with new_server("swa", *arguments) as server:
        without = await diagnose(server, directory)
    with new_server("swa", *arguments, "--swa-full") as server:
        mended = await diagnose(server, directory)
    assert without.exit_status == 2
    assert "--swa-full" in without.problems()["nothing can be restored"]
    assert (mended.problems(), mended.exit_status) == ({}, 0)


async def test_slots_that_are_mixed_up_are_named(new_server: NewServer, directory: Path) -> None:
    with new_server("hybrid", "--repack") as server:  # the last flag wins
        repacked = await diagnose(server, directory)
    with new_server("hybrid") as server:
        found = await diagnose(server, directory)
    assert list(repacked.problems()) == ["several slots"] * has_amx()
    assert (found.problems(), found.facts.n_slots) == ({}, 2)


async def test_states_without_context_checkpoints_are_named(
    new_server: NewServer, directory: Path
) -> None:
    with new_server("hybrid") as server:
        with rewriting(strip_context_checkpoints):
            stripped = await diagnose(server, directory)
    with new_server("hybrid", "--ctx-checkpoints", "0") as server:
        without = await diagnose(server, directory)
    for found in (stripped, without):
        assert (found.exit_status, list(found.problems())) == (1, ["memory rule"])
        assert "End only" in found.problems()["memory rule"]
        assert "without --ctx-checkpoints 0" in found.problems()["memory rule"]


async def test_missing_api_key_is_named(new_server: NewServer, directory: Path) -> None:
    with new_server("hybrid", "--api-key", "secret") as server:
        missing = await diagnose(server, directory)
        wrong = await diagnose(server, directory, api_key="guess")
        right = await diagnose(server, directory, api_key="secret")
    assert missing.exit_status == wrong.exit_status == 2
    assert "Invalid API Key" in wrong.problems()["llama-server wants an API key"]
    assert "UPSTREAM_API_KEY=KEY" in missing.problems()["llama-server wants an API key"]
    assert (right.problems(), right.exit_status) == ({}, 0)


async def test_full_slots_are_left_alone(new_server: NewServer, directory: Path) -> None:
    with new_server("hybrid") as server:
        hold(server, 0)
        hold(server, 1)
        found = await diagnose(server, directory)
        assert tokens_held(server) == [300, 300]
    assert found.exit_status == 1
    assert "not everything could be examined" in found.summary
    assert "none was emptied" in found.problems()["slots"]
    assert found.facts.layout is None
    assert os.listdir(directory) == []


async def test_full_slots_hide_no_missing_slot_save_path(
    new_server: NewServer, directory: Path
) -> None:
    with new_server("hybrid", slot_save_path=None) as server:
        hold(server, 0)
        hold(server, 1)
        found = await diagnose(server, directory)
        assert tokens_held(server) == [300, 300]
    assert (found.exit_status, found.summary) == (2, "Caching will not work.")
    assert "without --slot-save-path" in found.problems()["no slot save path"]


async def test_slot_that_was_only_restored_is_not_taken_for_empty(
    new_server: NewServer, directory: Path
) -> None:
    with new_server("hybrid") as server:
        hold(server, 0)
        server.request("POST", "/slots/0?action=save", {"filename": "work"})
        server.request("POST", "/slots/0?action=erase", {})
        server.request("POST", "/slots/1?action=restore", {"filename": "work"})
        assert tokens_held(server) == [0, 0]  # /slots does not tell
        found = await diagnose(server, directory)
        _, saved = server.request("POST", "/slots/1?action=save", {"filename": "after"})
    assert saved["n_saved"] == 300
    assert (found.facts.n_empty, found.facts.n_held) == (1, 1)
    assert (found.problems(), found.exit_status) == ({}, 0)


async def test_running_proxy_is_asked_and_its_slots_left_alone(
    start_rig: StartRig, directory: Path
) -> None:
    async with start_rig("hybrid") as rig:
        before = await asyncio.to_thread(rig.server.evaluated_tokens)
        admin = rig.admin_url.removeprefix("http://")
        found = await diagnose(rig.server, directory, admin=admin)
        without_admin = await diagnose(rig.server, directory)
        assert await asyncio.to_thread(rig.server.evaluated_tokens) == before
    assert (found.problems(), found.summary) == ({}, "Caching will work.")
    assert without_admin.exit_status == 1
    assert "--admin HOST:PORT" in without_admin.problems()["running proxy"]


async def test_running_proxy_that_only_forwards_is_quoted(
    start_rig: StartRig, directory: Path
) -> None:
    async with start_rig("hybrid", has_slot_save_path=False) as rig:
        admin = rig.admin_url.removeprefix("http://")
        found = await diagnose(rig.server, directory, admin=admin)
    assert found.exit_status == 2
    assert "without --slot-save-path" in found.problems()["running proxy"]


@pytest.mark.parametrize("has_default_directory", [False, True])
async def test_doctor_without_a_directory_asks_the_proxy_that_runs(
    start_rig: StartRig, tmp_path: Path, has_default_directory: bool
) -> None:
    if has_default_directory:
        (tmp_path / "llama-prefix-cache").mkdir()
    async with start_rig("hybrid") as rig:
        before = os.listdir(rig.settings.slot_save_path)
        environment = {"XDG_CACHE_HOME": str(tmp_path)}
        admin = ("--admin", rig.admin_url.removeprefix("http://"))
        result = await asyncio.to_thread(run_doctor, *admin, environment=environment)
        assert result.returncode == 0
        assert "is caching. Its slots were left alone" in " ".join(result.stdout.split())
        assert os.listdir(rig.settings.slot_save_path) == before, "no probe was saved there"
    result = await asyncio.to_thread(run_doctor, *admin, environment=environment)
    assert result.returncode == 2
    if not has_default_directory:
        assert "or start llama-server by `run`" in result.stderr


async def test_address_without_tls_is_named(new_server: NewServer, directory: Path) -> None:
    with new_server("hybrid") as server:
        url = server.base_url.replace("http:", "https:")
        found = Diagnosis(await examine(Settings(upstream=url, slot_save_path=str(directory))))
    assert found.exit_status == 2
    assert "`upstream` begins with https" in found.problems()["llama-server unreachable"]
    assert "attaching" not in found.problems()


async def test_proxy_taken_for_llama_server_is_named(
    start_rig: StartRig, new_server: NewServer, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    async with start_rig("hybrid") as rig:
        found = Diagnosis(
            await examine(Settings(upstream=rig.base_url, slot_save_path=str(tmp_path / "other")))
        )
    assert found.exit_status == 2
    assert "not at a proxy before it" in found.problems()["not a llama-server"]


def run_doctor(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_PREFIX_CACHE_")}
    return subprocess.run(
        [sys.executable, "-m", "proxy", "doctor", *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=own | (environment or {}),
        timeout=300,
    )


def test_command_prints_a_report_and_takes_the_configuration_of_serve(
    new_server: NewServer, directory: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    with new_server("hybrid") as server:
        settings = {"upstream": server.base_url, "slot_save_path": str(directory)}
        config.write_text(yaml.safe_dump({**settings, "max_store_bytes": "64MiB"}))
        result = run_doctor("--config", str(config))
    assert (result.returncode, result.stderr) == (0, "")
    first, _, *lines = result.stdout.splitlines()
    assert first == "Caching will work."
    assert any(line.startswith("ok") and "memory rule" in line for line in lines)
    assert "\x1b" not in result.stdout and max(map(len, lines)) <= 110


def test_command_prints_json(new_server: NewServer, directory: Path) -> None:
    with new_server("hybrid", slot_save_path=None) as server:
        result = CliRunner().invoke(
            main,
            ["doctor", "--upstream", server.base_url, "--slot-save-path", str(directory), "--json"],
        )
    content = msgspec.json.decode(result.stdout)
    assert result.exit_code == content["exit_status"] == 2
    assert content["verdict"] == "Caching will not work."
    assert "--slot-save-path" in next(f["cure"] for f in content["findings"] if f["cure"])
    (facts,) = content["facts"]["llama_servers"]
    assert [each["kind"] for each in facts["degradations"]] == ["no slot save path"]


def test_command_without_a_server_says_so(directory: Path) -> None:
    where = ["--upstream", "http://127.0.0.1:9", "--slot-save-path", str(directory)]
    result = CliRunner().invoke(main, ["doctor", *where])
    assert result.exit_code == 2
    assert result.stdout.startswith("Caching will not work.")
    assert "--upstream URL" in result.stdout
