"""What tests read in the metrics of a proxy in this process."""

from proxy.metrics import Metrics

_PREFIX = "llama_prefix_cache_"


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
