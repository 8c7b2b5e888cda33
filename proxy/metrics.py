"""Every Prometheus metric, in one table: base units, bounded labels, help that a user understands."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import prometheus_client as prometheus

from proxy.core.conditions import DegradationKind, State, docstrings_of_fields
from proxy.core.eviction import Removal
from proxy.core.model import Outcome, RuleKind
from proxy.core.rates import POSITIONS
from proxy.core.slots import SLOT_STATES
from proxy.explain.causes import Cause, PromptPart
from proxy.stabilize.model import Name

PREFIX = "llama_prefix_cache"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

UNANSWERED = ("client left", "llama-server gone", "queue full", "proxy stopped", "other")
STAGES = (
    *("attach", "self-test", "lifecycle", "tokenize", "lookup", "verify", "erase", "prepare"),
    *("placement", "settle", "explain", "save", "thin", "quarantine", "unattended action"),
    *("remember", "stabilize", "share"),
)
POSITION_LABELS = {p: "none" if p == math.inf else str(p) for p in POSITIONS}
MISSES = tuple(cause for cause in Cause if cause.is_miss)
SAVES_SKIPPED = (Removal.BUDGET, Removal.FREE_SPACE, "larger than the budget", "write budget")


def _metric(kind: Any, /, buckets: tuple[float, ...] = (), **labels: Iterable[str]) -> Any:
    """Declare a metric of a *kind*; *labels* are all values that each label can have."""
    return kind, {"buckets": buckets} if buckets else {}, labels


# Within a Metrics, the attribute of the same name is the metric itself.
_counter: Callable[..., prometheus.Counter] = partial(_metric, prometheus.Counter)
_gauge: Callable[..., prometheus.Gauge] = partial(_metric, prometheus.Gauge)
_histogram: Callable[..., prometheus.Histogram] = partial(
    _metric, prometheus.Histogram, buckets=SECONDS
)


class Metrics:
    """The metrics of one proxy, in a registry of their own; docs/metrics.md is made from them."""

    def __init__(self) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry()
        self.set_gauges: Callable[[], None] = lambda: None
        for name, (words, *_) in docstrings_of_fields(Metrics).items():
            kind, options, labels = vars(Metrics)[name]
            metric = kind(f"{PREFIX}_{name}", words, labels, registry=self.registry, **options)
            # All series are there, at zero: a rate is then right from the first event on.
            for values in product(*labels.values()) if labels else ():
                metric.labels(*values)
            vars(self)[name] = metric

    def exposition(self) -> bytes:
        self.set_gauges()
        return prometheus.generate_latest(self.registry)

    requests = _counter(outcome=Outcome)
    """Generation requests answered, by how their prompt was reused: hit (all that was expected),
    partial (less), miss (nothing, or at most 64 tokens), bypass (not looked up), degraded (the cache
    failed, or llama-server was not attached); refused, failed (answered with 4xx, 5xx).
    """
    unanswered_requests = _counter(reason=UNANSWERED)
    """Generation requests that were not answered to the end, by reason."""
    waiting_requests = _gauge()
    """Generation requests that wait for a slot, or for llama-server to come back."""
    stalled_clients = _counter()
    """Clients disconnected because they did not read their answers (docs/troubleshooting.md)."""
    unread_bytes = _gauge()
    """Bytes of answers that wait in memory until their clients read them."""
    background_tasks = _gauge()
    """Work behind requests: saves, restores, looks at llama-server, slots whose clients left."""
    event_loop_tasks = _gauge()
    """All tasks of the proxy, those of open connections included."""
    prompt_tokens = _counter(source=("reused", "evaluated"))
    """Prompt tokens of requests that were looked up and answered, by whether llama-server found them
    in its slot (reused) or had to evaluate them (evaluated). What the proxy has evaluated ahead or for
    a save counts as evaluated.
    """
    restored_tokens = _counter()
    """Reused prompt tokens that came from a restored checkpoint: without the proxy
    they would have been evaluated.
    """
    evaluation_seconds = _counter()
    """Time llama-server spent evaluating the evaluated prompt tokens, as it reports it; by the speeds
    measured here where it does not (/v1/messages).
    """
    saved_seconds = _counter(source=("live", "restored"))
    """What evaluating the reused prompt tokens, still in a slot (live) or restored, would have
    taken at the speeds measured here, less the time of the restore.
    """
    lost_seconds = _counter()
    """By how much restores took longer than evaluating the restored tokens would have taken;
    saved_seconds does not count those restores.
    """
    misses = _counter(cause=MISSES, part=PromptPart)
    """Requests whose known tokens were evaluated again, by cause (docs/misses.md) and by the part of
    the prompt with the cause.
    """
    missed_tokens = _counter(cause=MISSES)
    """Prompt tokens that were evaluated although they were known, by cause."""
    first_token_seconds = _histogram(outcome=Outcome)
    """Time from a streamed request's arrival at the proxy to the first token of its answer."""
    queue_seconds = _histogram()
    """Time that requests waited for a slot, once their prompt was known."""
    lookup_seconds = _histogram(buckets=SHORT_SECONDS)
    """Time to look up checkpoints and to plan a request."""
    checkpoints = _gauge()
    """Checkpoints in the store."""
    checkpoint_bytes = _gauge()
    """Size of all checkpoints."""
    checkpoint_limit_bytes = _gauge()
    """The budget for all checkpoints, max_store_bytes."""
    disk_free_bytes = _gauge()
    """Free space where the checkpoints lie; NaN if it cannot be read."""
    restores = _counter(result=("done", "missing", "refused", "ended"))
    """Checkpoint restores by result; missing: the file was gone, damaged or not read in time; ended:
    llama-server went away meanwhile.
    """
    restored_bytes = _counter()
    """Size of the checkpoints restored."""
    restore_seconds = _histogram()
    """Time of a checkpoint restore."""
    restore_ineffective = _counter()
    """Restores that answered 200 but were not reused; their checkpoints are mostly quarantined."""
    saves = _counter(result=("done", "failed"))
    """Checkpoint saves by result."""
    saved_bytes = _counter()
    """Size of the checkpoints saved."""
    written_bytes = _counter()
    """Bytes that llama-server wrote into the directory, for checkpoints and for files not kept."""
    written_last_day_bytes = _gauge()
    """Bytes that llama-server wrote into the directory within the last 24 hours, also before a restart
    of the proxy.
    """
    write_limit_bytes = _gauge()
    """The budget for 24 hours, max_write_bytes_per_day; 0 if there is none."""
    save_seconds = _histogram()
    """Time of a checkpoint save."""
    evictions = _counter(reason=Removal)
    """Checkpoints deleted: over the budget, for free space on the disk, superseded by a newer one,
    broken (the file was gone, damaged or made from a damaged one), or at an operator's word.
    """
    damaged_checkpoints = _counter()
    """Checkpoints whose file was not what llama-server had written: look at the disk."""
    saves_skipped = _counter(reason=SAVES_SKIPPED)
    """Saves not begun or not kept for want of room, by what limits it; write budget: not worth what
    is left of max_write_bytes_per_day.
    """
    shared_states = _counter(direction=("up", "down"))
    """States put into the shared store (up) or fetched (down)."""
    shared_bytes = _counter(direction=("up", "down"))
    """Bytes of the states put into the shared store (up) or fetched (down)."""
    shared_known_states = _gauge()
    """States that the shared store is known to have."""
    shared_fetches = _counter(result=("done", "late", "gone", "damaged", "failed", "dearer"))
    """Fetches from the shared store by result; late: given up, because evaluating was quicker by then;
    dearer: not begun, because evaluating is quicker.
    """
    shared_faults = _counter(operation=("list", "fetch", "upload", "delete"))
    """Failures of the shared store."""
    stabilized_requests = _counter(stabilizer=Name)
    """Requests rewritten, by stabilizer (docs/stabilizers.md)."""
    shortened_requests = _counter()
    """Requests of conversations that do not fit the context, sent without their oldest part
    (context_overflow: stable).
    """
    slots = _gauge(state=SLOT_STATES)
    """Slots of llama-server by state: leased (in use), or free with content that is known, empty or
    unknown.
    """
    rule = _gauge(rule=RuleKind)
    """1 for what a restored state is good for on this model and build, as was learned; 0 for the others."""
    evaluation_tokens_per_second = _gauge(up_to=POSITION_LABELS.values())
    """How fast prompt tokens are evaluated up to so many tokens into the prompt (none: further in),
    as measured lately; 0 until then.
    """
    restore_bytes_per_second = _gauge(file=("warm", "cold"))
    """How fast checkpoints are restored, as measured lately, from the page cache (warm) or from the
    disk (cold); 0 until then.
    """
    save_bytes_per_second = _gauge()
    """How fast checkpoints are saved, as measured lately; 0 until then."""
    self_tests = _counter(result=(*RuleKind, "failed"))
    """Self-tests run, by the rule that they learned, or failed."""
    drift = _counter()
    """Slots that held other tokens than the proxy expected, for example after requests that bypassed
    the proxy.
    """
    live_reuse_short = _counter()
    """Replies that reused less of a live slot than expected."""
    tokenization_disagreements = _counter()
    """Requests whose tokens the proxy predicted wrongly; their shape is served uncached."""
    state = _gauge(state=State)
    """1 for how requests are served now, as /health says: caching, degraded (cached, but something
    costs speed) or forwarding (nothing is cached); 0 for the others.
    """
    degraded = _gauge(kind=DegradationKind)
    """1 for each reason that /health names now."""
    degradations = _counter(kind=DegradationKind)
    """How often each reason that /health can name has begun."""
    cache_faults = _counter(stage=STAGES)
    """Faults that cost a request its speed, by what was being done."""
    served_models = _gauge(model=())
    """1 for each model that was served since the proxy started; its name is the label."""
    build_info = _gauge(version=())
    """1; the version of the proxy is the label."""
