"""The composition root: the only file that builds things and wires them together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from proxy.config import Settings, split_address
from proxy.driver.attach import Attacher
from proxy.driver.attachment import Attachment
from proxy.driver.cache import Cache
from proxy.driver.faults import Faults
from proxy.driver.lifecycle import Lifecycle
from proxy.driver.prompts import PromptReader
from proxy.driver.services import Services
from proxy.driver.session import Session
from proxy.driver.slot_work import RewriteStateFile, SlotWork, keep_as_saved
from proxy.driver.tasks import Tasks
from proxy.driver.write_back import WriteBack
from proxy.errors import StoreFault, StoreLocked
from proxy.front.admin import Admin
from proxy.front.checkpoints import Checkpoints
from proxy.front.handlers import Front
from proxy.log import get_logger
from proxy.metrics import Metrics
from proxy.store.budget import Limits
from proxy.store.store import CheckpointStore
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


def open_store(settings: Settings) -> tuple[CheckpointStore | None, str | None]:
    """Return the store, or why there is none; raises StoreLocked if another proxy has it."""
    try:
        limits = Limits(settings.max_store_bytes, settings.min_free_bytes)
        store = CheckpointStore(Path(settings.slot_save_path), limits)
    except StoreLocked:
        raise
    except (StoreFault, OSError) as fault:
        get_logger("store").error(
            "the store cannot be opened: nothing is cached", reason=str(fault)
        )
        return None, str(fault)
    get_logger("store").info(
        "store opened",
        directory=settings.slot_save_path,
        checkpoint_bytes=store.size_bytes,
        **asdict(store.report),
    )
    return store, None


@asynccontextmanager
async def run_proxy(
    settings: Settings, *, rewrite: RewriteStateFile = keep_as_saved
) -> AsyncIterator[Running]:
    """Serve until the block is left, then finish, write back and close.

    Raises StoreLocked if another proxy uses the directory, OSError if a port is taken.
    """
    store, store_problem = open_store(settings)
    try:
        async with new_session() as client:
            upstream = LlamaServer(client, settings.upstream, settings.upstream_api_key)
            async with _serve(settings, upstream, store, store_problem, rewrite) as running:
                yield running
    finally:
        if store is not None:
            store.close()


@asynccontextmanager
async def _serve(
    settings: Settings,
    upstream: LlamaServer,
    store: CheckpointStore | None,
    store_problem: str | None,
    rewrite: RewriteStateFile,
) -> AsyncIterator[Running]:
    metrics = Metrics()
    services = Services(upstream, store, metrics, Faults(metrics), Tasks())

    def new_session_of(attachment: Attachment) -> Session:
        work = SlotWork(services, attachment, rewrite)
        return Session(attachment, PromptReader(upstream), work)

    attacher = Attacher(services, max_waiting=settings.max_requests, rewrite=rewrite)
    lifecycle = Lifecycle(services, attacher, new_session_of, rewrite)
    cache = Cache(services, lifecycle)
    write_back = WriteBack(lifecycle, services.tasks, settings.idle_save_seconds)
    front = Front(
        upstream,
        cache,
        max_requests=settings.max_requests,
        allows_state_changes=settings.allow_state_changes,
        shares_between_api_keys=settings.share_between_api_keys,
    )
    admin = Admin(lifecycle, store, store_problem, metrics)
    _watch_store(metrics, store)
    clients = web.Application(client_max_size=settings.max_body_bytes)
    clients.router.add_route("*", "/{path:.*}", front.handle)
    operators = web.Application()
    operators.add_routes([*admin.routes(), *Checkpoints(lifecycle, store).routes()])
    # In reverse order of leaving: stop listening, then save, then stop watching.
    async with _background(lifecycle.watch()), _background(write_back.run()):
        try:
            async with (
                _listen(operators, settings.admin, 1.0) as admin_port,
                _listen(clients, settings.listen, settings.drain_seconds) as port,
            ):
                yield Running(port, admin_port, lifecycle, store, metrics, write_back)
        finally:
            await services.tasks.drain(settings.drain_seconds)
            await write_back.drain(settings.drain_seconds)
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


def _watch_store(metrics: Metrics, store: CheckpointStore | None) -> None:
    if store is not None:
        metrics.watch_counts(
            "evictions", "Checkpoints deleted, by reason.", "reason", lambda: store.removals
        )
        metrics.watch("checkpoints", "Checkpoints in the store.", lambda: len(store))
        metrics.watch("checkpoint_bytes", "Bytes of all checkpoints.", lambda: store.size_bytes)
