"""llama-server's own metrics beside the proxy's: never at the expense of the proxy's own."""

import pytest
from structlog.testing import capture_logs

from proxy.driver.fleet.fleet import Fleet
from proxy.front import metrics_page
from proxy.metrics import Metrics
from tests.integration.conftest import StartRig
from tests.integration.rig import Rig

THEIRS = b"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 1"


async def scrape(rig: Rig) -> str:
    async with rig.client.get(f"http://127.0.0.1:{rig.running.admin_port}/metrics") as reply:
        assert reply.status == 200
        return await reply.text()


def spoil(rig: Rig, fault: str) -> None:
    faults = rig.server.faults
    faults.refuse = {"metrics": 501} if fault == "refused" else {}
    faults.drop = {"metrics"} if fault == "gone" else set()
    faults.slow_seconds = {"metrics": 60.0} if fault == "slow" else {}
    rig.server.metrics = b"go_goroutines 1\n" if fault == "other" else THEIRS


async def test_metrics_that_cannot_be_joined_are_left_out_and_told_of_once(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(join_upstream_metrics=True) as rig:
        rig.server.metrics = THEIRS
        text = await scrape(rig)
        assert text.endswith("\nllamacpp:requests_processing 1\n")
        assert "llama_prefix_cache_llama_server_metrics_joined 1.0" in text
        complaints = []
        for fault in ("refused", "gone", "slow", "other"):
            spoil(rig, fault)
            monkeypatch.setattr(metrics_page, "JOIN_SECONDS", 0.05 if fault == "slow" else 60.0)
            with capture_logs() as logs:
                for _ in range(2):
                    text = await scrape(rig)
                    assert "\nllamacpp:" not in text and "go_goroutines" not in text
                    assert "llama_prefix_cache_llama_server_metrics_joined 0.0" in text
                    assert "llama_prefix_cache_build_info" in text
            complaints += [line["reason"] for line in logs if line.get("component") == "metrics"]
        assert len(complaints) == 4, complaints


def test_wait_for_llama_server_leaves_the_scraper_half_of_its_time() -> None:
    told = {"": 3.0, "10": 3.0, "1": 0.5, "0": 3.0, "-1": 3.0, "nan": 3.0, "soon": 3.0}
    for patience, seconds in told.items():
        headers = {"X-Prometheus-Scrape-Timeout-Seconds": patience}
        assert metrics_page.join_seconds(headers) == seconds
    assert metrics_page.join_seconds({}) == 3.0


async def test_llama_server_is_not_asked_unless_the_operator_wants_it() -> None:
    class Untouched(Fleet):
        def __init__(self) -> None:
            pass

    page = metrics_page.MetricsPage(Metrics(), Untouched(), joins_upstream=False)
    assert b"\nllamacpp:" not in await page.text()
