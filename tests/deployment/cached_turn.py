"""What every deployment is tried with: one turn, the end, and the next turn from the saved state."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.conversation import agent_requests, system, tools

PATIENCE_SECONDS = 600
TURNS = agent_requests(2, 1, header=[system(600)])


@dataclass(frozen=True, slots=True)
class Usage:
    """What llama-server says of one request's prompt."""

    n_prompt: int
    n_reused: int


def ask(url: str, messages: list[dict[str, Any]]) -> Usage:
    """Send one turn of an agent to the proxy."""
    body = {"messages": messages, "tools": tools(2), "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
        usage = json.load(reply)["usage"]
    return Usage(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def wait_until_caching(admin: str, goes_on: Callable[[], bool]) -> dict[str, Any]:
    """Return /health as soon as llama-server is known."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    health: dict[str, Any] = {}
    while not health.get("servers") or health["state"] == "forwarding":
        if not goes_on() or time.monotonic() > deadline:
            raise TimeoutError(f"the proxy does not come to cache: {health}")
        time.sleep(0.2)
        try:
            with urllib.request.urlopen(f"{admin}/health", timeout=10) as reply:
                health = json.load(reply)
        except (urllib.error.URLError, ConnectionError):
            continue
    return health


def n_states(slots: Path) -> int:
    """Return how many states are saved in a directory."""
    return len(list(slots.glob("lpc-*.state")))
