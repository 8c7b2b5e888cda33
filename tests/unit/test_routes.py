"""Which requests touch slots, and how."""

import pytest

from proxy.core.messages import Route
from proxy.llama.requests import (
    changes_server_state,
    generation_route,
    is_anthropic,
    is_task_for_each_input,
)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", Route.CHAT),
        ("/chat/completions", Route.CHAT),
        ("/api/chat", Route.CHAT),
        ("/v1/completions", Route.COMPLETION),
        ("/completion", Route.COMPLETION),
        ("/completions", Route.COMPLETION),
        ("/infill", Route.PINNED),
        ("/v1/responses", Route.RESPONSES),
        ("/responses", Route.RESPONSES),
        ("/v1/messages", Route.MESSAGES),
        ("/v1/embeddings", Route.UNPINNED),
        ("/v1/reranking", Route.UNPINNED),
        ("/v1/messages/count_tokens", None),
        ("/tokenize", None),
        ("/apply-template", None),
        ("/props", None),
        ("/slots", None),
        ("/", None),
    ],
)
def test_generation_route_of_a_post_is_by_its_path(path: str, route: Route | None) -> None:
    assert generation_route("POST", path) is route


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
def test_generation_route_of_another_method_is_none(method: str) -> None:
    assert generation_route(method, "/v1/chat/completions") is None


@pytest.mark.parametrize(
    ("method", "path", "changes"),
    [
        ("POST", "/slots/0", True),
        ("POST", "/slots/12", True),
        ("POST", "/lora-adapters", True),
        ("GET", "/slots", False),
        ("GET", "/lora-adapters", False),
        ("POST", "/v1/chat/completions", False),
    ],
)
def test_changes_server_state_of_slots_and_adapters_is_true(
    method: str, path: str, changes: bool
) -> None:
    assert changes_server_state(method, path) is changes


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/chat/completions", False),
        ("/completion", False),
    ],
)
def test_error_shape_is_that_of_the_clients_api(path: str, shape: bool) -> None:
    assert is_anthropic(path) is shape


@pytest.mark.parametrize(
    ("path", "is_so"),
    [("/v1/embeddings", True), ("/rerank", True), ("/v1/messages", False), ("/completion", False)],
)
def test_route_with_a_task_for_each_input_is_known(path: str, is_so: bool) -> None:
    assert is_task_for_each_input(path) is is_so
