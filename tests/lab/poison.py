"""States that llama-server restores with a 200 and then dies over, and what starts it again each time."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from proxy.llama.files import read_state_file
from tests.lab.server import ServerProcess

_LOOK_SECONDS = 0.02


class Poison:
    """A `RewriteStateFile` that spoils files before the proxy reads them: their checksums are right."""

    def __init__(self) -> None:
        self.is_armed = False

    def __call__(self, path: Path) -> None:
        if self.is_armed:
            spoil(path)


def spoil(path: Path) -> None:
    """Have a state of full attention hold a cell at position -1.

    Its lowest position is then -1 though the slot has tokens, which llama-server takes for a defect of its
    own and aborts at the next evaluation (server-context.cpp, "pos_min == -1, but n_past > 0").
    """
    state = read_state_file(path)
    assert state.sections is not None and state.sections[0].cell_bytes
    found = state.sections[0]
    with path.open("r+b") as file:
        file.seek(found.offset + found.cell_bytes)
        file.write(struct.pack("<i", -1))


@dataclass
class Deaths:
    """How often a server has died."""

    n: int = 0


@asynccontextmanager
async def started_again(server: ServerProcess) -> AsyncIterator[Deaths]:
    """Start a server again whenever it dies, as a service manager would, until the block is left."""
    deaths = Deaths()

    async def keep() -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if server.has_died:
                deaths.n += 1
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)

    keeping = asyncio.ensure_future(keep())
    try:
        yield deaths
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
