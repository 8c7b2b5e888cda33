"""What /metrics shows of the present: read from the running proxy at each scrape."""

import asyncio
import math
from collections.abc import Callable, Iterator

from proxy.core.degradation import State
from proxy.core.explaining.causes import Cause
from proxy.core.keeping.eviction import Removal
from proxy.core.model import Checkpoint, RuleKind
from proxy.core.prefix import TokenIds
from proxy.core.slots import SlotState, state_of
from proxy.driver.contact.attachment import Attachment
from proxy.driver.degradations import Degradations
from proxy.driver.fleet.fleet import Fleet
from proxy.driver.reporting.journal import Journal
from proxy.driver.services import Shared
from proxy.log import get_logger
from proxy.metrics import POSITION_LABELS, Metrics
from proxy.store.store import CheckpointStore


def connect_gauges(shared: Shared, fleet: Fleet) -> None:
    """Let every gauge read its value from what serves now; zero while there is nothing."""
    metrics = shared.metrics
    metrics.background_tasks.set_function(lambda: len(shared.tasks))
    metrics.event_loop_tasks.set_function(lambda: len(asyncio.all_tasks()))
    for state in State:
        metrics.state.labels(state).set_function(_is_state(shared.everywhere, state))
    metrics.waiting_requests.set_function(lambda: fleet.n_waiting)
    _connect_attachments(metrics, fleet)
    if shared.opened_store is not None:
        _connect_store(shared, shared.opened_store)


def _connect_attachments(metrics: Metrics, fleet: Fleet) -> None:
    def total(read: Callable[[Attachment], float]) -> Callable[[], float]:
        return lambda: float(sum(map(read, _attachments(fleet))))

    def highest(read: Callable[[Attachment], float]) -> Callable[[], float]:
        return lambda: max(map(read, _attachments(fleet)), default=0.0)

    metrics.rule_end_tokens.set_function(highest(lambda a: a.rule.end_holds_from))
    for position, label in POSITION_LABELS.items():
        metrics.evaluation_tokens_per_second.labels(label).set_function(
            highest(_rate_up_to(position))
        )
    warm, cold = (
        metrics.restore_bytes_per_second.labels("warm"),
        metrics.restore_bytes_per_second.labels("cold"),
    )
    warm.set_function(highest(lambda a: a.rates.warm_restore.bytes_per_second))
    cold.set_function(highest(lambda a: a.rates.cold_restore.bytes_per_second))
    metrics.save_bytes_per_second.set_function(highest(lambda a: a.rates.save.bytes_per_second))
    for state in SlotState:
        metrics.slots.labels(state).set_function(total(_n_slots_in(state)))
    for kind in RuleKind:
        metrics.rule.labels(kind).set_function(highest(_is_rule(kind)))


def _attachments(fleet: Fleet) -> Iterator[Attachment]:
    for backend in fleet.backends:
        if session := backend.lifecycle.current:
            yield session.attachment


def _is_state(degradations: Degradations, state: State) -> Callable[[], float]:
    return lambda: float(degradations.state is state)


def _n_slots_in(state: SlotState) -> Callable[[Attachment], float]:
    return lambda attachment: sum(state_of(slot) is state for slot in attachment.desk.table)


def _rate_up_to(position: float) -> Callable[[Attachment], float]:
    return lambda attachment: attachment.rates.tokens_per_second(position)


def _is_rule(kind: RuleKind) -> Callable[[Attachment], float]:
    return lambda attachment: float(attachment.can_cache and attachment.rule.kind is kind)


def _connect_store(services: Shared, store: CheckpointStore) -> None:
    metrics = services.metrics
    count_evictions(metrics, services.journal, store)
    metrics.checkpoints.set_function(lambda: len(store))
    metrics.checkpoint_bytes.set_function(lambda: store.size_bytes)
    metrics.checkpoint_limit_bytes.set(store.limits.max_bytes)
    store.writes.on_write = metrics.written_bytes.inc
    metrics.written_last_day_bytes.set_function(lambda: store.writes.last_day_bytes)
    metrics.write_limit_bytes.set(store.writes.max_bytes_per_day)
    metrics.disk_free_bytes.set_function(lambda: _free_bytes(store))


def count_evictions(metrics: Metrics, journal: Journal, store: CheckpointStore) -> None:
    """Count what the store removes, what it removed when it was opened included; the journal notes it."""
    for reason, n_removed in store.removals.items():
        metrics.evictions.labels(reason).inc(n_removed)

    def note(checkpoint: Checkpoint, tokens: TokenIds | None, reason: Removal) -> None:
        if reason is not Removal.SUPERSEDED:
            journal.note_loss(checkpoint.namespace, tokens, Cause.EVICTED)
        metrics.evictions.labels(reason).inc()
        get_logger("store").info(
            "checkpoint removed",
            reason=reason.value,
            kind=checkpoint.kind.value,
            n_tokens=checkpoint.n_tokens,
            size_bytes=checkpoint.size_bytes,
        )

    store.on_removal = note


def _free_bytes(store: CheckpointStore) -> float:
    try:
        return store.files.free_bytes()
    except OSError:
        return math.nan
