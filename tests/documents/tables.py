"""The tables of metrics, stabilizers and of what can be wrong, from the code that has them."""

from textwrap import fill

from proxy.core.conditions import DegradationKind
from proxy.explain.causes import Cause
from proxy.stabilize.model import SAFE, Name
from proxy.stabilize.run import OF_MESSAGES, OF_REQUESTS
from tests.lab.samples import families


def metrics_table() -> str:
    """Return every metric as a Markdown table; the values of labels are in /metrics from the start."""
    rows = ["| metric | meaning |", "|---|---|"]
    for family in families():
        labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
        rows.append(f"| `{family.name}{labels}` | {family.help} |")
    return "\n".join(rows) + "\n"


def causes_list() -> str:
    """Return the names of the causes of misses as one paragraph."""
    return fill(", ".join(cause for cause in Cause if cause.is_miss), 140) + ".\n"


def degradations_table() -> str:
    """Return every kind of degradation with what it leads to and its cure, as a Markdown table."""
    rows = ["| kind | state | cure |", "|---|---|---|"]
    for kind in DegradationKind:
        rows.append(f"| {kind} | {kind.leads_to} | {kind.cure} |")
    return "\n".join(rows) + "\n"


def stabilizers_table() -> str:
    """Return every stabilizer with its reason, as a Markdown table."""
    rows = ["| name | class | why |", "|---|---|---|"]
    for name in Name:
        reason = ((OF_MESSAGES.get(name) or OF_REQUESTS[name]).__doc__ or "").partition("\n")[0]
        rows.append(f"| `{name}` | {'safe' if name in SAFE else 'opt-in'} | {reason} |")
    return "\n".join(rows) + "\n"
