"""One examination of one llama-server: the real attach on a scratch store, and the probes beside it.

The attach says whether the model can be identified and its slots saved, whether idle slots keep what they
hold, and, by its self-test, what a restored state is good for. Its degradations are reported as they are.
This module judges nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.core.conditions import DegradationKind
from proxy.core.model import choose_namespace, is_same_canary, tenant_namespace
from proxy.core.slots import MAX_CONTEXT_CHECKPOINTS
from proxy.core.tokens import Namespace
from proxy.doctor.facts import (
    USUAL_TOKENS,
    BehaviourFacts,
    CostFacts,
    LlamaServerFacts,
    MemoryFacts,
    ServerFacts,
    SlotFacts,
    StateFacts,
    StoreFacts,
)
from proxy.doctor.probes import FreeBytes, Scratch, has_ram_cache, prefers_similar_slot, scratch
from proxy.errors import UpstreamFault
from proxy.llama.client import LlamaServer, Props
from proxy.llama.state_file import SUPPORTED_VERSIONS, StateFile
from proxy.servers import self_test
from proxy.servers.attach import attach, read_identity
from proxy.servers.server import kind_of
from proxy.serving.process import Process, quarantined_in_words
from proxy.serving.saver import RewriteStateFile
from proxy.store.catalogue import Limits
from proxy.store.index import IndexContent
from proxy.store.known_models import (
    NAMESPACES_PREFIX,
    Owner,
    known_namespaces,
    known_tenants,
    owners,
)

Note = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is to be examined; `admin` is where a proxy would answer operators, HOST:PORT.

    `asked_for` is the model of --model. `note` is told what is going on; `rewrite` and `free_bytes` are for
    tests.
    """

    roots: Sequence[LlamaServer]
    has_key: bool
    directory: Path
    admin: str
    limits: Limits
    idle_save_seconds: float
    asked_for: str
    rewrite: RewriteStateFile
    free_bytes: FreeBytes
    note: Note


async def examine_server(
    upstream: LlamaServer, server: ServerFacts, subject: Subject, index: IndexContent | None
) -> LlamaServerFacts:
    """Return all facts about a llama-server, with the degradations that its attach ran into.

    Without *index* its slots are not touched. Raises StoreFault or OSError if there is no scratch store.
    """
    limits = Limits(subject.limits.max_bytes)
    async with scratch(upstream, subject.directory, limits, subject.rewrite) as probing:
        facts = LlamaServerFacts(server=server)
        try:
            facts, props = await _contact(facts, probing, subject)
            if props is not None and index is not None and facts.server.has_slot_save_path:
                facts = await _examine_slots(facts, probing, props, index, subject.note)
        except UpstreamFault as fault:
            facts = replace(facts, failures=(f"the slots could not be examined: {fault}",))
        return replace(facts, degradations=tuple(probing.services.degradations.active))


async def _contact(
    facts: LlamaServerFacts, probing: Scratch, subject: Subject
) -> tuple[LlamaServerFacts, Props | None]:
    """Ask llama-server what it is; the properties are None if it cannot be attached to at all."""
    upstream, degradations = probing.server, probing.services.degradations
    try:
        props = await upstream.props()
        process_id = await upstream.process_id(props)
    except UpstreamFault as fault:
        kind = kind_of(fault)
        is_key_missing = kind is DegradationKind.API_KEY_REFUSED and not subject.has_key
        degradations.begin(kind, "none was given" if is_key_missing else str(fault))
        return facts, None
    if props.total_slots < 1:
        degradations.begin(DegradationKind.NOT_A_LLAMA_SERVER, "it has no slots")
        return facts, None
    if not process_id:
        degradations.begin(DegradationKind.PROCESS_HAS_NO_NAME)
    try:
        has_path = await upstream.has_slot_save_path()
        if not has_path:
            degradations.begin(DegradationKind.NO_SLOT_SAVE_PATH)
    except UpstreamFault as fault:
        has_path = None
        degradations.begin(DegradationKind.NOT_A_LLAMA_SERVER, str(fault))
    server = replace(
        facts.server,
        build=props.build_info,
        model=props.model_path,
        n_slots=props.total_slots,
        n_ctx=props.n_ctx,
        is_asleep=props.is_sleeping,
        has_slot_save_path=has_path,
    )
    return replace(facts, server=server), props


async def _examine_slots(
    facts: LlamaServerFacts, probing: Scratch, props: Props, index: IndexContent, note: Note
) -> LlamaServerFacts:
    """Attach, and probe what no attach tells, if there is an empty slot to do it in.

    Raises UpstreamFault.
    """
    server, name = probing.server, f"{facts.server.name}: " if facts.server.name else ""
    note(f"{name}looking for empty slots")
    await probing.find_empty_slots(props.total_slots)
    facts = replace(facts, probe_save=probing.first_save)
    if not probing.can_save:
        return facts
    slots = SlotFacts(len(server.empty), len(server.held), server.n_busy)
    facts = replace(facts, slots=slots)
    if not server.empty:
        return facts
    note(f"{name}attaching, and saving and restoring states of up to 4,400 tokens")
    process = await _attach(probing, props)
    if not process.can_cache:
        return facts
    facts = await _describe(facts, probing, process, props, index)
    note(f"{name}trying out similarity and the RAM cache")
    try:
        return replace(facts, behaviour=await _behaviour(probing, process))
    except UpstreamFault as fault:
        with suppress(UpstreamFault):
            await server.erase_all()
        return replace(facts, failures=(f"slot behaviour could not be examined: {fault}",))


async def _attach(probing: Scratch, props: Props) -> Process:
    """Attach as the proxy does, and wait for the self-test; raises UpstreamFault."""
    services, server, saver = probing.services, probing.server, probing.saver
    process = await attach(
        services,
        saver,
        props,
        "examined once",  # whether a restart can be told was looked at: this attachment outlives none
        max_waiting=0,
        shares_between_api_keys=None,
    )
    if process.obstacle:
        process.degrade(process.obstacle.kind, process.obstacle.detail)
    elif process.clears_idle_slots is None and any(server.held.values()):
        # One empty slot was run: what the others held before must be there still.
        statuses = [status for status in await server.slots() if server.held.get(status.id)]
        process.note_clearing(clears=any(not status.n_held for status in statuses))
    self_test.begin(process)
    await process.examination(None)
    return process


async def _describe(
    facts: LlamaServerFacts,
    probing: Scratch,
    process: Process,
    props: Props,
    index: IndexContent,
) -> LlamaServerFacts:
    """Add what the attach has found out about the model and its states."""
    _, owner = next(owners(probing.services.store.index))
    states = [state for state in probing.states if len(state.tokens)]
    version, layout = states[0].version, states[0].layout
    identity = await read_identity(probing.server, props)
    canary = tuple(owner.known.canary)
    return replace(
        facts,
        states=StateFacts(identity=identity, layout=repr((version, layout)), canary=canary),
        store=_store(index, owner),
        memory=MemoryFacts(
            file_version=version,
            is_version_supported=version in SUPPORTED_VERSIONS,
            sections=tuple(section.kind for section in layout or ()),
            rule=process.rule if process.self_test else None,
        ),
        cost=_cost(states, probing, process),
    )


def _store(index: IndexContent, owner: Owner) -> StoreFacts:
    """Return which of the checkpoints are of the model that the attach found on this server."""
    canary = owner.known.canary
    chosen = choose_namespace(known_namespaces(index, owner.static), canary)
    usable, models = [], []
    if chosen is not None:
        namespace = Namespace(chosen.id)
        tenants = {b"", *known_tenants(index, namespace)}
        ours = {tenant_namespace(namespace, tenant) for tenant in tenants}
        usable = [c for c in index.checkpoints if c.namespace in ours]
    else:
        names = (name for name in index.values if name.startswith(NAMESPACES_PREFIX))
        statics = (name.removeprefix(NAMESPACES_PREFIX) for name in names)
        models = [model for static in statics for model in known_namespaces(index, static)]
    return StoreFacts(
        n_checkpoints=len(index.checkpoints),
        size_bytes=sum(c.size_bytes for c in index.checkpoints),
        n_usable=len(usable),
        usable_bytes=sum(c.size_bytes for c in usable),
        quarantined=quarantined_in_words(index.checkpoints),
        knows_model_otherwise=any(is_same_canary(model.canary, canary) for model in models),
    )


def _cost(states: Sequence[StateFile], probing: Scratch, process: Process) -> CostFacts | None:
    """Return what a state costs, by the longest one of the self-test and one at most half as long."""
    longer = max(states, key=lambda state: len(state.tokens))
    shorter = [state for state in states if 2 * len(state.tokens) <= len(longer.tokens)]
    if not shorter or not probing.server.restores:
        return None
    other = max(shorter, key=lambda state: len(state.tokens))
    n_more_tokens = len(longer.tokens) - len(other.tokens)
    bytes_per_token = max(0, longer.state_end - other.state_end) / n_more_tokens
    fixed_bytes = max(0.0, longer.state_end - bytes_per_token * len(longer.tokens))
    points_bytes = (longer.size_bytes - longer.state_end) // max(1, len(longer.restore_points))
    state_bytes = round(fixed_bytes + bytes_per_token * USUAL_TOKENS)
    largest_bytes = state_bytes + MAX_CONTEXT_CHECKPOINTS * points_bytes
    restored_bytes, restore_seconds = max(probing.server.restores)
    return CostFacts(
        state_bytes=state_bytes,
        largest_bytes=largest_bytes,
        save_seconds=process.rates.save_seconds(largest_bytes),
        restore_seconds=restore_seconds * largest_bytes / max(1, restored_bytes),
        evaluate_seconds=process.rates.evaluation_seconds(0, USUAL_TOKENS),
    )


async def _behaviour(probing: Scratch, process: Process) -> BehaviourFacts:
    """Return what llama-server does to slots by itself; raises UpstreamFault."""
    server, clears = probing.server, process.clears_idle_slots
    server.n_vocab = (await server.model_meta()).n_vocab
    prefers_similar = await prefers_similar_slot(server, probing.states[-1].version)
    return BehaviourFacts(
        keeps_idle_slots=None if clears is None else not clears,
        prefers_similar_slot=prefers_similar,
        has_ram_cache=await has_ram_cache(server, prefers_similar=prefers_similar),
    )
