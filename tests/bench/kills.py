"""Kills the proxy at random points under traffic, and counts what that left wrong.

Three clients with conversations on two slots of a tiny model, and a store that holds some thirty states, so
that saves, replacements and evictions never pause. Kill -9 comes at a random moment, one time in eight
during the start, and one time in eight for llama-server, too. After each the directory is looked at in a
copy, opened as the next proxy opens it; the next proxy gets the original. Every answer is held against that
of a llama-server that reuses nothing.

python -m tests.bench.kills [--points N] [--memory hybrid] [--seed N]
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from proxy.__main__ import main as proxy_main
from proxy.errors import CacheFault
from proxy.log import configure_logging
from proxy.store.offline import ProblemKind, examine
from proxy.store.store import CheckpointStore
from tests.bench.answers import distance, read_answer
from tests.bench.interrupts import run_section
from tests.bench.progress import tell
from tests.bench.rigs import new_server
from tests.bench.section import Section
from tests.lab.conversation import agent_requests, system
from tests.lab.damage import CHAT, WRONG_DISTANCE, new_server_alone
from tests.lab.models import MEMORIES, model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer, find_free_port

N_POINTS = 1000
N_CLIENTS = 3
N_CONVERSATIONS = 12
BUDGET_BYTES = 16 << 20
MAX_SECONDS = 1.2
"""A kill comes at most so long after the traffic began, or after the start."""
RARELY = 1 / 8
ORPHANS = {ProblemKind.FILE_WITHOUT_ENTRY, ProblemKind.FILE_GONE, ProblemKind.RECORD_GONE}


def _serve(log: str, arguments: list[str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    proxy_main(["serve", *arguments])


class Kills:
    """A proxy that is killed again and again, and what was found after each time."""

    def __init__(self, server: LlamaServer, alone: LlamaServer, seed: int) -> None:
        assert server.slot_save_path is not None
        self._server, self._alone, self._rng = server, alone, random.Random(seed)
        self._directory = server.slot_save_path
        self.log = self._directory.parent / "proxy.log"
        self._port, self._admin_port = find_free_port(), find_free_port()
        # A process of its own that has everything imported: each start is a fork of it.
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload([__name__])
        self._n_conversations = 0
        self._conversations = [self._new_conversation() for _ in range(N_CONVERSATIONS)]
        self._seed = seed
        self.counts: Counter[str] = Counter()
        self.furthest = 0.0
        self.told: list[str] = []

    def _new_conversation(self) -> list[list[Any]]:
        self._n_conversations += 1
        number = self._n_conversations
        return agent_requests(
            3, 1, header=[system(150 + number % 3, seed=number % 3)], seed=100 * number
        )

    async def kill_once(self) -> None:
        arguments = [
            *("--upstream", self._server.base_url, "--slot-save-path", str(self._directory)),
            *("--listen", f"127.0.0.1:{self._port}", "--admin", f"127.0.0.1:{self._admin_port}"),
            *("--max-store-bytes", str(BUDGET_BYTES)),
            *("--idle-save-seconds", "0.05"),
        ]
        proxy = self._forks.Process(target=_serve, args=(str(self.log), arguments), daemon=True)
        proxy.start()
        try:
            traffic = None
            if self._rng.random() >= RARELY:
                await self._ready(proxy.is_alive)
                traffic = asyncio.ensure_future(self._traffic())
            await asyncio.sleep(self._rng.uniform(0, MAX_SECONDS))
        finally:
            proxy.kill()
        with_server = self._rng.random() < RARELY
        if with_server:
            await asyncio.to_thread(self._server.kill)
        proxy.join()
        if traffic is not None:
            await traffic
        self.counts["points"] += 1
        await asyncio.to_thread(self._look)
        if with_server:
            self.counts["with llama-server"] += 1
            await asyncio.to_thread(self._server.start)

    async def _ready(self, is_alive: Any) -> None:
        """Wait until the proxy caches: only then there is something to be killed."""
        url = f"http://127.0.0.1:{self._admin_port}/health"
        async with aiohttp.ClientSession() as client:
            for _ in range(1200):
                assert is_alive(), self.log.read_text(errors="replace")[-2000:]
                with suppress(aiohttp.ClientError):
                    async with client.get(url) as reply:
                        if (await reply.json())["state"] == "caching":
                            return
                await asyncio.sleep(0.05)
        raise AssertionError("the proxy does not cache")

    async def _traffic(self) -> None:
        """Have conversations go on until the proxy is gone, each answered once at a time."""
        free = list(range(N_CONVERSATIONS))
        self._rng.shuffle(free)
        async with aiohttp.ClientSession() as client:
            await asyncio.gather(*(self._go_on(client, free) for _ in range(N_CLIENTS)))

    async def _go_on(self, client: aiohttp.ClientSession, free: list[int]) -> None:
        while free:
            which = free.pop(0)
            if not self._conversations[which]:
                self._conversations[which] = self._new_conversation()
            body = {"messages": self._conversations[which][0], "max_tokens": 4, "temperature": 0}
            body |= {"logprobs": True, "top_logprobs": 10}
            try:
                url = f"http://127.0.0.1:{self._port}{CHAT}"
                async with client.post(url, json=body) as reply:
                    status, content = reply.status, await reply.json()
            except (aiohttp.ClientError, ConnectionError):
                return  # killed: the next proxy is asked again
            if status != 200:
                self.counts["refused"] += 1
                self.told.append(f"{status}: {content}")
                return
            self._conversations[which].pop(0)
            free.append(which)
            await self._compare(body, content)

    async def _compare(self, body: dict[str, Any], content: dict[str, Any]) -> None:
        alone = body | {"cache_prompt": False}
        status, cold = await asyncio.to_thread(self._alone.request, "POST", CHAT, alone)
        assert status == 200, cold
        far = distance(read_answer(content), read_answer(cold))
        self.furthest = max(self.furthest, min(far, 99.0))
        self.counts["answers"] += 1
        self.counts["reused"] += content["timings"]["cache_n"]
        self.counts["wrong"] += far > WRONG_DISTANCE

    def _look(self) -> None:
        """Open a copy of the directory as the next proxy opens it, and hold all of it against its files."""
        with tempfile.TemporaryDirectory(dir=self._directory.parent) as folder:
            copy = Path(folder) / "slots"
            copy.mkdir(mode=0o700)
            for path in self._directory.iterdir():
                if path.is_file():
                    os.link(path, copy / path.name)
            if (self._directory / "index").exists():
                shutil.copytree(self._directory / "index", copy / "index")
            self.counts["left half written"] += any(copy.glob("*.saving"))
            try:
                with closing(CheckpointStore(copy, BUDGET_BYTES)) as store:
                    found = examine(store._directory, lambda _: None)
                    problems = [p for p in found if not p.name.endswith(".saving")]  # counted above
                    n_gone, anew = (
                        store.report["n_entries_without_file"],
                        store.report.get("index_made_anew"),
                    )
                    self.counts["states"] += len(store)
                    self.counts["states swept"] += int(str(store.report["n_files_without_entry"]))
            except CacheFault as error:
                problems, n_gone, anew = [], 0, str(error)
        self.counts["unreadable"] += bool(anew) or any(p.kind not in ORPHANS for p in problems)
        self.counts["orphans"] += bool(n_gone) or any(p.kind in ORPHANS for p in problems)
        if anew or n_gone or problems:
            self.told.append(f"point {self.counts['points']}: {anew}, {n_gone}, {problems}")


async def measure_kills(n_points: int, kind: str, seed: int, leftovers: ExitStack) -> Section:
    """Return the table."""
    section = Section(
        "The proxy killed at random points under traffic",
        "0 wrong, 0 unreadable, 0 orphans",
        (
            *(
                "memory",
                "kill points",
                "llama-server, too",
                "half-written files left",
                "unreadable",
            ),
            *(
                "orphans",
                "answers",
                "wrong",
                "furthest",
                "tokens reused",
                "states found after each",
            ),
        ),
    )
    alone = await asyncio.to_thread(
        new_server_alone, model_path(kind, "tiny", DEFAULT_MODEL_FOLDER), leftovers
    )
    server = new_server(kind, leftovers)
    await asyncio.to_thread(server.start)
    kills = Kills(server, alone, seed)
    try:
        while kills.counts["points"] < n_points:
            await kills.kill_once()
            if kills.counts["points"] % 25 == 0:
                tell(f"{dict(kills.counts)}")
    finally:
        print(*kills.told, sep="\n", flush=True)
        for running in (server, alone):
            await asyncio.to_thread(running.stop)
    c = kills.counts
    section.add(
        *(kind, c["points"], c["with llama-server"], c["left half written"], c["unreadable"]),
        *(c["orphans"], c["answers"], c["wrong"], f"{kills.furthest:.3f}", c["reused"]),
        f"{c['states'] / c['points']:.1f}",
        is_met=not (c["unreadable"] or c["orphans"] or c["wrong"] or c["refused"]),
    )
    return section


def main() -> int:
    """Measure and print; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="Kill the proxy under traffic.")
    parser.add_argument("--points", type=int, default=N_POINTS, metavar="N")
    parser.add_argument("--memory", choices=MEMORIES, default="hybrid")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    arguments = parser.parse_args()
    configure_logging("error", "console")
    work = partial(measure_kills, arguments.points, arguments.memory, arguments.seed)
    return run_section(work)


if __name__ == "__main__":
    sys.exit(main())
