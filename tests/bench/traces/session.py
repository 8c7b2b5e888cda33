"""A coding agent's conversation as its client sends it: grows by user messages, tool calls and answers.

What the client records of an answer is scripted, so it differs from what the model generated, as with
real agents; `real_answer` alone stands for what the model said.
"""

import json
from typing import Any

from tests.bench.traces.text import passage
from tests.bench.traces.trace import Header, Message, Request

ANSWER_CHARACTERS = 400
USER_CHARACTERS = 240
REASONING_CHARACTERS = 120
_VERBS = ("read", "write", "search", "list", "run", "edit", "fetch", "plan", "review", "test")
_NOUNS = ("file", "folder", "symbol", "process", "branch", "patch", "page", "task", "diff", "log")


def header(seed: int, n_characters: int, n_tools: int = 10) -> Header:
    """Return tools and a system prompt of *n_characters* in all; half of them describe the tools."""
    per_tool = n_characters // 2 // n_tools if n_tools else 0
    tools = tuple(_tool(seed, i, per_tool - 250) for i in range(n_tools))
    n_left = n_characters - n_tools * per_tool
    system = {"role": "system", "content": "You are a coding agent.\n" + passage(seed, n_left)}
    return Header(system, tools)


def _tool(seed: int, index: int, n_characters: int) -> dict[str, Any]:
    name = f"{_VERBS[index]}_{_NOUNS[index]}"
    text = {"type": "string", "description": "Where to do it."}
    properties = {"path": text, "limit": {"type": "integer", "description": "How much of it."}}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": passage(seed + 1 + index, n_characters),
            "parameters": {"type": "object", "properties": properties, "required": ["path"]},
        },
    }


class Session:
    """One conversation; every method but `request` adds to it what the next request will hold."""

    def __init__(self, name: str, header: Header, seed: int) -> None:
        self.name = name
        self._header = header
        self._seed = seed
        self._messages: list[Message] = [header.system] if header.system else []
        self._n_requests = 0

    @property
    def n_messages(self) -> int:
        return len(self._messages)

    def request(self) -> Request:
        """Return the next request: all that was said so far."""
        self._n_requests += 1
        label = f"{self.name}.{self._n_requests}"
        return Request(label, tuple(self._messages), self._header.tools)

    def fork(self, name: str, n_messages: int) -> "Session":
        """Return another conversation that begins with the first *n_messages* of this one."""
        other = Session(name, self._header, self._seed + 500)
        other._messages = self._messages[:n_messages]
        return other

    def ask(self, n_characters: int = USER_CHARACTERS) -> "Session":
        """Add a user message."""
        return self.say(self._text(n_characters))

    def say(self, text: str) -> "Session":
        """Add a user message of that text."""
        return self._add({"role": "user", "content": text})

    def answer(self, n_characters: int = ANSWER_CHARACTERS) -> "Session":
        """Add the final answer to the last user message."""
        return self._add({"role": "assistant", "content": self._text(n_characters)})

    def real_answer(self) -> "Session":
        """Add what the model said to the last request, word for word."""
        return self._add({"role": "assistant", "answer_to": f"{self.name}.{self._n_requests}"})

    def call(
        self,
        n_characters: int,
        *,
        n_calls: int = 1,
        n_said: int = 0,
        n_reasoning: int = REASONING_CHARACTERS,
    ) -> "Session":
        """Add a message that says something and calls tools, and results of *n_characters* each."""
        ids = [f"{self.name}-{len(self._messages)}-{i}" for i in range(n_calls)]
        calls = [_tool_call(name, i) for i, name in enumerate(ids)]
        message = {"role": "assistant", "content": self._text(n_said) if n_said else ""}
        self._add({**message, "reasoning_content": self._text(n_reasoning), "tool_calls": calls})
        for name in ids:
            text = self._text(n_characters)
            self._add({"role": "tool", "tool_call_id": f"call_{name}", "content": text})
        return self

    def _add(self, message: Message) -> "Session":
        self._messages.append(message)
        return self

    def _text(self, n_characters: int) -> str:
        self._seed += 1
        return passage(self._seed, n_characters)


def _tool_call(name: str, index: int) -> dict[str, Any]:
    arguments = json.dumps({"path": f"src/{name}.py", "limit": 200 + index})
    function = {"name": "read_file", "arguments": arguments}
    return {"id": f"call_{name}", "type": "function", "function": function}
