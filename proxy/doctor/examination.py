"""Finds every llama-server that `upstream` names and examines them, one after the other.

The examination attaches to each as the proxy does, with a scratch store, and then probes it. While a proxy
uses the directory, the examination asks only that proxy: it asks no llama-server and loads no model. At a
host of models it loads only a model that was asked for by name, because the host may unload another model
for it. This module only collects facts; `findings` judges them.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import aiohttp
import msgspec

from proxy import errors
from proxy.core.conditions import DegradationKind
from proxy.core.cuts import MAX_CONTEXT_CHECKPOINTS
from proxy.core.model import Checkpoint, SlotId, is_same_canary
from proxy.core.saving import expected_bytes
from proxy.core.slots import Empty
from proxy.core.tokens import Namespace, TokenIds, token_ids
from proxy.doctor.findings import USUAL_TOKENS, HostFacts, LlamaServerFacts, Setup
from proxy.explain.report import Journal
from proxy.health import Degradations
from proxy.llama import client
from proxy.llama.connection import new_session
from proxy.llama.files import StateFile, has_two_caches, read_state_file
from proxy.llama.hosts import recognise
from proxy.metrics import Metrics
from proxy.servers.attach import measure_rule
from proxy.servers.server import Server
from proxy.serving.process import Process
from proxy.serving.services import new_shared
from proxy.settings import NO_DIRECTORY, Settings, reachable, token_to_show, upstream_urls
from proxy.store.directory import keep_proxies_out
from proxy.store.files import StateFiles, is_state_name
from proxy.store.index import Index
from proxy.store.known_models import Owner, owners
from proxy.store.store import CheckpointStore
from proxy.tasks import Tasks

Stored = tuple[list[Checkpoint], dict[Namespace, Owner]]
"""The checkpoints of the examined directory, and the owners of their namespaces."""

_HEALTH_SECONDS = 10.0


async def examine(settings: Settings, *, model: str = "", is_default: bool = False) -> Setup:
    """Return the facts about the llama-servers and the directory of *settings*.

    At a host of models, examine only *model* if it is named. *is_default* says that no directory was given:
    then a proxy that runs with another directory is asked in place of the default one. A problem that a
    person can mend becomes a fact. Raises SettingsError if the proxy's own address is to be examined, or if
    there is no default directory.
    """
    # Facts are printed, and the key must not be.
    told = msgspec.structs.replace(settings, upstream_api_key=None)
    setup = Setup(settings=told, own_uid=os.geteuid())
    async with new_session() as session, AsyncExitStack() as stack:
        try:
            stack.enter_context(keep_proxies_out(Path(settings.slot_save_path)))
        except errors.StoreLocked as lock:
            setup.lock = str(lock)
        if is_default or setup.lock:
            setup.health = await _health(session, settings)
        if setup.health and not setup.lock:
            return setup
        stored = _examine_directory(setup)
        if is_default and not setup.mode:
            raise errors.SettingsError(NO_DIRECTORY)
        if setup.problem or setup.lock or setup.scratch_problem:
            return setup
        urls = upstream_urls(settings)
        for url in urls:
            root = client.LlamaServer(session, client.Target(url), settings.upstream_api_key)
            upstreams, host = await reach(root, model)
            setup.hosts += [host] if host else []
            for upstream in upstreams:
                name = upstream.target.name if host or len(urls) > 1 else ""
                url, kind = upstream.target.base_url, host.kind if host else ""
                facts = LlamaServerFacts(url=url, name=name, host=kind)
                setup.llama_servers.append(facts)
                await _examine_server(upstream, facts, settings, stored)
    return setup


async def _health(session: aiohttp.ClientSession, settings: Settings) -> dict[str, Any] | None:
    """Return the /health of the proxy at the admin address, None if no proxy answers there."""
    url, token = f"http://{reachable(settings.admin)}/health", token_to_show(settings)
    limit = aiohttp.ClientTimeout(_HEALTH_SECONDS)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.get(url, timeout=limit, headers=headers) as reply:
            health = msgspec.json.decode(await reply.read(), type=dict[str, Any])
    except (aiohttp.ClientError, OSError, msgspec.DecodeError):
        return None
    return health if {"state", "reasons"} <= health.keys() else None


def _examine_directory(setup: Setup) -> Stored:
    """List the directory, create and remove a file; note permissions, free space and the index.

    Returns the stored checkpoints with their owners.
    """
    directory = Path(setup.settings.slot_save_path)
    try:
        status = directory.stat()
        setup.mode, setup.owner_uid = status.st_mode & 0o7777, status.st_uid
        setup.free_bytes = disk_usage(directory).free
        files = StateFiles(directory)
        setup.reserve_bytes = files.reserve_bytes()
        states = filter(is_state_name, files.names())
        setup.used_bytes = sum(map(files.size_bytes, states))
        probe = directory / files.new_temporary_name()
        probe.touch(mode=0o600, exist_ok=False)
        probe.unlink()
    except OSError as error:
        error.filename = None
        setup.problem = errors.in_words(error)
    stored: Stored = [], {}
    if not (setup.problem or setup.lock):
        try:
            setup.scratch_problem = _scratch_problem(directory / "index" / "data.mdb")
            stored = stored if setup.scratch_problem else read_index(directory)
        except (errors.StoreFault, PermissionError) as fault:
            setup.index_problem = errors.in_words(fault)
            setup.is_index_damaged = isinstance(fault, errors.IndexDamaged)
    setup.n_checkpoints = len(stored[0])
    return stored


def _scratch_problem(index: Path) -> str:
    """Return why no copy of an index can be made to look at; empty if one can."""
    try:
        place = Path(gettempdir())
    except FileNotFoundError as error:
        return str(error.strerror)  # it names the places that Python has tried
    # The scratch store has an index, too.
    n_bytes = (index.stat().st_size if index.exists() else 0) + (1 << 20)
    has_room = disk_usage(place).free >= n_bytes
    return "" if has_room else f"{place} has no room for {n_bytes:,} bytes"


def read_index(directory: Path) -> Stored:
    """Return the checkpoints in an index and the owners of their namespaces; nothing if there is no index.

    Leaves no trace. Raises StoreFault if the index cannot be read, is damaged or has another format. Not
    for an index that this process has open: LMDB forbids opening it twice.
    """
    if not (directory / "index" / "data.mdb").exists():
        return [], {}
    with TemporaryDirectory() as scratch:
        with closing(Index(directory / "index", scratch=Path(scratch))) as index:
            return index.all(), dict(owners(index))


async def reach(
    root: client.LlamaServer, asked_for: str
) -> tuple[list[client.LlamaServer], HostFacts | None]:
    """Return the llama-servers at an address, and the host if there is one.

    At a host these are the loaded models, or only the model *asked_for*, which is loaded if necessary.
    Raises nothing.
    """
    host = await recognise(root)
    if host is None:
        return [root], None
    facts = HostFacts(url=root.target.base_url, kind=host.kind)
    try:
        models = await host.models()
        chosen = models.named(asked_for)
        if chosen and chosen not in models.loaded:
            await host.load(chosen)
            facts.loaded = chosen
            models = await host.models()
    except errors.UpstreamFault as fault:
        facts.problem = str(fault)
        return [], facts
    facts.models = tuple(sorted(models.known))
    if asked_for and not chosen:
        facts.problem = f"There is no model {asked_for} to choose"
        return [], facts
    wanted = models.loaded & {chosen} if asked_for else models.loaded
    return [root.at(host.target(model)) for model in sorted(wanted)], facts


# One llama-server: the real attach on a scratch store, then the probes.


async def _examine_server(
    upstream: client.LlamaServer, facts: LlamaServerFacts, settings: Settings, stored: Stored
) -> None:
    """Fill in the facts about a llama-server."""
    try:
        async with scratch(upstream, settings) as (server, probed):
            await server.look(is_patient=True)
            if server.process:
                await _note_slots(facts, probed, server.process)
            if server.process and server.process.can_cache:
                with _noting(facts, "what a restored state is good for could not be measured"):
                    # The proxy itself runs this self-test only if requests contradict the rule.
                    empty = (s.id for s in server.process.slots if isinstance(s.content, Empty))
                    await measure_rule(server.process, next(empty))
                    facts.rule = server.process.rule
                _note_states(facts, probed, server.process, stored)
                with _noting(facts, "slot behaviour could not be examined"):
                    n_vocab = (await probed.model_meta()).n_vocab
                    facts.has_ram_cache = await has_ram_cache(probed, n_vocab)
                    facts.mixes_up_slots = await mixes_up_slots(probed, n_vocab)
            if facts.n_empty == 0 and not await probed.has_slot_save_path():
                server.services.degradations.begin(DegradationKind.NO_SLOT_SAVE_PATH)
            facts.degradations = tuple(server.services.degradations.active)
    except (errors.StoreFault, OSError) as fault:
        facts.failures.append(f"no scratch store could be opened: {errors.in_words(fault)}")


async def _note_slots(facts: LlamaServerFacts, probed: "ProbedServer", process: Process) -> None:
    """Note the build, model and slots of an attached llama-server, and the first and last saved file."""
    facts.build, facts.n_slots, facts.n_ctx = process.build, len(process.slots), process.n_ctx
    if probed.first_props:
        facts.model, facts.is_asleep = probed.first_props.model_path, probed.first_props.is_sleeping
    with suppress(errors.UpstreamFault):
        held = [status for status in await process.slot_states() if probed.held.get(status.id)]
        if process.clears_idle_slots is None and held:
            # One empty slot was run: the content of the other slots must still be there.
            process.note_clearing(clears=any(not status.n_held for status in held))
    counts = len(probed.empty), len(probed.held), probed.n_busy
    if sum(counts) == facts.n_slots:  # else the attach ended before all slots were looked at
        facts.n_empty, facts.n_held, facts.n_busy = counts
    if probed.file is not None:
        facts.probe_mode, facts.probe_owner_uid = probed.file.st_mode & 0o7777, probed.file.st_uid


@contextmanager
def _noting(facts: LlamaServerFacts, failure: str) -> Iterator[None]:
    """Note a fault in the block as a failure of the examination, which goes on."""
    try:
        yield
    except errors.CacheFault as fault:
        facts.failures.append(f"{failure}: {fault}")


def _note_states(
    facts: LlamaServerFacts, probed: "ProbedServer", process: Process, stored: Stored
) -> None:
    """Note the form and the cost of a state, and the stored checkpoints of this model."""
    if probed.state is not None:
        facts.layout = probed.state.version, probed.state.layout
        has_two = has_two_caches(probed.state.layout)
        facts.may_have_window = has_two and process.saver.may_have_window
        facts.has_drafting = bool(probed.state.draft_bytes)
    n_bytes = expected_bytes(process.sizes, USUAL_TOKENS, MAX_CONTEXT_CHECKPOINTS)
    if n_bytes is not None and probed.restores:
        restored_bytes, restore_seconds = max(probed.restores)
        facts.state_bytes = n_bytes
        facts.save_seconds = process.rates.save_seconds(n_bytes)
        facts.restore_seconds = restore_seconds * n_bytes / max(1, restored_bytes)
        facts.evaluate_seconds = process.rates.evaluation_seconds(0, USUAL_TOKENS)
    _, owner = next(owners(process.store.index))
    facts.owner = owner
    checkpoints, known = stored
    usable = {namespace for namespace, other in known.items() if owner.has_same_model(other)}
    sizes = [c.size_bytes for c in checkpoints if c.namespace in usable]
    facts.n_usable, facts.usable_bytes = len(sizes), sum(sizes)


# llama-server for probes, with a scratch store. Probes use only slots whose first save is empty. A slot
# that holds work is shown as busy, and the attach leaves busy slots alone. Afterwards the slots of probes
# are empty, and no file of a probe is left, whatever happens.

_ERASE_ATTEMPTS = 5
_LET_GO_SECONDS = 0.5
_PROBE_TOKENS = 64
"""Short enough for a slow machine, long enough for a clear result."""
_N_MORE = 8
_N_GENERATED = 100
_OTHERWISE = 0.3
"""Log-probabilities of another batch lie within 0.05, those of mixed-up slots 0.4 to 99 apart."""


class ProbedServer(client.LlamaServer):
    """llama-server for probes: a slot that holds work is shown as busy, and is not touched.

    `names` are the files that it was asked to save. `empty` are the slots that probes may use. `held` are
    the other idle slots, each with its number of tokens in GET /slots, 0 if only a save showed them.
    `restores` are the bytes and seconds of each restore. `first_props` is its first answer to /props,
    `file` the newest saved file as it was written, and `state` the newest state that holds tokens.
    """

    def __init__(self, upstream: client.LlamaServer, files: StateFiles) -> None:
        super().__init__(upstream.session, upstream.target, upstream.api_key)
        self.files = files
        self.names: list[str] = []
        self.first_props: client.Props | None = None
        self.empty: list[SlotId] = []
        self.held: dict[int, int] = {}
        self.n_busy = 0
        self.restores: list[tuple[int, float]] = []
        self.file: os.stat_result | None = None
        self.state: StateFile | None = None
        self._saves = Tasks()

    async def props(self, seconds: float = client.QUICK_SECONDS) -> client.Props:
        props = await super().props(seconds)
        self.first_props = self.first_props or props
        return props

    async def slots(self) -> list[client.SlotStatus]:
        """Return the slots' states, as if the slots that hold work were busy."""
        statuses = await super().slots()
        self.n_busy = sum(status.is_processing for status in statuses)
        for status in statuses:
            if not status.is_processing and status.n_held and status.id not in self.empty:
                self.held[status.id] = status.n_held
            status.is_processing |= status.id in self.held
        return statuses

    async def save(self, slot_id: SlotId, file_name: str) -> client.Saved:
        """Save a slot; the save goes on if this is cancelled, so that `clean_up` finds its file.

        A slot that GET /slots shows as empty may hold work: a mere restore does not show there. Raises
        NoRoom for such a slot, so that the attach leaves it alone.
        """
        self.names.append(file_name)
        saved = await asyncio.shield(self._saves.start(super().save(slot_id, file_name)))
        with suppress(OSError, errors.StateFileMalformed):
            self.file = self.files.path(file_name).stat()
            state = await asyncio.to_thread(read_state_file, self.files.path(file_name))
            self.state = state if state.tokens else self.state
        if slot_id not in self.empty:
            if saved.n_saved:
                self.held.setdefault(slot_id, 0)
                raise errors.NoRoom("scratch", "what slots hold is not kept")
            self.empty.append(slot_id)
        return saved

    async def restore(self, slot_id: SlotId, file_name: str) -> int:
        began = time.monotonic()
        n_restored = await super().restore(slot_id, file_name)
        self.restores.append((self.files.size_bytes(file_name), time.monotonic() - began))
        return n_restored

    async def erase(self, slot_id: SlotId) -> None:
        """Empty a slot; raises UpstreamRefused for a slot that may hold work."""
        self._require_empty(slot_id)
        await super().erase(slot_id)

    async def evaluate(
        self, slot_id: SlotId, tokens: TokenIds, headers: client.Headers | None = None
    ) -> client.Timings:
        """Evaluate tokens in a slot; raises UpstreamRefused for a slot that may hold work."""
        self._require_empty(slot_id)
        return await super().evaluate(slot_id, tokens, headers)

    async def generate(self, slot_id: SlotId, tokens: TokenIds) -> None:
        """Generate _N_GENERATED tokens behind *tokens*; raises UpstreamRefused as `evaluate` does."""
        self._require_empty(slot_id)
        fields = {"n_predict": _N_GENERATED, "ignore_eos": True, "cache_prompt": False}
        await self._complete(msgspec.Raw, {"prompt": tokens.tolist(), "id_slot": slot_id, **fields})

    def _require_empty(self, slot_id: SlotId) -> None:
        if slot_id not in self.empty:
            raise errors.UpstreamRefused(409, f"slot {slot_id} may hold work")

    async def has_slot_save_path(self) -> bool:
        """Return whether --slot-save-path was given; touches no slot, as all may hold work."""
        try:
            await self._act_on_slot(SlotId(0), "none", msgspec.Raw)
        except errors.UpstreamFault as fault:
            return getattr(fault, "status", None) != 501
        return True

    async def erase_all(self) -> None:
        """Empty the slots that probes may use; raises UpstreamFault."""
        for slot_id in self.empty:
            await self.erase(slot_id)

    async def clean_up(self) -> None:
        """Leave the slots of probes empty, and no file behind.

        A save may still be writing, and the slots are erased after it: so files are deleted last. A request
        that was given up while llama-server still parsed it starts after the first erase: so /slots is
        checked afterwards.
        """
        await self._saves.drain(client.SLOT_ACTION_SECONDS)
        with suppress(errors.CacheFault):
            for _ in range(_ERASE_ATTEMPTS if self.empty else 0):
                await self.erase_all()
                used = [status for status in await self.slots() if status.id in self.empty]
                if not any(status.is_processing or status.n_held for status in used):
                    break
                await asyncio.sleep(_LET_GO_SECONDS)
        for name in self.names:
            with suppress(OSError):
                self.files.remove(name)


@asynccontextmanager
async def scratch(
    upstream: client.LlamaServer, settings: Settings
) -> AsyncIterator[tuple[Server, ProbedServer]]:
    """Yield *upstream* with a scratch store; its state files are where llama-server writes.

    The index is in a temporary directory, and the store is opened there too: opening a store removes the
    files that its index does not know. Raises StoreFault.
    """
    probed = ProbedServer(upstream, StateFiles(Path(settings.slot_save_path)))
    metrics = Metrics()
    with TemporaryDirectory(prefix="llama-prefix-cache-doctor-") as folder:
        store = CheckpointStore(Path(folder), settings.max_store_bytes)
        store.files, store.files.most_reserved_bytes = probed.files, 0
        shared = new_shared(store, metrics, Degradations(metrics), Journal())
        try:
            yield Server(settings, shared.of(probed, "")), probed
        finally:
            await shared.tasks.drain(0)
            await probed.clean_up()
            store.close()


async def has_ram_cache(server: ProbedServer, n_vocab: int) -> bool:
    """Displace a prompt, send it again, and return whether it is brought back; raises UpstreamFault."""
    first, other = (_probe(n_vocab, seed, _PROBE_TOKENS) for seed in (4989, 6226))
    longer = _probe(n_vocab, 4989, _PROBE_TOKENS + _N_MORE)
    replies = [await server.evaluate(server.empty[0], each) for each in (first, other, longer)]
    await server.erase_all()
    # Sliding-window models reuse a few tokens less than they hold.
    return replies[-1].cache_n >= _PROBE_TOKENS // 2


async def mixes_up_slots(server: ProbedServer, n_vocab: int) -> bool:
    """Return whether a prompt is answered otherwise while another slot generates; raises UpstreamFault.

    docs/upstream/prompts_at_once.py shows such a llama-server.
    """
    if len(server.empty) < 2:
        return False
    other, slot_id = server.empty[:2]
    prompt = _probe(n_vocab, 31, _PROBE_TOKENS)
    alone = await server.canary(slot_id, prompt)
    generating = asyncio.ensure_future(server.generate(other, prompt[:_N_MORE]))
    try:  # the first of these may come before the other slot runs
        beside = [await server.canary(slot_id, prompt) for _ in range(3)]
    finally:
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
    await server.erase_all()
    return not all(is_same_canary(alone, answer, _OTHERWISE) for answer in beside)


def _probe(n_vocab: int, seed: int, n_tokens: int) -> TokenIds:
    return token_ids((i * 7919 + seed) % max(2, min(n_vocab, 30011)) for i in range(n_tokens))
