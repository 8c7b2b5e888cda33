"""What all tests share: the event loop, Hypothesis's profiles, folders in memory, logs, and Ctrl-C."""

import gc
import os
import shutil
import signal
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from proxy.llama.connection import EventLoop

# By default few examples, always the same: others are looked for in `make test-long`, where they are many.
# No deadline, for machines are busy.
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=600, deadline=None)
settings.load_profile("quick")

ROOT = Path(__file__).parents[1]
MEMORY = Path("/dev/shm")
LEAST_MEMORY_BYTES = 4 << 30


def pytest_configure() -> None:
    """Prepare the process of the tests and all that they start."""
    # Disks need 10 to 40 ms for each sync.
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > LEAST_MEMORY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    # With Python's own 700 a tenth of the tests' time goes into looking for garbage.
    gc.set_threshold(20_000)
    # Shells have what they start in the background ignore Ctrl-C, and commands under test inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection(session: pytest.Session) -> None:
    """Have each worker import a part of the modules first: it finds the others compiled.

    In a fresh clone all workers would else compile the same module at the same time.
    """
    if worker := getattr(session.config, "workerinput", None):
        folders = [ROOT / folder for folder in session.config.args]
        paths = sorted(path for folder in folders for path in folder.glob("**/test_*.py"))
        for path in paths[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
            with suppress(Exception, pytest.skip.Exception):  # the collection tells it
                import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """Run tests on the event loop that `serve` and `run` use."""
    return {"uvloop": EventLoop}


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later garbage collection; some tests ask for one each."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _logs_of_its_own() -> Iterator[None]:
    """Undo what a command sets up in this process: `doctor` logs nothing, and nothing would be captured.

    Tracebacks are plain, as the proxy logs them: structlog's own show all variables, which takes seconds
    beside busy loops, and the event loop stands still meanwhile.
    """
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])
    yield
    structlog.reset_defaults()
