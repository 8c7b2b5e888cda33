"""What demo and benchmarks send: a coding agent's session with a header of about 10,000 tokens.

Every client record of an answer is scripted, so it differs from what the model generated, as with real
agents. Each step adds at most about 150 tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.lab.conversation import Message, answer, system, tool_call, tool_result, tools, user

HEADER_WORDS = 1890
RESULT_WORDS = 8
OTHER_SEED = 500
TOOLS = tools()
HEADER = [system(HEADER_WORDS)]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the session; `restarts` says that both processes are restarted before it."""

    label: str
    messages: list[Message]
    restarts: bool = False

    def body(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a deterministic chat completion."""
        fixed = {"messages": self.messages, "tools": TOOLS, "temperature": 0, "seed": 1}
        return {**fixed, **fields}


def call_tool(seed: int) -> list[Message]:
    """Return a tool call and its result, what an agent's loop adds to a conversation."""
    return [tool_call(seed), tool_result(seed, RESULT_WORDS)]


def session() -> list[Request]:
    """Return the whole session: five requests, a restart, and three more."""
    return [*conversation(), second_conversation()]


def conversation() -> list[Request]:
    """Return the first conversation; the restart comes before its sixth request."""
    parts: list[tuple[str, list[Message]]] = [
        ("first request", [user(1)]),
        ("tool result", call_tool(1)),
        ("tool result", call_tool(2)),
        ("next task", [answer(1), user(2)]),
        ("tool result", call_tool(3)),
        ("tool result", call_tool(4)),
        ("next task", [answer(2), user(3)]),
    ]
    return [
        Request(label, messages, restarts=index == 5)
        for index, (label, messages) in enumerate(_accumulate(parts))
    ]


def second_conversation(seed: int = OTHER_SEED) -> Request:
    """Return the first request of another conversation with the same header."""
    return Request("other conversation", [*HEADER, user(seed)])


def tool_loop(n_calls: int) -> list[Request]:
    """Return a first request and *n_calls* tool results after it."""
    parts = [("first request", [user(1)])]
    parts += [("tool result", call_tool(seed)) for seed in range(1, n_calls + 1)]
    return [Request(label, messages) for label, messages in _accumulate(parts)]


def _accumulate(parts: list[tuple[str, list[Message]]]) -> Iterator[tuple[str, list[Message]]]:
    messages = list(HEADER)
    for label, added in parts:
        messages = [*messages, *added]
        yield label, messages
