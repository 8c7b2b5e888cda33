"""Starts and stops a real server, most often one llama-server, and asks it simple questions.

Owns the process, its port and its log file.  Knows nothing about models, slots or caching: tests
talk to the server's own HTTP interface through `request`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_SERVER_FOLDER = REPOSITORY / ".lab" / "llama-server"
DEFAULT_MODEL_FOLDER = REPOSITORY / ".lab" / "models"

START_TIMEOUT_SECONDS = 300.0
STOP_TIMEOUT_SECONDS = 60.0
POLL_INTERVAL_SECONDS = 0.05
LOG_TAIL_LINES = 20

_PORTS = [range(first, first + 2400) for first in range(10_000, 31_600, 2400)]
_given: set[int] = set()

# A fixed context and no RAM cache: every reuse a test sees comes from a slot.
BASE_ARGUMENTS = ("--cache-ram", "0", "--metrics", "--fit", "off", "-fa", "on")

# With several slots, AMX kernels mix up the prompts of a Qwen3.5: docs/upstream/prompts_at_once.py.
SLOTS_APART = "--no-repack"


class LlamaServerError(Exception):
    """A server is missing, died, or did not become ready."""


class WrongCpu(LlamaServerError):
    """A build has instructions that this CPU lacks, such as those of AVX-512."""


def find_llama_server() -> Path:
    """Return the llama-server to test with: LLAMA_SERVER_BIN, PATH, or the fetched one."""
    chosen = os.environ.get("LLAMA_SERVER_BIN") or shutil.which("llama-server")
    binary = Path(chosen) if chosen else DEFAULT_SERVER_FOLDER / "llama-server"
    if not os.access(binary, os.X_OK):
        raise LlamaServerError(
            f"no llama-server at {binary}: run tests/lab/fetch_llama_server.sh "
            f"{DEFAULT_SERVER_FOLDER}, or set LLAMA_SERVER_BIN"
        )
    return binary.resolve()


def find_free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on."""
    return find_free_ports(1)


def find_free_ports(n_ports: int) -> int:
    """Return the first of so many successive ports that nothing listens on.

    They lie below those that the kernel gives away, in a range that no other worker of pytest-xdist has,
    and no program with another number in LAB_WORKER. None is soon returned again: whoever has it may not
    have bound it yet.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER") or os.environ.get("LAB_WORKER", "-1")
    own = _PORTS[(int(worker.removeprefix("gw")) + 1) % len(_PORTS)]
    while True:
        first = random.SystemRandom().choice(own[: len(own) - n_ports])
        ports = range(first, first + n_ports)
        if len(_given) > len(own) // 2:
            _given.clear()
        if _given.isdisjoint(ports) and all(map(_is_free, ports)):
            _given.update(ports)
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def new_log_path() -> Path:
    """Return a new empty file for one server's log."""
    descriptor, name = tempfile.mkstemp(prefix="llama-server-", suffix=".log")
    os.close(descriptor)
    return Path(name)


class ServerProcess:
    """One process that answers GET /health; the same object can be started again, on the same port."""

    def __init__(self, port: int | None = None, log_path: Path | None = None) -> None:
        self.port = port or find_free_port()
        self.log_path = log_path or new_log_path()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """Return the command line."""
        raise NotImplementedError

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def has_died(self) -> bool:
        """Whether the process has ended without being told to."""
        return self._process is not None and self._process.poll() is not None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LlamaServerError("the server is not started")
        return self._process.pid

    def start(self) -> None:
        """Start the process and wait until GET /health answers 200."""
        if self._process is not None:
            raise LlamaServerError("the server is already started")
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self, patience_seconds: float = STOP_TIMEOUT_SECONDS) -> None:
        """End the process with SIGTERM, or with SIGKILL if it does not follow."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash would."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def log_text(self) -> str:
        """Return all that the process has printed so far, over all its starts."""
        return self.log_path.read_text(errors="replace")

    def request(
        self, method: str, path: str, body: object = None, timeout_seconds: float = 300.0
    ) -> tuple[int, Any]:
        """Send one request; return its status and parsed JSON (text, if it is not JSON)."""
        return request(self.base_url, method, path, body, timeout_seconds)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._is_ready():
            if self._process is None or (status := self._process.poll()) is not None:
                if self._process and status == -signal.SIGILL:
                    raise WrongCpu(f"{self.command()[0]} has instructions that this CPU lacks")
                raise LlamaServerError(f"{self.command()[0]} died at start:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise LlamaServerError(f"{self.command()[0]} is not ready:\n{self._log_tail()}")
            time.sleep(POLL_INTERVAL_SECONDS)

    def _is_ready(self) -> bool:
        try:
            return self.request("GET", "/health", timeout_seconds=2.0)[0] == 200
        except OSError:
            return False

    def _log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-LOG_TAIL_LINES:])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class LlamaServer(ServerProcess):
    """One llama-server with one model."""

    def __init__(
        self,
        model: Path,
        slot_save_path: Path | None = None,
        n_slots: int = 2,
        n_ctx: int = 65536,
        extra_args: Sequence[str] = (),
        port: int | None = None,
        binary: Path | None = None,
        log_path: Path | None = None,
        n_threads: int = 1,
    ) -> None:
        """Describe the process; `n_ctx` is shared out evenly between the slots.

        llama-server's threads spin while they wait for each other, so that a second one makes a tiny
        model many times slower as soon as anything else wants the processor.
        """
        super().__init__(port, log_path)
        self.model = model
        self.slot_save_path = slot_save_path
        self.n_slots = n_slots
        self.n_ctx = n_ctx
        self.n_threads = n_threads
        self.extra_args = tuple(extra_args)
        self.binary = binary or find_llama_server()

    def command(self) -> list[str]:
        """Return the command line; paths are absolute because the binary may change its folder."""
        command = [str(self.binary), "--model", str(self.model.resolve())]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["-np", str(self.n_slots), "-c", str(self.n_ctx), *BASE_ARGUMENTS]
        command += [SLOTS_APART] * (self.n_slots > 1)
        command += ["-t", str(self.n_threads)]
        if self.slot_save_path is not None:
            command += ["--slot-save-path", str(self.slot_save_path.resolve())]
        return [*command, *self.extra_args]

    def evaluated_tokens(self) -> int:
        """Return how many prompt tokens were evaluated (not reused) since the start."""
        return read_evaluated_tokens(self.request("GET", "/metrics")[1])


def read_evaluated_tokens(metrics: str) -> int:
    """Return llama-server's count of evaluated prompt tokens from its answer to GET /metrics."""
    for line in metrics.splitlines():
        if line.startswith("llamacpp:prompt_tokens_total "):
            return int(float(line.split()[1]))
    raise LlamaServerError("/metrics has no llamacpp:prompt_tokens_total")


def request(
    base_url: str,
    method: str,
    path: str,
    body: object = None,
    timeout_seconds: float = 300.0,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Any]:
    """Send one request; return its status and parsed JSON (text, if it is not JSON).

    A body in bytes is sent as it is.
    """
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = urllib.request.Request(base_url + path, data, headers or {}, method=method)
    sent.add_header("Content-Type", "application/json")
    try:
        with _open_directly(sent, timeout_seconds) as reply:
            return reply.status, _parse(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _parse(error.read())


# Proxy settings of the environment must never reach loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _open_directly(request: urllib.request.Request, timeout_seconds: float) -> Any:
    return _OPENER.open(request, timeout=timeout_seconds)


def _parse(body: bytes) -> Any:
    text = body.decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
