"""Somebody who does what a page says, word by word, on a machine with a llama-server and a small model.

Owns a home folder and what was started there. Commands are run by bash as they stand on the page, but for
four ports: 8080, 8081, 8082 and 8090 become free ones. `llama-server`, `llama-swap`,
`llama-prefix-cache serve` and `run` come back once they serve, and go on behind the scenes, as if in
another terminal.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.lab.processes import is_alive
from tests.lab.server import REPOSITORY, find_free_port, find_llama_server
from tests.lab.swap import find_llama_swap

COMMAND_SECONDS = 300.0
PORTS = ("8080", "8081", "8082", "8090")
_INTERPRETERS = {
    "sh": ("bash", "-e", "-u", "-o", "pipefail", "-c"),
    "python": (sys.executable, "-c"),
}
_PROGRAM = """#!/bin/sh
exec {python} {behind} {name} {command} -- "$@"
"""


class ReaderError(Exception):
    """A command on a page failed, or what it started does not serve."""


class Reader:
    """One home folder with the model as `model.gguf`, and four ports."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.home = folder / "home"
        self._own = folder / "reader"
        self.ports = {number: str(find_free_port()) for number in PORTS}
        programs = {
            "llama-server": str(find_llama_server()),
            "llama-swap": shlex.join(find_llama_swap()),
            "llama-prefix-cache": f"{sys.executable} -m proxy",
        }
        for path in (self.home, self._own / "bin"):
            path.mkdir(parents=True)
        for name, command in programs.items():
            script = self._own / "bin" / name
            behind = Path(__file__).with_name("behind.py")
            words = {"python": sys.executable, "behind": behind, "name": name, "command": command}
            script.write_text(_PROGRAM.format(**words))
            script.chmod(0o755)
        (self.home / "model.gguf").symlink_to(model.resolve())

    @property
    def environment(self) -> dict[str, str]:
        """Return all that commands see: nothing of the caller's but PATH."""
        return {
            "HOME": str(self.home),
            "PATH": f"{self._own / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "READER": str(self._own),
            "LLAMA_ARG_THREADS": "1",
            "LLAMA_ARG_REPACK": "0",  # as in `SLOTS_APART`: a reader's CPU mostly has no AMX
            "LLAMA_PREFIX_CACHE_UPSTREAM": f"http://127.0.0.1:{self.ports['8080']}",
            "LLAMA_PREFIX_CACHE_LISTEN": f"127.0.0.1:{self.ports['8081']}",
            "LLAMA_PREFIX_CACHE_ADMIN": f"127.0.0.1:{self.ports['8082']}",
        }

    def url(self, number: str, path: str = "") -> str:
        """Return the address that stands for 127.0.0.1:*number* on the pages."""
        return f"http://127.0.0.1:{self.ports[number]}{path}"

    def on_free_ports(self, text: str) -> str:
        """Return a text of a page with this reader's ports."""
        for number, port in self.ports.items():
            for before in ("127.0.0.1:", "localhost:", "--port "):
                text = text.replace(before + number, before + port)
        return text

    def do(self, commands: str, *, language: str = "sh", may_fail: bool = False) -> str:
        """Run commands, or a program in Python, as they stand on a page; return what they printed."""
        done = subprocess.run(
            [*_INTERPRETERS[language], self.on_free_ports(commands)],
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        if done.returncode and not may_fail:
            raise ReaderError(f"{commands}\nended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def stop(self) -> None:
        """End what was started, the last one first, as the pages say."""
        started = self._own / "started"
        pids = list(map(int, started.read_text().split())) if started.exists() else []
        for pid in reversed(pids):
            _end(pid, signal.SIGTERM)
        started.unlink(missing_ok=True)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _end(pid: int, number: signal.Signals) -> None:
    deadline = time.monotonic() + COMMAND_SECONDS
    if is_alive(pid):
        os.kill(pid, number)
    while is_alive(pid):
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
