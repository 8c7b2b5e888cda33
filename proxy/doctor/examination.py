"""Finds every llama-server that `upstream` names and examines them, one after the other.

It attaches to each as the proxy does, on a scratch store, and then probes it. While a proxy uses the
directory, the examination asks only that proxy: it asks no llama-server and loads no model. At a host of
models it loads only a model that was asked for by name, because another model may be unloaded for it. This
module judges nothing.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from typing import Any

import aiohttp
import msgspec

from proxy.core.model import Checkpoint
from proxy.core.saving import expected_bytes
from proxy.core.slots import MAX_CONTEXT_CHECKPOINTS, Empty
from proxy.core.tokens import Namespace
from proxy.doctor.findings import USUAL_TOKENS, HostFacts, LlamaServerFacts, Setup, is_same_model
from proxy.doctor.probes import ProbedServer, has_ram_cache, scratch
from proxy.errors import CacheFault, IndexDamaged, StoreFault, StoreLocked, UpstreamFault, in_words
from proxy.llama.client import LlamaServer, Target
from proxy.llama.connection import new_session
from proxy.llama.hosts import recognise
from proxy.servers import self_test
from proxy.serving.process import Process
from proxy.serving.shared import quarantined_in_words
from proxy.settings import Settings, parse_urls, reachable, token_to_show
from proxy.store.directory import keep_proxies_out
from proxy.store.files import StateFiles
from proxy.store.known_models import Owner, owners, read_index

Stored = tuple[list[Checkpoint], dict[Namespace, Owner]]
"""The checkpoints of the examined directory, and the owners of their namespaces."""

_HEALTH_SECONDS = 10.0


async def examine(settings: Settings, *, model: str = "") -> Setup:
    """Return the facts about the llama-servers and the directory of *settings*.

    At a host of models, examine only *model* if it is named. A problem that a person can mend is a fact,
    and is not raised.
    """
    # Facts are printed; the key must not be.
    told = msgspec.structs.replace(settings, upstream_api_key=None)
    setup = Setup(settings=told, own_uid=os.geteuid(), asked_for=model)
    async with new_session() as session:
        with ExitStack() as stack:
            try:
                stack.enter_context(keep_proxies_out(Path(settings.slot_save_path)))
            except StoreLocked as lock:
                setup.lock = str(lock)
                setup.health = await _health(session, settings)
            stored = _examine_directory(setup)
            if setup.problem or setup.lock:
                return setup
            urls = parse_urls(settings.upstream)
            for url in urls:
                root = LlamaServer(session, Target(url), settings.upstream_api_key)
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
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return None
    return health if {"state", "reasons"} <= health.keys() else None


def _examine_directory(setup: Setup) -> Stored:
    """Create, list and remove a file; note permissions, free space and the index.

    Returns the stored checkpoints with their owners.
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
        return [], {}
    try:
        checkpoints, known = read_index(directory)
    except StoreFault as fault:
        setup.index_problem, setup.is_index_damaged = str(fault), isinstance(fault, IndexDamaged)
        return [], {}
    setup.n_checkpoints = len(checkpoints)
    setup.used_bytes = sum(checkpoint.size_bytes for checkpoint in checkpoints)
    setup.quarantined = quarantined_in_words(checkpoints)
    return checkpoints, known


async def reach(root: LlamaServer, asked_for: str) -> tuple[list[LlamaServer], HostFacts | None]:
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
        facts.n_at_most = models.n_at_most
        facts.asked_for = models.named(asked_for) or ""
        if facts.asked_for and facts.asked_for not in models.loaded:
            await host.load(facts.asked_for)
            facts.loaded = facts.asked_for
        models = await host.models()
    except UpstreamFault as fault:
        facts.problem = str(fault)
        return [], facts
    facts.models = tuple(sorted(models.known))
    wanted = models.loaded & {facts.asked_for} if asked_for else models.loaded
    return [root.at(host.target(model)) for model in sorted(wanted)], facts


# One llama-server: the real attach on a scratch store, then the probes.


async def _examine_server(
    upstream: LlamaServer, facts: LlamaServerFacts, settings: Settings, stored: Stored
) -> None:
    """Fill in the facts about a llama-server."""
    try:
        async with scratch(upstream, settings) as (server, probed):
            await server.look(is_patient=True)
            if server.process:
                await _note_slots(facts, probed, server.process)
            if server.process and server.process.can_cache:
                with _noting(facts, "what a restored state is good for could not be measured"):
                    # The proxy itself runs the self-test only if requests contradict the rule.
                    empty = (s.id for s in server.process.slots if isinstance(s.content, Empty))
                    await self_test.measure(server.process, next(empty))
                    facts.rule = server.process.rule
                _note_states(facts, probed, server.process, stored)
                with _noting(facts, "slot behaviour could not be examined"):
                    n_vocab = (await probed.model_meta()).n_vocab
                    facts.has_ram_cache = await has_ram_cache(probed, n_vocab)
            facts.degradations = tuple(server.services.degradations.active)
    except (StoreFault, OSError) as fault:
        facts.failures.append(f"no scratch store could be opened: {in_words(fault)}")


async def _note_slots(facts: LlamaServerFacts, probed: ProbedServer, process: Process) -> None:
    """Note the build, model and slots of an attached llama-server, and the first and last saved file."""
    facts.build, facts.n_slots, facts.n_ctx = process.build, len(process.slots), process.n_ctx
    if probed.first_props:
        facts.model, facts.is_asleep = probed.first_props.model_path, probed.first_props.is_sleeping
    with suppress(UpstreamFault):
        statuses = [status for status in await process.slot_states() if status.id in probed.held]
        if process.clears_idle_slots is None and any(probed.held.values()):
            # One empty slot was run: the content of the other slots must still be there.
            told = [status for status in statuses if probed.held[status.id]]
            process.note_clearing(clears=any(not status.n_held for status in told))
    counts = len(probed.empty), len(probed.held), probed.n_busy
    if sum(counts) == facts.n_slots:  # else the attach ended before all slots were looked at
        facts.n_empty, facts.n_held, facts.n_busy = counts
    facts.probe_name = next(iter(probed.files.issued), "")
    if probed.file is not None:
        facts.probe_mode, facts.probe_owner_uid = probed.file.st_mode & 0o7777, probed.file.st_uid


@contextmanager
def _noting(facts: LlamaServerFacts, failure: str) -> Iterator[None]:
    """Note a fault in the block as a failure of the examination, which goes on."""
    try:
        yield
    except CacheFault as fault:
        facts.failures.append(f"{failure}: {fault}")


def _note_states(
    facts: LlamaServerFacts, probed: ProbedServer, process: Process, stored: Stored
) -> None:
    """Note the form and the cost of a state, and the stored checkpoints of this model."""
    if probed.state is not None:
        facts.layout = probed.state.version, probed.state.layout
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
    sizes = [c.size_bytes for c in checkpoints if is_same_model(owner, known.get(c.namespace))]
    facts.n_usable, facts.usable_bytes = len(sizes), sum(sizes)
