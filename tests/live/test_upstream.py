"""Each reproduction in docs/upstream/ shows what it says, on a real llama-server without the proxy."""

import subprocess
import sys
from pathlib import Path

import pytest

from proxy.run.process import has_amx
from tests.lab.models import least_model
from tests.lab.older_server import binary_of
from tests.lab.server import REPOSITORY, SLOTS_APART, LlamaServer, find_free_port, find_llama_server

FOLDER = REPOSITORY / "docs" / "upstream"
SHOWN = 0


def run(script: str, *arguments: str) -> tuple[int, str]:
    """Return a script's exit status and what it printed."""
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("script", "kind", "build"),
    [
        ("failed_restore_empties_slot.py", "full", ""),
        ("damaged_file_aborts.py", "full", ""),
        ("turn_start_dropped.py", "hybrid", ""),
        ("window_off_by_one.py", "swa", "2026.9.11063"),
        ("window_purged_too_early.py", "swa", ""),
        ("stale_context_checkpoint.py", "swa", ""),
        ("stale_context_checkpoint.py", "hybrid", ""),
    ],
)
def test_reproduction_shows_the_defect(script: str, kind: str, build: str, tmp_path: Path) -> None:
    model = least_model(kind)
    binary = binary_of(build) if build else find_llama_server()
    server = LlamaServer(model, tmp_path, n_slots=1, n_ctx=8192, binary=binary)
    server.start()
    try:
        takes_folder = script in ("damaged_file_aborts.py", "window_off_by_one.py")
        status, said = run(script, server.base_url, *([str(tmp_path)] if takes_folder else []))
    finally:
        server.kill()
    assert status == SHOWN, said
    if build:
        assert "one position lower: reused 2200" in said


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_late_copy_overwrites_restored_states(kind: str, tmp_path: Path) -> None:
    model = least_model(kind)
    flags = ("--cache-ram", "1024")  # the last flag wins
    server = LlamaServer(model, tmp_path, n_slots=2, n_ctx=16384, extra_args=flags)
    server.start()
    try:
        status, said = run("late_copy_overwrites_restore.py", server.base_url)
    finally:
        server.kill()
    assert status == SHOWN, said


@pytest.mark.parametrize("flag", ["--repack", SLOTS_APART])  # the last flag wins
def test_amx_kernels_mix_up_slots_unless_weights_are_not_repacked(
    tmp_path: Path, flag: str
) -> None:
    model = least_model("hybrid")
    server = LlamaServer(model, tmp_path, extra_args=(flag,))
    server.start()
    try:
        status, said = run("prompts_at_once.py", server.base_url)
    finally:
        server.kill()
    assert (status == SHOWN) == (flag == "--repack" and has_amx()), said


@pytest.mark.long
def test_several_sigterms_at_once_leave_a_process_that_never_ends() -> None:
    model = least_model("full").resolve()
    options = ["--host", "127.0.0.1", "--port", str(find_free_port()), "-c", "512", "-t", "1"]
    status, said = run(
        "parent_death_signals_twice.py", "30", str(find_llama_server()), "-m", str(model), *options
    )
    assert status == SHOWN, said


def test_every_script_is_listed_and_run() -> None:
    listed = (FOLDER / "README.md").read_text()
    assert all(
        f"]({path.name})" in listed for path in FOLDER.glob("*.*") if path.name != "README.md"
    )
