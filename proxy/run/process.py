"""One llama-server process of our own: its start, its output, its end.

It leads a session of its own, so that Ctrl-C in a terminal reaches only the proxy, which saves first.
Its output goes to our stderr as it comes. None outlives us, whatever becomes of us.
"""

import asyncio
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_N_TAIL_LINES = 15
_CHUNK_BYTES = 1 << 16
_LAST_OUTPUT_SECONDS = 1.0
"""How long the output of an ended process is waited for: something it started may still have the pipe."""


class Output:
    """Passes a process's output through, and remembers how it ended.

    A thread of its own, because a terminal that does not take it must not stop the proxy.
    """

    def __init__(self, source: int) -> None:
        """Take over the readable descriptor *source*."""
        self._lines: deque[bytes] = deque([b""], maxlen=_N_TAIL_LINES + 1)
        self._thread = threading.Thread(target=self._pass_through, args=(source,), daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """Return the last lines."""
        return b"\n".join(self._lines).decode(errors="replace").strip("\n")

    async def ended(self) -> None:
        """Wait a moment for the end of the output."""
        await asyncio.to_thread(self._thread.join, _LAST_OUTPUT_SECONDS)

    def _pass_through(self, source: int) -> None:
        while chunk := os.read(source, _CHUNK_BYTES):
            *whole, rest = (self._lines.pop() + chunk).split(b"\n")
            self._lines.extend((*whole, rest))
            # Whole lines only: our own go to the same place.
            _write(b"".join(line + b"\n" for line in whole))
        _write(self._lines[-1])
        os.close(source)


def _write(chunk: bytes) -> None:
    with suppress(OSError):  # nobody reads our stderr; the process must not be stopped by that
        while chunk:
            chunk = chunk[os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, chunk) :]


class LlamaProcess:
    """A running llama-server."""

    def __init__(self, process: asyncio.subprocess.Process, output: Output) -> None:
        self._process = process
        self._output = output
        self._is_over = False

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> "LlamaProcess":
        """Start *command* with more *environment* than ours; raises OSError if nothing can be started."""
        readable, writable = os.pipe()
        guard = (sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()))
        try:
            # Our own pipe: asyncio's would keep `wait` waiting for whoever else has it open.
            process = await asyncio.create_subprocess_exec(
                *guard,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writable,
                stderr=writable,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        except BaseException:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        return cls(process, Output(readable))

    @property
    def pid(self) -> int:
        return self._process.pid

    def tail(self) -> str:
        """Return the last lines of its output."""
        return self._output.tail()

    async def wait(self) -> str:
        """Wait for its end; return how it ended, in words."""
        status = await self._process.wait()
        self._signal_all(signal.SIGKILL)  # what a wrapper script leaves behind
        self._is_over = True
        await self._output.ended()
        return describe_end(status)

    async def stop(self, seconds: float) -> None:
        """End it with SIGTERM, and with SIGKILL after *seconds* or if we are cancelled meanwhile."""
        self._signal_all(signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                await self.wait()
        except TimeoutError:
            pass
        finally:
            self._signal_all(signal.SIGKILL)
            await self._process.wait()

    def _signal_all(self, number: signal.Signals) -> None:
        if self._is_over:
            return  # its number may be somebody else's by now
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def describe_end(status: int) -> str:
    """Return an exit status, or the number of a signal if it is negative, in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
