"""Fixtures around a scripted llama-server: here faults come when they are called."""

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.servers import background
from proxy.servers import server as lifecycle
from proxy.serving import launches as abandoned
from proxy.web import writer
from tests.fakes.llama_server import FakeLlamaServer
from tests.integration.rig import Rig
from tests.lab.waiting import HANG_SECONDS

StartRig = Callable[..., AbstractAsyncContextManager[Rig]]

SETTINGS = (
    "idle_save_seconds",
    "drain_seconds",
    "upstream_wait_seconds",
    "max_store_bytes",
    "max_write_bytes_per_day",
    "upstream_api_key",
    "share_between_api_keys",
    "aliases",
    "stabilizers",
    "context_overflow",
    "admin",
    "admin_open",
    "admin_token_file",
    "explain_keep",
    "has_salts",
    "shared_store",
    "ahead_seconds",
)


def evaluate_ahead_at_once(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Have the proxy evaluate ahead as soon as it may; return settings for such a rig."""
    monkeypatch.setattr(background, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(background, "_WORTH_SECONDS", 0.0)
    return {"idle_save_seconds": 60.0, "ahead_seconds": HANG_SECONDS}


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what the proxy waits for by the clock."""
    monkeypatch.setattr(lifecycle, "WATCH_SECONDS", 0.03)
    monkeypatch.setattr(lifecycle, "RETURN_WATCH_SECONDS", 0.03)
    monkeypatch.setattr(abandoned, "DISCONNECT_SECONDS", 0.1)
    monkeypatch.setattr(writer, "HALF_CLOSED_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def _nothing_escapes(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test after which asyncio or aiohttp had to report an exception that nobody caught."""
    yield
    gc.collect()
    gc.freeze()  # or each collection would look at all that earlier tests have left in caches
    said = [*caplog.get_records("call"), *caplog.get_records("teardown")]  # by that collection
    assert [r.getMessage() for r in said if r.levelname == "ERROR"] == []


@pytest.fixture
def start_rig(tmp_path: Path) -> StartRig:
    """Return a function that starts a scripted llama-server, and the proxy before it."""
    directory = tmp_path / "slots"
    directory.mkdir(mode=0o700)

    @asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[Rig]:
        settings = {name: options.pop(name) for name in SETTINGS if name in options}
        async with Rig(FakeLlamaServer(directory, **options), **settings) as rig:
            yield rig

    return start
