"""Every Prometheus metric, in one place: base units, bounded labels, help a user understands."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

PREFIX = "llama_prefix_cache"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(frozen=True)
class _Counts(Collector):
    """What somebody else counts."""

    name: str
    help_text: str
    label: str
    read: Callable[[], Mapping[Any, int]]

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self.name, self.help_text, labels=[self.label])
        for key, count in self.read().items():
            family.add_metric([str(key)], count)
        yield family


class Metrics:
    """The metrics of one proxy, in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Generation requests by how their prompt was reused.", "outcome"
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens by whether llama-server had to evaluate them.", "source"
        )
        self.restores = self._counter("restores", "Checkpoint restores by result.", "result")
        self.saves = self._counter("saves", "Checkpoint saves by result.", "result")
        self.restore_ineffective = self._counter(
            "restore_ineffective",
            "Restores that answered 200 but were not reused; their checkpoints are quarantined.",
        )
        self.drift = self._counter(
            "drift", "Replies that reused more than the proxy thought the slot held."
        )
        self.live_reuse_short = self._counter(
            "live_reuse_short", "Replies that reused less of a live slot than expected."
        )
        self.tokenization_disagreements = self._counter(
            "tokenization_disagreements",
            "Requests whose tokens the proxy predicted wrongly; their shape is served uncached.",
        )
        self.cache_faults = self._counter(
            "cache_faults", "Faults that cost a request its speed, by what was being done.", "stage"
        )
        self.saves_skipped = self._counter(
            "saves_skipped",
            "Saves not begun or not kept for want of room, by what limits it.",
            "reason",
        )
        self.lookup_seconds = self._histogram("lookup_seconds", "Time to plan a request.")
        self.restore_seconds = self._histogram("restore_seconds", "Time of a checkpoint restore.")
        self.save_seconds = self._histogram("save_seconds", "Time of a checkpoint save.")
        self.first_byte_seconds = self._histogram(
            "first_byte_seconds", "Time from request to the first byte of the answer.", "outcome"
        )

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        Gauge(f"{PREFIX}_{name}", help_text, registry=self.registry).set_function(read)

    def watch_counts(
        self, name: str, help_text: str, label: str, read: Callable[[], Mapping[Any, int]]
    ) -> None:
        """Add a counter, one series for each key, whose values are read at each scrape."""
        self.registry.register(_Counts(f"{PREFIX}_{name}", help_text, label, read))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(
            f"{PREFIX}_{name}", help_text, labels, buckets=SECONDS, registry=self.registry
        )
