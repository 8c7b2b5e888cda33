"""Mixed traffic without an end: what several people and their agents send, and how they misbehave.

Conversations that grow and are begun anew, on four APIs, streamed and whole; titles, embeddings and several
completions between them; clients that hang up at any moment. Deterministic by seed, but for what time
decides. Chats that are not streamed must be answered as by a llama-server that nobody else asks.
"""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.lab.conversation import Message, agent_requests, prose, system, tools, user

N_TURNS = 3
N_CALLS = 3
TOOLS = tools(2)
HEADERS = [[system(120, seed)] for seed in (7, 8)]
LEAVES = 0.2
"""The share of requests whose client does not wait for the answer."""
TITLES = 0.2
PATIENCE_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.2, 1.0)
HUNG_SECONDS = 300.0
LEAST_DIFFERENCE = 0.1
"""Rounding alone moves a log-probability by up to 0.03 (full attention, in other batches)."""
REFUSED_STATUSES = (502, 503)

Body = dict[str, Any]


class Client:
    """One client, which sends one request after the other."""

    def __init__(
        self, base_url: str, alone_url: str, seed: int, seeds: "itertools.count[int]", n_slots: int
    ) -> None:
        """*seeds* are shared by all clients: each conversation is another one."""
        self._base_url, self._alone_url = base_url, alone_url
        self._n_slots = n_slots
        self._chance = random.Random(seed)
        self._seeds = seeds
        self._conversation: list[list[Message]] = []

    def _next_messages(self) -> list[Message]:
        if not self._conversation:
            header, seed = self._chance.choice(HEADERS), 1000 * next(self._seeds)
            self._conversation = agent_requests(N_TURNS, N_CALLS, header=header, seed=seed)
        return self._conversation.pop(0)

    def next_request(self) -> tuple[str, Body]:
        """Return the path and the body of the next request."""
        stream, n_tokens = self._chance.random() < 0.7, self._chance.choice([1, 8, 40])
        fixed = {"max_tokens": n_tokens, "stream": stream, "temperature": 0}
        chat = fixed | {"logprobs": not stream}  # llama-server refuses them in streams with tools
        if self._chance.random() < TITLES:
            title = [user(self._chance.randrange(10_000), 12)]
            return "/v1/chat/completions", {"messages": title, **chat}
        messages = self._next_messages()
        match self._chance.randrange(10):
            case 0:
                anthropic = [m for m in messages if m["role"] == "user"][-1:]
                return "/v1/messages", {"messages": anthropic, **fixed}
            case 1:
                prompt = prose(self._chance.randrange(100), 300)
                return "/completion", {"prompt": prompt, "n_predict": n_tokens, "stream": stream}
            case 2:
                asked = {"input": prose(self._chance.randrange(100), 300), "stream": stream}
                return "/v1/responses", {**asked, "max_output_tokens": n_tokens, "temperature": 0}
            case 3 if self._chance.random() < 0.5:
                return "/v1/embeddings", {"input": "a word"}
            case 3:
                return "/v1/chat/completions", {"messages": messages, "n": self._n_slots, **chat}
            case _:
                return "/v1/chat/completions", {"messages": messages, "tools": TOOLS, **chat}

    async def visit(self) -> str:
        """Send one request and see it through, or hang up; return what came of it."""
        path, body = self.next_request()
        leaves = self._chance.random() < LEAVES
        patience_seconds = self._chance.choice(PATIENCE_SECONDS) if leaves else HUNG_SECONDS
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(force_close=True)
        try:
            async with asyncio.timeout(patience_seconds):
                async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
                    async with http.post(self._base_url + path, json=body) as reply:
                        content = await reply.read()
        except TimeoutError:
            return "left" if leaves else f"hung: {path}"
        except aiohttp.ClientError as error:
            return f"broken: {path}: {error!r}"
        if reply.status == 501 and path == "/v1/embeddings":
            return "served"  # as llama-server does without --embeddings
        if reply.status in REFUSED_STATUSES or b'"error":' in content:
            return f"refused: {path}: {reply.status} {content[-200:]!r}"
        if reply.status != 200:
            return f"failed: {path}: {reply.status} {content!r}"
        return await self._compare(body, content) if body.get("logprobs") else "served"

    async def _compare(self, body: Body, content: bytes) -> str:
        """Return *served* if the answer, or each of several, begins as llama-server's own."""
        chat, alone = self._alone_url + "/v1/chat/completions", {"cache_prompt": False, "n": 1}
        async with aiohttp.ClientSession() as http:
            async with http.post(chat, json=body | alone) as reply:
                (own,) = _first_tokens(await reply.json())
        answer = json.loads(content)
        own_logprobs = {top["id"]: top["logprob"] for top in own["top_logprobs"]}
        for mine in _first_tokens(answer):
            away = abs(mine["logprob"] - own_logprobs.get(mine["id"], float("-inf")))
            if away >= LEAST_DIFFERENCE:
                return f"other answer: {mine['token']!r} {away:.3f} away, {answer['timings']}"
        return "served"


def _first_tokens(answer: Body) -> list[Body]:
    return [choice["logprobs"]["content"][0] for choice in answer["choices"]]


class Traffic:
    """All clients; what went wrong while llama-server was away is counted as *excused*."""

    def __init__(
        self, base_url: str, alone_url: str, n_clients: int, seed: int, n_slots: int = 2
    ) -> None:
        seeds, urls = itertools.count(1), (base_url, alone_url)
        self._clients = [Client(*urls, seed + i, seeds, n_slots) for i in range(n_clients)]
        self._chance = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.away_since = float("inf")
        self.back_at = 0.0

    async def run(self, goes_on: Callable[[], bool]) -> None:
        """Let all clients send requests as long as *goes_on* says so, and wait for the last answers."""
        await asyncio.gather(*(self._run(client, goes_on) for client in self._clients))

    async def _run(self, client: Client, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            began = time.monotonic()
            self._count(await client.visit(), began)
            await asyncio.sleep(self._chance.choice([0.0, 0.0, 0.02, 0.3]))

    def _count(self, outcome: str, began: float) -> None:
        if outcome in ("served", "left"):
            self.outcomes[outcome] += 1
        elif outcome.startswith("other answer"):
            self.outcomes["other answers"] += 1
            self.failures.append(outcome)
        elif self._was_away_since(began) and not outcome.startswith(("hung", "failed")):
            self.outcomes["excused"] += 1
        else:
            self.outcomes["failed"] += 1
            self.failures.append(outcome)

    def _was_away_since(self, began: float) -> bool:
        return self.away_since <= time.monotonic() and began <= self.back_at
