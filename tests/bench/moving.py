"""What is sent to models and llama-servers between which conversations move, and what it should cost.

A conversation has four requests behind a header of about 4,000 tokens: a question, a tool's result, the
next question, a tool's result.
"""

import asyncio
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.ledger import Ledger
from tests.bench.workload import Request
from tests.lab import interleaved
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.models import model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

HEADER = [system(450)]
TOOLS = tools(6)
N_CTX = 32768


@dataclass(frozen=True, slots=True)
class Turn(Request):
    """A request for one model of several."""

    model: str = ""

    def body(self, **fields: Any) -> dict[str, Any]:
        return Request.body(self, tools=TOOLS, model=self.model, **fields)


def conversation(model: str, seed: int = 0) -> list[Turn]:
    """Return the four requests of a conversation with a model."""
    requests = agent_requests(2, 1, header=HEADER, seed=seed)
    return [Turn(f"{model} {i}", messages, model=model) for i, messages in enumerate(requests)]


@dataclass(frozen=True, slots=True)
class Cost(interleaved.Cost):
    """What one request cost, and how long its first token took."""

    seconds: float


def worst(costs: list[Cost], others: list[Cost]) -> tuple[Cost, Cost]:
    """Return the one that evaluated most beyond what was new, and its counterpart of *others*."""
    return max(
        zip(costs, others, strict=True), key=lambda pair: pair[0].n_evaluated - pair[0].n_new
    )


def new_folder(leftovers: ExitStack) -> Path:
    """Return a temporary folder with an empty `slots` in it."""
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    (folder / "slots").mkdir(mode=0o700)
    return folder


async def lengths(
    kind: str, size: str, turns: list[Turn], leftovers: ExitStack
) -> list[tuple[int, int]]:
    """Return each prompt's length, and how much of it no earlier one began with.

    A llama-server of their own counts, so that those which are measured are not asked.
    """
    model = model_path(kind, size, DEFAULT_MODEL_FOLDER)
    server = LlamaServer(model, n_ctx=N_CTX, log_path=new_folder(leftovers) / "counting.log")
    leftovers.callback(server.kill)
    await asyncio.to_thread(server.start)
    ledger = Ledger(server)
    prompts = [await ledger.tokens(turn) for turn in turns]
    await asyncio.to_thread(server.stop)
    return [(len(prompt), ledger.enter(prompt)) for prompt in prompts]
