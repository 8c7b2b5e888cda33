"""Every Prometheus metric, in one table: base units, bounded labels, help that a user understands."""

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, Generic, TypeVar

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

PREFIX = "llama_prefix_cache"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
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

M = TypeVar("M", bound=MetricWrapperBase)


class MetricFamily(Generic[M]):
    """One metric as it is declared and documented; `labels` are all values that each label can have.

    Within a `Metrics` the attribute of the same name is the metric itself.
    """

    def __init__(
        self, kind: type[M], help_text: str, labels: dict[str, Iterable[str]], **options: Any
    ) -> None:
        self._kind = kind
        self._options = options
        self.type = kind.__name__.lower()
        self.help = help_text
        self.labels = {label: tuple(map(str, values)) for label, values in labels.items()}

    def __set_name__(self, _: type, name: str) -> None:
        self.attribute = name
        self.name = f"{PREFIX}_{name}" + ("_total" if self._kind is Counter else "")

    def __get__(self, metrics: object, _: type) -> M:
        raise AttributeError(self.attribute)  # a Metrics has the metric in its own __dict__

    def make(self, registry: CollectorRegistry) -> M:
        """Return the metric with all its series, at zero: a rate is then right from the first event on."""
        name, options = f"{PREFIX}_{self.attribute}", self._options
        metric = self._kind(name, self.help, tuple(self.labels), registry=registry, **options)
        for values in product(*self.labels.values()) if self.labels else ():
            metric.labels(*values)
        return metric


def _counter(help_text: str, **labels: Iterable[str]) -> MetricFamily[Counter]:
    return MetricFamily(Counter, help_text, labels)


def _gauge(help_text: str, **labels: Iterable[str]) -> MetricFamily[Gauge]:
    return MetricFamily(Gauge, help_text, labels)


def _histogram(
    help_text: str, buckets: tuple[float, ...] = SECONDS, **labels: Iterable[str]
) -> MetricFamily[Histogram]:
    return MetricFamily(Histogram, help_text, labels, buckets=buckets)


class Metrics:
    """The metrics of one proxy, in a registry of their own; docs/metrics.md is made from them."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.families = [f for f in vars(Metrics).values() if isinstance(f, MetricFamily)]
        for family in self.families:
            vars(self)[family.attribute] = family.make(self.registry)

    def total(self, counter: str, **labels: str) -> float:
        """Return what a counter has come to."""
        return self.registry.get_sample_value(f"{PREFIX}_{counter}_total", labels) or 0.0

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    requests = _counter(
        "Generation requests answered, by how their prompt was reused: hit (all that was "
        "expected), partial (less), miss (nothing), bypass (not looked up), degraded (the cache "
        "failed, or llama-server was not attached).",
        outcome=Outcome,
    )
    unanswered_requests = _counter(
        "Generation requests that were not answered to the end, by reason.", reason=UNANSWERED
    )
    waiting_requests = _gauge(
        "Generation requests that wait for a slot, or for llama-server to come back."
    )
    stalled_clients = _counter(
        "Clients disconnected because they did not read their answers (docs/troubleshooting.md)."
    )
    unread_bytes = _gauge("Bytes of answers that wait in memory until their clients read them.")
    background_tasks = _gauge(
        "Work behind requests: saves, restores, looks at llama-server, slots whose clients left."
    )
    event_loop_tasks = _gauge("All tasks of the proxy, those of open connections included.")
    prompt_tokens = _counter(
        "Prompt tokens by whether llama-server found them in its slot (reused) or had to evaluate "
        "them (evaluated).",
        source=("reused", "evaluated"),
    )
    restored_tokens = _counter(
        "Those of the reused prompt tokens that came from a restored checkpoint: without the proxy "
        "they would have been evaluated."
    )
    evaluation_seconds = _counter(
        "Time llama-server spent evaluating prompt tokens, as it reports it."
    )

    saved_seconds = _counter(
        "What evaluating the reused prompt tokens, still in a slot (live) or restored, would have "
        "taken at the speeds measured here, less the time of the restore.",
        source=("live", "restored"),
    )
    lost_seconds = _counter(
        "By how much restores took longer than evaluating what they spared; saved_seconds does not "
        "count those."
    )
    misses = _counter(
        "Requests that had tokens evaluated that were known, by cause (docs/misses.md) and by where in "
        "the prompt it lies.",
        cause=MISSES,
        part=PromptPart,
    )
    missed_tokens = _counter(
        "Prompt tokens that were evaluated although they were known, by cause.", cause=MISSES
    )

    first_token_seconds = _histogram(
        "Time from a streamed request's arrival at the proxy to the first token of its answer.",
        outcome=Outcome,
    )
    queue_seconds = _histogram("Time that requests waited for a slot, once their prompt was known.")
    lookup_seconds = _histogram(
        "Time to look up checkpoints and to plan a request.", buckets=SHORT_SECONDS
    )

    checkpoints = _gauge("Checkpoints in the store.")
    checkpoint_bytes = _gauge("Size of all checkpoints.")
    checkpoint_limit_bytes = _gauge("The budget for all checkpoints, max_store_bytes.")
    disk_free_bytes = _gauge("Free space where the checkpoints lie; NaN if it cannot be read.")
    restores = _counter(
        "Checkpoint restores by result; missing: the file was gone or damaged; ended: llama-server "
        "went away meanwhile.",
        result=("done", "missing", "refused", "ended"),
    )
    restored_bytes = _counter("Size of the checkpoints restored.")
    restore_seconds = _histogram("Time of a checkpoint restore.")
    restore_ineffective = _counter(
        "Restores that answered 200 but were not reused; their checkpoints are quarantined."
    )
    saves = _counter("Checkpoint saves by result.", result=("done", "failed"))
    saved_bytes = _counter("Size of the checkpoints saved.")
    written_bytes = _counter(
        "What llama-server wrote into the directory: checkpoints, and what was not kept."
    )
    written_last_day_bytes = _gauge(
        "What it wrote there within the last 24 hours, before restarts included."
    )
    write_limit_bytes = _gauge(
        "The budget for 24 hours, max_write_bytes_per_day; 0 if there is none."
    )
    save_seconds = _histogram("Time of a checkpoint save.")
    evictions = _counter(
        "Checkpoints deleted: over the budget, for free space on the disk, superseded by a newer one, "
        "broken (the file was gone, damaged or made from a damaged one), or at an operator's word.",
        reason=Removal,
    )
    damaged_checkpoints = _counter(
        "Checkpoints whose file was not what llama-server had written: look at the disk."
    )
    saves_skipped = _counter(
        "Saves not begun or not kept for want of room, by what limits it; write budget: not worth "
        "what is left of max_write_bytes_per_day.",
        reason=SAVES_SKIPPED,
    )

    stabilized_requests = _counter(
        "Requests rewritten, by stabilizer (docs/stabilizers.md).", stabilizer=Name
    )
    shortened_requests = _counter(
        "Requests of conversations that do not fit the context, sent without their oldest part "
        "(context_overflow: stable)."
    )
    left_out_tokens = _counter("Prompt tokens that these were sent without.")

    slots = _gauge(
        "Slots of llama-server by state: leased (in use), or free with content that is known, "
        "empty or unknown.",
        state=SlotState,
    )
    rule = _gauge(
        "1 for what a restored state is good for on this model and build, as was learned; "
        "0 for the others.",
        rule=RuleKind,
    )
    rule_end_tokens = _gauge(
        "The shortest state that can be continued at its very end, part of the learned rule."
    )
    evaluation_tokens_per_second = _gauge(
        "How fast prompt tokens are evaluated up to so many tokens into the prompt (none: further in), "
        "as measured lately; 0 until then.",
        up_to=POSITION_LABELS.values(),
    )
    restore_bytes_per_second = _gauge(
        "How fast checkpoints are restored, as measured lately, from the page cache (warm) or from "
        "the disk (cold); 0 until then.",
        file=("warm", "cold"),
    )
    save_bytes_per_second = _gauge(
        "How fast checkpoints are saved, as measured lately; 0 until then."
    )
    self_tests = _counter(
        "Self-tests run, by the rule that they learned, or failed.", result=(*RuleKind, "failed")
    )
    drift = _counter(
        "Slots that held something else than the proxy thought, such as after requests that did "
        "not go through it."
    )
    live_reuse_short = _counter("Replies that reused less of a live slot than expected.")
    tokenization_disagreements = _counter(
        "Requests whose tokens the proxy predicted wrongly; their shape is served uncached."
    )

    state = _gauge(
        "1 for how requests are served now, as /health says: caching, degraded (cached, but "
        "something costs speed) or forwarding (nothing is cached); 0 for the others.",
        state=State,
    )
    degraded = _gauge("1 for each reason that /health names now.", kind=DegradationKind)
    degradations = _counter("How often each of these reasons has begun.", kind=DegradationKind)
    cache_faults = _counter(
        "Faults that cost a request its speed, by what was being done.", stage=STAGES
    )
    served_models = _gauge(
        "1 for each model that was served since the proxy started; its name is the label.", model=()
    )
    build_info = _gauge("1; the version of the proxy is the label.", version=())
