"""What a trace is: requests, the clients that send them, and the stages in which the clients run.

Pure values; the same trace is the same bytes on every run.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proxy.core.messages import Route

Message = dict[str, Any]
MAX_ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Header:
    """What all conversations of one agent begin with."""

    system: Message | None
    tools: tuple[dict[str, Any], ...] = ()


NO_HEADER = Header(None)


@dataclass(frozen=True, slots=True)
class Request:
    """One chat completion, or Anthropic's message: that has a `system` prompt of its own.

    A message with `answer_to` stands for the real answer to the request of that label.
    """

    label: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    system: tuple[dict[str, Any], ...] = ()

    @property
    def form(self) -> Route:
        return Route.MESSAGES if self.system else Route.CHAT

    def body(self, answers: dict[str, Message] | None = None, **fields: Any) -> dict[str, Any]:
        """Return the body of a deterministic chat completion; *answers* are real ones by label."""
        messages = [(answers or {}).get(m.get("answer_to", ""), m) for m in self.messages]
        body = {"messages": messages, "max_tokens": MAX_ANSWER_TOKENS, "temperature": 0, "seed": 1}
        if self.tools:
            body["tools"] = list(self.tools)
        if self.system:
            body["system"] = list(self.system)
        return {**body, **fields}


Client = tuple[Request, ...]
"""Requests that are sent one after the other, each once the one before is answered."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Clients that run at the same time; the stage ends once all of them are done."""

    clients: tuple[Client, ...]
    restarts: bool = False
    """Both processes are stopped and started again before it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A named sequence of stages, and the llama-servers that it is meant for."""

    name: str
    stages: tuple[Stage, ...]
    slots: tuple[int, ...] = (1,)
    n_ctx: int = 32768
    """Of each slot."""

    @property
    def n_requests(self) -> int:
        return sum(1 for _ in self.requests())

    def requests(self) -> Iterator[Request]:
        for stage in self.stages:
            for client in stage.clients:
                yield from client

    def digest(self) -> str:
        """Return what tells this trace from any other."""
        stages = [
            [stage.restarts, [[request.body() for request in client] for client in stage.clients]]
            for stage in self.stages
        ]
        return hashlib.sha256(json.dumps([self.n_ctx, stages]).encode()).hexdigest()[:16]


def one_client(requests: list[Request], *, restarts: bool = False) -> Stage:
    """Return a stage with a single client."""
    return Stage((tuple(requests),), restarts)
