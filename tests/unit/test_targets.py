"""How calls name the model that they are for."""

import json
import re
import time
from typing import Any

import pytest

from proxy.errors import UpstreamRefused
from proxy.llama.client import LlamaServer, Target
from proxy.llama.connection import new_session
from proxy.llama.hosts import Models, Router, Swap
from proxy.llama.requests import unloads_models
from tests.lab.server import REPOSITORY

BASE = "http://10.0.0.1:8080/prefix"
MODELS = Models(frozenset(), frozenset({"qwen", "author/model", "author"}), {"nick": "qwen"})


def test_llama_server_of_its_own_is_asked_as_it_is() -> None:
    target = Target(BASE)
    assert target.addressed("GET", "/props", b"{}") == ("/props", b"{}")
    assert target.name == "10.0.0.1:8080"


def test_router_is_told_the_model_and_never_to_load_it() -> None:
    target = Target(BASE, "a b&c", "router")
    assert target.addressed("GET", "/props", None) == (
        "/props?model=a%20b%26c&autoload=false",
        None,
    )
    sent = b'{"model": "other", "filename": "x", "n": 1.0}'
    path, body = target.addressed("POST", "/slots/0?action=save", sent)
    assert path == "/slots/0?action=save&autoload=false"
    assert body is not None and json.loads(body) == {"filename": "x", "n": 1.0, "model": "a b&c"}


UNREACHED = b"proxy error: Could not establish connection"


@pytest.mark.parametrize(
    ("target", "status", "content", "lost"),
    [
        (Target(BASE), 500, UNREACHED, ""),
        (Target(BASE), 502, b"<html>nginx", "after"),
        (Target(BASE), 503, b"<html>nginx", ""),
        (Target(BASE, "qwen", "router"), 500, UNREACHED, "before"),
        (Target(BASE, "qwen", "router"), 502, b"", ""),
        (Target(BASE, "qwen", "llama-swap"), 502, b"", "after"),
        (Target(BASE, "qwen", "llama-swap"), 502, b"upstream command exited prematurely", ""),
        (Target(BASE, "qwen", "llama-swap"), 500, b"", ""),
    ],
)
def test_host_that_cannot_reach_llama_server_is_understood(
    target: Target, status: int, content: bytes, lost: str
) -> None:
    assert target.lost(status, content) == lost


def test_llama_swap_is_asked_by_path() -> None:
    target = Target(BASE, "author/a model?", "llama-swap")
    there = "/upstream/author/a%20model%3F/props"
    assert target.addressed("GET", "/props", b"{}") == (there, b"{}")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/upstream/qwen/v1/chat/completions", ("qwen", "/v1/chat/completions")),
        ("/upstream/author/model/slots", ("author/model", "/slots")),
        ("/upstream/author/props", ("author", "/props")),
        ("/upstream/nick/props", ("nick", "/props")),
        ("/upstream/unknown/props", ("unknown", "/props")),
        ("/upstream/qwen", ("qwen", "")),
        ("/upstream/team/gpt/slots/0", ("team/gpt", "/slots/0")),
        ("/upstream/team/gpt//slots/0", ("team/gpt", "//slots/0")),
        ("/upstream/team/gpt/v1/messages", ("team/gpt", "/v1/messages")),
        ("/upstream/qwen/v1/messages\xa0 \n", ("qwen", "/v1/messages")),
        ("/v1/models", ("asked", "/v1/models")),
    ],
)
def test_path_of_llama_swap_names_a_model(path: str, found: tuple[str, str]) -> None:
    assert Swap.split_path(path, "asked", MODELS) == found


def test_longest_name_in_a_path_counts() -> None:
    path = "/upstream/author/model/v1/messages"
    assert Swap.split_path(path, "", MODELS) == ("author/model", "/v1/messages")


def test_path_of_thousands_of_parts_is_read_at_once() -> None:
    """It took six seconds, in which nothing else was served."""
    began = time.thread_time()
    assert Swap.split_path("/upstream/" + "a/" * 16_000, "", MODELS)[0] == "a"
    assert time.thread_time() - began < 1


def test_path_of_a_router_names_no_model() -> None:
    path = "/upstream/author/model/v1/messages"
    assert Router.split_path(path, "asked", MODELS) == ("asked", path)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_question_which_models_there_are_unloads_none(method: str) -> None:
    """Before one is unloaded its slots are saved, once none of them is in use."""
    assert unloads_models(method, "/unload")  # llama-swap takes HEAD for GET
    assert not unloads_models(method, "/models")
    assert unloads_models("DELETE", "/models") and unloads_models("POST", "/models/unload")


def test_path_that_llama_swap_shortens_is_read_as_llama_server_gets_it() -> None:
    """Its /v/... routes are those of APIs that have no version."""
    assert Swap.split_path("/v/chat/completions", "", MODELS) == ("", "/chat/completions")
    assert Swap.split_path("/version", "", MODELS) == ("", "/version")


class Listing(LlamaServer):
    """Answers what llama-swap v250 lists."""

    def __init__(self, about: dict[str, dict[str, str]]) -> None:
        self._entries = [{"id": id, "meta": {"llamaswap": told}} for id, told in about.items()]

    async def call(self, *_: object, **__: object) -> Any:
        return []

    async def models(self, path: str = "") -> list[dict[str, Any]]:
        return self._entries


async def test_what_chooses_a_model_for_each_request_is_no_model() -> None:
    kinds = ("model", "alias", "selector", "profile")
    about = {f"a-{kind}": {"type": kind} for kind in kinds}
    about["a-alias"]["modelID"] = "a-model"
    swap = Swap(Listing(about))
    models = await swap.models()
    assert models.known == {"a-model"} and models.named("a-alias") == "a-model"
    for name in ("a-selector", "a-profile"):
        assert models.named(name) is None and await swap.resolve(name) is None


def test_own_calls_load_no_model_at_a_llama_swap_set_up_as_the_guide_says() -> None:
    """They go to /upstream/MODEL; only /health, by which the proxy has a model loaded, may load it."""
    guide = (REPOSITORY / "docs" / "models.md").read_text()
    (ignored,) = re.findall(r'ignorePaths: \["(.+)"\]', guide)
    source = (REPOSITORY / "proxy" / "llama" / "client.py").read_text()
    paths = {*re.findall(r'[("](/[a-z][a-z0-9/-]+)', source)} - {"/upstream/"}
    assert {"/slots", "/props", "/completion", "/v1/models"} <= paths
    assert [path for path in sorted(paths) if not re.search(ignored, path)] == []
    assert not re.search(ignored, "/health")


async def test_reply_that_is_nested_too_deep_is_not_understood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read(*_: Any) -> tuple[dict[str, str], bytes]:
        return {}, b'{"modalities":' + b'{"a":' * 100_000

    monkeypatch.setattr(LlamaServer, "_read", read)
    async with new_session() as session:
        with pytest.raises(UpstreamRefused, match="not understood"):
            await LlamaServer(session, Target("http://127.0.0.1:1"), None).props()


@pytest.mark.parametrize(
    ("target", "status", "headers", "may_be"),
    [
        (Target(BASE), 502, {"Content-Length": "157", "Content-Type": "text/html"}, True),
        (Target(BASE), 500, {"Content-Type": "text/plain"}, False),
        (Target(BASE, "qwen", "router"), 500, {"Content-Type": "text/plain"}, True),
        (Target(BASE, "qwen", "router"), 502, {"Content-Type": "application/json"}, False),
        (Target(BASE, "qwen", "llama-swap"), 502, {"Content-Length": "0"}, True),
        (Target(BASE, "qwen", "llama-swap"), 502, {"Content-Length": "40"}, False),
    ],
)
def test_answer_that_a_host_may_give_for_llama_server_is_known_by_its_head(
    target: Target, status: int, headers: dict[str, str], *, may_be: bool
) -> None:
    assert target.may_be_lost(status, headers) is may_be
