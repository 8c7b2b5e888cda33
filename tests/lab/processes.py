"""The processes that a server has started: which they are, and that they end."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

END_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.02


def child_pids(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    with suppress(OSError):  # it has ended, and its children are nobody's
        threads = Path(f"/proc/{pid}/task").iterdir()
        told = [(thread / "children").read_text().split() for thread in threads]
        return [int(child) for children in told for child in children]
    return []


def await_end(pids: Sequence[int]) -> None:
    """Wait until none of the processes runs; raises TimeoutError if one goes on running."""
    deadline = time.monotonic() + END_TIMEOUT_SECONDS
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"some of the processes {pids} do not end")
        time.sleep(_POLL_SECONDS)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state != "Z"  # an orphan stays one where nobody collects them
