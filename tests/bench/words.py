"""The demo with a real small model and real words: `make demo MODEL=smollm2`.

A person asks about this project's README, everything is restarted in the middle, and the conversation goes
on: through the proxy, and on llama-server alone. Fails if the proxy evaluates what was evaluated before.
Answers may differ: llama-server rounds otherwise when it evaluates a prompt in other batches, as it does
with and without a restored state or a stop at the header (tests/bench/correctness.py measures how far).
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from tests.bench.demo import NARROWEST
from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import Setup, Stack
from tests.bench.sides import ask
from tests.bench.traces.chat import Reply
from tests.lab.conversation import Message
from tests.lab.server import REPOSITORY

MODEL = ("smollm2", "135m")
N_ANSWER_TOKENS = 24
SLACK_TOKENS = 32
QUESTIONS = (
    "In one sentence: what does llama-prefix-cache do?",
    "When does llama-server lose its work?",
    "Which clients does it work with?",
    "Does the proxy change the answers?",
    "How do I try it without a model?",
)
RESTARTS_BEFORE = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """One question as it was answered; `n_new` tokens of its prompt had not been sent before.

    `n_evaluated` is llama-server's own count, so that what the proxy had evaluated is in it.
    """

    question: str
    reply: Reply
    n_new: int
    n_evaluated: int

    @property
    def n_prompt(self) -> int:
        return _n_prompt(self.reply)


def _n_prompt(reply: Reply) -> int:
    return int(reply.timings["prompt_n"] + reply.timings["cache_n"])


def header(n_words: int | None = None) -> Message:
    """Return a system prompt with the README in it, or its first words."""
    readme = " ".join((REPOSITORY / "README.md").read_text().split(" ")[:n_words])
    return {
        "role": "system",
        "content": f"Answer in one short sentence from this text.\n\n{readme}",
    }


async def converse(
    stack: Stack,
    opening: Message,
    script: list[Message] | None = None,
    *,
    questions: Sequence[str] = QUESTIONS,
    restarts_before: int = RESTARTS_BEFORE,
) -> list[Turn]:
    """Ask all questions, with a restart in the middle.

    The model's answers are sent back with the next question, or those of *script* in their place.
    """
    messages, turns, n_before = [opening], list[Turn](), 0
    for index, question in enumerate(questions):
        if index == restarts_before:
            await stack.restart()
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "temperature": 0, "seed": 1, "max_tokens": N_ANSWER_TOKENS}
        n_evaluated = await stack.evaluated_tokens()
        reply = await asyncio.to_thread(ask, stack.base_url, body)
        n_evaluated = await stack.evaluated_tokens() - n_evaluated
        turns.append(Turn(question, reply, _n_prompt(reply) - n_before, n_evaluated))
        n_before = _n_prompt(reply)
        messages.append(script[index] if script else reply.message)
    return turns


def failures(ours: list[Turn]) -> list[str]:
    """Return what the proxy promises and did not do."""
    return [
        f"{turn.question}: {turn.n_evaluated} tokens evaluated for {turn.n_new} new ones"
        for turn in ours
        if turn.n_evaluated > turn.n_new + SLACK_TOKENS
    ]


def _table(ours: list[Turn], alone: list[Turn]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("question and answer", overflow="fold")
    for heading in (
        "prompt",
        "proxy:\nevaluated",
        "first\ntoken",
        "alone:\nevaluated",
        "first\ntoken",
    ):
        table.add_column(heading, justify="right")
    for index, (mine, theirs) in enumerate(zip(ours, alone, strict=True)):
        if index == RESTARTS_BEFORE:
            table.add_section()
            table.add_row("[dim]restart of both[/]")
        cells = [f"{mine.n_prompt:,}"]
        for turn in (mine, theirs):
            cells += [f"{turn.n_evaluated:,}", f"{turn.reply.first_token_seconds:.2f}s"]
        table.add_row(f"{mine.question}\n[dim]{mine.reply.text.strip()}[/]", *cells)
    return table


async def show(leftovers: ExitStack) -> int:
    """Run the demo on the standard output; return the exit status."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=NARROWEST)
    played: list[list[Turn]] = []
    for title, has_proxy in (("through the proxy", True), ("llama-server alone", False)):
        with console.status(title):
            setup = Setup(n_threads=1, n_ctx=8192)
            stack = Stack(*MODEL, leftovers, has_proxy=has_proxy, setup=setup)
            await stack.start()
            # Both sides are asked the same, to the letter.
            script = [turn.reply.message for turn in played[0]] if played else None
            played.append(await converse(stack, header(), script))
            await stack.stop()
    ours, alone = played
    console.print(_table(ours, alone), highlight=False)
    for failure in (broken := failures(ours)):
        console.print(f"[bold red]not as promised:[/] {failure}")
    n_same = sum(a.reply.text == b.reply.text for a, b in zip(ours, alone, strict=True))
    told = f"{n_same} of {len(ours)} answers are those of llama-server alone, to the letter"
    if n_same < len(ours):
        told += "; a prompt that is evaluated in other batches is rounded otherwise"
    console.print(f"{told}.", highlight=False)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(run_to_the_end(show))
