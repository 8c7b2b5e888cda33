"""Anthropic's and OpenAI's own SDKs see the same through the proxy as of llama-server alone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.lab.models import TEMPLATE_FOLDER, least_model
from tests.lab.rig import Rig
from tests.lab.sdks import anthropic_uses, openai_uses
from tests.lab.sdks.observing import Use, seen_by
from tests.lab.server import LlamaServer
from tests.lab.vocabulary import END_OF_TURN, train_vocabulary

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANTHROPIC: list[Use] = [*anthropic_uses.USES, *anthropic_uses.CALLS]
CALLS: list[Use] = [*anthropic_uses.CALLS, *openai_uses.CALLS]
USES: list[Use] = [*anthropic_uses.USES, *openai_uses.USES, *CALLS]


class Clients:
    """Both SDKs, asking one place."""

    def __init__(self, base_url: str) -> None:
        # llama-server closes idle connections when it likes: a request on one of them fails unsent.
        limits = httpx2.Limits(max_keepalive_connections=0)
        once: dict[str, Any] = {"api_key": "none", "max_retries": 0}
        self._anthropic = AsyncAnthropic(
            base_url=base_url, http_client=anthropic.DefaultAsyncHttpxClient(limits=limits), **once
        )
        self._openai = AsyncOpenAI(
            base_url=base_url + "/v1",
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
            **once,
        )

    async def see(self, use: Use) -> Any:
        if use in ANTHROPIC:
            return await seen_by(use, self._anthropic, anthropic.APIError)
        return await seen_by(use, self._openai, openai.APIError)

    async def __aenter__(self) -> "Clients":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._anthropic.close()
        await self._openai.close()


@dataclass
class Compared:
    """What uses show of llama-server alone, and the proxy before the same llama-server."""

    alone: dict[Use, Any]
    clients: Clients


@asynccontextmanager
async def compared(
    folder: Path, uses: list[Use], *, kind: str, extra_args: tuple[str, ...] = ()
) -> AsyncIterator[Compared]:
    (folder / "slots").mkdir(mode=0o700, parents=True)
    model = least_model(kind)
    options: dict[str, Any] = {"n_ctx": 8192, "extra_args": extra_args, "log_path": folder / "log"}
    server = LlamaServer(model, folder / "slots", **options)
    with server:
        async with Clients(server.base_url) as clients:
            alone = {use: await clients.see(use) for use in uses}
    async with Rig(server, folder / "slots", idle_save_seconds=3600.0) as rig:
        async with Clients(rig.base_url) as clients:
            yield Compared(alone, clients)
        assert ((await rig.health())["reasons"], rig.sample("drift_total")) == ([], 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def talking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Compared]:
    uses = [use for use in USES if use not in CALLS]
    async with compared(tmp_path_factory.mktemp("sdks"), uses, kind="hybrid") as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calling(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Compared]:
    """A model that calls a tool where the grammar asks for one, and otherwise says nothing."""
    folder = tmp_path_factory.mktemp("calls")
    template = folder / "template.jinja"
    text = (TEMPLATE_FOLDER / "plain.jinja").read_text()
    # Without line breaks a token that every answer prefers is all it takes to begin a call.
    template.write_text(text.replace("<tool_call>\\n", "<tool_call>").replace("\\n</", "</"))
    tokens = train_vocabulary().tokens
    biases = {tokens.index("<tool_call>"): 1000, tokens.index(END_OF_TURN): 2000}
    args = [arg for token, bias in biases.items() for arg in ("--logit-bias", f"{token}+{bias}")]
    extra_args = ("--chat-template-file", str(template), *args)
    async with compared(folder, CALLS, kind="full", extra_args=extra_args) as found:
        yield found


def named(uses: list[Use]) -> pytest.MarkDecorator:
    names = [f"{use.__module__.rpartition('.')[2]}.{use.__name__}" for use in uses]
    return pytest.mark.parametrize("use", uses, ids=names)


@named([use for use in USES if use not in CALLS])
async def test_client_sees_what_it_sees_of_llama_server_alone(talking: Compared, use: Use) -> None:
    await assert_sees_the_same(talking, use)


@named(CALLS)
async def test_tools_are_called_as_by_llama_server_alone(calling: Compared, use: Use) -> None:
    await assert_sees_the_same(calling, use)


async def assert_sees_the_same(seen: Compared, use: Use) -> None:
    expected = seen.alone[use]
    for _ in range(2):  # the second time the prompt is cached
        shown = await seen.clients.see(use)
        if use in ANTHROPIC and "raised" in expected:
            assert_is_anthropics_error(shown, expected)
        elif "too_long" in use.__name__:
            # llama-server's words stand behind those that other clients know.
            told, said = shown["body"]["message"], expected["body"]["message"]
            assert told.startswith("prompt is too long: ") and said in told
            known = {"code": "context_length_exceeded", "message": told}
            assert shown == {**expected, "body": {**expected["body"], **known}}
        else:
            assert shown == expected


def assert_is_anthropics_error(shown: Any, expected: Any) -> None:
    """llama-server's errors have OpenAI's shape on all routes."""
    assert (shown["raised"], shown["status"]) == (expected["raised"], expected["status"])
    assert shown["body"]["type"] == "error"
    assert set(shown["body"]["error"]) == {"type", "message"}
    assert expected["body"]["error"]["message"] in shown["body"]["error"]["message"]
