"""The proxy's counters over a whole trace, restarts and the last write-backs included. Pure."""

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from proxy.metrics import PREFIX

Counters = dict[str, float]


def read_counters(exposition: str) -> Counters:
    """Return all counters of one proxy, with their labels: `restores_total{result="done"}`."""
    return {
        _name(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(exposition)
        if family.type == "counter"
        for sample in family.samples
    }


def add_up(at_end: Iterable[Counters], before: Counters) -> Counters:
    """Return what several processes counted one after the other, less what stood there *before*."""
    total = {name: -value for name, value in before.items()}
    for counters in at_end:
        for name, value in counters.items():
            total[name] = total.get(name, 0.0) + value
    return {name: value for name, value in total.items() if value}


def _name(name: str, labels: dict[str, str]) -> str:
    short = name.removeprefix(PREFIX + "_")
    given = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{short}{{{given}}}" if given else short
