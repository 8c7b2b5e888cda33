"""docs/models.md, done as it stands: before a router, before llama-swap, before two llama-servers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.documents.blocks import Block, blocks_for
from tests.lab.conversation import Message, agent_requests, system, tools
from tests.lab.models import least_model
from tests.lab.reader import Reader
from tests.lab.router import link_models
from tests.lab.server import find_free_ports, request
from tests.lab.waiting import wait_until

MODELS = {"coder": "hybrid", "small": "full"}
TOOLS = tools(3)


class Host:
    """Somebody who has models in a folder, and does one part of the page."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        link_models(reader.home / "models", MODELS)

    def do(self, part: str, *, more: str = "") -> str:
        """Do the blocks of one part; what is no command is written to the file it names, with *more*."""
        return "".join(self._do(block, more) for block in blocks_of(part))

    def _do(self, block: Block, more: str) -> str:
        _, _, name = block.words.partition(" ")
        if not name:
            return self.reader.do(block.text)
        # Two tests at once may not count from the same port.
        first = find_free_ports(len(MODELS))
        given = f"startPort: {first}\n" if name.endswith(".yaml") else ""
        (self.reader.home / name).write_text(given + block.text + more)
        return ""

    def ask(self, model: str, messages: list[Message]) -> dict[str, Any]:
        """Send a request; return its record."""
        body = {"model": model, "messages": messages, "tools": TOOLS, "max_tokens": 4}
        status, reply = self.get("8081", "POST", "/v1/chat/completions", body)
        assert status == 200, reply
        (record,) = self.get("8082", "GET", "/requests?limit=1")[1]["requests"]
        return dict(record)

    def health(self) -> dict[str, Any]:
        return dict(self.get("8082", "GET", "/health")[1])

    def get(self, port: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
        return request(self.reader.url(port), method, path, body)


def blocks_of(part: str) -> list[Block]:
    found = [block for block in blocks_for(__file__) if block.words.partition(" ")[0] == part]
    assert found
    return found


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with Reader(tmp_path, least_model("full")) as reader:
        yield Host(reader)


def converse_by_turns(host: Host, *models: str) -> None:
    """Have the same conversation with each model, of which only one is loaded at a time."""
    for i, messages in enumerate(agent_requests(2, 1, header=[system(150)])):
        for model in models:
            record = host.ask(model, messages)
            assert record["server"] == model
            assert i == 0 or record["confirmed"] > record["n_prompt"] * 0.75, record


def test_run_before_a_router(host: Host) -> None:
    host.do("run")
    converse_by_turns(host, *MODELS)


def test_router(host: Host) -> None:
    told = host.do("router")
    assert '"coder"' in told and '"error"' not in told and '"name":"coder"' in told
    converse_by_turns(host, *MODELS)
    # Not handled: an answer of the router's own.
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert host.get("8081", "POST", "/v1/chat/completions", body)[0] == 400


def test_presets_of_a_router(host: Host) -> None:
    host.do("presets")
    listed = host.get("8081", "GET", "/models")[1]["data"]
    flags = {each["id"]: " ".join(each["status"]["args"]) for each in listed}
    assert "--ctx-size 65536" in flags["coder"] and "--swa-checkpoints 16" in flags["coder"]
    assert "--ctx-size 16384" in flags["small"] and "--parallel 1" in flags["small"]
    assert host.ask("local-model", [{"role": "user", "content": "hello"}])["server"] == "coder"


def test_llama_swap(host: Host) -> None:
    host.do("llama-swap", more="    filters: {setParamsByID: {plain: {tools: []}}}\n")
    converse_by_turns(host, *MODELS)
    host.ask("small", [{"role": "user", "content": "hello"}])
    titled = host.ask("titles", [{"role": "user", "content": "hello"}])
    assert titled["server"] == "small" and titled["outcome"] == "hit"
    # A filter that changes the prompt.
    asked: list[Message] = [{"role": "user", "content": "hello"}]
    assert host.ask("plain", asked)["cause"] == "tokenization disagreement"
    assert [reason["kind"] for reason in host.health()["reasons"]] == ["tokenized otherwise"]
    assert host.ask("plain", asked)["outcome"] == "bypass"
    assert host.ask("small", asked)["outcome"] == "hit"
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert host.get("8081", "POST", "/v1/chat/completions", body)[0] == 404


def test_two_llama_servers(host: Host) -> None:
    host.do("pair")
    wait_until(lambda: len(host.health()["servers"]) == 2)
    servers = {server["name"] for server in host.health()["servers"]}
    for i, messages in enumerate(agent_requests(2, 1, header=[system(150)])):
        record = host.ask("any", messages)
        assert record["server"] in servers
        assert i == 0 or record["confirmed"] > record["n_prompt"] * 0.75, record
