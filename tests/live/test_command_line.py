"""The command as users run it, in a process of its own, before a real llama-server."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import openai
import pytest
import yaml

from proxy.errors import SettingsError
from proxy.settings import NAMES
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.models import least_model
from tests.lab.server import REPOSITORY, LlamaServer, find_free_port, request
from tests.lab.settings import load_settings
from tests.lab.waiting import HANG_SECONDS, wait_until

EXAMPLE = REPOSITORY / "deploy" / "config.example.yaml"


@contextmanager
def serving(
    server: LlamaServer, directory: Path, log: Path, *more: str
) -> Iterator[dict[str, str]]:
    """Run `python -m proxy serve` until the block is left; yield the URLs of its two listeners."""
    urls = {name: f"127.0.0.1:{find_free_port()}" for name in ("listen", "admin")}
    command = [sys.executable, "-m", "proxy", "serve", "--upstream", server.base_url]
    command += ["--slot-save-path", str(directory)]
    command += [part for name, address in urls.items() for part in (f"--{name}", address)]
    with log.open("ab") as output:
        process = subprocess.Popen([*command, *more], stderr=output, cwd=REPOSITORY)

    def rules() -> list[str]:
        servers = get(f"http://{urls['admin']}/health").get("servers", [])
        return [each["rule"] for each in servers]

    try:
        wait_until(lambda: rules() == ["restore points"])
        yield {name: f"http://{address}" for name, address in urls.items()}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, log.read_text()


def get(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=HANG_SECONDS) as reply:
            content: dict[str, Any] = msgspec.json.decode(reply.read())
            return content
    except OSError:  # it does not listen yet
        return {}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LlamaServer]:
    (tmp_path / "slots").mkdir()
    model = least_model("hybrid")
    with LlamaServer(model, tmp_path / "slots", log_path=tmp_path / "server.log") as server:
        yield server


def test_served_conversation_survives_a_restart_of_both(
    server: LlamaServer, tmp_path: Path
) -> None:
    requests = agent_requests(2, 1, header=[system(300)])

    def ask(urls: dict[str, str], messages: list[Any]) -> Any:
        with openai.OpenAI(base_url=urls["listen"] + "/v1", api_key="none") as client:
            return client.chat.completions.create(
                model="any",
                messages=messages,
                tools=cast(Any, tools(2)),
                max_tokens=8,
                temperature=0,
            )

    with serving(server, tmp_path / "slots", tmp_path / "proxy.log") as urls:
        ask(urls, requests[0])
        assert get(urls["listen"] + "/health") == {"status": "ok"}
    server.stop()
    server.start()
    with serving(
        server, tmp_path / "slots", tmp_path / "proxy.log", "--log-format", "json"
    ) as urls:
        usage = ask(urls, requests[1]).usage
        assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens / 2
        counted = 'llama_prefix_cache_requests_total{outcome="hit"} 1.0'
        wait_until(lambda: counted in request(urls["admin"], "GET", "/metrics")[1])
    line = next(line for line in reversed(proxy_lines(tmp_path)) if b'"outcome": "hit"' in line)
    assert msgspec.json.decode(line)["chosen"] == "restore"
    assert "Task 0" not in (tmp_path / "proxy.log").read_text()  # no prompt text in the log


def proxy_lines(tmp_path: Path) -> list[bytes]:
    return (tmp_path / "proxy.log").read_bytes().splitlines()


def test_example_configuration_is_complete_and_shows_the_defaults(tmp_path: Path) -> None:
    example = yaml.safe_load(EXAMPLE.read_text())
    assert set(example) == set(NAMES)
    path = {"slot_save_path": str(tmp_path)}
    assert load_settings(path, {}, EXAMPLE) == load_settings(path, {}, None)
    with pytest.raises(SettingsError, match="not a directory"):
        load_settings({}, {}, EXAMPLE)
