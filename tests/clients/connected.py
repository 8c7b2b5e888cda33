"""Clients that are set up as a user would do it: by `llama-prefix-cache connect NAME --write`."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.clients.programs import find_program, run
from tests.lab.server import REPOSITORY

PROXY = Path(sys.executable).with_name("llama-prefix-cache")


@dataclass(frozen=True)
class Client:
    """How a client is asked one thing headless: its program and, before the prompt, its arguments."""

    name: str
    program: str
    fresh: tuple[str, ...]
    continued: tuple[str, ...] = ()
    """How the last session is continued; empty, here and below, if it cannot be without a terminal."""
    forked: tuple[str, ...] = ()
    """How the last session is forked; `SESSION` stands for its id."""
    compacted: tuple[str, ...] = ()
    n_at_most: tuple[int, int] = (600, 600)
    """Tokens of a fresh session behind the first one, and of one continued: all requests together."""
    n_compacting: int = 0
    """Tokens at most of a prompt that has the conversation compacted first, or of the command to do so."""
    compact_prompt: str = "What is left to do?"
    n_sessions: int = 2
    """How many fresh sessions until what they share is known."""
    stabilizers: str = "safe"
    script: str = ""
    """What the program runs, where that is an interpreter."""
    has_file: bool = True
    """Whether `connect` writes a file; else it prints variables."""


_N_ID = 36
"""The characters of a UUID, with which codex' files of sessions end."""
FREE = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
SESSION = "SESSION"
CLIENTS = (
    Client(
        "codex",
        "@openai/codex-linux-*/vendor/*/bin/codex",
        ("exec", *FREE),
        ("exec", "resume", "--last", *FREE),
        ("exec", "fork", SESSION, *FREE),
        ("exec", "resume", "--last", *FREE, "-c", "model_auto_compact_token_limit=6000"),
        # The summary is asked for without tools, which stand in front of all: the whole conversation again.
        n_compacting=12000,
    ),
    Client(
        "qwen-code",
        "node-linux-*/bin/node",
        ("--yolo", "--prompt"),
        ("--yolo", "--continue", "--prompt"),
        ("--yolo", "--continue", "--fork-session", "--prompt"),
        ("--yolo", "--continue", "--prompt"),
        # Behind each answer an agent of its own looks for what to remember: 1,000 tokens of orders follow
        # the conversation. A continued session has no date in its first message: all behind it is new.
        (1600, 8000),
        # The summary has a system prompt of its own.
        n_compacting=7500,
        compact_prompt="/compress",
        script="@qwen-code/qwen-code/cli.js",
    ),
    Client("cline", "@cline/cli-linux-*/bin/cline", (), n_at_most=(100, 100)),
    Client(
        "continue",
        "node-linux-*/bin/node",
        ("--print",),
        ("--resume", "--print"),
        n_at_most=(60, 60),
        script="@continuedev/cli/dist/cn.js",
    ),
    Client(
        "kilo",
        "@kilocode/cli-linux-*/bin/kilo",
        ("run",),
        ("run", "--continue"),
        # With a continued session it asks for a title as well.
        n_at_most=(200, 1200),
    ),
    Client(
        "pi",
        "node-linux-*/bin/node",
        ("--offline", "--print"),
        ("--offline", "--continue", "--print"),
        n_at_most=(60, 60),
        script="@earendil-works/pi-coding-agent/dist/cli.js",
    ),
    Client(
        "kimi",
        "node-linux-*/bin/node",
        ("--prompt",),
        ("--continue", "--prompt"),
        # Date and permissions follow the user's first words.
        n_at_most=(400, 400),
        script="@moonshot-ai/kimi-code/dist/main.mjs",
    ),
    Client(
        "copilot",
        "@github/copilot-linux-*/copilot",
        ("--allow-all-tools", "--prompt"),
        ("--allow-all-tools", "--continue", "--prompt"),
        # A folder named after the session stands near the end of the system prompt, before the tools.
        n_at_most=(200, 200),
        n_sessions=3,
        stabilizers="safe, sticky_session",
        has_file=False,
    ),
)


class Connected:
    """A client with a home of its own, in which `connect` has written."""

    def __init__(self, client: Client, home: Path) -> None:
        home.mkdir()
        self._client = client
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(home)}

    async def connect(self, url: str, admin_url: str) -> str:
        """Have the proxy's own command write or tell the client's settings; return what it says."""
        arguments = ["connect", self._client.name, "--url", url]
        arguments += ["--admin", admin_url.removeprefix("http://")]
        if self._client.has_file:
            arguments += ["--write", "--yes"]
        said = (await run(PROXY, arguments, REPOSITORY, self._environment)).decode()
        if not self._client.has_file:
            self._environment |= dict(line.split("=", 1) for line in said.splitlines())
        return said

    async def ask(self, prompt: str, folder: Path, how: tuple[str, ...]) -> None:
        """Give the client one prompt; *how* tells whether in a new conversation."""
        client = self._client
        script = [str(find_program(client.script))] if client.script else []
        arguments = [*script, *(self._last_session() if w == SESSION else w for w in how), prompt]
        await run(find_program(client.program), arguments, folder, self._environment)

    def _last_session(self) -> str:
        sessions = sorted(Path(self._environment["HOME"]).rglob("rollout-*.jsonl"))
        return sessions[-1].stem[-_N_ID:]
