"""Fixtures: a real llama-server, the proxy before it, and the real clients before that."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.claude_code import ClaudeCode
from tests.clients.ledger import Turn, turns_of
from tests.clients.opencode import OpenCode
from tests.clients.programs import make_repository
from tests.clients.scripted_server import ScriptedServer
from tests.lab.models import TEMPLATE_FOLDER, model_path
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer
from tests.lab.vocabulary import END_OF_TURN, train_vocabulary

N_CTX = 131072
ATTACH_SECONDS = 300.0
END_BIAS = 60.0
"""Makes a random model end its turn after some words; without it, only at the limit of tokens."""


@dataclass(frozen=True)
class Lab:
    """One llama-server, one proxy, one repository, and a home folder for each client."""

    rig: Rig[Any]
    folder: Path
    repository: Path
    n_evaluated_before: int
    """By the proxy's self-test, before any client came."""

    @property
    def scripted(self) -> ScriptedServer:
        assert isinstance(self.rig.server, ScriptedServer)
        return self.rig.server

    def turns(self) -> list[Turn]:
        """Return all requests so far, as they left the proxy."""
        return turns_of(self.scripted, self.n_evaluated_before)

    def claude_code(self, **environment: str) -> ClaudeCode:
        return ClaudeCode(self.folder / "claude-code", self.rig.base_url, **environment)

    def opencode(self, **limits: int) -> OpenCode:
        return OpenCode(self.folder / "opencode", self.rig.base_url, **limits)

    def clients_of_server(self) -> tuple[ClaudeCode, OpenCode]:
        """Return both clients, pointed past the proxy."""
        base_url = self.rig.server.base_url
        return (
            ClaudeCode(self.folder / "claude-code", base_url),
            OpenCode(self.folder / "opencode", base_url),
        )


StartLab = Callable[..., AbstractAsyncContextManager[Lab]]


@pytest.fixture
def start_plain(tmp_path: Path) -> StartLab:
    """Return a function that starts a llama-server which answers as its random model likes."""

    @asynccontextmanager
    async def start(template: str, **settings: Any) -> AsyncIterator[Lab]:
        end = train_vocabulary().tokens.index(END_OF_TURN)
        arguments = _arguments(tmp_path, template, "--logit-bias", f"{end}+{END_BIAS}")
        async with Rig(LlamaServer(**arguments), tmp_path / "slots", **settings) as rig:
            yield await _lab(rig, tmp_path)

    return start


@pytest.fixture
def start_scripted(tmp_path: Path) -> StartLab:
    """Return a function that starts a llama-server whose words are scripted."""

    @asynccontextmanager
    async def start(template: str, **settings: Any) -> AsyncIterator[Lab]:
        server = ScriptedServer(**_arguments(tmp_path, template))
        settings = {"upstream": server.front_url, **settings}
        async with server, Rig(server, tmp_path / "slots", **settings) as rig:
            yield await _lab(rig, tmp_path)

    return start


async def _lab(rig: Rig, folder: Path) -> Lab:
    async with asyncio.timeout(ATTACH_SECONDS):
        while (await rig.health())["state"] != "caching":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return Lab(rig, folder, make_repository(folder / "shop"), await rig.evaluated())


def _arguments(folder: Path, template: str, *more: str) -> dict[str, Any]:
    slots = folder / "slots"
    slots.mkdir(mode=0o700)
    template_path = TEMPLATE_FOLDER / f"{template}.jinja"
    return {
        "model": model_path("hybrid", "tiny", DEFAULT_MODEL_FOLDER),
        "slot_save_path": slots,
        "n_slots": 2,
        "n_ctx": N_CTX,
        "extra_args": ("--chat-template-file", str(template_path), *more),
        "log_path": folder / "llama-server.log",
    }
