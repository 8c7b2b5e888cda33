"""The dashboard and the alerts as files: whole, by Grafana's own types, and of metrics that there are."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any, get_args

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from proxy.metrics import PREFIX
from tests.documents.dashboard.rows import ROWS
from tests.documents.dashboard.tables import ALERTS, alert_rules
from tests.documents.files import DASHBOARD, REPOSITORY
from tests.lab.samples import families

GRAFANA = REPOSITORY / "deploy" / "grafana"
FAMILIES = {family.name: family for family in families()}
CONTENT: dict[str, Any] = json.loads(DASHBOARD.read_text())
SELECTOR = re.compile(rf"({PREFIX}_\w+?)(_bucket|_sum|_count)?\b(?:\{{([^}}]*)\}})?")
MATCHER = re.compile(r'(\w+)\s*(=~|=|!=)\s*"([^"]*)"')


def panels(among: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in among:
        if panel["type"] != "row":
            yield panel
        yield from panels(panel.get("panels", []))


PANELS = list(panels(CONTENT["panels"]))
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS += [annotation["expr"] for annotation in CONTENT["annotations"]["list"]]


def test_dashboard_has_nothing_that_grafanas_types_do_not_know() -> None:
    read = Dashboard.from_json(CONTENT)
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == CONTENT
    known = {get_args(unit)[0] for unit in units.__annotations__.values()}
    used = {panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS}
    assert {unit for unit in used if not unit.startswith("suffix:")} <= known


def test_every_panel_tells_what_it_shows_and_where_from() -> None:
    ids = [panel["id"] for panel in (*CONTENT["panels"], *PANELS) if panel["type"] == "row"]
    ids += [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in PANELS]
    assert len(titles) == len(set(titles)) == sum(len(row.panels) for row in ROWS)
    for panel in PANELS:
        assert panel["description"].endswith(".") and "|" not in panel["description"]
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(t["legendFormat"] and "$instance" in t["expr"] for t in panel["targets"])
        names = {o["matcher"]["options"] for o in panel["fieldConfig"]["overrides"]}
        legends = " ".join(t["legendFormat"] for t in panel["targets"])
        # A colour for a series that cannot be there is a misspelt one.
        assert "{{" in legends or all(name in legends for name in names)


def test_panels_lie_beside_each_other_and_fill_the_width() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        return {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}

    for among in (CONTENT["panels"], *(p["panels"] for p in CONTENT["panels"] if p.get("panels"))):
        assert not any(cells(one) & cells(other) for one, other in combinations(among, 2))
        # Without a hole, from the first line to the last.
        taken = set[tuple[int, int]]().union(*map(cells, among))
        lines = {y for _, y in taken}
        assert lines == set(range(min(lines), max(lines) + 1))
        assert len(taken) == 24 * len(lines)


def test_free_space_has_an_axis_of_its_own() -> None:
    (size,) = [panel for panel in PANELS if panel["title"] == "Size"]
    overrides = {o["matcher"]["options"]: o["properties"] for o in size["fieldConfig"]["overrides"]}
    apart = {name for name, given in overrides.items() if "right" in [p["value"] for p in given]}
    assert apart == {"free on the disk"}


def test_queries_and_alerts_name_only_what_metrics_has() -> None:
    expressions = EXPRESSIONS + [rule["expr"] for rule in alert_rules()]
    n_matchers = 0
    for expression in expressions:
        for name, suffix, selector in SELECTOR.findall(expression):
            family = FAMILIES[name]
            assert bool(suffix) == (family.type == "histogram"), name
            for label, relation, value in MATCHER.findall(selector):
                if label == "instance":
                    continue
                n_matchers += 1
                held = [v for v in family.labels[label] if re.fullmatch(value, v)]
                assert held if relation == "=~" else value in family.labels[label], (name, value)
    assert n_matchers > 20


def test_every_alert_is_tested_to_fire_and_to_be_silent() -> None:
    tests = yaml.safe_load((ALERTS.parent / "alerts.test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    silent = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fired == silent == {rule["alert"] for rule in alert_rules()}


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        told = rule["annotations"]
        assert set(told) == {"summary", "action", "runbook_url"}
        assert told["summary"].startswith("{{ $labels.instance }}: ")
        assert told["summary"].endswith(".") and told["action"].endswith(".")
        assert told["runbook_url"] == "http://{{ $labels.instance }}/"


def test_provisioning_leads_to_prometheus_and_to_the_dashboard() -> None:
    provisioning = GRAFANA / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    config = yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "prometheus.yml").read_text())
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load(
        (provisioning / "dashboards" / "llama-prefix-cache.yml").read_text()
    )["providers"]
    compose = yaml.safe_load((REPOSITORY / "deploy" / "compose.monitoring.yml").read_text())
    mounts = [
        volume.split(":")[:2]
        for service in compose["services"].values()
        for volume in service["volumes"]
        if volume.startswith("./")
    ]
    assert all((REPOSITORY / "deploy" / here).exists() for here, _ in mounts)
    assert provider["options"]["path"] in {there for _, there in mounts}
