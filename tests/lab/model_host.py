"""What starts a llama-server for each model: its children end with it."""

import os
import signal
from contextlib import suppress

from tests.lab.processes import await_end, child_pids
from tests.lab.server import STOP_TIMEOUT_SECONDS, ServerProcess


class ModelHost(ServerProcess):
    """A process with llama-servers for children."""

    def stop(self, patience_seconds: float = STOP_TIMEOUT_SECONDS) -> None:
        """End it, and wait for its llama-servers, which it ends itself."""
        children = self._children()
        super().stop(patience_seconds)
        await_end(children)

    def kill(self) -> None:
        """End it with SIGKILL, and its llama-servers too: some would outlive it."""
        children = self._children()
        super().kill()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await_end(children)

    def _children(self) -> list[int]:
        return child_pids(self.pid) if self._process is not None else []
