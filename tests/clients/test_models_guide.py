"""docs/models.md: the real OpenCode and Claude Code with several models, before a router."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import END_BIAS, N_CTX, Lab
from tests.clients.opencode import OpenCode
from tests.clients.programs import make_repository
from tests.clients.test_guides import do
from tests.documents.blocks import blocks_for
from tests.lab.rig import Rig
from tests.lab.router import Router, link_models
from tests.lab.vocabulary import END_OF_TURN, train_vocabulary

MODELS = {"coder": "hybrid", "small": "full"}
PROMPTS = ("Mend the parser in src/one.py", "Write tests for src/two.py, please")
(CONFIGURATION,) = [b for b in blocks_for(__file__) if b.language == "json"]
(COMMANDS,) = [b for b in blocks_for(__file__) if b.language == "sh"]


class Requests:
    """What the proxy says of the requests of one model."""

    def __init__(self, records: list[dict[str, Any]], model: str) -> None:
        self.of_model = [r for r in records if r["server"] == model]

    @property
    def n_evaluated(self) -> int:
        return sum(record["evaluated"] or 0 for record in self.of_model)


async def requests_of(lab: Lab, model: str) -> Requests:
    async with lab.rig.client.get(lab.rig.admin_url + "/requests?limit=200") as reply:
        return Requests((await reply.json())["requests"], model)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    end = train_vocabulary().tokens.index(END_OF_TURN)
    bias = ("--logit-bias", f"{end}+{END_BIAS}")
    models = link_models(tmp_path / "models", MODELS)
    router = Router(models, slots, n_ctx=N_CTX, extra_args=bias, log_path=tmp_path / "router.log")
    async with Rig(router, slots) as rig:
        for model in MODELS:
            await rig.chat([{"role": "user", "content": "hello"}], model=model)
            async with asyncio.timeout(300):
                while (await rig.health())["reasons"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        yield Lab(rig, tmp_path, make_repository(tmp_path / "shop"), 0)


def with_models(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of one model with the page's in it, and short answers."""
    told = json.loads(CONFIGURATION.text)
    models = told["provider"]["llamacpp"]["models"]
    models["coder"]["limit"]["output"] = 64
    provider = {**config["provider"]["llamacpp"], "models": models}
    return {**config, **told, "provider": {"llamacpp": provider}}


async def test_opencode_has_titles_from_the_small_model(lab: Lab) -> None:
    client = OpenCode(lab.folder / "opencode", lab.rig.base_url)
    config = with_models(json.loads(client.environment["OPENCODE_CONFIG_CONTENT"]))
    client.environment["OPENCODE_CONFIG_CONTENT"] = json.dumps(config)
    await client.ask(PROMPTS[0], lab.repository)
    first = (await requests_of(lab, "coder")).n_evaluated
    await client.ask(PROMPTS[1], lab.repository)
    second = (await requests_of(lab, "coder")).n_evaluated - first
    print(f"\nOpenCode, coder: {first}, {second}")
    assert first > 10_000 and second < first / 10
    assert len((await requests_of(lab, "small")).of_model) > 1


async def test_claude_code_finds_its_header_again(lab: Lab) -> None:
    await do(COMMANDS, lab)
    first = (await requests_of(lab, "coder")).n_evaluated
    await lab.rig.chat([{"role": "user", "content": "hello"}], model="small")
    await do(COMMANDS, lab)
    second = (await requests_of(lab, "coder")).n_evaluated - first
    print(f"\nClaude Code, coder: {first}, {second}")
    assert first > 10_000 and second < first / 10
