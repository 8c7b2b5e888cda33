"""What the safe stabilizers cost a request of which nothing is to be changed; no llama-server is needed.

python -m tests.bench.stabilizing
"""

import random
import time
from statistics import median
from typing import Any

import msgspec

from proxy.core.messages import Route
from proxy.stabilize.model import SAFE, Memory, RequestFacts
from proxy.stabilize.run import NOTHING_SEEN, stabilize

SIZES = ((1_000, 250), (32_000, 250), (128_000, 250), (12_001, 1))
"""Tokens of a conversation, and of each of its messages."""
CHARACTERS_A_TOKEN = 4
N_REQUESTS = 25
N_TOOLS = 20


class Agent:
    """Sends requests of a conversation in which every other message is a tool call."""

    def __init__(self, route: Route, n_tokens: int, message_tokens: int) -> None:
        self._random = random.Random(1)
        self._route = route
        self._n_bytes = max(1, message_tokens * CHARACTERS_A_TOKEN // 2)
        self.memory = Memory()
        self.messages: list[dict[str, Any]] = []
        while len(self.messages) * message_tokens < n_tokens:
            self._call() if len(self.messages) % 2 else self._say()

    def body(self) -> dict[str, Any]:
        """Return the next request, decoded anew as each request is."""
        tools = [{"name": f"tool {i}", "description": "Look. " * 100} for i in range(N_TOOLS)]
        body: dict[str, Any] = {"messages": self.messages, "tools": tools}
        if self._route is Route.MESSAGES:
            body["system"] = [{"type": "text", "text": "Be brief. " * 1000}]
        decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(body))
        self._call()
        self._say()
        return decoded

    def _say(self) -> None:
        self.messages.append(
            {"role": "user", "content": self._random.randbytes(self._n_bytes).hex()}
        )

    def _call(self) -> None:
        call_id, value = (
            f"call {len(self.messages)}",
            {"path": self._random.randbytes(self._n_bytes).hex()},
        )
        arguments = msgspec.json.encode(value).decode()
        self.memory.remember_call(call_id, "look", arguments)
        if self._route is Route.MESSAGES:
            block = {"type": "tool_use", "id": call_id, "name": "look", "input": value}
            self.messages.append({"role": "assistant", "content": [block]})
        else:
            function = {"name": "look", "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def milliseconds(route: Route, n_tokens: int, message_tokens: int) -> tuple[float, float]:
    """Return how long the first request of a conversation takes, and a later one."""
    agent, seen, taken = Agent(route, n_tokens, message_tokens), NOTHING_SEEN, []
    facts = RequestFacts(accepts_late_system=True)
    for _ in range(N_REQUESTS):
        body = agent.body()
        began = time.perf_counter()
        result = stabilize(route, body, agent.memory, SAFE, facts, seen)
        agent.memory.learn(result.lessons)
        taken.append(1000 * (time.perf_counter() - began))
        assert result.body is body, result.changed_by
        seen = result.seen
    return taken[0], median(taken[1:])


def main() -> None:
    """Measure and print."""
    for route in (Route.CHAT, Route.MESSAGES):
        for n_tokens, message_tokens in SIZES:
            first, later = milliseconds(route, n_tokens, message_tokens)
            size = f"{route}, {n_tokens:,} tokens in messages of {message_tokens}"
            print(f"{size}: {first:.2f} ms at first, then {later:.3f} ms")


if __name__ == "__main__":
    main()
