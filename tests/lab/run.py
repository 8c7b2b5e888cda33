"""`llama-prefix-cache run` as users start it: one command, in a process of its own.

Owns the process, its two listeners and its log. llama-server is reached through the proxy, which passes
on what it does not know.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.lab.server import (
    REPOSITORY,
    LlamaServerError,
    find_free_port,
    find_llama_server,
    request,
)

READY_SECONDS = 300.0
STOP_SECONDS = 300.0
_POLL_SECONDS = 0.05

_SETTINGS = {
    "LLAMA_PREFIX_CACHE_LOG_LEVEL": "debug"  # all events with all fields, and llama-server's own log
}

LLAMA_SERVER_ARGUMENTS = ("-c", "16384", "-t", "1", "--fit", "off", "-fa", "on")


def slots_in(health: dict[str, Any]) -> Counter[str]:
    """Return how many slots of the first llama-server are in which state."""
    return Counter(slot["state"] for slot in health["servers"][0]["slots"])


class RunProcess:
    """One `run`; the same object can be started again, on the same ports."""

    def __init__(
        self,
        log_path: Path,
        *,
        model: Path | None = None,
        slot_save_path: Path | None = None,
        options: Sequence[str] = (),
        arguments: Sequence[str] = LLAMA_SERVER_ARGUMENTS,
        program: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log_path = log_path
        # One that `run` chose, the kernel could give to somebody else before llama-server has it.
        self._environment = {"LLAMA_ARG_PORT": str(find_free_port()), **(environment or {})}
        listen, admin = (f"127.0.0.1:{find_free_port()}" for _ in range(2))
        self.base_url, self.admin_url = f"http://{listen}", f"http://{admin}"
        self.command = [sys.executable, "-m", "proxy", "run", "--listen", listen, "--admin", admin]
        if slot_save_path is not None:
            self.command += ["--slot-save-path", str(slot_save_path)]
        self.command += [*options, "--", str(program or find_llama_server())]
        self.command += ["-m", str(model)] if model else []
        self.command += arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process in a session of its own, away from our terminal.

        Under nohup a process would inherit that SIGHUP is ignored, and then ignores it, too.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LLAMA_PREFIX_CACHE_", "LLAMA_ARG_"))
        }
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env={**inherited, **_SETTINGS, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
            )

    def start_and_await_caching(self) -> None:
        self.start()
        self.wait_for(lambda: self.health().get("state") == "caching")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.send(number)
        return self.ended()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> int:
        """Return the exit status once the process has ended by itself."""
        assert self._process is not None
        return self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """End the process at once, as a crash would; the kernel then ends llama-server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def health(self) -> dict[str, Any]:
        """Return the proxy's own view, or nothing while it does not listen."""
        try:
            return dict(request(self.admin_url, "GET", "/health")[1])
        except OSError:
            return {}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post to the proxy; the reply must be 200."""
        status, reply = request(self.base_url, "POST", path, body)
        if status != 200:
            raise LlamaServerError(f"{path} answered {status}: {reply}")
        return dict(reply)

    def evaluated_tokens(self) -> int:
        """Return llama-server's own count of evaluated prompt tokens since its start."""
        _, metrics = request(self.base_url, "GET", "/metrics")
        found = re.search(r"^llamacpp:prompt_tokens_total (\S+)$", metrics, re.M)
        if found is None:
            raise LlamaServerError("/metrics has no llamacpp:prompt_tokens_total")
        return int(float(found[1]))

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def server_pids(self) -> list[int]:
        """Return the process of every llama-server started so far; each keeps the guard's number."""
        return [
            int(pid) for pid in re.findall(r"started llama-server +.*?pid=(\d+)", self.log_text())
        ]

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until *condition* holds, as long as the process runs."""
        deadline = time.monotonic() + READY_SECONDS
        while not condition():
            if self._process is None or self._process.poll() is not None:
                raise LlamaServerError(f"`run` has ended:\n{self.log_text()}")
            if time.monotonic() > deadline:
                raise LlamaServerError(f"waited too long:\n{self.log_text()}")
            time.sleep(_POLL_SECONDS)
