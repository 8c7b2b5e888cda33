"""What verifying a state of 1 GB adds to its restore, cold and warm, against the restore by hand.

One slot, full attention. In every round each way comes once: by hand is the call alone, as it was before
states were verified; verified and not yet verified are the same call inside `CheckpointStore.using`, as a
request makes it. Cold is a file that the page cache was told to forget, warm one that was just read.
Evaluating the state takes some minutes.

"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from proxy.core.model import Checkpoint
from proxy.llama.files import read_state_file
from proxy.store.store import CheckpointStore
from tests.bench.interrupts import run_section
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.lab.models import build_model
from tests.lab.page_cache import forget, read
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer
from tests.store.conftest import new_checkpoint

N_TOKENS = 4000
N_ROUNDS = 15
WAYS = ("by hand", "verified", "not yet verified")
BARS = {("warm", "verified"): 1.02, ("cold", "verified"): 1.02, ("cold", "not yet verified"): 1.1}


class VerificationBenchmark:
    """Times restores of one state into the only slot of a llama-server."""

    def __init__(self, server: LlamaServer, store: CheckpointStore) -> None:
        self._server = server
        self._store = store
        self.checkpoint: Checkpoint
        self.seconds: dict[tuple[str, str], list[float]] = {}

    async def save(self) -> None:
        """Commit the state that all rounds restore."""
        prompt = random.Random(1).choices(range(300, 3900), k=N_TOKENS)
        body = {"prompt": prompt, "n_predict": 0, "id_slot": 0, "cache_prompt": True}
        await self._post("/completion", body)
        files = self._store.files
        name = files.new_temporary_name()
        await self._act("save", name)
        state = read_state_file(files.path(name))
        new = new_checkpoint(self._store, name, state.tokens, state.part_sizes)
        self.checkpoint = await self._store.commit(new, state.tokens)

    async def round(self) -> None:
        """Time each way once."""
        for temperature in ("warm", "cold"):
            for way in WAYS:
                await self._act("erase")
                self._prepare(temperature)
                if way == "not yet verified":
                    self._store._verification.verified.pop(self.checkpoint.id, None)
                began = time.monotonic()
                if way == "by hand":
                    await self._act("restore", self.checkpoint.file_name)
                else:
                    async with self._store.using(self.checkpoint):
                        await self._act("restore", self.checkpoint.file_name)
                self.seconds.setdefault((temperature, way), []).append(time.monotonic() - began)

    def _prepare(self, temperature: str) -> None:
        path = self._store.files.path(self.checkpoint.file_name)
        if temperature == "cold":
            forget(path)
        else:
            read(path)

    async def _act(self, action: str, name: str = "") -> None:
        await self._post(f"/slots/0?action={action}", {"filename": name} if name else {})

    async def _post(self, path: str, body: object) -> None:
        ask = self._server.request
        status, reply = await asyncio.to_thread(ask, "POST", path, body, timeout_seconds=3600.0)
        assert status == 200, reply


async def measure_verification(n_rounds: int, leftovers: ExitStack) -> Section:
    """Return the table."""
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    model = build_model("full", "large", DEFAULT_MODEL_FOLDER)
    server = LlamaServer(model, folder, n_slots=1, n_ctx=8192, log_path=folder / "llama-server.log")
    leftovers.callback(server.kill)
    await asyncio.to_thread(server.start)
    store = CheckpointStore(folder, 1 << 40)
    try:
        benchmark = VerificationBenchmark(server, store)
        tell("verification: evaluating and saving")
        await benchmark.save()
        for index in range(n_rounds):
            tell(f"verification: round {index + 1}")
            await benchmark.round()
    finally:
        store.close()
        await asyncio.to_thread(server.stop)
    size_bytes = benchmark.checkpoint.size_bytes
    section = Section(
        f"Restores of a state of {size_bytes / 1e9:.2f} GB, {n_rounds} rounds",
        "verified <= 1.02, cold and not yet verified <= 1.1 times as long as by hand (medians)",
        ("page cache", "restore", "least", "median", "times by hand (least)", "(median)"),
    )
    for (temperature, way), seconds in benchmark.seconds.items():
        by_hand, bar = benchmark.seconds[temperature, "by hand"], BARS.get((temperature, way))
        least, middle = min(seconds) / min(by_hand), median(seconds) / median(by_hand)
        section.add(
            *(temperature, way, f"{min(seconds):.3f} s", f"{median(seconds):.3f} s"),
            *(f"{least:.2f}", f"{middle:.2f}"),
            is_met=middle <= bar if bar else None,
        )
    return section


def main() -> int:
    """Measure and print; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="Time restores of a state of 1 GB.")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS, metavar="N")
    arguments = parser.parse_args()

    return run_section(partial(measure_verification, arguments.rounds))


if __name__ == "__main__":
    sys.exit(main())
