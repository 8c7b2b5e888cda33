"""What stands between the proxy and several models: it serves each by name, and swaps A -> B -> A."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from tests.lab.router import Router, link_models
from tests.lab.server import LlamaServerError, request

NOT_LOADED = {"code": 400, "message": "model is not loaded", "type": "invalid_request_error"}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    folder: Path = tmp_path_factory.mktemp("router")
    models = link_models(folder / "models", {"full": "full", "hybrid": "hybrid"})
    slots = folder / "slots"
    slots.mkdir()
    with Router(models, slots, models_max=1, log_path=folder / "router.log") as started:
        yield started


def complete(router: Router, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": list(range(100, 150)), "n_predict": 1, "id_slot": 0}
    status, answer = router.request("POST", "/completion", body)
    assert status == 200, answer
    assert answer["model"] == model
    timings: dict[str, Any] = answer["timings"]
    return timings


def act_on_slot(router: Router, model: str, action: str) -> dict[str, Any]:
    body = {"model": model, "filename": f"{model}.bin"}
    status, answer = router.request("POST", f"/slots/0?action={action}", body)
    assert status == 200, answer
    result: dict[str, Any] = answer
    return result


def test_router_swaps_models_and_a_slot_file_outlives_the_swap(router: Router) -> None:
    assert complete(router, "full")["prompt_n"] == 50
    assert act_on_slot(router, "full", "save")["n_saved"] == 50
    marker = router.request("GET", "/props?model=full")[1]["media_marker"]

    assert complete(router, "hybrid")["prompt_n"] == 50
    assert router.statuses() == {"full": "unloaded", "hybrid": "loaded"}
    status, answer = router.request("GET", "/slots?model=full&autoload=false")
    assert (status, answer["error"]) == (400, NOT_LOADED)

    assert act_on_slot(router, "full", "restore")["n_restored"] == 50  # loads it
    assert complete(router, "full")["cache_n"] == 49
    assert router.statuses() == {"full": "loaded", "hybrid": "unloaded"}
    assert router.request("GET", "/props?model=full")[1]["media_marker"] != marker


def test_router_child_can_be_asked_directly_and_ends_when_unloaded(router: Router) -> None:
    complete(router, "full")
    url = router.child_url("full")
    assert request(url, "POST", "/tokenize", {"content": "hello"})[0] == 200  # names no model
    assert router.evaluated_tokens("full") > 0

    router.unload("full")
    assert router.statuses()["full"] == "unloaded"
    with pytest.raises(LlamaServerError):
        router.child_pid("full")
    with pytest.raises(URLError):
        request(url, "GET", "/health")
