"""doctor before a scripted llama-server: what the real one cannot be made to show, and interruptions."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.cli.command import Exit
from proxy.core.conditions import DegradationKind
from proxy.doctor.examination import examine
from proxy.doctor.findings import LlamaServerFacts, Severity, exit_status, findings_of
from proxy.settings import Settings
from proxy.store.store import CheckpointStore
from tests.fakes.faults import Faults
from tests.fakes.llama_server import FakeLlamaServer
from tests.fakes.slots import Memory
from tests.lab.waiting import until

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
async def server(directory: Path) -> AsyncIterator[FakeLlamaServer]:
    async with FakeLlamaServer(directory) as server:
        yield server


def settings_for(server: FakeLlamaServer) -> Settings:
    path = str(server.directory)
    return Settings(upstream=server.base_url, slot_save_path=path, max_store_bytes=1 << 20)


@dataclass(frozen=True)
class Diagnosis:
    """The facts, exit status, and text and cure of all that is not well."""

    facts: LlamaServerFacts
    exit_status: int
    problems: dict[str, str]


async def diagnose(server: FakeLlamaServer) -> Diagnosis:
    setup = await examine(settings_for(server))
    assert os.listdir(server.directory) == []
    assert [slot.tokens for slot in server.slots] == [[]] * server.n_slots
    (facts,), findings = setup.llama_servers, findings_of(setup)
    problems = {f.topic: f"{f.text} -> {f.cure}" for f in findings if f.severity is not Severity.OK}
    return Diagnosis(facts, exit_status(findings), problems)


async def test_scripted_server_is_approved(server: FakeLlamaServer) -> None:
    found = await diagnose(server)
    assert (found.problems, found.facts.failures) == ({}, [])


@pytest.mark.parametrize(
    ("faults", "kind", "status", "cure"),
    [
        (Faults(is_loading=True), DegradationKind.LOADING, 1, "answers 200"),
        (Faults(refuse={"props": 404}), DegradationKind.NOT_A_LLAMA_SERVER, 2, "--api-prefix"),
        (Faults(props={"total_slots": 0}), DegradationKind.NOT_A_LLAMA_SERVER, 2, "--upstream URL"),
        (
            Faults(refuse={"props": 502}),
            DegradationKind.UNREACHABLE,
            2,
            "gateway or host answers 502",
        ),
        (Faults(drop={"props"}), DegradationKind.UNREACHABLE, 2, "--upstream URL"),
    ],
)
async def test_server_that_cannot_be_examined_is_named(
    server: FakeLlamaServer, faults: Faults, kind: DegradationKind, status: int, cure: str
) -> None:
    server.faults = faults
    found = await diagnose(server)
    assert [degradation.kind for degradation in found.facts.degradations] == [kind]
    assert found.exit_status == status
    assert cure in found.problems[kind]


async def test_server_that_cannot_write_is_named(server: FakeLlamaServer) -> None:
    server.faults.refuse["save"] = 500
    found = await diagnose(server)
    assert found.exit_status == 2
    problem = found.problems["attaching failed"]
    assert "llama-server answered 500" in problem
    assert "write there" in problem and "not full" in problem


async def test_server_whose_restarts_cannot_be_told_is_named(server: FakeLlamaServer) -> None:
    server.faults.props["media_marker"] = "<always the same>"
    server.faults.refuse["metrics"] = 501
    found = await diagnose(server)
    assert found.exit_status == 2
    assert "--metrics" in found.problems["restarts cannot be told"]


async def test_server_that_restores_to_no_use_is_named(directory: Path) -> None:
    async with FakeLlamaServer(directory, memory=Memory.NOTHING) as server:
        found = await diagnose(server)
    assert found.exit_status == 2
    assert "reuses nothing of a restored state" in found.problems["nothing can be restored"]


async def test_cache_of_llama_servers_own_is_named(server: FakeLlamaServer) -> None:
    server.faults.has_native_cache = True
    found = await diagnose(server)
    assert (found.exit_status, list(found.problems)) == (1, ["RAM cache"])
    assert "without --cache-disk and --radix-cache" in found.problems["RAM cache"]


async def test_window_that_has_to_be_repaired_is_named(directory: Path) -> None:
    async with FakeLlamaServer(directory, memory=Memory.CUT_WINDOW, file_version=3) as server:
        found = await diagnose(server)
    assert found.exit_status == 1
    assert list(found.problems) == ["memory rule"]
    assert "End only" in found.problems["memory rule"]
    assert "llama.cpp 0.7.0 or later" in found.problems["memory rule"]
    assert "--swa-full" in found.problems["memory rule"]


async def test_unknown_slot_file_version_is_named(directory: Path) -> None:
    async with FakeLlamaServer(directory, file_version=5) as server:
        found = await diagnose(server)
    assert found.exit_status >= 1
    assert "Version 5 is not known" in found.problems["slot files"]


async def test_probe_that_fails_is_named_and_the_others_run(server: FakeLlamaServer) -> None:
    server.faults.refuse["models"] = 500
    found = await diagnose(server)
    assert found.exit_status == 1
    assert "could not be examined at first contact" in found.problems["attaching failed"]
    assert "nobody else uses llama-server" in found.problems["attaching failed"]
    assert found.facts.probe_owner_uid == os.geteuid()


async def test_states_beside_a_proxy_that_tells_nothing_are_counted(directory: Path) -> None:
    """They give way to new ones: a disk that they fill is no problem."""
    with closing(CheckpointStore(directory, 1 << 20)):
        (directory / "lpc-0123456789abcdef.state").write_bytes(bytes(5000))
        setup = await examine(Settings(slot_save_path=str(directory), admin="127.0.0.1:9"))
    assert setup.lock and not setup.health
    assert setup.used_bytes == 5000


@pytest.mark.parametrize("place", ["save", "evaluate", "generate", "restore", "erase"])
async def test_interrupted_examination_leaves_nothing_behind(
    server: FakeLlamaServer, place: str
) -> None:
    gate = server.hold(place, 1)
    task = asyncio.ensure_future(examine(settings_for(server)))
    await gate.reached()
    task.cancel()
    server.release(place)
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert [slot.tokens for slot in server.slots] == [[], []]
    assert os.listdir(server.directory) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_command_leaves_nothing_behind(
    server: FakeLlamaServer, number: int
) -> None:
    gate = server.hold("restore", 1)
    command = [sys.executable, "-m", "proxy", "doctor", "--upstream", server.base_url]
    process = await asyncio.create_subprocess_exec(
        *(*command, "--slot-save-path", str(server.directory)),
        cwd=REPOSITORY,
        env=_environment(),
        stderr=asyncio.subprocess.PIPE,
    )
    await until(lambda: gate.n_reached)
    process.send_signal(number)
    server.release("restore")
    _, said = await process.communicate()
    assert process.returncode == Exit.CUT_SHORT, said
    assert b"interrupted" in said and b"Traceback" not in said
    assert [slot.tokens for slot in server.slots] == [[], []]
    assert os.listdir(server.directory) == []


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_PREFIX_CACHE_")}
