"""What the path of a restore costs, against llama-server's own restore of the same file by hand.

One slot, a hybrid model with states of 10 to 200 MB. Two conversations take turns through the proxy, so
that each request restores its state; counted is the time from its arrival in the queue until the slot is
prepared: planning, verification, restore. Then the same file is restored by hand. Cold is a file that the
page cache was told to forget; "first" is one that was not verified since the proxy's start.

python -m tests.bench.restores [--rounds N] [--folder FOLDER]
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from proxy.core.model import Checkpoint
from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.lab.models import build_model
from tests.lab.page_cache import forget, read
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

N_ROUNDS = 15
KIND, SIZE = "hybrid", "large"
LENGTHS = (48, 600, 2800)
MAX_TIMES = 1.1
WAYS = tuple(product(("warm", "cold"), ("verified", "first")))


class RestoreBenchmark:
    """Times restores of states of one length."""

    def __init__(self, rig: Rig, n_tokens: int) -> None:
        self._rig = rig
        chosen = random.Random(n_tokens)
        self._prompts = [chosen.choices(range(300, 3900), k=n_tokens) for _ in range(2)]
        self._store = rig.running.pool.processes[0].store
        self.proxy: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}
        self.by_hand: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}
        self.n_bytes = 0

    async def run(self, n_rounds: int) -> None:
        """Time each way once a round, after both conversations were saved."""
        for prompt in self._prompts * 2:
            await self._ask(prompt)
        restored, other = self._prompts
        for way in WAYS * n_rounds:
            await self._once(restored, way)
            await self._ask(other)

    async def _once(self, prompt: list[int], way: tuple[str, str]) -> None:
        temperature, verified = way
        path = self._file_of(prompt)
        _bring(path, temperature)
        if verified == "first":
            self._store._verification.verified.pop(self._checkpoint_of(prompt).id, None)
        line = await self._ask(prompt)
        assert line["chosen"] == "restore", line
        self.proxy[way].append(float(line["prepared_seconds"]))
        self.n_bytes = path.stat().st_size
        _bring(path, temperature)
        began = time.monotonic()
        url = f"{self._rig.server.base_url}/slots/0?action=restore"
        async with self._rig.client.post(url, json={"filename": path.name}) as reply:
            assert reply.status == 200, await reply.text()
        self.by_hand[way].append(time.monotonic() - began)

    def _checkpoint_of(self, prompt: list[int]) -> Checkpoint:
        stored = (c for c in self._store if c.n_tokens >= len(prompt) - 8)
        [found] = [
            c
            for c in stored
            if (tokens := self._store.index.tokens(c.id)) and list(tokens[:32]) == prompt[:32]
        ]
        return found

    def _file_of(self, prompt: list[int]) -> Path:
        return self._store.files.path(self._checkpoint_of(prompt).file_name)

    async def _ask(self, prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0}
        await self._rig.post("/completion", body)
        await self._rig.settled()
        async with self._rig.client.get(self._rig.admin_url + "/requests?limit=1") as reply:
            [line] = (await reply.json())["requests"]
        return dict(line)


def _bring(path: Path, temperature: str) -> None:
    """Have the page cache hold all of a file, or nothing of it."""
    (forget if temperature == "cold" else read)(path)


async def measure_restores(n_rounds: int, parent: Path | None, leftovers: ExitStack) -> Section:
    """Return the table."""
    section = Section(
        f"Restores through the proxy and by hand ({KIND}, {SIZE}, medians of {n_rounds})",
        f"verified and warm, through the proxy at most {MAX_TIMES} times as long as by hand",
        ("state", "page cache", "checksums", "by hand", "through the proxy", "times", "added"),
    )
    model = build_model(KIND, SIZE, DEFAULT_MODEL_FOLDER)
    for n_tokens in LENGTHS:
        tell(f"restores: {n_tokens} tokens")
        temporary = tempfile.TemporaryDirectory(prefix="prefix-cache-", dir=parent)
        folder = Path(leftovers.enter_context(temporary))
        log_path = folder / "llama-server.log"
        server = LlamaServer(model, folder, n_slots=1, n_ctx=8192, log_path=log_path)
        leftovers.callback(server.kill)
        async with Rig(server, folder) as rig:
            benchmark = RestoreBenchmark(rig, n_tokens)
            await benchmark.run(n_rounds)
        for way in WAYS:
            ours, by_hand = median(benchmark.proxy[way]), median(benchmark.by_hand[way])
            is_bound = way == ("warm", "verified")
            section.add(
                *(f"{benchmark.n_bytes / 1e6:.0f} MB", *way),
                *(f"{1000 * by_hand:.1f} ms", f"{1000 * ours:.1f} ms"),
                *(f"{ours / by_hand:.2f}", f"{1000 * (ours - by_hand):.1f} ms"),
                is_met=ours / by_hand <= MAX_TIMES if is_bound else None,
            )
    return section


def main() -> int:
    """Measure and print; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="Time restores through the proxy and by hand.")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS, metavar="N")
    parser.add_argument("--folder", type=Path, help="where the states lie, such as /dev/shm")
    arguments = parser.parse_args()

    async def program(leftovers: ExitStack) -> int:
        section = await measure_restores(arguments.rounds, arguments.folder, leftovers)
        print(section.markdown(), flush=True)
        return 1 if section.n_missed else 0

    return run_to_the_end(program)


if __name__ == "__main__":
    sys.exit(main())
