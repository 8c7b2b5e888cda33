"""Fixtures around a real llama-server: nothing here is scripted."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.models import model_path
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

KINDS = ("full", "swa", "recurrent", "hybrid", "hybrid_no_mrope")

StartRig = Callable[..., AbstractAsyncContextManager[Rig]]


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
            model_path(kind, "tiny", DEFAULT_MODEL_FOLDER),
            directory if has_slot_save_path else None,
            n_slots=n_slots,
            n_ctx=n_ctx,
            extra_args=extra_args,
            binary=binary,
            log_path=tmp_path / "llama-server.log",
        )
        async with Rig(server, directory, **options) as rig:
            yield rig

    return start
