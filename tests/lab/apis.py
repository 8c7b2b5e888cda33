"""One conversation in the body of each API, and what its answer says of tokens."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.lab.conversation import Message

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer says was in the cache, and how long the prompt is."""

    n_cached: int
    n_prompt: int


@dataclass(frozen=True, slots=True)
class Api:
    """How one API asks, and how it tells of reuse."""

    path: str
    count_path: str
    body: Callable[[list[Message], list[Body]], Body]
    usage: Callable[[list[Body]], Usage]

    def ask(self, messages: list[Message], tools: list[Body], **fields: Any) -> Body:
        return {**self.body(messages, tools), "temperature": 0, **fields}

    def limit(self, n_tokens: int) -> Body:
        """Return the field that bounds how much is generated."""
        return {"max_output_tokens" if self.path == "/v1/responses" else "max_tokens": n_tokens}

    def read(self, answer: bytes) -> Usage:
        """Return what an answer says, be it a stream or not."""
        return self.usage(events_of(answer))


def events_of(answer: bytes) -> list[Body]:
    """Return the objects of a stream, or the one of an answer that came whole."""
    if answer.startswith(b"{"):
        return [json.loads(answer)]
    lines = answer.decode().splitlines()
    data = [line[5:].strip() for line in lines if line.startswith("data:")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def _chat_body(messages: list[Message], tools: list[Body]) -> Body:
    return {"messages": messages, "tools": tools}


def _chat_usage(events: list[Body]) -> Usage:
    usage = events[-1]["usage"]
    return Usage(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])


def _messages_body(messages: list[Message], tools: list[Body]) -> Body:
    system = [{"type": "text", "text": m["content"]} for m in messages if m["role"] == "system"]
    functions = [tool["function"] for tool in tools]
    return {
        "messages": [_anthropic_message(m) for m in messages if m["role"] != "system"],
        **({"system": system} if system else {}),
        "tools": [
            {k: f[k] for k in ("name", "description")} | {"input_schema": f["parameters"]}
            for f in functions
        ],
    }


def _anthropic_message(message: Message) -> Body:
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
        return {"role": "user", "content": [{**result, "content": message["content"]}]}
    blocks: list[Body] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        made = call["function"]
        arguments = json.loads(made["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": made["name"], "input": arguments}
        )
    return {"role": message["role"], "content": blocks}


def _messages_usage(events: list[Body]) -> Usage:
    usage = events[0].get("message", events[0])["usage"]
    n_cached = usage["cache_read_input_tokens"]
    return Usage(
        n_cached, n_cached + usage.get("cache_creation_input_tokens", 0) + usage["input_tokens"]
    )


def _responses_body(messages: list[Message], tools: list[Body]) -> Body:
    system = "".join(m["content"] for m in messages if m["role"] == "system")
    return {
        "input": [item for m in messages if m["role"] != "system" for item in _items(m)],
        **({"instructions": system} if system else {}),
        "tools": [{"type": "function", **tool["function"]} for tool in tools],
    }


def _items(message: Message) -> list[Body]:
    if message["role"] == "tool":
        output = {"type": "function_call_output", "call_id": message["tool_call_id"]}
        return [{**output, "output": message["content"]}]
    items: list[Body] = []
    if reasoning := message.get("reasoning_content"):
        thought = {"type": "reasoning_text", "text": reasoning}
        items.append({"type": "reasoning", "summary": [], "content": [thought]})
    if message["content"]:
        kind = "input_text" if message["role"] == "user" else "output_text"
        part = {"type": kind, "text": message["content"]}
        items.append({"type": "message", "role": message["role"], "content": [part]})
    for call in message.get("tool_calls", ()):
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _responses_usage(events: list[Body]) -> Usage:
    usage = events[-1].get("response", events[-1])["usage"]
    return Usage(usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"])


CHAT = Api("/v1/chat/completions", "/v1/chat/completions/input_tokens", _chat_body, _chat_usage)
MESSAGES = Api("/v1/messages", "/v1/messages/count_tokens", _messages_body, _messages_usage)
RESPONSES = Api("/v1/responses", "/v1/responses/input_tokens", _responses_body, _responses_usage)
