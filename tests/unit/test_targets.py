"""How calls name the model that they are for."""

import json

import pytest

from proxy.llama.client import Target
from proxy.llama.hosts import Models, Router, Swap

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
        (Target(BASE), 502, b"", ""),
        (Target(BASE, "qwen", "router"), 500, UNREACHED, "before"),
        (Target(BASE, "qwen", "router"), 502, b"", ""),
        (Target(BASE, "qwen", "llama-swap"), 502, b"", "perhaps"),
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
        ("/v1/models", ("asked", "/v1/models")),
    ],
)
def test_path_of_llama_swap_names_a_model(path: str, found: tuple[str, str]) -> None:
    assert Swap.split_path(path, "asked", MODELS) == found


def test_longest_name_in_a_path_counts() -> None:
    path = "/upstream/author/model/v1/messages"
    assert Swap.split_path(path, "", MODELS) == ("author/model", "/v1/messages")


def test_path_of_a_router_names_no_model() -> None:
    path = "/upstream/author/model/v1/messages"
    assert Router.split_path(path, "asked", MODELS) == ("asked", path)
