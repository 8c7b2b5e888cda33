"""One streamed answer: what was answered, when, and what llama-server says it cost."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from proxy.core.messages import Route
from tests.bench.traces.trace import Message

REQUEST_SECONDS = 600.0
PATHS = {Route.CHAT: "/v1/chat/completions", Route.MESSAGES: "/v1/messages"}


class ChatFailed(Exception):
    """A request was not answered as it must be."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The whole answer; `timings` are llama-server's own, as the client sees them."""

    message: Message
    text: str
    timings: dict[str, Any]
    first_token_seconds: float
    seconds: float


async def chat(
    client: aiohttp.ClientSession, base_url: str, body: dict[str, Any], form: Route = Route.CHAT
) -> Reply:
    """Stream one answer to its end; raises ChatFailed."""
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    url, read = base_url + PATHS[form], READ[form]
    try:
        async with client.post(url, json={**body, "stream": True}, timeout=timeout) as reply:
            if reply.status != 200:
                raise ChatFailed(f"answered {reply.status}: {await reply.text()}")
            first, chunks = 0.0, []
            async for line in reply.content:
                if line.startswith(b"data: "):
                    first = first or time.monotonic()
                    chunks.append(line[len("data: ") :].strip())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ChatFailed(str(error) or type(error).__name__) from error
    message, timings = read(chunks)
    text = message.get("reasoning_content", "") + message["content"]
    return Reply(message, text, timings, first - began, time.monotonic() - began)


def read_chunks(chunks: Iterable[bytes]) -> tuple[Message, dict[str, Any]]:
    """Return the assistant's message as a client puts it together, and the timings; raises ChatFailed."""
    *events, last = [b"", *chunks]
    if last != b"[DONE]":
        raise ChatFailed(f"the stream ended early: {last.decode(errors='replace')}")
    texts = {"reasoning_content": "", "content": ""}
    timings: dict[str, Any] = {}
    for event in map(json.loads, filter(None, events)):
        if "error" in event:
            raise ChatFailed(f"broke off: {event}")
        timings = event.get("timings", timings)
        for choice in event["choices"]:
            for name in texts:
                texts[name] += choice["delta"].get(name) or ""
    message: Message = {"role": "assistant", "content": texts["content"]}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    return message, timings


def read_events(chunks: Iterable[bytes]) -> tuple[Message, dict[str, Any]]:
    """Return the same of a Messages stream, whose usage says what was evaluated; raises ChatFailed."""
    texts = {"thinking": "", "text": ""}
    timings: dict[str, Any] = {}
    kind = ""
    for event in map(json.loads, filter(None, chunks)):
        kind = event.get("type", "error")
        if kind == "error":
            raise ChatFailed(f"broke off: {event}")
        if kind == "message_start":
            usage = event["message"]["usage"]
            n_new = usage.get("cache_creation_input_tokens", 0)
            timings = {"prompt_n": usage["input_tokens"] + n_new}
        for name in texts:
            texts[name] += event.get("delta", {}).get(name) or ""
    if kind != "message_stop":
        raise ChatFailed(f"the stream ended early: {kind}")
    said = {"role": "assistant", "content": texts["text"]}
    return {**said, "reasoning_content": texts["thinking"]}, timings


READ = {Route.CHAT: read_chunks, Route.MESSAGES: read_events}
