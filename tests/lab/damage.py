"""Damages state files as failing disks and bad copies do, and asks what conversations answer then.

Times of modification are kept, and sizes except where a file is cut off. Whoever writes into a file changes
its ctime all the same; before a restart of the proxy nobody knows that one.
"""

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from proxy.store.offline import ProblemKind, examine, open_offline
from tests.bench.answers import Answer, distance, read_answer
from tests.lab.conversation import agent_requests, system
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer

CHAT = "/v1/chat/completions"
WRONG_DISTANCE = 0.25
"""Twice what llama-server's answers to the same prompt differ by when it is evaluated in other batches."""

Damage = Callable[[bytearray, bytes, random.Random], None]
"""Changes a file's content, given that of another conversation's file."""


def _flip_a_bit(content: bytearray, other: bytes, rng: random.Random) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _flip_a_high_bit_of_many(content: bytearray, other: bytes, rng: random.Random) -> None:
    for _ in range(64):
        content[rng.randrange(len(content) // 2, len(content))] ^= 0x40


def _zero_a_range(content: bytearray, other: bytes, rng: random.Random) -> None:
    n_bytes = min(4096, len(content) // 4)
    begin = rng.randrange(len(content) - n_bytes)
    content[begin : begin + n_bytes] = bytes(n_bytes)


def _cut_and_extend(content: bytearray, other: bytes, rng: random.Random) -> None:
    begin = rng.randrange(len(content) // 4, len(content))
    content[begin:] = bytes(len(content) - begin)


def _cut_off(content: bytearray, other: bytes, rng: random.Random) -> None:
    del content[rng.randrange(len(content)) :]


def _swap(content: bytearray, other: bytes, rng: random.Random) -> None:
    n_bytes = min(len(content), len(other))
    content[:n_bytes] = other[:n_bytes]


def _swap_the_state(content: bytearray, other: bytes, rng: random.Random) -> None:
    """Leave the head with the tokens as it is: the worst, for llama-server finds nothing wrong with it."""
    begin, end = len(content) // 4, min(len(content), len(other))
    content[begin:end] = other[begin:end]


DAMAGES: tuple[Damage, ...] = (
    *(_flip_a_bit, _flip_a_high_bit_of_many, _zero_a_range, _cut_off),
    *(_cut_and_extend, _swap, _swap_the_state),
)


def damage(directory: Path, rng: random.Random, *, share: float) -> set[str]:
    """Damage a *share* of a store's state files, each in one way; return the names of those."""
    paths = sorted(directory.glob("lpc-*.state"), key=lambda path: path.stat().st_size)
    before = {path: path.read_bytes() for path in paths}
    damaged: set[str] = set()
    for index, path in enumerate(paths):
        if rng.random() >= share:
            continue
        content, other = bytearray(before[path]), before[paths[index - 1]]
        DAMAGES[rng.randrange(len(DAMAGES))](content, other, rng)
        while content == before[path]:
            _flip_a_bit(content, other, rng)
        status = path.stat()
        with path.open("r+b") as file:
            file.write(content)
            file.truncate()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        damaged.add(path.name)
    return damaged


def found_by_check(directory: Path) -> set[str]:
    """Return the files that `check` names in a copy of a store, which a proxy may be using."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "slots"
        shutil.copytree(directory, copy)
        with open_offline(copy) as store:
            problems = examine(store, lambda _: None)
    return {problem.name for problem in problems if problem.kind is ProblemKind.FILE_CHANGED}


SHARES = (1.0, 0.5, 0.5)
"""So many of the states are damaged before each generation: later on some of their successors are whole."""


class Generations:
    """Conversations that go on from damaged states, held against llama-server alone."""

    def __init__(self, rig: Rig, alone: LlamaServer, n_conversations: int, seed: int) -> None:
        self._rig = rig
        self._alone = alone
        self._rng = random.Random(seed)
        self._requests = [
            agent_requests(6, 0, header=[system(250, seed=seed + i)], seed=1000 * i)
            for i in range(n_conversations)
        ]
        self.damaged: set[str] = set()
        self.n_answers = self.n_wrong = self.n_reused = self.n_not_named = self.n_deaths = 0
        self.furthest = 0.0
        self.n_spread = 0
        """How many other files `check` names at the end."""

    @property
    def _directory(self) -> Path:
        return Path(self._rig.settings.slot_save_path)

    async def run(self, *, while_running: bool, n_generations: int = len(SHARES)) -> None:
        """Ask; damage states and go on, generation after generation; restart everything and go on."""
        await self._ask(0)
        await self._rig.settled()
        for generation, share in enumerate(SHARES[:n_generations], start=1):
            await self._damage(share, while_running=while_running)
            await self._ask(generation)
            await self._rig.settled()
        await self._rig.restart()
        await self._ask(n_generations + 1)
        await self._rig.settled()
        self.n_spread = len(found_by_check(self._directory) - self.damaged)

    async def _damage(self, share: float, *, while_running: bool) -> None:
        if not while_running:
            await self._rig.stop_proxy()
        await asyncio.to_thread(self._rig.server.stop)
        changed = damage(self._directory, self._rng, share=share)
        self.damaged |= changed
        self.n_not_named += len(changed - found_by_check(self._directory))
        await asyncio.to_thread(self._rig.server.start)
        if not while_running:
            await self._rig.start_proxy()

    async def _ask(self, generation: int) -> None:
        for requests in self._requests:
            body = {"messages": requests[generation], "max_tokens": 4, "temperature": 0}
            body |= {"logprobs": True, "top_logprobs": 10}
            pid = self._rig.server.pid
            proxied, cold = await asyncio.gather(self._proxied(body), self._cold(body))
            far = distance(proxied, cold)
            self.furthest = max(self.furthest, min(far, 99.0))
            self.n_answers += 1
            self.n_wrong += far > WRONG_DISTANCE
            if not _is_alive(pid):
                self.n_deaths += 1
                await asyncio.to_thread(self._rig.server.kill)
                await asyncio.to_thread(self._rig.server.start)

    async def _proxied(self, body: dict[str, Any]) -> Answer:
        async with self._rig.client.post(self._rig.base_url + CHAT, json=body) as reply:
            content = await reply.json()
        if reply.status != 200:
            return Answer({}, ())  # llama-server died: neither right nor wrong, but far off
        self.n_reused += content["timings"]["cache_n"]
        return read_answer(content)

    async def _cold(self, body: dict[str, Any]) -> Answer:
        alone = body | {"cache_prompt": False}
        status, reply = await asyncio.to_thread(self._alone.request, "POST", CHAT, alone)
        assert status == 200, reply
        return read_answer(reply)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def new_server_alone(model: Path, leftovers: ExitStack) -> LlamaServer:
    """Start a llama-server that saves nothing."""
    server = LlamaServer(model, n_slots=1)
    leftovers.callback(server.kill)
    server.start()
    return server
