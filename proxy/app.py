"""The composition root: the only file that builds things and wires them together."""

import asyncio
import math
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from aiohttp import web

from proxy import __version__
from proxy.core.conditions import DegradationKind, State
from proxy.core.eviction import Removal
from proxy.core.model import Checkpoint, RuleKind
from proxy.core.slots import SlotState, state_of
from proxy.core.tokens import TokenIds
from proxy.errors import StoreFault, StoreLocked
from proxy.explain.causes import Cause
from proxy.explain.report import Journal, Keep, Report
from proxy.health import Degradations, Faults
from proxy.llama.client import LlamaServer, new_session
from proxy.llama.routes import Target, parse_aliases
from proxy.log import get_logger
from proxy.metrics import POSITION_LABELS, Metrics
from proxy.servers.pool import Pool
from proxy.servers.server import Server
from proxy.servers.warming import EarlierRequests, Warming
from proxy.serving.process import NewestProcesses, Process, Shared, note_quarantined
from proxy.serving.saver import RewriteStateFile, keep_as_saved
from proxy.settings import Settings, parse_hosts, parse_urls, split_address
from proxy.store.catalogue import Limits
from proxy.store.files import is_private
from proxy.store.store import CheckpointStore
from proxy.tasks import Tasks
from proxy.web.admin import AdminListener, RequestList, Warm, only_by_own_names
from proxy.web.clients import Front
from proxy.web.page import Events, Looks, PageFiles
from proxy.web.stored import Checkpoints, TreeView
from proxy.web.writer import Unread

# What /metrics shows of the present: read from the running proxy at each scrape.


def connect_gauges(shared: Shared, pool: Pool) -> None:
    """Let every gauge read its value from what serves now; zero while there is nothing."""
    metrics = shared.metrics
    metrics.background_tasks.set_function(lambda: len(shared.tasks))
    metrics.event_loop_tasks.set_function(lambda: len(asyncio.all_tasks()))
    for state in State:
        metrics.state.labels(state).set_function(_is_state(shared.everywhere, state))
    metrics.waiting_requests.set_function(lambda: pool.n_waiting)
    _connect_processes(metrics, pool)
    if shared.opened_store is not None:
        _connect_store(shared, shared.opened_store)


def _connect_processes(metrics: Metrics, pool: Pool) -> None:
    def total(read: Callable[[Process], float]) -> Callable[[], float]:
        return lambda: float(sum(map(read, pool.processes)))

    def highest(read: Callable[[Process], float]) -> Callable[[], float]:
        return lambda: max(map(read, pool.processes), default=0.0)

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


def _is_state(degradations: Degradations, state: State) -> Callable[[], float]:
    return lambda: float(degradations.state is state)


def _n_slots_in(state: SlotState) -> Callable[[Process], float]:
    return lambda process: sum(state_of(slot) is state for slot in process.slots)


def _rate_up_to(position: float) -> Callable[[Process], float]:
    return lambda process: process.rates.tokens_per_second(position)


def _is_rule(kind: RuleKind) -> Callable[[Process], float]:
    return lambda process: float(process.can_cache and str(process.rule) == kind)


def _connect_store(services: Shared, store: CheckpointStore) -> None:
    metrics = services.metrics
    count_evictions(services, store)
    metrics.checkpoints.set_function(lambda: len(store))
    metrics.checkpoint_bytes.set_function(lambda: store.size_bytes)
    metrics.checkpoint_limit_bytes.set(store.limits.max_bytes)
    store.writes.on_write = metrics.written_bytes.inc
    metrics.written_last_day_bytes.set_function(lambda: store.writes.last_day_bytes)
    metrics.write_limit_bytes.set(store.writes.max_bytes_per_day)
    metrics.disk_free_bytes.set_function(lambda: _free_bytes(store))


def count_evictions(services: Shared, store: CheckpointStore) -> None:
    """Count what the store removes, what it removed when it was opened included; the journal notes it."""
    metrics, journal = services.metrics, services.journal
    for reason, n_removed in store.removals.items():
        metrics.evictions.labels(reason).inc(n_removed)

    def note(checkpoint: Checkpoint, tokens: TokenIds | None, reason: Removal) -> None:
        if reason is not Removal.SUPERSEDED:
            is_broken = reason is Removal.BROKEN
            cause = Cause.RESTORE_REFUSED if is_broken else Cause.EVICTED
            journal.note_loss(checkpoint.namespace, tokens, cause)
        metrics.evictions.labels(reason).inc()
        if checkpoint.quarantine:
            note_quarantined(services.everywhere, store)
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


# The composition root: the only file that builds things and wires them together.


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that serves; the ports are those really bound."""

    port: int
    admin_port: int
    pool: Pool
    shared: Shared

    @property
    def server(self) -> Server:
        """The only llama-server, or the first one."""
        return self.pool.servers[0]

    @property
    def store(self) -> CheckpointStore | None:
        return self.shared.opened_store

    @property
    def metrics(self) -> Metrics:
        return self.shared.metrics

    @property
    def degradations(self) -> Degradations:
        return self.shared.everywhere


def open_store(settings: Settings, degradations: Degradations) -> CheckpointStore | None:
    """Return the store, or None if it cannot be opened; raises StoreLocked if another proxy has it."""
    directory = Path(settings.slot_save_path)
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
        limits = Limits(
            settings.max_store_bytes, settings.min_free_bytes, settings.max_write_bytes_per_day
        )
        store = CheckpointStore(directory, limits)
    except StoreLocked:
        raise
    except (StoreFault, OSError) as fault:
        degradations.begin(DegradationKind.STORE_NOT_OPEN, str(fault))
        return None
    if not is_private(mode):
        degradations.begin(DegradationKind.DIRECTORY_IS_OPEN, f"{directory} has mode {mode:04o}")
    note_quarantined(degradations, store)
    get_logger("store").info(
        "store opened",
        directory=settings.slot_save_path,
        checkpoint_bytes=store.size_bytes,
        **asdict(store.report),
    )
    return store


@asynccontextmanager
async def run_proxy(
    settings: Settings,
    *,
    rewrite: RewriteStateFile = keep_as_saved,
    is_llama_server_coming: bool = False,
) -> AsyncIterator[Running]:
    """Serve until the block is left, then finish, write back and close.

    *is_llama_server_coming* says that it is being started, so that the first requests wait for it.
    Raises StoreLocked if another proxy uses the directory, OSError if a port is taken.
    """
    metrics = Metrics()
    metrics.build_info.labels(__version__).set(1)
    degradations = Degradations(metrics)
    store = open_store(settings, degradations)
    journal = Journal(Keep(settings.explain_keep))
    report = Report(metrics, journal)
    shared = Shared(
        store, metrics, Faults(metrics), degradations, report, journal, Tasks(), NewestProcesses()
    )
    rebuilding = Tasks()
    try:
        if store is not None and store.rebuild_reason:
            rebuilding.start(_rebuild(store, degradations))
        async with new_session() as client:
            key = settings.upstream_api_key
            roots = [LlamaServer(client, Target(url), key) for url in parse_urls(settings.upstream)]
            pool = Pool(settings, shared, roots, rewrite, is_coming=is_llama_server_coming)
            async with _serve(settings, shared, pool) as running:
                yield running
    finally:
        await rebuilding.drain(0)  # the next start goes on with it
        if store is not None:
            store.close()


async def _rebuild(store: CheckpointStore, degradations: Degradations) -> None:
    """Enter the states again that a damaged index has lost, while requests are served."""
    log = get_logger("store")
    degradations.begin(DegradationKind.INDEX_REBUILDING, store.rebuild_reason)
    try:
        log.info("index made anew", became=await store.rebuild())
    except StoreFault as fault:
        log.error("the index could not be made anew: the next start tries again", error=str(fault))
        return
    degradations.end(DegradationKind.INDEX_REBUILDING)


def _operators(settings: Settings, shared: Shared, pool: Pool) -> web.Application:
    """Return what the admin listener serves."""
    warm = Warm(
        Warming(shared, pool),
        EarlierRequests(shared.journal, pool),
        aliases=parse_aliases(settings.aliases),
    )
    views = (
        AdminListener(shared, pool),
        Checkpoints(shared.served, shared.opened_store),
        TreeView(shared.served, shared.opened_store),
        RequestList(shared.journal),
        warm,
        PageFiles(),
        events := Events(Looks(shared, pool)),
    )
    own_hosts = (split_address(settings.admin)[0], *parse_hosts(settings.admin_hosts))
    middlewares = [only_by_own_names(*own_hosts)]
    app = web.Application(client_max_size=settings.max_body_bytes, middlewares=middlewares)
    app.add_routes([route for view in views for route in view.routes()])
    app.on_shutdown.append(events.stop)
    return app


def _clients(settings: Settings, shared: Shared, pool: Pool) -> web.Application:
    """Return what the listener for clients serves."""
    front = Front(
        pool,
        shared.report,
        unread := Unread(shared.metrics),
        max_requests=settings.max_requests,
        aliases=parse_aliases(settings.aliases),
    )
    app = web.Application(client_max_size=settings.max_body_bytes)
    app.router.add_route("*", "/{path:.*}", front.handle)
    app.on_shutdown.append(unread.stop)
    return app


@asynccontextmanager
async def _serve(settings: Settings, shared: Shared, pool: Pool) -> AsyncIterator[Running]:
    connect_gauges(shared, pool)
    operators = _operators(settings, shared, pool)
    clients = _clients(settings, shared, pool)
    # In reverse order of leaving: stop listening, then save, then stop watching.
    async with pool.followed():
        try:
            async with (
                _listen(operators, settings.admin, 1.0) as admin_port,
                _listen(clients, settings.listen, settings.drain_seconds) as port,
            ):
                try:
                    yield Running(port, admin_port, pool, shared)
                finally:
                    pool.give_up()
        finally:
            try:
                await shared.tasks.drain(settings.drain_seconds)
                await pool.drain(settings.drain_seconds)
                await pool.stabilizing.keep()
            finally:
                await shared.tasks.drain(0)


@asynccontextmanager
async def _listen(app: web.Application, address: str, drain_seconds: float) -> AsyncIterator[int]:
    """Serve *app* at HOST:PORT and yield the port; port 0 takes a free one."""
    # Without cancellation a client that leaves the queue would keep its place.
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=drain_seconds,
        auto_decompress=False,
    )
    await runner.setup()
    try:
        host, port = split_address(address)
        site = web.TCPSite(runner, host or None, port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
