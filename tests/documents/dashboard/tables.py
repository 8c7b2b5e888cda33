"""The tables of the dashboard's panels and of the alerts, from what Grafana and Prometheus read."""

from pathlib import Path
from typing import Any

import yaml

from tests.documents.dashboard.rows import ROWS

ALERTS = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml"


def panels_table() -> str:
    """Return every panel with how it is read, as a Markdown table for each row."""
    tables = []
    for row in ROWS:
        folded = " (folded)" if row.is_folded else ""
        lines = [
            f"### {row.title or 'The top row'}{folded}\n",
            "| panel | how to read it |",
            "|---|---|",
        ]
        lines += [f"| {panel.title} | {panel.says} |" for panel in row.panels]
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def alert_rules() -> list[dict[str, Any]]:
    """Return the alerts of deploy/prometheus/alerts.yml."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts_table() -> str:
    """Return every alert with its cure, as a Markdown table."""
    rows = ["| alert | severity | after | what it says | what to do |", "|---|---|---|---|---|"]
    for rule in alert_rules():
        severity, told = rule["labels"]["severity"], rule["annotations"]
        after = rule.get("for", "at once")
        rows.append(
            f"| {rule['alert']} | {severity} | {after} | {told['summary']} | {told['action']} |"
        )
    return "\n".join(rows) + "\n"
