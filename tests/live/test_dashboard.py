"""Every panel of the dashboard, asked of a real Prometheus that scraped the real proxy under traffic."""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.documents.blocks import blocks_for
from tests.documents.files import DASHBOARD, REPOSITORY
from tests.lab.conversation import system, tools, user
from tests.lab.prometheus import Prometheus, promtool
from tests.lab.rig import Rig
from tests.lab.waiting import until, wait_until
from tests.live.conftest import StartRig

CONFIG = REPOSITORY / "deploy" / "prometheus" / "prometheus.yml"
BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cch=00000;\n"
TOOLS = tools(2, 30)
N_REQUESTS = "sum(llama_prefix_cache_requests_total)"
FAULT = 'llama_prefix_cache_degraded{kind="llama-server unreachable"} == 1'


def targets(panels: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return every query of a dashboard with its panel's title, those in folded rows included."""
    for panel in panels:
        yield from ((panel["title"], target) for target in panel.get("targets", []))
        yield from targets(panel.get("panels", []))


def filled_in(expr: str, seconds: float) -> str:
    """Return a query as Grafana would send it."""
    expr = expr.replace("$instance", ".*").replace("$__range", f"{math.ceil(seconds)}s")
    expr = expr.replace("$__rate_interval", "10s")
    assert "$" not in expr
    return expr


async def stream(rig: Rig, messages: list[Any]) -> None:
    body = {"messages": messages, "tools": TOOLS, "stream": True, "max_tokens": 4}
    async with rig.client.post(rig.base_url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200 and b"data:" in await reply.read()


def conversation(day: int, billing: str = "") -> list[Any]:
    about = system(120)
    return [{**about, "content": f"{billing}Today is 2026-11-{day}.\n{about['content']}"}, user(1)]


async def traffic(rig: Rig) -> None:
    """Let two conversations displace each other from the only slot: one misses, one is restored."""
    again = [*conversation(21, BILLING), {"role": "assistant", "content": "Done."}, user(2)]
    for messages in (conversation(21), conversation(22), again):
        await stream(rig, messages)
        await rig.settled()


def documented_queries() -> list[str]:
    """Return the queries in docs/; a line that is indented goes on with the one before."""
    queries = "".join(block.text for block in blocks_for(__file__))
    return queries.replace("\n ", " ").splitlines()


@asynccontextmanager
async def scraping(rig: Rig, directory: Path) -> AsyncIterator[Prometheus]:
    """Run a Prometheus that has the proxy as it is before any request."""
    prometheus = Prometheus(CONFIG, directory, [f"127.0.0.1:{rig.running.admin_port}"])
    await asyncio.to_thread(prometheus.start)
    try:
        await until(
            lambda: asyncio.to_thread(lambda: 0.0 in prometheus.instant(N_REQUESTS).values())
        )
        yield prometheus
    finally:
        await asyncio.to_thread(prometheus.stop)


def without_data(
    prometheus: Prometheus, started_at: float, served_at: float
) -> list[tuple[str, str]]:
    """Return queries that bring no number: values up to before the fault, graphs up to now."""
    empty, now = [], time.time()
    asked = [("docs/", {"instant": True, "expr": q}) for q in documented_queries()]
    for title, target in asked + list(targets(json.loads(DASHBOARD.read_text())["panels"])):
        expr = filled_in(target["expr"], served_at - started_at)
        if target["instant"]:
            values = list(prometheus.instant(expr, served_at).values())
            has_data = bool(values) and not any(math.isnan(value) for value in values)
        else:
            has_data = any(prometheus.over(expr, started_at, now + 1).values())
        if not has_data:
            empty.append((title, expr))
    return empty


def check_variables_and_annotations(prometheus: Prometheus) -> None:
    """Models and proxies can be chosen, and annotations asked for: Prometheus refuses what cannot be."""
    content = json.loads(DASHBOARD.read_text())
    models, proxies = (each for each in content["templating"]["list"] if each["type"] == "query")
    assert models["query"]["query"] == "label_values(llama_prefix_cache_served_models, model)"
    assert prometheus.ask("label/model/values") == ["full-least"]
    # Grafana takes `allValue` for what can be chosen, or all that can be.
    assert models["allValue"] == ".*" and "allValue" not in proxies
    (selector,) = re.findall(r"label_values\((.+), instance\)", proxies["query"]["query"])
    for model, n_proxies in ((".*", 1), ("full-least", 1), ("another", 0)):
        asked = {"match[]": selector.replace("$model", model)}
        assert len(prometheus.ask("label/instance/values", **asked)) == n_proxies
    for annotation in content["annotations"]["list"]:
        prometheus.instant(filled_in(annotation["expr"], 60))


def check_alerts(prometheus: Prometheus) -> None:
    """All of them can be evaluated, and that for the fault is about to fire."""

    def healths() -> set[str]:
        groups = prometheus.ask("rules")["groups"]
        return {rule["health"] for group in groups for rule in group["rules"]}

    wait_until(lambda: "unknown" not in healths())
    assert healths() == {"ok"}
    wait_until(lambda: prometheus.instant('ALERTS{alertname="LlamaServerDown"}'))


async def test_every_panel_has_data_under_traffic_and_every_alert_can_be_evaluated(
    start_rig: StartRig, tmp_path: Path
) -> None:
    settings = {"max_write_bytes_per_day": 1 << 40}
    async with start_rig("full", n_slots=1, n_ctx=8192, **settings) as rig:
        started_at = time.time()
        async with scraping(rig, tmp_path) as prometheus:
            await traffic(rig)
            await until(
                lambda: asyncio.to_thread(lambda: 3.0 in prometheus.instant(N_REQUESTS).values())
            )
            served_at = time.time()
            assert not promtool("check", "metrics", stdin=rig.running.metrics.exposition())
            await asyncio.to_thread(rig.server.kill)
            await until(lambda: asyncio.to_thread(prometheus.instant, FAULT))
            assert await asyncio.to_thread(without_data, prometheus, started_at, served_at) == []
            await asyncio.to_thread(check_variables_and_annotations, prometheus)
            await asyncio.to_thread(check_alerts, prometheus)
