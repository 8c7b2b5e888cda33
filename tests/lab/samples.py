"""What tests read in the metrics of a proxy in this process."""

from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase

from proxy.metrics import Metrics

_PREFIX = "llama_prefix_cache_"


class Family(NamedTuple):
    """A metric as /metrics names and describes it, with the values of each label."""

    name: str
    type: str
    help: str
    labels: dict[str, set[str]]


def families() -> list[Family]:
    """Return every metric of a new proxy, in the order of the code."""
    found = []
    for metric in vars(Metrics()).values():
        if isinstance(metric, MetricWrapperBase):
            name = metric._name + "_total" * (metric._type == "counter")
            series = list(getattr(metric, "_metrics", ()))  # the values of all labels of each
            labels = {label: {s[i] for s in series} for i, label in enumerate(metric._labelnames)}
            found.append(Family(name, str(metric._type), metric._documentation, labels))
    return found


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    """Return a metric's value, 0 while it has none; raises KeyError if there is no such metric."""
    collector = metrics.registry._names_to_collectors[_PREFIX + name]
    if set(labels) != set(getattr(collector, "_labelnames", ())):
        raise KeyError(f"{name} has other labels than {sorted(labels)}")
    return metrics.registry.get_sample_value(_PREFIX + name, labels) or 0.0


def n_faults(metrics: Metrics) -> float:
    """Return how often the cache has failed, whatever it was doing."""
    families = (f for f in metrics.registry.collect() if f.name == _PREFIX + "cache_faults")
    return sum(s.value for f in families for s in f.samples if s.name.endswith("_total"))
