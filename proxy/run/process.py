"""llama-server as a child process: its build and port, its start, its end and its restart.

llama-server runs in a session of its own: Ctrl-C in a terminal reaches only the proxy, which saves first.
llama-server's output is shown at level debug; otherwise the last part is kept, and shown if llama-server
dies. No llama-server outlives the proxy, even if the proxy is killed; but one that a wrapper script starts
without `exec` outlives a proxy that is killed: only the script is killed with the proxy.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from proxy.core.launch import restart_delay_seconds
from proxy.errors import SettingsError, in_words
from proxy.log import get_logger

# Before the start: the flags that this build knows, the model's files, the CPU, and a free port.

_HELP_SECONDS = 60.0
"""GPU builds load their libraries before they print the help."""


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command's program with its subcommands (`llama serve`), and its arguments."""
    n_program = next((i for i, part in enumerate(command) if part.startswith("-")), len(command))
    return list(command[:n_program]), list(command[n_program:])


def read_help(program: Sequence[str]) -> str:
    """Return a build's --help; raises SettingsError if there is no such program or it does not answer."""
    try:
        done = subprocess.run(
            [*program, "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_HELP_SECONDS,
        )
    except OSError as error:
        refused = f"{' '.join(program)} cannot be run: command not found, or no program"
        raise SettingsError(
            f"{refused if program else 'no program stands behind `--`'}. Give llama-server's path:"
            " llama-prefix-cache run -- /path/to/llama-server -m model.gguf"
        ) from error
    except subprocess.TimeoutExpired as error:
        told = f"{program[0]} --help did not answer within {_HELP_SECONDS:.0f} s"
        raise SettingsError(told) from error
    return done.stdout.decode(errors="replace")


_CACHES = (
    ("LLAMA_CACHE", ""),
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
    ("HOME", ".cache/huggingface/hub"),
)


def downloaded(repository: str) -> list[Path]:
    """Return the files that llama-server has of `-hf user/model:quant` (hf-cache.cpp)."""
    bases = ((os.environ.get(name), folder) for name, folder in _CACHES)
    cache = next((Path(base, folder) for base, folder in bases if base), Path())
    name = "models--" + repository.partition(":")[0].replace("/", "--")
    return sorted(cache.joinpath(name, "snapshots").rglob("*.gguf"))


def has_amx() -> bool:
    """Return whether this machine's CPU has AMX, as far as Linux tells."""
    with suppress(OSError):
        return "amx_int8" in Path("/proc/cpuinfo").read_text()
    return False


def free_port(host: str, port: int = 0) -> int:
    """Return *port*, or any for 0; raises OSError if it is taken, or *host* no address of this machine.

    Builds of llama-server that share ports would start all the same, and answer every other request.
    """
    try:
        found = socket.getaddrinfo(host or "127.0.0.1", port, type=socket.SOCK_STREAM)
        family, *_, address = found[0]
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        with socket.create_server(address, family=family, dualstack_ipv6=is_dual) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        why = f"llama-server cannot listen on {host}:{port}: {in_words(error)}"
        raise OSError(why) from error


# One process: its start and its end.

_GUARD = Path(__file__).with_name("guard.py")
_STOP_SECONDS = 20.0
"""How long llama-server may take to end; it finishes the batch at hand first."""
_KEPT_BYTES = 1 << 16
_N_LAST_LINES, _N_SHOWN = 30, 8
_IS_ERROR = re.compile(r"[\d.]+ E |(error|terminate|GGML_ASSERT|Segmentation)|.*\berror:")


class LlamaProcess:
    """A running llama-server."""

    def __init__(self, process: asyncio.subprocess.Process, output: int | None) -> None:
        """*output* is the file descriptor of its output, None if it writes to our stderr."""
        self._process = process
        self._is_over = False
        self._output = output
        self._written = b""
        if output is not None:
            os.set_blocking(output, False)
            asyncio.get_running_loop().add_reader(output, self._read)

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], *, is_shown: bool
    ) -> "LlamaProcess":
        """Start *command* with *environment* added to ours; raises OSError if the start fails."""
        guard = (sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()))
        output, theirs = (None, None) if is_shown else os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *guard,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.__stderr__ if theirs is None else theirs,
                stderr=theirs,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        finally:
            if theirs is not None:
                os.close(theirs)
        get_logger("llama-server").info("started llama-server", pid=process.pid)
        return cls(process, output)

    def _read(self) -> None:
        """Read its output, and keep the last part."""
        with suppress(BlockingIOError):
            while self._output is not None and (data := os.read(self._output, 1 << 16)):
                self._written = (self._written + data)[-_KEPT_BYTES:]
            self.close()

    def close(self) -> None:
        """Stop reading its output."""
        if self._output is not None:
            asyncio.get_running_loop().remove_reader(self._output)
            os.close(self._output)
            self._output = None

    @property
    def last_words(self) -> str:
        """The lines at the end of its output that say why it ended; empty if it writes to our stderr.

        These are the errors among its last lines; if it ended with an exit status and without an error, its
        last lines. SIGKILL leaves no time for a word.
        """
        self._read()
        status = self._process.returncode or 0
        lines = self._written.decode(errors="replace").splitlines()[-_N_LAST_LINES:]
        errors = [line for line in lines if _IS_ERROR.match(line)]
        said = [] if -status == signal.SIGKILL else errors or lines * (status >= 0)
        return "".join(f"\n  {line}" for line in said[-_N_SHOWN:])

    @property
    def last_line(self) -> str:
        """The last line that it wrote, such as a download's progress; empty if it writes to our stderr."""
        lines = self._written.decode(errors="replace").splitlines()  # a progress bar ends with \r
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    async def wait(self) -> str:
        """Wait for its end; return how it ended, in words."""
        status = await self._process.wait()
        self._signal_all(signal.SIGKILL)  # the processes that a wrapper script leaves behind
        self._is_over = True
        return describe_end(status)

    async def stop(self) -> None:
        """End it with SIGTERM; if that takes too long, or if this call is cancelled, with SIGKILL."""
        self._signal_all(signal.SIGTERM)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self.wait()
        finally:
            self._signal_all(signal.SIGKILL)
            await self._process.wait()

    def _signal_all(self, number: signal.Signals) -> None:
        if self._is_over:
            return  # its pid may belong to another process by now
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def describe_end(status: int) -> str:
    """Return an exit status in words; a negative one is the number of a signal."""
    if status >= 0:
        return f"exit status {status}"
    name = next((each.name for each in signal.Signals if each == -status), f"signal {-status}")
    perhaps = ", as the kernel does when memory runs out" * (-status == signal.SIGKILL)
    return f"killed by {name}{perhaps}"


# Keeping llama-server running.

_LOOK_SECONDS = 0.2
TELL_SECONDS = 20.0
"""While a start takes long, its progress is logged this often."""
_STEADY_SECONDS = 60.0
"""If a process was ready for this long, failures are counted from zero again."""


IsReady = Callable[[], Awaitable[bool]]


async def keep_running(
    command: Sequence[str],
    environment: Mapping[str, str],
    is_ready: IsReady,
    *,
    restarts: bool,
    is_shown: bool,
    says_ready: str,
) -> str:
    """Run llama-server with *environment* added to ours until cancelled, then stop it.

    If cancelled once more, kill it. *is_shown* sends its output to our stderr. *says_ready* is logged once
    *is_ready* returns True. Returns how llama-server ended by itself, unless it has been ready and
    *restarts* is set: a command that never worked will not work the next time either.
    """
    n_failures = 0
    has_been_ready = False
    while True:
        process = await LlamaProcess.start(command, environment, is_shown=is_shown)
        end, ready_seconds = await _outlast(process, is_ready, says_ready)
        has_been_ready = has_been_ready or ready_seconds is not None
        if not (restarts and has_been_ready):
            return end + "\n`run --restart` starts it again when it dies" * has_been_ready
        n_failures = 1 if (ready_seconds or 0.0) >= _STEADY_SECONDS else n_failures + 1
        delay_seconds = restart_delay_seconds(n_failures)
        says = f"{end}\nIt is started again in {delay_seconds:.0f} s"
        get_logger("llama-server").error(end, restart_in_seconds=delay_seconds, says=says)
        await asyncio.sleep(delay_seconds)


async def _outlast(
    process: LlamaProcess, is_ready: IsReady, says_ready: str
) -> tuple[str, float | None]:
    """Return a process's end in words, and how long it had been ready, None if never.

    Loading can take minutes, and a download longer: now and then its last line is told.
    """
    log, began = get_logger("llama-server"), time.monotonic()
    ended, ready_at, told_at = asyncio.ensure_future(process.wait()), None, began
    try:
        while not ended.done():
            now = time.monotonic()
            if await is_ready():
                ready_at, seconds = now, round(now - began, 1)
                log.info("llama-server is ready", after_seconds=seconds, says=says_ready)
                break
            if now >= told_at + TELL_SECONDS and (line := process.last_line):
                told_at = now
                log.info("llama-server is starting", says=f"llama-server is starting: {line}")
            await asyncio.wait({ended}, timeout=_LOOK_SECONDS)
        how = await ended
    finally:
        ended.cancel()
        await process.stop()
        said = process.last_words
        process.close()
    if ready_at is None:
        return f"llama-server died before it was ready: {how}{said}", None
    return f"llama-server died: {how}{said}", time.monotonic() - ready_at
