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
    continued: tuple[str, ...]
    n_at_most: tuple[int, int] = (600, 600)
    """Tokens of a fresh session behind the first one, and of one continued: all requests together."""
    script: str = ""
    """What the program runs, where that is an interpreter."""


FREE = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
CLIENTS = (
    Client(
        "codex",
        "@openai/codex-linux-*/vendor/*/bin/codex",
        ("exec", *FREE),
        ("exec", "resume", "--last", *FREE),
    ),
    Client(
        "qwen-code",
        "node-linux-*/bin/node",
        ("--yolo", "--prompt"),
        ("--yolo", "--continue", "--prompt"),
        # Behind each answer an agent of its own looks for what to remember: 1,000 tokens of orders follow
        # the conversation. A continued session has no date in its first message: all behind it is new.
        (1600, 8000),
        script="@qwen-code/qwen-code/cli.js",
    ),
)


class Connected:
    """A client with a home of its own, in which `connect` has written."""

    def __init__(self, client: Client, home: Path) -> None:
        home.mkdir()
        self._client = client
        self._environment = {"PATH": os.environ["PATH"], "HOME": str(home)}

    async def connect(self, url: str, admin_url: str) -> str:
        """Have the proxy's own command write the client's settings; return what it says."""
        addresses = ["--url", url, "--admin", admin_url.removeprefix("http://")]
        arguments = ["connect", self._client.name, "--write", "--yes", *addresses]
        return (await run(PROXY, arguments, REPOSITORY, self._environment)).decode()

    async def ask(self, prompt: str, folder: Path, *, is_continued: bool = False) -> None:
        """Give the client one prompt, in a new conversation or in the last one."""
        client = self._client
        script = [str(find_program(client.script))] if client.script else []
        arguments = [*script, *(client.continued if is_continued else client.fresh), prompt]
        await run(find_program(client.program), arguments, folder, self._environment)
