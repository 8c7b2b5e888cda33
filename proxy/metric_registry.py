"""How metrics are defined: all their series from the start, and what the documents say of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase

M = TypeVar("M", bound=MetricWrapperBase)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as it is documented; `labels` are all values that each label can have."""

    name: str
    type: str
    help: str
    labels: dict[str, tuple[str, ...]]


class MetricRegistry:
    """Metrics whose names begin with the same word."""

    def __init__(self, prefix: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.families: list[Family] = []
        self._prefix = prefix

    def total(self, counter: str, **labels: str) -> float:
        """Return what a counter has come to."""
        return self.registry.get_sample_value(f"{self._prefix}_{counter}_total", labels) or 0.0

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, **labels: Iterable[str]) -> Counter:
        metric = Counter(f"{self._prefix}_{name}", help_text, tuple(labels), registry=self.registry)
        return self._define(metric, f"{name}_total", "counter", help_text, labels)

    def _gauge(self, name: str, help_text: str, **labels: Iterable[str]) -> Gauge:
        metric = Gauge(f"{self._prefix}_{name}", help_text, tuple(labels), registry=self.registry)
        return self._define(metric, name, "gauge", help_text, labels)

    def _histogram(
        self,
        name: str,
        help_text: str,
        *,
        buckets: tuple[float, ...] = SECONDS,
        **labels: Iterable[str],
    ) -> Histogram:
        metric = Histogram(
            f"{self._prefix}_{name}",
            help_text,
            tuple(labels),
            buckets=buckets,
            registry=self.registry,
        )
        return self._define(metric, name, "histogram", help_text, labels)

    def _define(
        self,
        metric: M,
        name: str,
        type_: str,
        help_text: str,
        labels: dict[str, Iterable[str]],
    ) -> M:
        """Note how a metric is documented, and bring all its series into being."""
        values = {label: tuple(str(v) for v in allowed) for label, allowed in labels.items()}
        self.families.append(Family(f"{self._prefix}_{name}", type_, help_text, values))
        for combination in product(*values.values()) if values else ():
            metric.labels(*combination)
        return metric
