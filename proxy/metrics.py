"""How metrics are defined: all their series from the start, and what the documents say of them."""

import math
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

from proxy.core.conditions import DegradationKind, State
from proxy.core.eviction import Removal
from proxy.core.model import Outcome, RuleKind
from proxy.core.rates import POSITIONS
from proxy.core.slots import SlotState
from proxy.explain.causes import Cause, PromptPart
from proxy.stabilize.model import Name

# How metrics are defined: all their series from the start, and what the documents say of them.


M = TypeVar("M", bound=MetricWrapperBase)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(frozen=True, slots=True)
class MetricFamily:
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
        self.families: list[MetricFamily] = []
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
        self.families.append(MetricFamily(f"{self._prefix}_{name}", type_, help_text, values))
        for combination in product(*values.values()) if values else ():
            metric.labels(*combination)
        return metric


# Every Prometheus metric, in one place: base units, bounded labels, help that a user understands.
#
# All series exist from the start, at zero, so that a rate is right from the first event on. The table in
# docs/metrics.md is made from here.


PREFIX = "llama_prefix_cache"
SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

UNANSWERED = ("client left", "llama-server gone", "queue full", "other")
STAGES = (
    *("attach", "self-test", "lifecycle", "tokenize", "lookup", "verify", "erase", "prepare"),
    *("placement", "settle", "explain", "save", "thin", "quarantine", "unattended action"),
    *("remember", "stabilize"),
)
POSITION_LABELS = {p: "none" if p == math.inf else str(p) for p in POSITIONS}
MISSES = tuple(cause for cause in Cause if cause.is_miss)
SAVES_SKIPPED = (Removal.BUDGET, Removal.FREE_SPACE, "larger than the budget", "write budget")


class Metrics(MetricRegistry):
    """The metrics of one proxy, in a registry of their own."""

    def __init__(self) -> None:
        super().__init__(PREFIX)
        self._define_requests()
        self._define_benefit()
        self._define_waiting()
        self._define_checkpoints()
        self._define_rewrites()
        self._define_llama_server()
        self._define_degradations()

    def _define_requests(self) -> None:
        self.requests = self._counter(
            "requests",
            "Generation requests answered, by how their prompt was reused: hit (all that was "
            "expected), partial (less), miss (nothing), bypass (not looked up), degraded (the cache "
            "failed, or llama-server was not attached).",
            outcome=Outcome,
        )
        self.unanswered_requests = self._counter(
            "unanswered_requests",
            "Generation requests that were not answered to the end, by reason.",
            reason=UNANSWERED,
        )
        self.waiting_requests = self._gauge(
            "waiting_requests",
            "Generation requests that wait for a slot, or for llama-server to come back.",
        )
        self.stalled_clients = self._counter(
            "stalled_clients",
            "Clients disconnected because they did not read their answers (docs/operations.md).",
        )
        self.unread_bytes = self._gauge(
            "unread_bytes", "Bytes of answers that wait in memory until their clients read them."
        )
        self.background_tasks = self._gauge(
            "background_tasks",
            "Work behind requests: saves, restores, looks at llama-server, slots whose clients left.",
        )
        self.event_loop_tasks = self._gauge(
            "event_loop_tasks", "All tasks of the proxy, those of open connections included."
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens by whether llama-server found them in its slot (reused) or had to evaluate "
            "them (evaluated).",
            source=("reused", "evaluated"),
        )
        self.restored_tokens = self._counter(
            "restored_tokens",
            "Those of the reused prompt tokens that came from a restored checkpoint: without the proxy "
            "they would have been evaluated.",
        )
        self.evaluation_seconds = self._counter(
            "evaluation_seconds",
            "Time llama-server spent evaluating prompt tokens, as it reports it.",
        )

    def _define_benefit(self) -> None:
        self.saved_seconds = self._counter(
            "saved_seconds",
            "What evaluating the reused prompt tokens, still in a slot (live) or restored, would have "
            "taken at the speeds measured here, less the time of the restore.",
            source=("live", "restored"),
        )
        self.lost_seconds = self._counter(
            "lost_seconds",
            "By how much restores took longer than evaluating what they spared; saved_seconds does not "
            "count those.",
        )
        self.misses = self._counter(
            "misses",
            "Requests that had tokens evaluated that were known, by cause (docs/misses.md) and by where in "
            "the prompt it lies.",
            cause=MISSES,
            part=PromptPart,
        )
        self.missed_tokens = self._counter(
            "missed_tokens",
            "Prompt tokens that were evaluated although they were known, by cause.",
            cause=MISSES,
        )

    def _define_waiting(self) -> None:
        self.first_token_seconds = self._histogram(
            "first_token_seconds",
            "Time from a streamed request's arrival at the proxy to the first token of its answer.",
            outcome=Outcome,
        )
        self.queue_seconds = self._histogram(
            "queue_seconds", "Time that requests waited for a slot, once their prompt was known."
        )
        self.lookup_seconds = self._histogram(
            "lookup_seconds",
            "Time to look up checkpoints and to plan a request.",
            buckets=SHORT_SECONDS,
        )

    def _define_checkpoints(self) -> None:
        self.checkpoints = self._gauge("checkpoints", "Checkpoints in the store.")
        self.checkpoint_bytes = self._gauge("checkpoint_bytes", "Size of all checkpoints.")
        self.checkpoint_limit_bytes = self._gauge(
            "checkpoint_limit_bytes", "The budget for all checkpoints, max_store_bytes."
        )
        self.disk_free_bytes = self._gauge(
            "disk_free_bytes", "Free space where the checkpoints lie; NaN if it cannot be read."
        )
        self.restores = self._counter(
            "restores",
            "Checkpoint restores by result; missing: the file was gone or damaged; ended: llama-server "
            "went away meanwhile.",
            result=("done", "missing", "refused", "ended"),
        )
        self.restored_bytes = self._counter("restored_bytes", "Size of the checkpoints restored.")
        self.restore_seconds = self._histogram("restore_seconds", "Time of a checkpoint restore.")
        self.restore_ineffective = self._counter(
            "restore_ineffective",
            "Restores that answered 200 but were not reused; their checkpoints are quarantined.",
        )
        self.saves = self._counter(
            "saves", "Checkpoint saves by result.", result=("done", "failed")
        )
        self.saved_bytes = self._counter("saved_bytes", "Size of the checkpoints saved.")
        self.written_bytes = self._counter(
            "written_bytes",
            "What llama-server wrote into the directory: checkpoints, and what was not kept.",
        )
        self.written_last_day_bytes = self._gauge(
            "written_last_day_bytes",
            "What it wrote there within the last 24 hours, before restarts included.",
        )
        self.write_limit_bytes = self._gauge(
            "write_limit_bytes",
            "The budget for 24 hours, max_write_bytes_per_day; 0 if there is none.",
        )
        self.save_seconds = self._histogram("save_seconds", "Time of a checkpoint save.")
        self.evictions = self._counter(
            "evictions",
            "Checkpoints deleted: over the budget, for free space on the disk, superseded by a newer one, "
            "broken (the file was gone, damaged or made from a damaged one), or at an operator's word.",
            reason=Removal,
        )
        self.damaged_checkpoints = self._counter(
            "damaged_checkpoints",
            "Checkpoints whose file was not what llama-server had written: look at the disk.",
        )
        self.saves_skipped = self._counter(
            "saves_skipped",
            "Saves not begun or not kept for want of room, by what limits it; write budget: not worth "
            "what is left of max_write_bytes_per_day.",
            reason=SAVES_SKIPPED,
        )

    def _define_rewrites(self) -> None:
        self.stabilized = self._counter(
            "stabilized_requests",
            "Requests rewritten, by stabilizer (docs/stabilizers.md).",
            stabilizer=Name,
        )
        self.shortened_requests = self._counter(
            "shortened_requests",
            "Requests of conversations that do not fit the context, sent without their oldest part "
            "(context_overflow: stable).",
        )
        self.left_out_tokens = self._counter(
            "left_out_tokens", "Prompt tokens that these were sent without."
        )

    def _define_llama_server(self) -> None:
        self.slots = self._gauge(
            "slots",
            "Slots of llama-server by state: leased (in use), or free with content that is known, "
            "empty or unknown.",
            state=SlotState,
        )
        self.rule = self._gauge(
            "rule",
            "1 for what a restored state is good for on this model and build, as the self-test "
            "learned it; 0 for the others.",
            rule=RuleKind,
        )
        self.rule_end_tokens = self._gauge(
            "rule_end_tokens",
            "The shortest state that can be continued at its very end, part of the learned rule.",
        )
        self.evaluation_tokens_per_second = self._gauge(
            "evaluation_tokens_per_second",
            "How fast prompt tokens are evaluated up to so many tokens into the prompt (none: further in), "
            "as measured lately; 0 until then.",
            up_to=POSITION_LABELS.values(),
        )
        self.restore_bytes_per_second = self._gauge(
            "restore_bytes_per_second",
            "How fast checkpoints are restored, as measured lately, from the page cache (warm) or from "
            "the disk (cold); 0 until then.",
            file=("warm", "cold"),
        )
        self.save_bytes_per_second = self._gauge(
            "save_bytes_per_second",
            "How fast checkpoints are saved, as measured lately; 0 until then.",
        )
        self.self_tests = self._counter(
            "self_tests",
            "Self-tests run, by the rule that they learned, or failed.",
            result=(*RuleKind, "failed"),
        )
        self.drift = self._counter(
            "drift",
            "Slots that held something else than the proxy thought, such as after requests that did "
            "not go through it.",
        )
        self.live_reuse_short = self._counter(
            "live_reuse_short", "Replies that reused less of a live slot than expected."
        )
        self.tokenization_disagreements = self._counter(
            "tokenization_disagreements",
            "Requests whose tokens the proxy predicted wrongly; their shape is served uncached.",
        )

    def _define_degradations(self) -> None:
        self.state = self._gauge(
            "state",
            "1 for how requests are served now, as /health says: caching, degraded (cached, but "
            "something costs speed) or forwarding (nothing is cached); 0 for the others.",
            state=State,
        )
        self.degraded = self._gauge(
            "degraded", "1 for each reason that /health names now.", kind=DegradationKind
        )
        self.degradations = self._counter(
            "degradations", "How often each of these reasons has begun.", kind=DegradationKind
        )
        self.cache_faults = self._counter(
            "cache_faults",
            "Faults that cost a request its speed, by what was being done.",
            stage=STAGES,
        )
        self.build_info = self._gauge(
            "build_info", "1; the version of the proxy is the label.", version=()
        )
