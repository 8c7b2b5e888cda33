"""`make test-bare`: docs/quickstart.md on a bare Debian, from nothing to a cached request of OpenCode.

Takes the commands from the page. The root is in memory, mounts and network are its own. Needs root.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.clients.opencode import PROGRAM, QUIET
from tests.clients.programs import find_program
from tests.deployment.cached_turn import wait_until_caching
from tests.deployment.namespaces import (
    leave_mounts,
    leave_network,
    online,
    run_in,
    unmount,
    unpack_debian,
)
from tests.documents.blocks import blocks_for
from tests.lab.models import model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY

MAX_SECONDS = 300
MAX_COMMANDS = 5
ADMIN = "http://127.0.0.1:8082"
FOLDER = "/root/llama-prefix-cache"
MAX_EVALUATED = 500
"""Of a prompt of 10,000 tokens: what differs between two sessions of OpenCode, and 32."""
TOLD = ("outcome", "chosen", "n_prompt", "confirmed", "evaluated")


def read_commands() -> list[str]:
    """Return the commands of the page."""
    (block,) = blocks_for(__file__)
    return block.text.splitlines()


def prepare(root: Path) -> None:
    """Put into a bare root what the page presumes: a model, OpenCode, and this folder."""
    unpack_debian(root)
    model = model_path("hybrid", "tiny", DEFAULT_MODEL_FOLDER)
    shutil.copyfile(model, root / "root" / "model.gguf")
    shutil.copy(find_program(PROGRAM), root / "usr" / "local" / "bin" / "opencode")
    clone(root)


def clone(root: Path) -> None:
    """Put this folder, as it was committed, into a root."""
    command = ["git", "clone", "--quiet", "--single-branch", "--depth=1"]
    subprocess.run([*command, f"file://{REPOSITORY}", root / FOLDER.lstrip("/")], check=True)


def fetch(root: Path, command: str) -> None:
    run_in(root, command, {}, FOLDER)


def make_answers_short(root: Path) -> None:
    """The lab's models never come to an end by themselves."""
    config = root / FOLDER.lstrip("/") / "deploy" / "opencode.json"
    config.write_text(re.sub(r'"output": \d+', '"output": 32', config.read_text()))


@contextmanager
def serving(root: Path, command: str) -> Iterator[None]:
    """Run the command that ends with & until the block is left; then SIGTERM, as a shell's kill."""
    assert command.endswith("&")
    inside = f"cd {FOLDER} && exec {command.removesuffix('&')}"
    process = subprocess.Popen(
        ["/usr/sbin/chroot", root, "/bin/sh", "-c", inside],
        env={
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/root",
            "LLAMA_PREFIX_CACHE_LOG_FORMAT": "json",
        },
    )
    try:
        wait_until_caching(ADMIN, lambda: process.poll() is None)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(MAX_SECONDS) == 0


def largest_request(root: Path) -> dict[str, Any]:
    """Return the log line of the longest prompt since the last start: OpenCode's main one."""
    log = (root / FOLDER.lstrip("/") / "proxy.log").read_text().splitlines()
    lines = [json.loads(line) for line in log if line.startswith("{")]
    asked = (line for line in lines if line.get("event") == "request")
    return max(asked, key=lambda line: int(line["n_prompt"]))


def walk_through(root: Path) -> None:
    """Do what the page says, step by step, and tell how long each step took."""
    commands = read_commands()
    assert len(commands) <= MAX_COMMANDS
    *fetching, serve, use = commands
    began = time.monotonic()
    with online(root):
        for command in fetching:
            with timed(command):
                fetch(root, command)
        make_answers_short(root)
        leave_network()
        for name in (use, "the same, after a restart of both"):
            with serving(root, serve), timed(name):
                run_in(root, use, QUIET, FOLDER)
            asked = largest_request(root)
            print("        " + ", ".join(f"{key} {asked[key]}" for key in TOLD))
    seconds = time.monotonic() - began
    print(f"{len(commands)} commands, {seconds:.0f} s to a request that was cached before")
    assert asked["outcome"] in ("hit", "partial") and asked["chosen"] == "restore"
    assert asked["evaluated"] <= MAX_EVALUATED
    assert seconds <= MAX_SECONDS


@contextmanager
def timed(name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("test-bare needs root: it mounts and changes roots")
    leave_mounts()
    with tempfile.TemporaryDirectory(prefix="test-bare-") as name:
        root = Path(name, "root")
        try:
            prepare(root)
            walk_through(root)
        finally:
            unmount(root)


if __name__ == "__main__":
    main()
