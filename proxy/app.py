"""The composition root: the only file that builds things and wires them together."""

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from proxy import __version__
from proxy.addresses import parse_hosts, split_address
from proxy.config import Settings
from proxy.core.degradation import DegradationKind
from proxy.driver.contact.absence import Absence
from proxy.driver.contact.attach import Attacher
from proxy.driver.contact.attachment import Attachment
from proxy.driver.contact.learning import Learning
from proxy.driver.contact.lifecycle import Lifecycle
from proxy.driver.contact.remembering import Remembering
from proxy.driver.degradations import Degradations
from proxy.driver.faults import Faults
from proxy.driver.reporting.earlier_requests import EarlierRequests
from proxy.driver.reporting.gauges import connect_gauges
from proxy.driver.reporting.journal import Journal, Keep
from proxy.driver.reporting.report import Report
from proxy.driver.saving.room import Room
from proxy.driver.saving.saver import RewriteStateFile, Saver, keep_as_saved
from proxy.driver.saving.slot_saves import SlotSaves
from proxy.driver.saving.write_back import WriteBack
from proxy.driver.services import Services
from proxy.driver.serving.cache import Cache
from proxy.driver.serving.overflow import Overflow
from proxy.driver.serving.prompts import PromptReader
from proxy.driver.serving.stabilizing import Stabilizing
from proxy.driver.serving.warming import Warming
from proxy.driver.session import Session
from proxy.driver.slots.arrivals import Arrivals
from proxy.driver.slots.launches import Launches
from proxy.driver.slots.slot_work import SlotWork
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
from proxy.stabilize.names import parse_switches
from proxy.store.budget import Limits
from proxy.store.state_files import is_private
from proxy.store.store import CheckpointStore
from proxy.upstream.aliases import parse_aliases
from proxy.upstream.llama_server import LlamaServer, new_session


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that serves; the ports are those really bound."""

    port: int
    admin_port: int
    lifecycle: Lifecycle
    store: CheckpointStore | None
    metrics: Metrics
    write_back: WriteBack
    degradations: Degradations


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
    try:
        async with new_session() as client:
            upstream = LlamaServer(client, settings.upstream, settings.upstream_api_key)
            journal = Journal(Keep(settings.explain_keep))
            report = Report(metrics, journal)
            services = Services(
                upstream, store, metrics, Faults(metrics), degradations, report, journal, Tasks()
            )
            absence = Absence(settings.upstream_wait_seconds, is_expected=is_llama_server_coming)
            async with _serve(settings, services, rewrite, absence) as running:
                yield running
    finally:
        if store is not None:
            store.close()


def _new_session(services: Services, saver: Saver, attachment: Attachment) -> Session:
    work = SlotWork(services, attachment)
    saves = SlotSaves(services, attachment, Room(services, attachment, saver))
    return Session(
        attachment,
        PromptReader(services.upstream, shares_headers=len(attachment.desk.table) > 1),
        work,
        saves,
        Launches(services, attachment, work, saves),
        Arrivals(attachment.desk),
    )


def _new_lifecycle(
    settings: Settings, services: Services, saver: Saver, absence: Absence
) -> Lifecycle:
    attacher = Attacher(
        services,
        saver,
        max_waiting=settings.max_requests,
        n_context_checkpoints=settings.context_checkpoints,
    )
    learning = Learning(services, saver)
    new_session = partial(_new_session, services, saver)
    return Lifecycle(services, attacher, new_session, learning, absence)


def _operators(
    settings: Settings, services: Services, lifecycle: Lifecycle, cache: Cache
) -> web.Application:
    """Return what the admin listener serves."""
    page = MetricsPage(
        services.metrics, services.upstream, joins_upstream=settings.join_upstream_metrics
    )
    warm = Warm(
        Warming(services, lifecycle, cache),
        EarlierRequests(services.journal, lifecycle, services.upstream),
        aliases=parse_aliases(settings.aliases),
        shares_between_api_keys=settings.share_between_api_keys,
    )
    views = (
        Admin(services, lifecycle, page),
        Checkpoints(lifecycle, services.opened_store),
        Tree(lifecycle, services.opened_store),
        Requests(services.journal),
        warm,
        PageFiles(),
        events := Events(Looks(services, lifecycle)),
    )
    own_hosts = (split_address(settings.admin)[0], *parse_hosts(settings.admin_hosts))
    middlewares = [only_by_own_names(*own_hosts)]
    app = web.Application(client_max_size=settings.max_body_bytes, middlewares=middlewares)
    app.add_routes([route for view in views for route in view.routes()])
    app.on_shutdown.append(events.stop)
    return app


@asynccontextmanager
async def _serve(
    settings: Settings, services: Services, rewrite: RewriteStateFile, absence: Absence
) -> AsyncIterator[Running]:
    lifecycle = _new_lifecycle(settings, services, Saver(services, rewrite), absence)
    stabilizing = Stabilizing(services, parse_switches(settings.stabilizers))
    overflow = Overflow(services, is_on=settings.context_overflow == "stable")
    cache = Cache(services, lifecycle, stabilizing, overflow)
    write_back = WriteBack(lifecycle, services.tasks, settings.idle_save_seconds)
    front = Front(
        services.upstream,
        cache,
        services.report,
        max_requests=settings.max_requests,
        allows_state_changes=settings.allow_state_changes,
        shares_between_api_keys=settings.share_between_api_keys,
        aliases=parse_aliases(settings.aliases),
    )
    connect_gauges(services, lifecycle)
    clients = web.Application(client_max_size=settings.max_body_bytes)
    clients.router.add_route("*", "/{path:.*}", front.handle)
    operators = _operators(settings, services, lifecycle, cache)
    # In reverse order of leaving: stop listening, then save, then stop watching.
    remembering = Remembering(services, lifecycle)
    async with (
        _background(remembering.run()),
        _background(lifecycle.watch()),
        _background(write_back.run()),
    ):
        try:
            async with (
                _listen(operators, settings.admin, 1.0) as admin_port,
                _listen(clients, settings.listen, settings.drain_seconds) as port,
            ):
                try:
                    yield Running(
                        port,
                        admin_port,
                        lifecycle,
                        services.opened_store,
                        services.metrics,
                        write_back,
                        services.degradations,
                    )
                finally:
                    absence.give_up()
        finally:
            try:
                await services.tasks.drain(settings.drain_seconds)
                await write_back.drain(settings.drain_seconds)
                await stabilizing.keep()
            finally:
                await services.tasks.drain(0)


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


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
