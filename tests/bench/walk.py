"""Walks at random through long prompts, and holds every answer against a llama-server that reuses nothing.

Each prompt begins like an earlier one and goes on by up to 5,000 tokens: behind its end or its answer,
behind any token of it, or behind a context checkpoint of some state, one token more or less; many lengths
lie at bounds of batches and windows. Some come together, some clients leave and send again, some answers
are not wanted, some requests may reuse nothing. Chats have messages in their midst edited, and go through
two APIs. Now and then the proxy is restarted, mostly with llama-server.

An answer is wrong if log-probabilities of its first token are further than WRONG from those of the prompt
evaluated from nothing, and from those of the prompt evaluated from nothing in the same two pieces: other
batches round otherwise.

python -m tests.bench.walk [--kind KIND] [--steps N] [--seed N] [--slots N] [--flags="-b 512"]
"""

import argparse
import asyncio
import random
import shlex
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from proxy.log import configure_logging
from tests.bench.answers import distance, read_answer
from tests.bench.interrupts import run_section
from tests.bench.progress import tell
from tests.bench.rigs import new_server
from tests.bench.section import Section
from tests.lab.conversation import answer, system, user
from tests.lab.models import KINDS
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer

WRONG = 0.1
N_KEPT = 8
N_CTX = 16384
MOST_TOKENS = 13_000
LONG_TOKENS = 600
BOUNDS = (128, 256, 512, 1024, 1536, 2048, 4096)
COMPLETION, CHAT, MESSAGES = "/completion", "/v1/chat/completions", "/v1/messages"

Body = dict[str, Any]


class Walk:
    """What was asked so far, and how far the answers were from right ones."""

    def __init__(self, rig: Rig, alone: LlamaServer, seed: int) -> None:
        self._rig, self._alone, self._rng = rig, alone, random.Random(seed)
        self._prompts: list[list[int]] = []
        self._chats: list[list[Any]] = []
        self.counts: Counter[str] = Counter()
        self.furthest = 0.0
        self.told: list[str] = []

    async def step(self) -> None:
        """Perhaps restart something; then send a few requests together, and compare their answers."""
        self.counts["steps"] += 1
        if self._rng.random() < 0.12:
            if self._rng.random() < 0.8:
                await self._rig.settled()
            self._note_restores()
            await self._rig.restart(server=self._rng.random() < 0.8)
        asked = [self._next() for _ in range(self._rng.choice((1, 1, 1, 1, 2, 3)))]
        replies = await asyncio.gather(*(self._ask(path, body) for path, body in asked))
        for (path, body), reply in zip(asked, replies, strict=True):
            await self._compare(path, body, reply)
        if self._rng.random() < 0.5:
            await self._rig.settled()

    def _next(self) -> tuple[str, Body]:
        rng = self._rng
        if rng.random() < 0.15:
            return CHAT, self._next_chat()
        prompt = self._next_prompt()
        body: Body = {"prompt": prompt, "n_predict": rng.choice((0, 1, 8, 40)), "n_probs": 10}
        body |= {"temperature": 0, "return_tokens": True}
        if rng.random() < 0.05:
            body["cache_prompt"] = False
        return COMPLETION, body

    def _next_prompt(self) -> list[int]:
        rng = self._rng
        if not self._prompts or rng.random() < 0.08:
            before, n_more = [], rng.choice((rng.randint(16, 2500), rng.randint(2500, 9000)))
        else:
            before = rng.choice(self._prompts)
            before = before[: self._cut(len(before))]
            n_more = rng.choice((1, rng.randint(2, 600), rng.randint(600, 3000)))
            if rng.random() < 0.3:  # the new tokens, or all of them, end at a bound
                n_more = rng.choice(BOUNDS) + rng.randint(-1, 1)
                n_more -= rng.choice((0, len(before) % 512))
        more = rng.choices(range(100, 3000), k=max(1, n_more))
        return [*before, *more][:MOST_TOKENS] if len(before) < MOST_TOKENS else more

    def _cut(self, n_tokens: int) -> int:
        rng, n_cut = self._rng, n_tokens
        match rng.choice(("end", "end", "end", "any", "near", "bound", "point")):
            case "any":
                n_cut = rng.randint(1, n_tokens)
            case "near":
                n_cut -= rng.choice((rng.randint(1, 8), rng.randint(9, 700)))
            case "bound":
                n_cut = 512 * rng.randint(1, 24) + rng.randint(-1, 1)
            case "point":
                assert self._rig.running.store is not None
                points = [
                    p for c in self._rig.running.store for p in (*c.restore_points, c.n_tokens)
                ]
                n_cut = rng.choice(points or [n_tokens]) + rng.randint(-1, 1)
        return n_cut if 0 < n_cut < n_tokens else n_tokens

    def _next_chat(self) -> Body:
        rng, n = self._rng, self._rng.randrange
        if not self._chats or rng.random() < 0.2:
            self._chats = [
                *self._chats[-3:],
                [system(n(1500) + 20, n(3)), user(n(99), n(1500) + 9)],
            ]
        messages = rng.choice(self._chats)
        if len(messages) > 3 and rng.random() < 0.3:
            messages[rng.randrange(1, len(messages) - 1) | 1] = user(n(9999), n(900) + 9)
        elif rng.random() < 0.8:
            messages += [answer(n(9999)), user(n(9999), n(1500) + 9)]
        del messages[2:-8]
        fields = {"logprobs": True, "top_logprobs": 10, "max_tokens": rng.choice((1, 8))}
        return {"messages": [*messages], "temperature": 0, **fields}

    async def _ask(self, path: str, body: Body) -> Body:
        """Send a request; some clients leave and send it again."""
        if self._rng.random() < 0.08:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(0, 0.6)):
                    await self._rig.post(path, body | {"n_predict": 400})
            self.counts["left"] += 1
        try:
            if path == CHAT and self._rng.random() < 0.3:  # this API tells no probabilities
                fields = {"messages": body["messages"], "max_tokens": 4, "temperature": 0}
                await self._rig.post(MESSAGES, fields)
            return await self._rig.post(path, body)
        except AssertionError as refusal:
            self.told.append(f"step {self.counts['steps']}: {path}: {refusal}")
            return {}

    async def _compare(self, path: str, body: Body, reply: Body) -> None:
        if not reply:
            self.counts["refused"] += 1
            return
        n_reused, n_new = reply["timings"]["cache_n"], reply["timings"]["prompt_n"]
        far = await asyncio.to_thread(self._distance, body, reply, n_reused)
        self.furthest = max(self.furthest, min(far, 99.0))
        self.counts["answers"] += 1
        self.counts["reused"] += n_reused
        self.counts["long"] += bool(n_reused) and n_new >= LONG_TOKENS
        if far > WRONG:
            self.counts["wrong"] += 1
            told = f"{path} {n_reused} + {n_new} tokens: {far:.3f}"
            self.told.append(f"step {self.counts['steps']}: {told}")
        if path == COMPLETION:
            said = reply["tokens"] if self._rng.random() < 0.5 else []
            self._prompts = [*self._prompts[-N_KEPT:], [*body["prompt"], *said]]

    def _distance(self, body: Body, reply: Body, n_reused: int) -> float:
        prompt = body.get("prompt") or self._tokens(body)
        far = self._distance_to(prompt, 0, reply)
        return min(far, self._distance_to(prompt, n_reused, reply)) if far > WRONG else far

    def _distance_to(self, prompt: list[int], n_first: int, reply: Body) -> float:
        return distance(read_answer(reply), read_answer(self._answer_alone(prompt, n_first)))

    def _tokens(self, chat: Body) -> list[int]:
        text = self._post("/apply-template", {"messages": chat["messages"]})["prompt"]
        fields = {"content": text, "add_special": True, "parse_special": True}
        return list(self._post("/tokenize", fields)["tokens"])

    def _answer_alone(self, prompt: list[int], n_first: int) -> Body:
        self._post("/slots/0?action=erase", {})
        fields = {"temperature": 0, "n_probs": 10, "id_slot": 0}
        # llama-server stops four tokens before the end of a prompt in any case.
        if first := prompt[: n_first or -4]:
            self._post(COMPLETION, fields | {"prompt": first, "n_predict": 0})
        return self._post(COMPLETION, fields | {"prompt": prompt, "n_predict": 1})

    def _post(self, path: str, body: Body) -> Body:
        status, reply = self._alone.request("POST", path, body)
        assert status == 200, reply
        return dict(reply)

    def _note_restores(self) -> None:
        self.counts["restores"] += int(self._rig.sample("restores_total", result="done"))

    async def run(self, n_steps: int, seconds: float) -> None:
        began = time.monotonic()
        while self.counts["steps"] < n_steps and time.monotonic() - began < seconds:
            await self.step()
            if self.counts["steps"] % 25 == 0:
                tell(f"{dict(self.counts)}, furthest {self.furthest:.3f}")
        self._note_restores()


async def measure_walk(given: argparse.Namespace, leftovers: ExitStack) -> Section:
    """Return the table."""
    section = Section(
        "A random walk through long prompts",
        "0 wrong",
        (
            *("memory", "slots", "flags", "answers", "wrong", "furthest", "tokens reused"),
            *("restores", f"{LONG_TOKENS} new tokens and more behind reused ones", "clients left"),
        ),
    )
    flags = tuple(shlex.split(given.flags))
    server, alone = (new_server(given.kind, leftovers) for _ in range(2))
    for started, n_slots in ((server, given.slots), (alone, 1)):
        started.n_slots, started.n_ctx, started.extra_args = n_slots, given.slots * N_CTX, flags
    assert server.slot_save_path is not None
    await asyncio.to_thread(alone.start)
    async with Rig(server, server.slot_save_path) as rig:
        walk = Walk(rig, alone, given.seed)
        try:
            await walk.run(given.steps, given.seconds)
        finally:
            print(*walk.told, f"faults: {rig.n_faults()}", sep="\n", flush=True)
    await asyncio.to_thread(alone.stop)
    c = walk.counts
    section.add(
        *(given.kind, given.slots, given.flags, c["answers"], c["wrong"], f"{walk.furthest:.3f}"),
        *(c["reused"], c["restores"], c["long"], c["left"]),
        is_met=not c["wrong"],
    )
    return section


def main() -> int:
    """Measure and print; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="Walk at random through long prompts.")
    parser.add_argument("--kind", choices=KINDS, default="swa")
    parser.add_argument("--steps", type=int, default=1000, metavar="N")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--slots", type=int, default=2, metavar="N")
    parser.add_argument("--flags", default="", help="of llama-server")
    configure_logging("error", "console")
    return run_section(partial(measure_walk, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
