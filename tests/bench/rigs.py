"""Rigs and bare llama-servers for the benchmark, none of which outlives it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.lab.models import model_path
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer


def new_server(kind: str, leftovers: ExitStack) -> LlamaServer:
    """Return a llama-server with a tiny model and a temporary --slot-save-path, not yet started."""
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    slots = folder / "slots"
    slots.mkdir()
    model = model_path(kind, "tiny", DEFAULT_MODEL_FOLDER)
    server = LlamaServer(model, slots, log_path=folder / "llama-server.log")
    leftovers.callback(server.kill)
    return server


@asynccontextmanager
async def open_rig(kind: str, leftovers: ExitStack, **options: Any) -> AsyncIterator[Rig]:
    """Start a llama-server with a tiny model, and the proxy before it in this process."""
    server = new_server(kind, leftovers)
    assert server.slot_save_path is not None
    rig = Rig(server, server.slot_save_path, **options)
    try:
        # Not `async with rig`: cancelled while it starts, that would not close what it opened.
        await asyncio.to_thread(server.start)
        await rig.start_proxy()
        yield rig
    finally:
        await rig.stop_proxy()
        await asyncio.to_thread(server.stop)
