"""Several models behind one address, each with the proxy's cache: llama-server's router, and llama-swap."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.core.prefix import TokenIds, common_prefix_length, token_ids
from tests.lab.conversation import Message, agent_requests, system, tools
from tests.lab.rig import Rig
from tests.lab.router import Router, link_models
from tests.lab.swap import Swap

SLACK_TOKENS = 32
CANARY_TOKENS = 128
KINDS = ("full", "swa", "recurrent", "hybrid")
TOOLS = tools(6)
CHAT = "/v1/chat/completions"

Host = Router | Swap


class Models:
    """A rig before a host of one model of each kind, which are called as their kinds are."""

    def __init__(self, rig: Rig[Host], host: Host) -> None:
        self.rig = rig
        self.host = host
        self.sequences: dict[str, list[TokenIds]] = {}

    async def ask(self, model: str, messages: list[Message], **fields: Any) -> dict[str, Any]:
        return await self.rig.chat(messages, model=model, tools=TOOLS, **fields)

    async def measure_all(self) -> None:
        """Have each model loaded once, so that its rule is known."""
        for model in KINDS:
            await self.ask(model, [{"role": "user", "content": "hello"}], max_tokens=1)
            async with asyncio.timeout(30):
                while (await self.rig.health())["reasons"]:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.02)

    async def n_new(self, model: str, messages: list[Message]) -> int:
        """Return how many tokens of a prompt no earlier one of the model began with."""
        rendered = await self._post(
            model, "/apply-template", {"messages": messages, "tools": TOOLS}
        )
        content = {"content": rendered["prompt"], "add_special": True, "parse_special": True}
        tokens = token_ids((await self._post(model, "/tokenize", content))["tokens"])
        seen = self.sequences.setdefault(model, [])
        n_known = max((common_prefix_length(tokens, s) for s in seen), default=0)
        seen.append(tokens)
        return len(tokens) - n_known

    async def _post(self, model: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post what is no generation, in the host's own way to name a model."""
        if isinstance(self.host, Router):
            return await self.rig.post(path, {"model": model, **body})
        return await self.rig.post(f"/upstream/{model}{path}", body)

    async def last_request(self) -> dict[str, Any]:
        async with self.rig.client.get(self.rig.admin_url + "/requests?limit=1") as reply:
            record: dict[str, Any] = (await reply.json())["requests"][0]
            return record

    def loaded(self) -> set[str]:
        if isinstance(self.host, Router):
            return {model for model, status in self.host.statuses().items() if status == "loaded"}
        return set(self.host.states())


StartModels = Callable[..., AbstractAsyncContextManager[Models]]


@pytest.fixture(params=["router", "swap"])
def start_models(request: pytest.FixtureRequest, tmp_path: Path) -> StartModels:
    """Return a function that starts a host of models, of which one is loaded at a time."""

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Models]:
        slots = tmp_path / "slots"
        slots.mkdir(mode=0o700)
        kinds = {kind: kind for kind in KINDS}
        host: Host
        if request.param == "router":
            models = link_models(tmp_path / "models", kinds)
            host = Router(models, slots, n_ctx=32768, log_path=tmp_path / "router.log")
        else:
            host = Swap(tmp_path, kinds, slots, n_ctx=32768)
        # What is written back is what a swap has written back, not what was idle.
        async with Rig(host, slots, **{"idle_save_seconds": 3600.0, **settings}) as rig:
            yield Models(rig, host)

    return start


async def test_conversation_goes_on_after_its_model_was_swapped_out(
    start_models: StartModels,
) -> None:
    requests = agent_requests(2, 1, header=[system(450)])
    async with start_models() as models:
        await models.measure_all()
        for messages in requests[:2]:
            for kind in KINDS:
                await models.n_new(kind, messages)
                reply = await models.ask(kind, messages)
                assert reply["model"] and models.loaded() == {kind}
        for messages in requests[2:]:
            for kind in KINDS:
                reply = await models.ask(kind, messages)
                record = await models.last_request()
                n_counted = models.host.evaluated_tokens(kind)
                n_new = await models.n_new(kind, messages)
                assert record["server"] == kind
                assert record["evaluated"] <= n_new + SLACK_TOKENS, (kind, record)
                assert n_counted == record["evaluated"] + CANARY_TOKENS
                assert reply["usage"]["prompt_tokens"] == len(models.sequences[kind][-1])
