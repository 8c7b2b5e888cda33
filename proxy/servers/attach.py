"""What a llama-server process has and can do: first contact with it, and the self-test.

The order matters. First the proxy saves the content of the slots, which may be hours of work. Then it finds
an empty slot, asks the model for its canary there, and saves that slot as a probe. The probe shows the
layout of the cache, so that the proxy can find the namespace of the saved states. It also shows the rule.
"""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from proxy.core import model
from proxy.core.conditions import DegradationKind
from proxy.core.cuts import MAX_CONTEXT_CHECKPOINTS
from proxy.core.launch import N_CONTEXT_CHECKPOINTS, Launch
from proxy.core.model import NO_RULE, Canary, CheckpointKind, Rule, SlotId
from proxy.core.rates import Rates
from proxy.core.residency import choose_slot_to_empty
from proxy.core.saving import StateSize
from proxy.core.slots import TAINTED, Empty, Origin, SlotTable, Unknown
from proxy.core.tokens import Namespace, TokenIds, token_ids
from proxy.errors import CacheFault, NoRoom, UpstreamFault, UpstreamRefused, UpstreamSlow
from proxy.health import CannotCache
from proxy.llama import files as state_files
from proxy.llama.client import LlamaServer, ModelMeta, Props
from proxy.llama.files import StateFile, fingerprint_model, has_two_caches, read_state_file
from proxy.log import get_logger
from proxy.servers.background import time_disk
from proxy.serving.launches import Launches, note_emptied
from proxy.serving.process import RATES, RULE, SIZES, Process
from proxy.serving.prompts import PromptReader
from proxy.serving.queue import SlotQueue
from proxy.serving.saver import SavedSlot, Saver
from proxy.serving.saves import SlotSaves
from proxy.serving.services import ServerServices
from proxy.settings import MAX_REQUESTS, Settings
from proxy.store.known_models import introduce_model, known_namespaces, known_tenants, owners

Adopted = dict[SlotId, SavedSlot]
"""The states saved from slots at first contact; their files wait for a namespace."""

_MAY_BE_WRONG = (
    "this model has a sliding window: llama-server answers some prompts wrongly if -b is larger than -ub,"
    " as it is by default; start llama-server with -b 512"
)
_OTHER_NUMBERS = (
    "the same model file computes other numbers than before (another backend, -ngl, kernels or rope flags):"
    " states from before are not used until it computes as it did"
)
_FEW_TOKENS = token_ids(range(1, 9))


Identity = dict[str, Any]
"""A model with its adapters, as llama-server and the model file describe them; it is only hashed.

Identity, layout of the cache and canary make a namespace; only the canary needs an evaluation.
"""


async def attach(
    services: ServerServices, settings: Settings, props: Props, process_id: str, launch: Launch
) -> Process:
    """Return the process that answered with *props*; if it cannot cache, its obstacle says why.

    *launch* says how many context checkpoints a slot keeps, until a save or a reply shows the number. If it
    does not say so, a slot counts as keeping as many as with `run`, and a file as loaded whole.
    """
    n_told = launch.n_context_checkpoints
    newest = services.served.get(services.upstream.target)
    is_same = newest and newest.id == process_id and len(newest.slots) == props.total_slots
    before = newest if is_same else None  # it is met again, unless its successor has no name either
    known = before.slots.met_again() if before else ()
    process = Process(
        **vars(services),
        id=process_id,
        build=props.build_info,
        queue=SlotQueue(SlotTable(known or [Unknown()] * props.total_slots), MAX_REQUESTS),
        n_ctx=props.n_ctx,
        accused=before.accused if before else [],
        n_kept_points=N_CONTEXT_CHECKPOINTS if n_told is None else n_told,
        n_loaded_points=MAX_CONTEXT_CHECKPOINTS if n_told is None else n_told,
        takes_media=not props.modalities or any(props.modalities.values()),
        has_ram_cache=launch.has_ram_cache,
    )
    shares_headers = props.total_slots > 1
    process.reader = PromptReader(process.upstream, props.n_ctx, shares_headers=shares_headers)
    process.saver = Saver(process)
    process.saves = SlotSaves(process)
    process.launches = Launches(process)
    try:
        with suppress(UpstreamRefused):  # then it may ask for one
            process.asks_for_key = not await process.upstream.takes_key({})
        shares = settings.share_between_api_keys
        process.is_one_tenant = not process.asks_for_key if shares is None else shares
        if process.is_one_tenant:
            process.tenants.add(b"")
        process.takes_completions = not await process.upstream.dies_of_completions()
        if not process.takes_completions:
            process.clears_idle_slots = False  # the trial below would be a completion
            raise CannotCache(DegradationKind.ONLY_EMBEDDINGS)
        if process.opened_store is None:
            raise CannotCache(DegradationKind.STORE_NOT_OPEN)
        if not process_id:
            raise CannotCache(DegradationKind.PROCESS_HAS_NO_NAME)
        await _identify(process, props, launch)
    except CannotCache as obstacle:
        process.obstacle = obstacle
    except CacheFault as fault:
        process.obstacle = CannotCache(DegradationKind.ATTACH_FAILED, str(fault))
    if process.obstacle:
        process.model_namespace, process.rule = None, NO_RULE  # states of no model are not saved
        process.faults.count("attach")
        # If no save has shown whether idle slots are cleared, a trial does, once per process.
        if process.clears_idle_slots is None:
            clears = before.clears_idle_slots if before else await _seen_clearing(process.upstream)
            process.clears_idle_slots = clears  # no condition: nothing is saved, and nothing waits
    elif process.accused:
        await process.acquit()
    return process


async def _seen_clearing(upstream: LlamaServer) -> bool | None:
    """Fill one empty slot, run another; return whether the first has lost its tokens, None if unknown.

    For servers that cannot save; where llama-server cannot erase either, both slots keep a few tokens.
    """
    with suppress(UpstreamFault):
        idle = [status for status in await upstream.slots() if not status.is_processing]
        empty = [SlotId(status.id) for status in idle if status.n_held == 0][:2]
        if len(empty) < 2:
            return None
        for slot_id in empty:
            await upstream.evaluate(slot_id, _FEW_TOKENS)
        first = next(s for s in await upstream.slots() if s.id == empty[0])
        with suppress(UpstreamFault):
            for slot_id in empty:
                await upstream.erase(slot_id)
        return None if first.n_held is None else first.n_held == 0
    return None


async def _identify(process: Process, props: Props, launch: Launch) -> None:
    """Save what the slots hold, learn namespace and rule in an empty slot, and commit what was saved."""
    with suppress(UpstreamRefused):  # --no-slots: a save of a busy slot just waits for it
        for status in await process.slot_states():
            if status.is_processing:  # nobody knows whether that may be saved
                process.slots.set_content(SlotId(status.id), TAINTED)
                process.slots.lease(SlotId(status.id), time.monotonic())
    process.adapters = await process.upstream.lora_adapters()
    async with AsyncExitStack() as files:
        adopted = await _adopt_slots(process, files)
        # Before a slot is emptied: if this is refused, no more can be learned.
        meta = await process.upstream.model_meta()
        slot_id = await _empty_slot(process, adopted)
        try:
            await _examine(process, slot_id, props, meta, launch)
        except CacheFault:
            with suppress(UpstreamFault):  # the next try, or `doctor`, needs an empty slot again
                await process.erase(slot_id)
            raise
        if process.rule.is_end_only and launch.n_context_checkpoints is None:
            # Files of such builds have no context checkpoints: nobody limits them, and no save counts them.
            process.n_kept_points = MAX_CONTEXT_CHECKPOINTS
        known = known_tenants(process.store.index, process.model_namespace)
        process.tenants |= {tenant for tenant in known if process.tenant_here(tenant) == tenant}
        process.sizes.extend(process.remembered(SIZES, list[StateSize]) or [])
        process.rates = process.remembered(RATES, Rates) or Rates()
        process.tasks.start(time_disk(process))
        for slot_id, saved in adopted.items():
            await _commit(process, slot_id, saved)


async def _adopt_slots(process: Process, files: AsyncExitStack) -> Adopted:
    """Save every idle slot that holds something that may be saved; *files* deletes the files on leaving.

    A slot stays unknown if the store has no room for its state, and is given up if its save takes too long,
    as behind a gateway with a short time limit: no other try would end sooner. Where there are adapters, a
    slot's tokens do not tell by which scales they were evaluated, so the slot is erased.
    """
    adopted: Adopted = {}
    for slot in (slot for slot in process.slots.free() if slot.content.can_be_adopted):
        try:
            async with AsyncExitStack() as file:
                name = await file.enter_async_context(process.saver.room_for(slot.content))
                saved = await process.saver.save(slot.id, name)
                if not saved.state.tokens:
                    process.slots.set_content(slot.id, Empty())
                elif process.adapters:
                    await process.erase(slot.id)
                else:
                    adopted[slot.id] = saved
                    files.push_async_exit(file.pop_all())
        except UpstreamSlow as slow:
            process.degrade(DegradationKind.SAVES_FAIL, str(slow))
            process.slots.set_content(slot.id, TAINTED)
        except NoRoom:
            pass
    return adopted


async def _empty_slot(process: Process, adopted: Adopted) -> SlotId:
    """Return an empty slot; if there is none, empty one that must not be saved, or has the fewest tokens.

    If the store had no room for any slot, the content of one slot is lost.
    """
    n_saved = {slot_id: len(saved.state.tokens) for slot_id, saved in adopted.items()}

    def loss(slot_id: SlotId) -> tuple[bool, bool, int]:
        content, n_tokens = process.slots[slot_id].content, n_saved.get(slot_id, process.n_ctx)
        return not isinstance(content, Empty), content.can_be_adopted, n_tokens

    slot_id = min((slot.id for slot in process.slots.free()), key=loss, default=None)
    if slot_id is None:
        raise CannotCache(DegradationKind.EVERY_SLOT_BUSY)
    if not isinstance(process.slots[slot_id].content, Empty):
        await process.erase(slot_id)
    return slot_id


async def _examine(
    process: Process, slot_id: SlotId, props: Props, meta: ModelMeta, launch: Launch
) -> None:
    """Find the namespace and the rule of the model in an empty slot, and leave that slot empty."""
    upstream, table = process.upstream, process.slots
    n_vocab, path = meta.n_vocab, Path(props.model_path)
    fingerprint = await asyncio.to_thread(fingerprint_model, path)  # empty if it cannot be read
    process.saver.may_have_window = not await asyncio.to_thread(state_files.lacks_window, path)
    identity = {
        "model": fingerprint or f"{path} {meta.size}",
        "n_vocab": n_vocab,
        "n_params": meta.n_params,
        "size_bytes": meta.size,
        "modalities": props.modalities,
        "adapters": [(a.id, a.path, a.scale) for a in process.adapters],
    }
    fixed = token_ids(token % max(1, n_vocab) for token in model.CANARY_TOKENS)
    tokens = fixed[:-1]
    table.set_content(slot_id, TAINTED)
    canary = await upstream.canary(slot_id, tokens)
    if process.store.files.is_readonly:
        await _recognize(process, identity, canary)
    else:
        async with process.saver.probe(slot_id, len(tokens)) as saved:
            probe = saved.state
            if probe.tokens[: len(tokens)] != tokens:
                raise CacheFault("a saved slot holds other tokens than were evaluated in it")
            is_windowed = process.saver.may_have_window and has_two_caches(probe.layout)
            if is_windowed and not launch.has_narrow_batches:
                get_logger("lifecycle").warning(_MAY_BE_WRONG)
            await _look_for_clearing(process, slot_id, fixed[-1:])
            process.saves_context_checkpoints = bool(probe.restore_points)
            sections = [s for s in probe.layout or () if s.kind == "attention"]
            process.shares_cells = len(table) > 1 and any(s.n_streams == 1 for s in sections)
            name = upstream.target.model or Path(props.model_path).name.removesuffix(".gguf")
            process.metrics.served_models.labels(name).set(1)
            static = _static(process, identity, probe)
            process.model_namespace = await _namespace(process, static, canary, name)
            try:
                rule = process.remembered(RULE, Rule) or await _derive(process, slot_id, saved)
            except UpstreamRefused as refusal:
                if refusal.status != 400:
                    raise
                rule = NO_RULE  # as in `learn_rule`: it would refuse the probe at each try
            await process.learn_rule(rule)
    await upstream.erase(slot_id)
    table.set_content(slot_id, Empty())


def _static(process: Process, identity: Identity, state: StateFile) -> str:
    """Return the key of a model before its canary is known: its identity and the form of its states.

    With drafting, llama-server restores a state without a draft state too, and every state that it saves
    after such a restore lacks one. The length of the draft state stands for its form.
    """
    drafting = (state.draft_bytes,) if state.draft_bytes else ()
    # States from before windows were put in order can answer wrongly: they must not be found. Nor
    # must those from when the index of sparse attention was put in order, too, or no window behind it.
    order = "in order" if process.saver.may_have_window else "as saved"
    n_caches = sum(section.kind == "attention" for section in state.layout or ())
    ordered = [order] * (n_caches - 1) if has_two_caches(state.layout) else []
    told = msgspec.json.encode([identity, (state.version, state.layout), *drafting, *ordered])
    return xxhash.xxh3_128_hexdigest(told)


async def _recognize(process: Process, identity: Identity, canary: Canary) -> None:
    """Find the namespace and the rule from the stored states, for a directory that is read-only."""
    store, owned = process.store, dict(owners(process.store.index))
    directory = str(store.files.directory)
    for namespace, checkpoint in {c.namespace: c for c in store}.items():
        owner = owned.get(namespace)
        if owner is None or not model.choose_namespace([owner.known], canary):
            continue
        with suppress(OSError, CacheFault):
            state = read_state_file(store.files.path(checkpoint.file_name))
            process.model_namespace = Namespace(owner.known.id)
            # Whether this build saves context checkpoints is not known: a rule is known for one case only.
            for process.saves_context_checkpoints in (True, False):
                known = process.remembered(RULE, Rule)
                if known and owner.static == _static(process, identity, state):
                    process.degrade(DegradationKind.DIRECTORY_IS_READ_ONLY, directory)
                    return await process.learn_rule(known)
    raise CannotCache(DegradationKind.DIRECTORY_IS_NO_USE, directory)


async def _look_for_clearing(process: Process, slot_id: SlotId, tokens: TokenIds) -> None:
    """Run another slot, if one is empty, and see whether *slot_id* still holds its tokens.

    With llama-server's default flags, a slot that starts empties idle slots. Builds before June 2026 do not
    tell how many tokens a slot holds: there a save shows it.
    """
    upstream, table = process.upstream, process.slots
    other_id = next((slot.id for slot in table if isinstance(slot.content, Empty)), None)
    if other_id is not None:
        await upstream.evaluate(other_id, tokens)
        await upstream.erase(other_id)
    has_emptied, n_held = False, None
    with suppress(UpstreamRefused):
        statuses = await upstream.slots()
        has_emptied = note_emptied(table, statuses)
        n_held = next((s.n_held for s in statuses if s.id == slot_id), None)
    has_emptied |= n_held == 0
    if other_id is not None and n_held is None:
        async with process.saver.probe(slot_id, len(model.CANARY_TOKENS)) as saved:
            has_emptied |= not saved.state.tokens
    if other_id is not None or has_emptied:
        process.note_clearing(clears=has_emptied)


async def _derive(
    process: Process, slot_id: SlotId, saved: SavedSlot, *, trusts_points: bool = True
) -> Rule:
    """Return the rule that a saved state shows; where its file is not enough, it is restored.

    Its context checkpoints are tried out only without *trusts_points*.
    """
    state, holds_at_end, n_most, rewinds = saved.state, False, 0, False
    tokens, can_be_cut, points = state.tokens, state.has_every_position, state.restore_points
    process.slots.set_content(slot_id, TAINTED)
    if not (points and trusts_points):
        # A state that lacks positions cannot give its last token back: the prompt is one token longer.
        longer = tokens if can_be_cut else tokens + tokens[:1]
        holds_at_end = await _reused(process, slot_id, saved, longer) == len(longer) - 1
        n_common = len(tokens) - BACK_TOKENS
        can_rewind = holds_at_end and can_be_cut
        n_most = model.highest_point(points, n_common) if points else n_common * can_rewind
        if n_most:
            branching = tokens[:n_common] + tokens[:1]
            rewinds = n_most <= await _reused(process, slot_id, saved, branching) <= n_common
    # A longer state fills most windows: if that is not continued at its end, none is.
    may_be_window = holds_at_end or len(tokens) < model.FULL_WINDOW_TOKENS
    rule = model.derive(
        has_points=bool(points) and (rewinds or not n_most),
        has_every_position=can_be_cut and may_be_window,
        holds_at_end=holds_at_end,
        rewinds=rewinds,
    )
    return replace(rule, stride_tokens=model.FAR_TOKENS) if state.version == 2 else rule


async def _reused(process: Process, slot_id: SlotId, saved: SavedSlot, prompt: TokenIds) -> int:
    """Return how many tokens of a prompt are reused after a restore of the probe."""
    await process.upstream.erase(slot_id)
    await process.upstream.restore(slot_id, saved.file_name)
    return (await process.upstream.evaluate(slot_id, prompt)).cache_n


async def _namespace(process: Process, static: str, canary: Canary, name: str) -> Namespace:
    """Return the namespace of the model with this canary; *name* is its name for people."""
    known = known_namespaces(process.store.index, static)
    if known and model.choose_namespace(known, canary) is None:
        get_logger("lifecycle").warning(_OTHER_NUMBERS)
    meet = partial(introduce_model, process.store.index, static, canary, name, renames=True)
    return await process.store.write(meet)  # another llama-server may be met at the same time


async def _commit(process: Process, slot_id: SlotId, saved: SavedSlot) -> None:
    """Commit the state of an adopted slot, unless several tenants could own it: nothing tells which one."""
    state, tenants = saved.state, process.tenants or {b""}
    if len(tenants) > 1 or state.n_media or -1 in state.tokens:
        return
    # An earlier proxy may have restored this slot.
    origin = Origin(0 if state.has_every_position else len(state.tokens))
    held = Unknown(process.tenant_namespace(min(tenants)), origin=origin)
    if not isinstance(process.slots[slot_id].content, Empty):  # it was emptied meanwhile
        process.slots.set_content(slot_id, held)
    await process.saves.commit(slot_id, CheckpointKind.CONVERSATION, saved, held, held)


# The self-test: it measures how much of a restored state this server reuses.
#
# It runs when requests contradict the rule that the first files showed, and in `doctor`. A state that fills
# most sliding windows shows where it can be continued. A shorter one shows whether that holds for short
# states, too.


PROBE_LENGTHS = (64, model.FULL_WINDOW_TOKENS, 2 * model.FULL_WINDOW_TOKENS)
"""The shortest and the longest that fit into the context are used."""
BACK_TOKENS = 20
"""A prompt leaves a state so many tokens before its end, to show whether it can be continued there."""


async def learn_rule(process: Process, slot_id: SlotId) -> Rule:
    """Return the rule, and leave something in the slot; raises CacheFault.

    The slot is leased and empty; the holder of the lease erases it afterwards. Nothing can be restored
    where llama-server refuses the short state; the long one may just have no room at that time.
    """
    n_ids = max(2, min((await process.upstream.model_meta()).n_vocab, 30011))
    text = token_ids((i * 7919 + 1237) % n_ids for i in range(PROBE_LENGTHS[-1]))
    process.saver.repairs_windows = True
    rules: list[Rule] = []
    fitting = [n for n in PROBE_LENGTHS if n + 1 < process.n_ctx]
    for n_tokens in dict.fromkeys(fitting[:1] + fitting[-1:]):
        try:
            await process.upstream.erase(slot_id)
            process.learn_evaluation(await process.upstream.evaluate(slot_id, text[:n_tokens]))
            async with process.saver.probe(slot_id, n_tokens) as saved:
                rules.append(await _derive(process, slot_id, saved, trusts_points=False))
        except UpstreamRefused as refusal:
            if rules or refusal.status != 400:
                raise
            return NO_RULE
    return replace(rules[-1], end_holds_from=rules[0].end_holds_from) if rules else NO_RULE


async def measure_rule(process: Process, slot_id: SlotId) -> None:
    """Measure the rule in a leased slot, and use it; the slot is saved before and empty afterwards.

    Raises CacheFault, and then keeps the earlier rule.
    """
    await process.saves.write_back(slot_id)
    await process.launches.clear_others()  # which waits for slots that are closing, as this one is
    await process.erase(slot_id)
    process.slots.set_content(slot_id, TAINTED)
    process.queue.reconsider()  # no request need wait for this slot's earlier content
    try:
        learned = await learn_rule(process, slot_id)
        rule = replace(learned, stride_tokens=process.rule.stride_tokens)
    finally:
        process.saver.repairs_windows = process.rule.needs_repair
    await process.erase(slot_id)  # raises if the measured process is gone
    await process.learn_rule(rule)
    process.recover(DegradationKind.RESTORES_NOT_REUSED)
    process.metrics.self_tests.labels(rule.kind).inc()
    get_logger("learning").info(
        "self-test done", rule=rule.kind.value, end_holds_from=rule.end_holds_from
    )


def look_again(process: Process) -> None:
    """Measure the rule if enough requests contradict it; the number needed doubles each time.

    Contradictions mean that the first files showed a wrong rule, or that the server has changed (other
    flags, say).
    """
    if process.n_contradictions < process.n_contradictions_allowed:
        return
    if (turn := process.launches.try_turn()) is None:
        return
    slot = choose_slot_to_empty(process.slots)
    if slot is None or (lease := process.queue.try_lease(slot.id)) is None:
        return turn.end()  # everything is busy: the next look may find a free slot
    get_logger("learning").warning(
        "restores are refused, or not reused as the rule says: the self-test runs",
        rule=process.rule.kind.value,
        n_contradictions=process.n_contradictions,
    )
    process.n_contradictions = 0
    process.n_contradictions_allowed *= 2
    measuring = process.tasks.start(_try_to_measure(process, slot.id))
    measuring.add_done_callback(turn.end)
    lease.hand_over(measuring)


async def _try_to_measure(process: Process, slot_id: SlotId) -> None:
    try:
        await measure_rule(process, slot_id)
    except Exception as error:
        process.metrics.self_tests.labels("failed").inc()
        process.faults.record("self-test", error)
