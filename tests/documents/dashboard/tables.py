"""The table of the alerts, from what Prometheus reads."""

from pathlib import Path
from typing import Any

import yaml

ALERTS = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml"


def alert_rules() -> list[dict[str, Any]]:
    """Return the alerts of deploy/prometheus/alerts.yml."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts_table() -> str:
    """Return what every alert says, and its cure, as a Markdown table."""
    rows = ["| alert | says | what to do |", "|---|---|---|"]
    for rule in alert_rules():
        told = rule["annotations"]
        says = told["summary"].partition("}}: ")[2]
        rows.append(f"| {rule['alert']} | {says} | {told['action']} |")
    return "\n".join(rows) + "\n"
