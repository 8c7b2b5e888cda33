"""What explaining costs a request, and what 10,000 requests leave in memory; no llama-server is needed.

python -m tests.bench.explain
"""

import random
import time
import tracemalloc
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import structlog

from proxy.core.messages import Route
from proxy.core.model import Prompt, Rule, RuleKind, SlotId
from proxy.core.plan import Plan, Start
from proxy.core.tokens import Namespace, token_ids
from proxy.explain.causes import Cause
from proxy.explain.judgement import Account, Judgement
from proxy.explain.report import Inquiry, Journal, Report
from proxy.llama.answers import Answer
from proxy.llama.client import Timings
from proxy.llama.requests import GenerationBody
from proxy.metrics import Metrics
from proxy.serving.process import Process
from proxy.serving.request import Request

SPACE = Namespace(b"n" * 16)
RULE = Rule(RuleKind.RESTORE_POINTS)
CHARACTERS_A_TOKEN = 4
N_MISSES = 300
SIZES = ((1_000, 250), (32_000, 250), (128_000, 250), (12_001, 1))
"""Tokens of a prompt, and of each of its messages."""


class Conversation:
    """Grows by a message a request; *seed* makes its words its own."""

    def __init__(self, seed: int, n_tokens: int, message_tokens: int = 250) -> None:
        self._random = random.Random(seed)
        self.message_tokens = message_tokens
        self.messages: list[dict[str, Any]] = []
        self.tokens = token_ids(())
        self.text = ""
        while len(self.tokens) < n_tokens:
            self.grow()

    def grow(self) -> None:
        role = "user" if len(self.messages) % 2 else "assistant"
        n_tokens = self.message_tokens
        content = self._random.randbytes(n_tokens * CHARACTERS_A_TOKEN // 2).hex()
        self.messages.append({"role": role if self.messages else "system", "content": content})
        self.text += content
        self.tokens += token_ids(self._random.choices(range(150_000), k=n_tokens))

    def prompt(self) -> tuple[Prompt, GenerationBody]:
        fields = {"messages": list(self.messages)}
        body = GenerationBody(msgspec.json.encode(fields), fields)
        return Prompt(token_ids(self.tokens), SPACE, text=self.text), body


async def _relay(*_: object) -> Answer:
    raise AssertionError("nothing is sent here")


class Explainer:
    """Explains and reports requests as the driver does, with everything but llama-server."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.report = Report(Metrics(), self.journal)
        facts = {
            "rule": RULE,
            "id": "process",
            "opened_store": None,
            "journal": self.journal,
            "served": {},
        }
        self.process = cast(Process, SimpleNamespace(**facts))
        self._n_requests = 0

    def serve(self, prompt: Prompt, body: GenerationBody, n_reused: int) -> tuple[float, Judgement]:
        """Return the milliseconds of CPU that it took to explain, count and record a request."""
        self._n_requests += 1
        request = Request(
            id=f"{self._n_requests:08x}", path="/v1", route=Route.CHAT, keys={}, relay=_relay
        )
        plan = Plan(Start(SlotId(0), n_reused, n_reused), n_shared=n_reused)
        request.answer = Answer(200, None)
        request.account = account = Account(plan, prompt.n_tokens)
        account.add(Timings(n_reused, prompt.n_tokens - n_reused))
        began = time.thread_time()
        inquiry = Inquiry(self.process, prompt, body)
        judgement = inquiry.judge(account, request.id)
        self.report.answered(request, judgement)
        return 1000 * (time.thread_time() - began), judgement


def time_of_hits(n_tokens: int, message_tokens: int) -> float:
    """Return the milliseconds of CPU for a request that goes on from the one before."""
    explainer, conversation = Explainer(), Conversation(1, n_tokens, message_tokens)
    taken = []
    for _ in range(40):
        n_before = len(conversation.tokens) - message_tokens
        taken.append(explainer.serve(*conversation.prompt(), n_before)[0])
        conversation.grow()
    return median(taken[1:])


def time_of_misses(n_tokens: int, message_tokens: int) -> tuple[float, float]:
    """Return the milliseconds of CPU for a request whose system prompt has changed.

    First while the journal fills up, then once it is full: what it forgets makes room in warm memory.
    """
    explainer, first, taken = Explainer(), Conversation(1, n_tokens, message_tokens), []
    for number in range(N_MISSES):
        stamp = f"It is 2026-11-21 {number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}. "
        content = stamp + first.messages[0]["content"]
        system = {**first.messages[0], "content": content}
        raw = msgspec.json.encode({"messages": [system, *first.messages[1:]]})
        tokens = token_ids(first.tokens)
        tokens[5] = number
        prompt = Prompt(tokens, SPACE, text=stamp + first.text)
        body = GenerationBody(raw, msgspec.json.decode(raw))
        milliseconds, judgement = explainer.serve(prompt, body, 5)
        taken.append(milliseconds)
        assert number == 0 or judgement.cause is Cause.DATE, judgement
    return median(taken[1:100]), median(taken[-100:])


def memory_of(n_requests: int, n_tokens: int) -> tuple[float, float, int]:
    """Return MB allocated after requests of conversations of their own, what is counted, and how many."""
    block = Conversation(1, n_tokens)
    tracemalloc.start()
    explainer = Explainer()
    for number in range(n_requests):
        tokens = token_ids(block.tokens)
        tokens[0] = number
        text = f"{number} {block.text}"
        fields = {"messages": [{"role": "user", "content": str(number)}, *block.messages]}
        explainer.serve(Prompt(tokens, SPACE, text=text), GenerationBody(b"", fields), 0)
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    prompts = explainer.journal.prompts
    return allocated / 1e6, prompts.size_bytes / 1e6, len(prompts.newest())


def main() -> None:
    """Measure and print."""
    structlog.configure(processors=[_drop])
    for n_tokens, message_tokens in SIZES:
        hit = time_of_hits(n_tokens, message_tokens)
        miss, later_miss = time_of_misses(n_tokens, message_tokens)
        print(
            f"{n_tokens:,} tokens: {hit:.3f} ms of CPU for a hit, {miss:.3f} ms for a miss, "
            f"{later_miss:.3f} ms once the journal is full"
        )
    allocated, counted, n_kept = memory_of(10_000, 30_000)
    print(
        f"10,000 requests of 30,000 tokens: {allocated:.1f} MB, {counted:.1f} counted, {n_kept} kept"
    )


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


if __name__ == "__main__":
    main()
