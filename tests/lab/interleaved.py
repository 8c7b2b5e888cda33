"""Three conversations that share a header, told in turn through one `run`, and what each request costs."""

from dataclasses import dataclass

from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from tests.lab.conversation import Message, agent_requests, system, tools
from tests.lab.run import RunProcess

SLACK_TOKENS = 32
N_CONVERSATIONS = 3
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
    """Agent conversations whose own parts are short, so that nothing of them may be lost."""

    def __init__(
        self, run: RunProcess, *, n_conversations: int = N_CONVERSATIONS, n_calls: int = 2
    ) -> None:
        self._run = run
        self._prompts: list[TokenIds] = []
        self._requests = [
            agent_requests(3, n_calls, header=HEADER, seed=100 * i) for i in range(n_conversations)
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
