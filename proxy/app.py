"""The composition root: the only file that builds things and wires them together."""

import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from aiohttp import web

from proxy import __version__
from proxy.addresses import parse_hosts, parse_urls, split_address
from proxy.building import Builder
from proxy.config import Settings
from proxy.core.degradation import DegradationKind
from proxy.driver.contact.lifecycle import Lifecycle
from proxy.driver.degradations import Degradations
from proxy.driver.faults import Faults
from proxy.driver.fleet.dispatch import Dispatch
from proxy.driver.fleet.earlier_requests import EarlierRequests
from proxy.driver.fleet.fleet import Fleet, Patience
from proxy.driver.fleet.warming import Warming
from proxy.driver.gauges import connect_gauges
from proxy.driver.reporting.journal import Journal, Keep
from proxy.driver.reporting.report import Report
from proxy.driver.saving.saver import RewriteStateFile, keep_as_saved
from proxy.driver.saving.write_back import WriteBack
from proxy.driver.served import Served
from proxy.driver.services import Shared
from proxy.driver.tasks import Tasks
from proxy.errors import StoreFault, StoreLocked
from proxy.front.admin import Admin
from proxy.front.handlers import Front
from proxy.front.metrics_page import MetricsPage
from proxy.front.requests import Requests
from proxy.front.stored.checkpoints import Checkpoints
from proxy.front.stored.tree import Tree
from proxy.front.visitors import only_by_own_names
from proxy.front.warm import Warm
from proxy.log import get_logger
from proxy.metrics import Metrics
from proxy.page.events import Events
from proxy.page.files import PageFiles
from proxy.page.looks import Looks
from proxy.store.budget import Limits
from proxy.store.state_files import is_private
from proxy.store.store import CheckpointStore
from proxy.upstream.aliases import parse_aliases
from proxy.upstream.llama_server import LlamaServer, new_session
from proxy.upstream.target import Target


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that serves; the ports are those really bound."""

    port: int
    admin_port: int
    fleet: Fleet
    shared: Shared

    @property
    def lifecycle(self) -> Lifecycle:
        """That of the only llama-server, or the first one."""
        return self.fleet.backends[0].lifecycle

    @property
    def write_back(self) -> WriteBack:
        return self.fleet.backends[0].write_back

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
        store, metrics, Faults(metrics), degradations, report, journal, Tasks(), Served()
    )
    try:
        async with new_session() as client:
            key = settings.upstream_api_key
            roots = [LlamaServer(client, Target(url), key) for url in parse_urls(settings.upstream)]
            builder = Builder(settings, shared, rewrite, is_coming=is_llama_server_coming)
            async with _serve(settings, shared, builder, roots) as running:
                yield running
    finally:
        if store is not None:
            store.close()


def _operators(
    settings: Settings, shared: Shared, fleet: Fleet, dispatch: Dispatch
) -> web.Application:
    """Return what the admin listener serves."""
    page = MetricsPage(shared.metrics, fleet, joins_upstream=settings.join_upstream_metrics)
    warm = Warm(
        Warming(shared, fleet, dispatch),
        EarlierRequests(shared.journal, fleet),
        aliases=parse_aliases(settings.aliases),
        shares_between_api_keys=settings.share_between_api_keys,
    )
    views = (
        Admin(shared, fleet, page),
        Checkpoints(shared.served, shared.opened_store),
        Tree(shared.served, shared.opened_store),
        Requests(shared.journal),
        warm,
        PageFiles(),
        events := Events(Looks(shared, fleet)),
    )
    own_hosts = (split_address(settings.admin)[0], *parse_hosts(settings.admin_hosts))
    middlewares = [only_by_own_names(*own_hosts)]
    app = web.Application(client_max_size=settings.max_body_bytes, middlewares=middlewares)
    app.add_routes([route for view in views for route in view.routes()])
    app.on_shutdown.append(events.stop)
    return app


def _clients(
    settings: Settings, shared: Shared, fleet: Fleet, dispatch: Dispatch
) -> web.Application:
    """Return what the listener for clients serves."""
    front = Front(
        fleet,
        dispatch,
        shared.report,
        max_requests=settings.max_requests,
        allows_state_changes=settings.allow_state_changes,
        shares_between_api_keys=settings.share_between_api_keys,
        aliases=parse_aliases(settings.aliases),
    )
    app = web.Application(client_max_size=settings.max_body_bytes)
    app.router.add_route("*", "/{path:.*}", front.handle)
    return app


@asynccontextmanager
async def _serve(
    settings: Settings, shared: Shared, builder: Builder, roots: Sequence[LlamaServer]
) -> AsyncIterator[Running]:
    patience = Patience(settings.upstream_wait_seconds, settings.drain_seconds)
    fleet = Fleet(roots, builder.build, shared, patience)
    dispatch = Dispatch(fleet, builder.stabilizing, shared.report)
    connect_gauges(shared, fleet)
    operators = _operators(settings, shared, fleet, dispatch)
    clients = _clients(settings, shared, fleet, dispatch)
    # In reverse order of leaving: stop listening, then save, then stop watching.
    async with fleet.followed():
        try:
            async with (
                _listen(operators, settings.admin, 1.0) as admin_port,
                _listen(clients, settings.listen, settings.drain_seconds) as port,
            ):
                try:
                    yield Running(port, admin_port, fleet, shared)
                finally:
                    fleet.give_up()
        finally:
            try:
                await shared.tasks.drain(settings.drain_seconds)
                await fleet.drain(settings.drain_seconds)
                await builder.stabilizing.keep()
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
