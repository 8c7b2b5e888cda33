"""The processes that a server has started: which they are, and that they end."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.lab.waiting import wait_until


def child_pids(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    with suppress(OSError):  # it has ended, and its children are nobody's
        threads = Path(f"/proc/{pid}/task").iterdir()
        told = [(thread / "children").read_text().split() for thread in threads]
        return [int(child) for children in told for child in children]
    return []


def await_end(pids: Sequence[int]) -> None:
    """Wait until none of the processes runs; raises TimeoutError if one goes on running."""
    wait_until(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state != "Z"  # an orphan stays one where nobody collects them
