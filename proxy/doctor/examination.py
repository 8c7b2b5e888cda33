"""Finds every llama-server that `upstream` names and examines them, one after the other.

Each is attached to as the proxy does, on a scratch store, and probed beside that. While a proxy uses the
directory nothing is tried out and no model loaded: the proxy is asked instead. At a host of models only the
model that was asked for by name is loaded, for another one may have to go for it. This module judges
nothing.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from shutil import disk_usage
from typing import Any

import aiohttp
import msgspec

from proxy.core.conditions import DegradationKind
from proxy.core.model import Checkpoint, is_same_canary
from proxy.core.saving import expected_bytes
from proxy.core.slots import MAX_CONTEXT_CHECKPOINTS, Empty
from proxy.core.tokens import Namespace
from proxy.doctor.facts import USUAL_TOKENS, HostFacts, LlamaServerFacts, Setup
from proxy.doctor.probes import ProbedServer, Scratch, has_ram_cache, scratch
from proxy.errors import CacheFault, IndexDamaged, StoreFault, StoreLocked, UpstreamFault, in_words
from proxy.llama.client import LlamaServer, Props, new_session
from proxy.llama.hosts import recognise
from proxy.llama.routes import Target
from proxy.servers import self_test
from proxy.servers.attach import attach
from proxy.servers.server import kind_of
from proxy.serving.process import Process
from proxy.serving.saver import RewriteStateFile, keep_as_saved
from proxy.serving.shared import quarantined_in_words
from proxy.settings import Settings, parse_urls, reachable, token_to_show
from proxy.store.directory import keep_proxies_out
from proxy.store.files import StateFiles
from proxy.store.known_models import Owner, owners, read_index

Note = Callable[[str], object]
"""Is told what is going on."""
Stored = tuple[list[Checkpoint], dict[Namespace, Owner]]
"""The checkpoints of the examined directory, and whose namespaces are theirs."""

_HEALTH_SECONDS = 10.0


async def examine(
    settings: Settings,
    *,
    model: str = "",
    rewrite: RewriteStateFile = keep_as_saved,
    note: Note = lambda text: None,
) -> Setup:
    """Return what there is to know about the llama-servers and the directory of *settings*.

    At a host of models only about *model*, if one is named. *rewrite* is for tests. Raises nothing that a
    person could mend.
    """
    # Facts are printed, and the key must not be.
    told = msgspec.structs.replace(settings, upstream_api_key=None)
    setup = Setup(settings=told, own_uid=os.geteuid(), asked_for=model)
    async with new_session() as session:
        with ExitStack() as stack:
            try:
                stack.enter_context(keep_proxies_out(Path(settings.slot_save_path)))
            except StoreLocked as lock:
                setup.lock = str(lock)
                setup.health = await _health(session, settings)
                # What it stands before, only it knows: under `run` the port is a random one.
                upstream = (setup.health or {}).get("upstream") or settings.upstream
                settings = msgspec.structs.replace(settings, upstream=upstream)
            note("asking llama-server what it is")
            found, urls = [], parse_urls(settings.upstream)
            for url in urls:
                root = LlamaServer(session, Target(url), settings.upstream_api_key)
                upstreams, host = await reach(root, model, may_load=not setup.lock, note=note)
                setup.hosts += [host] if host else []
                for upstream in upstreams:
                    name = upstream.target.name if host or len(urls) > 1 else ""
                    url, kind = upstream.target.base_url, host.kind if host else ""
                    found.append((upstream, LlamaServerFacts(url=url, name=name, host=kind)))
            setup.llama_servers = [facts for _, facts in found]
            stored = _examine_directory(setup)
            for upstream, facts in found:
                await _examine_server(upstream, facts, setup, stored, rewrite, note)
                if setup.health is not None:
                    facts.degradations = ()  # the proxy has llama-server's key, and says what it met
    return setup


async def _health(session: aiohttp.ClientSession, settings: Settings) -> dict[str, Any] | None:
    """Return what a proxy says of itself on its admin listener, None if none answers there."""
    url, limit = (
        f"http://{reachable(settings.admin)}/health",
        aiohttp.ClientTimeout(total=_HEALTH_SECONDS),
    )
    token = token_to_show(settings)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.get(url, timeout=limit, headers=headers) as reply:
            health = msgspec.json.decode(await reply.read(), type=dict[str, Any])
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return None
    return health if {"state", "reasons"} <= health.keys() else None


def _examine_directory(setup: Setup) -> Stored | None:
    """Make and remove a file, and list them; look at permissions, free space and the index.

    Returns what is stored, None if slots are not to be touched.
    """
    directory = Path(setup.settings.slot_save_path)
    try:
        status = directory.stat()
        setup.mode, setup.owner_uid = status.st_mode & 0o7777, status.st_uid
        setup.free_bytes = disk_usage(directory).free
        probe = directory / StateFiles(directory).new_temporary_name()
        probe.touch(mode=0o600, exist_ok=False)
        os.listdir(directory)
        probe.unlink()
    except OSError as error:
        error.filename = None
        setup.problem = in_words(error)
    if setup.problem or setup.lock:
        return None
    try:
        stored = checkpoints, _ = read_index(directory)
    except StoreFault as fault:
        setup.index_problem, setup.is_index_damaged = str(fault), isinstance(fault, IndexDamaged)
        return [], {}
    setup.n_checkpoints = len(checkpoints)
    setup.used_bytes = sum(checkpoint.size_bytes for checkpoint in checkpoints)
    setup.quarantined = quarantined_in_words(checkpoints)
    return stored


# What answers at the addresses of `upstream`.


async def reach(
    root: LlamaServer, asked_for: str, *, may_load: bool, note: Note
) -> tuple[list[LlamaServer], HostFacts | None]:
    """Return the llama-servers at an address, and the host if there is one.

    Of a host these are the loaded models, or only the one *asked_for*: that one is loaded if it *may* be,
    and *note* is told so. Raises nothing.
    """
    host = await recognise(root)
    if host is None:
        return [root], None
    facts = HostFacts(url=root.target.base_url, kind=host.kind)
    try:
        models = await host.models()
        facts.n_at_most = models.n_at_most
        facts.asked_for = models.named(asked_for) or ""
        if facts.asked_for and may_load and facts.asked_for not in models.loaded:
            note(f"having {facts.asked_for} loaded")
            await host.load(facts.asked_for)
            facts.loaded = facts.asked_for
        models = await host.models()
    except UpstreamFault as fault:
        facts.problem = str(fault)
        return [], facts
    facts.models = tuple(sorted(models.known))
    wanted = models.loaded & {facts.asked_for} if asked_for else models.loaded
    return [root.at(host.target(model)) for model in sorted(wanted)], facts


# One llama-server: the real attach on a scratch store, and the probes beside it.


async def _examine_server(
    upstream: LlamaServer,
    facts: LlamaServerFacts,
    setup: Setup,
    stored: Stored | None,
    rewrite: RewriteStateFile,
    note: Note,
) -> None:
    """Fill in the facts about a llama-server; without *stored* its slots are not touched."""
    directory, max_bytes = Path(setup.settings.slot_save_path), setup.settings.max_store_bytes
    try:
        async with scratch(upstream, directory, rewrite, max_bytes) as probing:
            try:
                props = await _contact(facts, probing)
                if props is not None and stored is not None:
                    await _examine_slots(facts, probing, props, stored, note)
            except UpstreamFault as fault:
                facts.failures.append(f"the slots could not be examined: {fault}")
            facts.degradations = tuple(probing.services.degradations.active)
    except (StoreFault, OSError) as fault:
        facts.failures.append(f"no scratch store could be opened: {in_words(fault)}")


async def _contact(facts: LlamaServerFacts, probing: Scratch) -> Props | None:
    """Ask llama-server what it is; return its properties, None if it cannot be attached to."""
    upstream, degradations = probing.server, probing.services.degradations
    try:
        props = await upstream.props()
        process_id = await upstream.process_id(props)
        has_path = props.total_slots > 0 and await upstream.has_slot_save_path()
    except UpstreamFault as fault:
        kind = kind_of(fault)
        has_no_key = kind is DegradationKind.API_KEY_REFUSED and upstream.api_key is None
        degradations.begin(kind, "none was given" if has_no_key else str(fault))
        return None
    if props.total_slots < 1:
        degradations.begin(DegradationKind.NOT_A_LLAMA_SERVER, "it has no slots")
        return None
    facts.build, facts.model = props.build_info, props.model_path
    facts.n_slots, facts.n_ctx = props.total_slots, props.n_ctx
    facts.is_asleep = props.is_sleeping
    if not process_id:
        degradations.begin(DegradationKind.PROCESS_HAS_NO_NAME)
    if not has_path:
        degradations.begin(DegradationKind.NO_SLOT_SAVE_PATH)
    return props if has_path else None


async def _examine_slots(
    facts: LlamaServerFacts, probing: Scratch, props: Props, stored: Stored, note: Note
) -> None:
    """Attach, and probe what no attach tells, if there is an empty slot to do it in.

    Raises UpstreamFault.
    """
    server, name = probing.server, f"{facts.name}: " if facts.name else ""
    note(f"{name}looking for empty slots")
    await probing.find_empty_slots(facts)
    if not facts.n_empty:
        return
    note(f"{name}attaching, and saving and restoring states of up to 4,400 tokens")
    process = await _attach(probing, props)
    if not process.can_cache:
        return
    await _measure_rule(facts, process)
    assert probing.layout is not None, "an attach that can cache has saved a state"
    facts.layout = probing.layout
    _note_cost(facts, server, process)
    _find_usable(facts, probing, stored)
    note(f"{name}trying out the RAM cache")
    try:
        server.n_vocab = (await server.model_meta()).n_vocab
        facts.has_ram_cache = await has_ram_cache(server)
    except UpstreamFault as fault:
        facts.failures.append(f"slot behaviour could not be examined: {fault}")
        with suppress(UpstreamFault):
            await server.erase_all()


async def _attach(probing: Scratch, props: Props) -> Process:
    """Attach as the proxy does; raises UpstreamFault."""
    services, server, saver = probing.services, probing.server, probing.saver
    process = await attach(
        services,
        saver,
        props,
        "examined once",  # no restart has to be noticed: this process is dropped at once
        max_waiting=0,
        shares_between_api_keys=None,
    )
    if process.obstacle:
        process.degrade(process.obstacle.kind, process.obstacle.detail)
    elif process.clears_idle_slots is None and any(server.held.values()):
        # One empty slot was run: what the others held before must be there still.
        statuses = [status for status in await server.slots() if server.held.get(status.id)]
        process.note_clearing(clears=any(not status.n_held for status in statuses))
    return process


async def _measure_rule(facts: LlamaServerFacts, process: Process) -> None:
    """Run the self-test; the proxy itself runs it only where requests contradict the rule."""
    slot_id = next(slot.id for slot in process.slots if isinstance(slot.content, Empty))
    try:
        await self_test.measure(process, slot_id)
    except CacheFault as fault:
        facts.failures.append(f"what a restored state is good for could not be measured: {fault}")
    else:
        facts.rule = process.rule


def _find_usable(facts: LlamaServerFacts, probing: Scratch, stored: Stored) -> None:
    """Note which of the directory's checkpoints are of the model that the attach found."""
    _, owner = next(owners(probing.services.store.index))
    facts.owner = owner
    checkpoints, known = stored
    ours = {
        namespace
        for namespace, other in known.items()
        if other.static == owner.static and is_same_canary(other.known.canary, owner.known.canary)
    }
    sizes = [c.size_bytes for c in checkpoints if c.namespace in ours]
    facts.n_usable, facts.usable_bytes = len(sizes), sum(sizes)


def _note_cost(facts: LlamaServerFacts, server: ProbedServer, process: Process) -> None:
    """Note what a state costs, as the proxy expects after the saves and restores of the self-test."""
    n_bytes = expected_bytes(process.sizes, USUAL_TOKENS, MAX_CONTEXT_CHECKPOINTS)
    if n_bytes is None or not server.restores:
        return
    restored_bytes, restore_seconds = max(server.restores)
    facts.state_bytes = n_bytes
    facts.save_seconds = process.rates.save_seconds(n_bytes)
    facts.restore_seconds = restore_seconds * n_bytes / max(1, restored_bytes)
    facts.evaluate_seconds = process.rates.evaluation_seconds(0, USUAL_TOKENS)
