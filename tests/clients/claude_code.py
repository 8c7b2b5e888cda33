"""Claude Code, headless: one run, and what it says of the tokens."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.programs import find_program, run

PROGRAM = "@anthropic-ai/claude-code-*/claude"
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "IS_SANDBOX": "1",
}


@dataclass(frozen=True)
class Outcome:
    """What one run printed."""

    said: dict[str, Any]

    @property
    def text(self) -> str:
        return str(self.said.get("result", ""))

    @property
    def session_id(self) -> str:
        return str(self.said["session_id"])

    @property
    def n_cached(self) -> int:
        """What the client counted as read from the cache, over all requests of its session."""
        return self._counted("cacheReadInputTokens")

    @property
    def n_evaluated(self) -> int:
        """What it counted as not in the cache, newly saved or not."""
        return self._counted("inputTokens") + self._counted("cacheCreationInputTokens")

    def _counted(self, name: str) -> int:
        return sum(int(model[name]) for model in self.said["modelUsage"].values())


class ClaudeCode:
    """The program with a home of its own, pointed at the proxy."""

    def __init__(self, home: Path, base_url: str, **environment: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "local-model",
            **QUIET,
            **environment,
        }

    async def ask(
        self, prompt: str, folder: Path, *flags: str, environment: dict[str, str] | None = None
    ) -> Outcome:
        """Give it one prompt, let it do as it pleases, and return what it says at the end."""
        arguments = ["-p", prompt, "--output-format", "json", *flags]
        arguments.append("--dangerously-skip-permissions")
        environment = {**self.environment, **(environment or {})}
        printed = await run(find_program(PROGRAM), arguments, folder, environment)
        return Outcome(json.loads(printed))
