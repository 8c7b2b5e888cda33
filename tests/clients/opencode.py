"""OpenCode, headless: one run, and what it says of the tokens."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.programs import find_program, run

PROGRAM = "opencode-linux-*/bin/opencode"
QUIET = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}
CONTEXT = 65536


@dataclass(frozen=True)
class Outcome:
    """The events that one run printed."""

    events: list[dict[str, Any]]

    def steps(self) -> list[dict[str, Any]]:
        """Return what the client counted of tokens, request by request."""
        parts = [event["part"] for event in self.events if event["type"] == "step_finish"]
        return [part["tokens"] for part in parts]

    @property
    def n_evaluated(self) -> int:
        """What it counted as not in the cache, over all requests of the run but those for titles."""
        return sum(int(step["input"]) for step in self.steps())


class OpenCode:
    """The program with a home of its own, pointed at the proxy."""

    def __init__(self, home: Path, base_url: str, **limits: int) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "OPENCODE_CONFIG_CONTENT": json.dumps(_config(base_url, limits)),
            **QUIET,
        }

    async def ask(
        self, prompt: str, folder: Path, *flags: str, environment: dict[str, str] | None = None
    ) -> Outcome:
        """Give it one prompt, let it do as it pleases, and return its events."""
        arguments = ["run", "--format", "json", "--auto", *flags, prompt]
        environment = {**self.environment, **(environment or {})}
        printed = await run(find_program(PROGRAM), arguments, folder, environment)
        return Outcome([json.loads(line) for line in printed.splitlines() if line.startswith(b"{")])

    async def stats(self, folder: Path) -> str:
        printed = await run(find_program(PROGRAM), ["stats", "--models"], folder, self.environment)
        return printed.decode()


def _config(base_url: str, limits: dict[str, int]) -> dict[str, Any]:
    model = {"limit": {"context": CONTEXT, "output": 8192, **limits}}
    options = {
        "baseURL": f"{base_url}/v1",
        "apiKey": "none",
        "headerTimeout": False,
        "chunkTimeout": 1800000,
    }
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options}
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": "llamacpp/local-model",
        "small_model": "llamacpp/local-model",
        "share": "disabled",
        "autoupdate": False,
        "provider": {"llamacpp": {**provider, "models": {"local-model": model}}},
    }
