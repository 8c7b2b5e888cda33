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
    """Return every alert with its cure, as a Markdown table."""
    rows = ["| alert | what to do |", "|---|---|"]
    for rule in alert_rules():
        rows.append(f"| {rule['alert']} | {rule['annotations']['action']} |")
    return "\n".join(rows) + "\n"
