"""The tables of metrics, and of what can be wrong, from the code that shows them."""

from proxy.core.degradation import EXPLANATIONS
from proxy.metrics import Metrics


def metrics_table() -> str:
    """Return every metric as a Markdown table."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in Metrics().families:
        labels = "<br>".join(
            f"`{label}`: {', '.join(values) or 'any'}" for label, values in family.labels.items()
        )
        rows.append(f"| `{family.name}` | {family.type} | {labels} | {family.help} |")
    return "\n".join(rows) + "\n"


def degradations_table() -> str:
    """Return every kind of degradation with what it leads to and its cure, as a Markdown table."""
    rows = ["| kind | state | what it means | cure |", "|---|---|---|---|"]
    for kind, about in EXPLANATIONS.items():
        rows.append(f"| {kind} | {about.leads_to} | {about.reason} | {about.cure} |")
    return "\n".join(rows) + "\n"
