"""`run` with one command: three conversations on one slot, SIGTERM, and all of them go on."""

import asyncio
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from proxy.core.prefix import TokenIds, common_prefix_length, token_ids
from tests.bench.progress import tell
from tests.bench.rigs import KINDS
from tests.bench.section import Section
from tests.lab.conversation import Message, agent_requests, system, tools
from tests.lab.models import model_path
from tests.lab.run import RunProcess
from tests.lab.server import DEFAULT_MODEL_FOLDER

SLACK_TOKENS = 32
N_CONVERSATIONS = 3
N_BEFORE_RESTART = 4
TOOLS = tools(6, 60)
HEADER = [system(600)]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request cost; `n_new` tokens had never been sent before."""

    n_prompt: int
    n_new: int
    n_evaluated: int

    @property
    def n_at_most(self) -> int:
        return self.n_new + SLACK_TOKENS

    @property
    def is_met(self) -> bool:
        return self.n_evaluated <= self.n_at_most


class Conversations:
    """Three conversations that share a header, told in turn through one `run`."""

    def __init__(self, run: RunProcess) -> None:
        self._run = run
        self._prompts: list[TokenIds] = []
        self._requests = [
            agent_requests(3, 2, header=HEADER, seed=100 * i) for i in range(N_CONVERSATIONS)
        ]

    def tell_all(self, n_request: int) -> list[Cost]:
        """Send the request *n_request* of every conversation; return what each one cost."""
        return [self._ask(requests[n_request]) for requests in self._requests]

    def _ask(self, messages: list[Message]) -> Cost:
        body = {"messages": messages, "tools": TOOLS, "max_tokens": 8, "temperature": 0}
        text = self._run.post("/apply-template", body)["prompt"]
        content = {"content": text, "add_special": True, "parse_special": True}
        prompt = token_ids(self._run.post("/tokenize", content)["tokens"])
        n_known = max((common_prefix_length(prompt, p) for p in self._prompts), default=0)
        n_before = self._run.evaluated_tokens()
        self._run.post("/v1/chat/completions", body)
        self._prompts.append(prompt)
        n_evaluated = self._run.evaluated_tokens() - n_before
        return Cost(len(prompt), len(prompt) - n_known, n_evaluated)


async def measure_restarts(leftovers: ExitStack) -> Section:
    """Return the table of the first request of each conversation after everything was restarted."""
    section = Section(
        "`run`: three conversations on one slot, killed with SIGTERM and started again",
        "evaluated <= new + 32",
        ("memory", "conversation", "prompt", "new", "evaluated", "at most"),
    )
    for kind in KINDS:
        tell(f"run: {kind}")
        for i, cost in enumerate(await asyncio.to_thread(_measure, kind, leftovers)):
            cells = (cost.n_prompt, cost.n_new, cost.n_evaluated, cost.n_at_most)
            section.add(kind, "ABC"[i], *cells, is_met=cost.is_met)
    return section


def _measure(kind: str, leftovers: ExitStack) -> list[Cost]:
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    (folder / "slots").mkdir()
    model = model_path(kind, "tiny", DEFAULT_MODEL_FOLDER)
    run = RunProcess(folder / "run.log", model=model, slot_save_path=folder / "slots")
    leftovers.callback(run.kill)
    run.start_and_await_caching()
    conversations = Conversations(run)
    for n_request in range(N_BEFORE_RESTART):
        conversations.tell_all(n_request)
    run.stop()
    run.start_and_await_caching()
    costs = conversations.tell_all(N_BEFORE_RESTART)
    run.stop()
    return costs
