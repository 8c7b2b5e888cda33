"""Fixtures around a real llama-server: nothing here is scripted."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.lab.models import least_model
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer, WrongCpu
from tests.lab.steady import measure_an_idle_machine

KINDS = ("full", "swa", "recurrent", "hybrid", "hybrid_no_mrope")


def in_long(*rows: Any) -> list[Any]:
    """Return parameters for `make test-long` alone: other kinds of memory, other ways to the same code."""
    of_several = (row if isinstance(row, tuple) else (row,) for row in rows)
    return [pytest.param(*row, marks=pytest.mark.long) for row in of_several]


ONE_KIND = pytest.mark.parametrize("kind", ["hybrid", *in_long("full", "swa", "recurrent")])
"""What is the same for all kinds of memory: the one that can do least stands for all."""

StartRig = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture(autouse=True)
def _is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide what pays as on an idle machine."""
    measure_an_idle_machine(monkeypatch)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return an empty directory for states."""
    path = tmp_path / "slots"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def start_rig(tmp_path: Path) -> StartRig:
    """Return a function that starts llama-server with a tiny model, and the proxy before it."""

    @asynccontextmanager
    async def start(
        kind: str,
        *,
        n_slots: int = 2,
        n_ctx: int = 65536,
        extra_args: tuple[str, ...] = (),
        has_slot_save_path: bool = True,
        binary: Path | None = None,
        **options: Any,
    ) -> AsyncIterator[Rig]:
        directory = tmp_path / "slots"
        directory.mkdir(mode=0o700, exist_ok=True)
        server = LlamaServer(
            least_model(kind),
            directory if has_slot_save_path else None,
            n_slots=n_slots,
            n_ctx=n_ctx,
            extra_args=extra_args,
            binary=binary,
            log_path=tmp_path / "llama-server.log",
        )
        rig = Rig(server, directory, **options)
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(rig)
            except WrongCpu as error:  # an older build, for newer CPUs
                pytest.skip(str(error))
            yield rig

    return start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """Yield one rig for all tests of a module to which it does not matter what slots and store hold."""
    folder = tmp_path_factory.mktemp("lasting")
    (directory := folder / "slots").mkdir(mode=0o700)
    model = least_model("hybrid")
    async with Rig(LlamaServer(model, directory, log_path=folder / "log"), directory) as rig:
        yield rig
