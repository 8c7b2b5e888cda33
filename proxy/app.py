"""The composition root: the only file that builds things and wires them together."""

import asyncio
import secrets
import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from proxy import __version__
from proxy import settings as configuration
from proxy.core.conditions import DegradationKind, State
from proxy.core.eviction import Removal
from proxy.core.launch import Launch
from proxy.core.model import Checkpoint, RuleKind
from proxy.core.slots import SLOT_STATES, state_of
from proxy.core.tokens import TokenIds
from proxy.errors import StoreFault, StoreLocked
from proxy.explain.causes import Cause
from proxy.explain.report import Journal
from proxy.health import Degradations
from proxy.llama.client import LlamaServer, Target
from proxy.llama.connection import new_session
from proxy.log import get_logger
from proxy.metrics import POSITION_LABELS, Metrics
from proxy.servers.pool import Pool
from proxy.serving.services import Services, new_shared, note_quarantined
from proxy.settings import MAX_REQUESTS, Settings, parse_list, split_address, upstream_urls
from proxy.stabilize.model import parse_switches
from proxy.store.files import is_private, write_whole
from proxy.store.store import CheckpointStore
from proxy.tasks import Deadline
from proxy.web.admin import Admin, only_operators
from proxy.web.clients import IDLE_SECONDS, MAX_BODY_BYTES, MAX_TARGET_BYTES, Front
from proxy.web.page import LivePage
from proxy.web.writer import Connection, Unread

if TYPE_CHECKING:
    from proxy.shared.tier import Tier


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that serves; the ports are those really bound."""

    port: int
    admin_port: int
    pool: Pool
    shared: Services


@asynccontextmanager
async def run_proxy(settings: Settings, *, launch: Launch | None = None) -> AsyncIterator[Running]:
    """Serve until the block is left, then finish, write back and close.

    With a *launch*, llama-server is being started like that: the first requests wait for it. Raises
    StoreLocked if another proxy uses the directory, OSError if a port is taken, SettingsError if a file
    that was given has no token, or a URL of `upstream` is the proxy's own.
    """
    urls, metrics = upstream_urls(settings), Metrics()
    metrics.build_info.labels(__version__).set(1)
    degradations = Degradations(metrics, wait_seconds=settings.upstream_wait_seconds)
    store = open_store(settings, degradations)
    journal = Journal(settings.explain_keep, parse_switches(settings.stabilizers))
    shared = new_shared(store, metrics, degradations, journal)
    shared.tier = open_tier(settings, shared)
    try:
        async with new_session() as client:
            roots = [LlamaServer(client, Target(url), settings.upstream_api_key) for url in urls]
            async with _serve(settings, shared, Pool(settings, shared, roots, launch)) as running:
                yield running
    finally:
        if store is not None:
            store.close()


def open_store(settings: Settings, degradations: Degradations) -> CheckpointStore | None:
    """Return the store, or None if it cannot be opened; raises StoreLocked if another proxy has it."""
    directory = Path(settings.slot_save_path)
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
        written_bytes = settings.max_write_bytes_per_day
        store = CheckpointStore(directory, settings.max_store_bytes, written_bytes)
    except StoreLocked:
        raise
    except (StoreFault, OSError) as fault:
        degradations.begin(DegradationKind.STORE_NOT_OPEN, str(fault))
        return None
    if not is_private(mode):
        degradations.begin(DegradationKind.DIRECTORY_IS_OPEN, f"{directory} has mode {mode:04o}")
    note_quarantined(degradations, store.quarantined)
    get_logger("store").info(
        "store opened",
        directory=settings.slot_save_path,
        checkpoint_bytes=store.size_bytes,
        **store.report,
    )
    if anew := store.report.get("index_made_anew"):
        says = f"the index of {directory} was mended from the states there ({anew})"
        get_logger("store").warning("index made anew", says=says)
    return store


def open_tier(settings: Settings, shared: Services) -> "Tier | None":
    """Return the shared store, None if there is none to be used; raises SettingsError."""
    store = shared.opened_store
    url, key_file, limits = configuration.parse_shared_store(settings.shared_store)
    if store is None or store.files.is_readonly or not url:
        return None
    # Loaded only where `shared_store` is set.
    from proxy.shared.bucket import Bucket
    from proxy.shared.objects import Sealing, read_key
    from proxy.shared.remote import Remote
    from proxy.shared.tier import Tier

    sealing = Sealing(read_key(Path(key_file)) if key_file else b"")
    seen = shared.metrics, shared.all_degradations, shared.faults
    try:
        return Tier(Remote(store, Bucket(url), sealing, shared.present, *seen), limits)
    except StoreFault as fault:
        shared.all_degradations.begin(DegradationKind.SHARED_STORE_AWAY, str(fault))
        return None


def admin_token(settings: Settings) -> str | None:
    """Return the token that the admin listener asks for, None if it asks for none.

    Where a token is needed and there is none yet, one is made, stored and logged. Raises SettingsError as
    `read_admin_token`.
    """
    is_here = configuration.is_loopback(split_address(settings.admin)[0])
    if is_here and not settings.admin_token_file:
        return None
    if (token := configuration.read_admin_token(settings)) is None:
        token, path = secrets.token_urlsafe(24), configuration.admin_token_file(settings)
        kept_in = ""  # in a directory that cannot be written
        with suppress(OSError):
            write_whole(path, f"{token}\n".encode())
            kept_in = str(path)
        where = f"kept in {path}" if kept_in else f"for this run: {path} cannot be written"
        says = f"the live page and the commands ask for a token: {token} ({where})"
        get_logger("admin").info("token made", token=token, kept_in=kept_in, says=says)
    return token


@asynccontextmanager
async def _serve(settings: Settings, shared: Services, pool: Pool) -> AsyncIterator[Running]:
    shared.metrics.set_gauges = partial(set_gauges, shared, pool)
    if shared.opened_store is not None:
        shared.opened_store.writes.on_write = shared.metrics.written_bytes.inc
        count_evictions(shared, shared.opened_store)
    aliases, page = configuration.parse_pairs(settings.aliases), LivePage(shared, pool)
    open_paths = [f"/{name}" for name in parse_list(settings.admin_open)]
    own_host = split_address(settings.admin)[0]
    guard = only_operators(admin_token(settings), open_paths, own_host)
    operators = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard])
    operators.add_routes([*Admin(shared, pool, aliases).routes(), *page.routes()])
    unread = Unread(shared.metrics)
    limit = MAX_REQUESTS * len(pool.roots)
    front = Front(pool, shared, unread, limit, aliases, deadline := Deadline())

    async def stop(_: web.Application) -> None:
        unread.is_stopping = True
        deadline.set(settings.drain_seconds)

    clients = web.Application()
    clients.router.add_route("*", "/{path:(?s:.*)}", front.handle)  # a path may have a newline
    clients.on_shutdown.append(stop)
    # Before the first call to llama-server: another proxy may be using it, and would be disturbed.
    for address in (settings.admin, settings.listen):
        (await _bind(asyncio.Protocol, address)).close()
    # These blocks are left in reverse order: listening stops, then slots are saved, then watching stops.
    async with shared.tier.running() if shared.tier else nullcontext(), pool.followed():
        try:
            async with (
                _listen(operators, settings.admin, 1.0, Deadline()) as admin_port,
                _listen(clients, settings.listen, settings.drain_seconds, deadline) as port,
            ):
                bound = f"{settings.listen.rpartition(':')[0]}:{port}"
                pool.settings = msgspec.structs.replace(settings, listen=bound)
                try:
                    yield Running(port, admin_port, pool, shared)
                finally:
                    pool.give_up()
        finally:
            try:
                await pool.ahead.close()
                await shared.tasks.drain(settings.drain_seconds)
                await pool.drain(settings.drain_seconds)
                if shared.tier:
                    await shared.tier.uploads.drain(settings.drain_seconds)
                await pool.stabilizing.keep()
            finally:
                await shared.tasks.drain(0)


@asynccontextmanager
async def _listen(
    app: web.Application, address: str, drain_seconds: float, deadline: Deadline
) -> AsyncIterator[int]:
    """Serve *app* at HOST:PORT and yield the port; port 0 takes a free one."""
    # Without cancellation a client that leaves the queue would stay in the queue.
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        # aiohttp waits twice for this time: generations end at `drain_seconds`, the rest a little later.
        shutdown_timeout=0.6 * drain_seconds + 0.1,
        auto_decompress=False,
        keepalive_timeout=IDLE_SECONDS,
        max_line_size=MAX_TARGET_BYTES,
    )
    await runner.setup()
    connected = runner.server
    assert connected is not None
    listener: asyncio.Server | None = None
    try:
        listener = await _bind(lambda: Connection(connected()), address)
        yield int(listener.sockets[0].getsockname()[1])
    finally:
        if listener is not None:
            listener.close()
        try:
            await runner.cleanup()
        except asyncio.CancelledError:
            # A second signal. Requests that still run end here, while llama-server still answers.
            deadline.set(0)
            await connected.shutdown(0.1)
            raise


async def _bind(new_protocol: Callable[[], asyncio.Protocol], address: str) -> asyncio.Server:
    """Listen at HOST:PORT; raises OSError with the address as its file name."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    everywhere = host in ("", "::")  # with "::" itself, asyncio would leave out IPv4
    try:
        return await loop.create_server(new_protocol, None if everywhere else host, port)
    except OSError as error:
        error.filename = address
        raise


# Gauges are set at each scrape; they are zero while there is nothing to measure.


def set_gauges(shared: Services, pool: Pool) -> None:
    """Set every gauge to its present value."""
    metrics, processes = shared.metrics, pool.processes

    def highest(values: Iterable[float]) -> float:
        return max(values, default=0.0)

    metrics.background_tasks.set(len(shared.tasks))
    metrics.event_loop_tasks.set(len(asyncio.all_tasks()))
    metrics.waiting_requests.set(pool.n_waiting)
    for state in State:
        metrics.state.labels(state).set(shared.all_degradations.state is state)
    slots = Counter(state_of(slot) for process in processes for slot in process.slots)
    for held in SLOT_STATES:
        metrics.slots.labels(held).set(slots[held])
    rules = {process.rule.kind for process in processes if process.can_cache}
    for kind in RuleKind:
        metrics.rule.labels(kind).set(kind in rules)
    for position, label in POSITION_LABELS.items():
        speed = highest(p.rates.tokens_per_second(position) for p in processes)
        metrics.evaluation_tokens_per_second.labels(label).set(speed)
    restores = metrics.restore_bytes_per_second
    restores.labels("warm").set(highest(p.rates.warm_restore.bytes_per_second for p in processes))
    restores.labels("cold").set(highest(p.rates.cold_restore.bytes_per_second for p in processes))
    metrics.save_bytes_per_second.set(highest(p.rates.save.bytes_per_second for p in processes))
    metrics.shared_known_states.set(len(shared.tier.remote.known) if shared.tier else 0)
    if (store := shared.opened_store) is not None:
        metrics.checkpoints.set(len(store))
        metrics.checkpoint_bytes.set(store.size_bytes)
        metrics.checkpoint_limit_bytes.set(store.writes.max_bytes)
        metrics.written_last_day_bytes.set(store.writes.last_day_bytes)
        metrics.write_limit_bytes.set(store.writes.max_bytes_per_day)
        metrics.disk_free_bytes.set(store.free_bytes)


def count_evictions(shared: Services, store: CheckpointStore) -> None:
    """Count the checkpoints that the store removes or removed at its opening, and tell the journal."""
    metrics = shared.metrics
    for reason, n_removed in store.removals.items():
        metrics.evictions.labels(reason).inc(n_removed)

    def note(checkpoint: Checkpoint, tokens: TokenIds | None, reason: Removal) -> None:
        if reason is not Removal.SUPERSEDED:
            cause = Cause.RESTORE_REFUSED if reason is Removal.BROKEN else Cause.EVICTED
            shared.journal.prompts.note_loss(checkpoint.namespace, tokens, cause)
        metrics.evictions.labels(reason).inc()
        if shared.tier:
            shared.tier.uploads.note_removed(checkpoint, reason)
        if checkpoint.quarantine:
            note_quarantined(shared.all_degradations, store.quarantined)
        get_logger("store").info(
            "checkpoint removed",
            reason=reason.value,
            kind=checkpoint.kind.value,
            n_tokens=checkpoint.n_tokens,
            size_bytes=checkpoint.size_bytes,
        )

    store.on_removal = note
