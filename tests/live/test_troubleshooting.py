"""What docs/troubleshooting.md quotes is what llama-server and the proxy say."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from proxy.store.offline import open_offline
from tests.documents.blocks import Block, blocks_for
from tests.lab.models import least_model
from tests.lab.reader import Reader
from tests.lab.router import Router, link_models
from tests.lab.server import DEFAULT_SERVER_FOLDER, LlamaServer, request
from tests.lab.swap import Swap
from tests.lab.waiting import wait_until

LIBRARIES = DEFAULT_SERVER_FOLDER / "root" / "usr" / "lib"
PRINTABLE = re.compile(rb"[\x20-\x7e\n]{8,}")
PLACEHOLDER = re.compile(r"%[-+ 0#]*[\d*.]*(?:hh|h|ll|l|z)?[a-zA-Z]")
PREFIX = re.compile(r"^(?:%s: |(?:srv|slot) +%12\.\*s: (?:id %2d \| task %d \| )?)")
"""What a format begins with before the words that pages quote."""
HYBRID = least_model("hybrid")
IDS = [100 + i * 37 % 3000 for i in range(3000)]


def quoted(words: str) -> list[str]:
    """Return the lines of the blocks with these words above them."""
    blocks: list[Block] = [block for block in blocks_for(__file__) if block.words == words]
    assert blocks
    return list(chain.from_iterable(block.text.splitlines() for block in blocks))


def pattern_of(format_: str) -> re.Pattern[str]:
    """Return what matches all that a format of printf can print; of one that has no words, nothing."""
    words = PREFIX.sub("", format_.strip())
    if len(PLACEHOLDER.sub("", words).strip()) < 8:
        return re.compile(r"(?!)")
    return re.compile(".+?".join(map(re.escape, PLACEHOLDER.split(words))))


@pytest.fixture(scope="module")
def formats() -> list[re.Pattern[str]]:
    """Every text in llama-server's libraries."""
    libraries = sorted(LIBRARIES.rglob("libllama*.so*"))
    if not libraries:
        pytest.skip("llama-server is not the one that was unpacked into .lab")
    texts = chain.from_iterable(PRINTABLE.findall(path.read_bytes()) for path in libraries)
    return [pattern_of(text.decode()) for text in set(texts) if b"_Z" not in text]


def test_quoted_lines_are_in_the_binary(formats: list[re.Pattern[str]]) -> None:
    def is_there(line: str) -> bool:
        parts = [line, *re.split(r"(?<=: )", line)]
        return any(found.fullmatch(part.strip()) for found in formats for part in parts)

    lines = quoted("in the binary") + quoted("produced")
    assert [line for line in lines if not is_there(line)] == []
    made_up = ["slot is not available", "failed to restore slot 5"]
    assert [line for line in made_up if is_there(line)] == []


def ask(server: LlamaServer, path: str, **body: Any) -> str:
    return str(server.request("POST", path, body)[1])


def evaluate(server: LlamaServer, prompt: list[int]) -> None:
    body = {"prompt": prompt, "n_predict": 30, "id_slot": 0, "ignore_eos": True}
    assert server.request("POST", "/completion", body)[0] == 200


def said_of_prompts(folder: Path) -> Iterator[str]:
    """Go back in a prompt, ask for a slot that is busy, and for more than fits into one."""
    flags = ("-lv", "5", "--cache-reuse", "64", "--swa-full")
    log_path = folder / "prompts.log"
    with LlamaServer(HYBRID, n_ctx=8192, extra_args=flags, log_path=log_path) as server:
        for prompt in (IDS, IDS[:200] + [5] * 50):
            evaluate(server, prompt)

        def have_met_in_slot() -> bool:
            with ThreadPoolExecutor() as clients:
                list(clients.map(evaluate, [server] * 2, [IDS, IDS[::-1]]))
            return "slot is unavailable" in server.log_text()

        wait_until(have_met_in_slot)
        yield ask(server, "/completion", prompt=IDS * 3)
    yield server.log_text()


def said_of_states(folder: Path) -> Iterator[str]:
    """Restore what cannot be restored: nothing, another build's file, a piece of one, another layout's."""
    log_path = folder / "states.log"
    with LlamaServer(HYBRID, folder, n_slots=1, n_ctx=8192, log_path=log_path) as server:
        ask(server, "/slots/0?action=save", filename="of another layout")
    with LlamaServer(HYBRID, folder, n_ctx=8192, log_path=log_path) as server:
        evaluate(server, IDS)
        ask(server, "/slots/0?action=save", filename="whole")
        state = bytearray((folder / "whole").read_bytes())
        (folder / "piece").write_bytes(state[: len(state) // 20])
        state[4] = 3
        (folder / "of another build").write_bytes(state)
        for name in ("nothing", "of another build", "piece", "of another layout"):
            yield ask(server, "/slots/0?action=restore", filename=name)
        yield ask(server, "/slots/0?action=frobnicate")
    yield server.log_text()


def said_without_flags(folder: Path) -> Iterator[str]:
    with Reader(folder, HYBRID) as reader:
        reader.do("llama-server -m model.gguf -c 4096 -np 2 --no-slots --api-key k --port 8080")
        url = reader.url("8080")
        yield str(request(url, "GET", "/slots")[1])
        for method, path in (
            ("POST", "/slots/0?action=save"),
            ("GET", "/slots"),
            ("GET", "/metrics"),
        ):
            yield str(request(url, method, path, headers={"Authorization": "Bearer k"})[1])


def test_quoted_lines_are_produced(tmp_path: Path) -> None:
    told = chain(said_of_prompts(tmp_path), said_of_states(tmp_path), said_without_flags(tmp_path))
    said = "".join(told)
    assert [line for line in quoted("produced") if generalized(line).search(said) is None] == []


def said_by_router(folder: Path) -> Iterator[str]:
    """Ask for a model that is none, one that is not there, none, and one that may not be loaded."""
    models = link_models(folder / "models", {"full": "full"})
    (models / "broken.gguf").write_text("no model")
    with Router(models, log_path=folder / "router.log") as router:
        for model in ({"model": "broken"}, {"model": "nosuch"}, {}):
            yield str(router.request("POST", "/completion", {"prompt": IDS[:9], **model})[1])
        yield str(router.request("GET", "/props?model=full&autoload=false")[1])


def said_by_swap(folder: Path) -> Iterator[str]:
    settings: dict[str, Any] = {"coder": {"concurrencyLimit": 1}, "broken": {"cmd": "false"}}
    kinds = {"coder": "full", "broken": "full"}
    guard = {"ignorePaths": ["^/slots"]}
    with Swap(folder, kinds, settings=settings, upstream=guard) as swap:
        yield str(swap.request("GET", "/upstream/coder/slots")[1])
        for model in ({"model": "nosuch"}, {}, {"model": "broken"}):
            yield str(swap.request("POST", "/completion", {"prompt": IDS[:9], **model})[1])
        body = {"model": "coder", "prompt": IDS[:9], "n_predict": 1000, "ignore_eos": True}
        with ThreadPoolExecutor() as clients:
            several = clients.map(lambda _: swap.request("POST", "/completion", body)[1], range(2))
            yield "".join(map(str, several))


def test_quoted_lines_of_hosts_are_theirs(tmp_path: Path) -> None:
    for host, told in (
        ("router", said_by_router(tmp_path)),
        ("llama-swap", said_by_swap(tmp_path)),
    ):
        said = "".join(told)
        assert [line for line in quoted(host) if generalized(line).search(said) is None] == []


def generalized(line: str) -> re.Pattern[str]:
    """Return what matches a quoted line with other numbers and another path."""
    escaped = re.sub(r"\d[\d.]*", r"[\\d.]+", re.escape(line.replace("/slots/a", "PATH")))
    return re.compile(escaped.replace("PATH", r"\S+"))


def test_proxy_says_what_is_quoted_of_it(tmp_path: Path) -> None:
    used, serve = tmp_path / "used", "llama-prefix-cache serve --slot-save-path"
    used.mkdir(mode=0o700)
    with Reader(tmp_path, HYBRID) as reader, open_offline(used, may_be_new=True):
        taken, missing = (reader.do(f"{serve} {p}", may_fail=True) for p in (used, tmp_path / "no"))
    first, second = (line.split("/home/you/slots") for line in quoted("proxy"))
    assert str(used).join(first) in taken
    assert str(tmp_path / "no").join(second) in missing
