"""What saves and restores cost a neighbour: one client streams, others work in the second slot.

llama-server reads and writes states in the loop that decodes for all slots, so a stream stands still
meanwhile. The neighbours send prompts of which only a few tokens are new, so that evaluating them holds up
the stream as little as possible; what is left are the saves and restores of their states.
"""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from statistics import median

import aiohttp

from tests.bench.processes import Setup, Stack
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.traces.metrics import Counters, add_up, read_counters

N_CONTEXT_CHECKPOINTS = 8
N_PROMPT = 2000
N_NEW = 8
N_REQUESTS = 10
UNDISTURBED_SECONDS = 5.0
PAUSE_SECONDS = 0.3
_FIRST_TOKENS = 5

SAVES, RESTORES = 'saves_total{result="done"}', 'restores_total{result="done"}'
SAVED_BYTES = "saved_bytes_total"


@dataclass(slots=True)
class Stream:
    """One answer as it comes; `gaps` are the seconds between its tokens while it was listened to."""

    gaps: list[float] = field(default_factory=list)
    n_tokens: int = 0
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    _last: float = 0.0

    def note_token(self) -> None:
        now = time.monotonic()
        if self.has_begun.is_set():
            self.gaps.append(now - self._last)
        self._last = now
        self.n_tokens += 1
        if self.n_tokens == _FIRST_TOKENS:
            self.has_begun.set()


class Neighbours:
    """Conversations of token ids; every request of one goes on from the one before."""

    def __init__(self, base_url: str) -> None:
        self._url = base_url + "/completion"
        self._seeds = itertools.count(1)

    def conversation(self) -> list[int]:
        """Return the prompt of a new one."""
        return self._tokens(N_PROMPT)

    async def ask(self, prompt: list[int]) -> float:
        """Add a few tokens to a conversation and have them evaluated; return the seconds it took."""
        prompt += self._tokens(N_NEW)
        began = time.monotonic()
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0}
        async with aiohttp.ClientSession() as client, client.post(self._url, json=body) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()
        return time.monotonic() - began

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[Stream]:
        """Stream an answer that is longer than the block takes."""
        stream = Stream()
        listening = asyncio.ensure_future(self._listen(stream))
        try:
            await stream.has_begun.wait()
            yield stream
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, stream: Stream) -> None:
        body = {"prompt": self._tokens(50), "n_predict": 20_000, "stream": True, "ignore_eos": True}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            async with client.post(self._url, json=body) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: "):
                        stream.note_token()

    def _tokens(self, n_tokens: int) -> list[int]:
        return random.Random(next(self._seeds)).choices(range(300, 3900), k=n_tokens)


class StallBenchmark:
    """Measures one model, through the proxy and without it."""

    def __init__(self, kind: str, size: str, leftovers: ExitStack) -> None:
        self._kind = kind
        self._size = size
        self._leftovers = leftovers
        self.section = Section(
            f"What saves and restores cost a neighbour's stream ({kind}, {size}, 2 slots)",
            "",
            (
                *("through", "in the other slot", "tokens", "median gap", "longest gap"),
                *("saves", "restores", "written", "its answers p50"),
            ),
        )

    async def run(self) -> Section:
        for has_proxy in (False, True):
            stack = self._stack(has_proxy=has_proxy)
            await stack.start()
            neighbours = Neighbours(stack.base_url)
            for what, n_conversations in (
                ("nobody", 0),
                ("one conversation", 1),
                ("two that take turns", 2),
            ):
                tell(f"stall: {'proxy' if has_proxy else 'alone'}, {what}")
                await self._measure(stack, neighbours, what, n_conversations)
            await stack.stop()
        return self.section

    def _stack(self, *, has_proxy: bool) -> Stack:
        n_checkpoints = str(N_CONTEXT_CHECKPOINTS)
        setup = Setup(
            server_arguments=("--ctx-checkpoints", n_checkpoints),
            proxy_options=("--context-checkpoints", n_checkpoints),
        )
        return Stack(self._kind, self._size, self._leftovers, has_proxy=has_proxy, setup=setup)

    async def _measure(
        self, stack: Stack, neighbours: Neighbours, what: str, n_conversations: int
    ) -> None:
        conversations = [neighbours.conversation() for _ in range(n_conversations)]
        for prompt in conversations:
            await neighbours.ask(prompt)
        before = await _counters(stack)
        answer_seconds: list[float] = []
        async with neighbours.streaming() as stream:
            if not conversations:
                await asyncio.sleep(UNDISTURBED_SECONDS)
            for prompt in itertools.islice(itertools.cycle(conversations), N_REQUESTS):
                answer_seconds.append(await neighbours.ask(prompt))
                await asyncio.sleep(PAUSE_SECONDS)
        counters = add_up([await _counters(stack)], before)
        self._add(stack, what, stream, answer_seconds, counters)
        if stack.proxy:
            await stack.proxy.settled()

    def _add(
        self,
        stack: Stack,
        what: str,
        stream: Stream,
        answer_seconds: list[float],
        counters: Counters,
    ) -> None:
        shown = [
            f"{int(counters.get(name, 0))}" if stack.proxy else "-" for name in (SAVES, RESTORES)
        ]
        written = f"{counters.get(SAVED_BYTES, 0) / 1e6:.0f} MB" if stack.proxy else "-"
        self.section.add(
            *("proxy" if stack.proxy else "llama-server alone", what, stream.n_tokens),
            *(f"{median(stream.gaps):.3f} s", f"{max(stream.gaps):.2f} s", *shown, written),
            f"{median(answer_seconds):.2f} s" if answer_seconds else "-",
            is_met=None,
        )


async def _counters(stack: Stack) -> Counters:
    return read_counters(await stack.proxy.metrics()) if stack.proxy else {}
