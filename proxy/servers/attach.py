"""Finds out whether a slot that starts to run empties the idle ones, as with llama-server's default flags.

Only in slots that are known to be empty. Without a save the answer is read from /slots.
"""

import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from proxy.core.conditions import DegradationKind
from proxy.core.eviction import family_of
from proxy.core.model import CheckpointKind, SlotId, choose_namespace, new_namespace
from proxy.core.slots import (
    MAX_CONTEXT_CHECKPOINTS,
    TAINTED,
    Content,
    Empty,
    Known,
    Origin,
    SlotTable,
    n_believed_points,
)
from proxy.core.tokens import Namespace, TokenIds, token_ids
from proxy.errors import CacheFault, NoRoom, SaveRejected, UpstreamFault, UpstreamRefused
from proxy.health import CannotCache
from proxy.llama.client import LlamaServer, Props
from proxy.llama.state_file import StateFile
from proxy.log import get_logger
from proxy.servers.attachment import (
    canary_tokens,
    known_rates,
    known_sizes,
    owner_of,
    read_identity,
    remember_asking,
    static_key,
    unite_tenants,
)
from proxy.serving.desk import LeaseDesk
from proxy.serving.launches import Arrivals, Launches, note_emptied
from proxy.serving.process import Process, Services
from proxy.serving.prompts import PromptReader
from proxy.serving.saver import Room, SavedSlot, Saver
from proxy.serving.saves import SlotSaves
from proxy.store.known_models import known_namespaces, known_tenants, namespaces_name
from proxy.store.store import CheckpointStore

# Finds out whether a slot that starts to run empties the idle ones, as with llama-server's default flags.
#
# Only in slots that are known to be empty. Without a save the answer is read from /slots.


_FEW_TOKENS = token_ids(range(1, 9))


async def disturb(upstream: LlamaServer, table: SlotTable, tokens: TokenIds) -> bool:
    """Run another empty slot for a token, and leave it empty; return whether there was one."""
    for slot in table:
        if isinstance(slot.content, Empty):
            await upstream.evaluate(slot.id, tokens)
            await upstream.erase(slot.id)
            return True
    return False


async def seen_clearing(upstream: LlamaServer) -> bool | None:
    """Fill one empty slot, run another, and see whether the first still holds what it held.

    For servers that save and erase nothing: both keep a few tokens. None if it cannot be told.
    """
    with suppress(UpstreamFault):
        empty = [
            SlotId(status.id)
            for status in await upstream.slots()
            if not status.is_processing and status.n_held == 0
        ]
        if len(empty) < 2:
            return None
        for slot_id in empty[:2]:
            await upstream.evaluate(slot_id, _FEW_TOKENS)
        first = next(s for s in await upstream.slots() if s.id == empty[0])
        return None if first.n_held is None else first.n_held == 0
    return None


# First contact with a llama-server process: what it is, what its slots hold, what may be shared.
#
# In this order: save whatever the slots hold (it may be hours of work), then find an empty slot, ask the
# model for its canary there, save a probe to learn the cache's layout, and only then decide which
# namespace all of it belongs to.


Adopted = dict[SlotId, SavedSlot]
"""What slots held at first contact, as their saves told it; the files wait for their namespaces."""


class Attacher:
    """Attaches the proxy to a llama-server process."""

    def __init__(
        self,
        services: Services,
        saver: Saver,
        *,
        max_waiting: int,
        n_context_checkpoints: int,
        shares_between_api_keys: bool | None,
    ) -> None:
        self._services = services
        self._upstream = services.upstream
        self._saver = saver
        self._max_waiting = max_waiting
        self._n_context_checkpoints = n_context_checkpoints
        self._shares_between_api_keys = shares_between_api_keys
        self._log = get_logger("attach")
        self._seen = ""
        self._seen_clearing: bool | None = None

    async def attach(self, props: Props, process_id: str) -> Process:
        """Return the attachment; where caching is impossible its obstacle says why."""
        process = self._new_process(props, process_id)
        try:
            process.asks_for_key = await self._asks_for_key()
            shares = self._shares_between_api_keys
            process.is_one_tenant = not process.asks_for_key if shares is None else shares
            if self._services.opened_store is None:
                raise CannotCache(DegradationKind.STORE_NOT_OPEN)
            if not process_id:
                raise CannotCache(DegradationKind.PROCESS_HAS_NO_NAME)
            await self._identify(process, props)
        except CannotCache as obstacle:
            process.obstacle = obstacle
        except CacheFault as fault:
            process.obstacle = CannotCache(DegradationKind.ATTACH_FAILED, str(fault))
        if process.obstacle:
            self._services.faults.count("attach")
            if process.clears_idle_slots is None:
                await self._see_clearing(process)
        return process

    def _new_process(self, props: Props, process_id: str) -> Process:
        """Return a process of which nothing is known yet: every slot may hold anything."""
        contents: list[Content] = [TAINTED for _ in range(props.total_slots)]
        process = Process(
            **vars(self._services),
            id=process_id,
            build=props.build_info,
            desk=LeaseDesk(SlotTable(contents), self._max_waiting),
            n_ctx=props.n_ctx,
            n_believed_points=n_believed_points(self._n_context_checkpoints),
        )
        process.reader = PromptReader(self._upstream, shares_headers=props.total_slots > 1)
        process.room = Room(process, self._saver)
        process.saves = SlotSaves(process)
        process.launches = Launches(process)
        process.arrivals = Arrivals(process.desk)
        return process

    async def _asks_for_key(self) -> bool:
        """Return whether llama-server, or what stands before it, refuses who sends no key."""
        try:
            return not await self._upstream.takes_key({})
        except UpstreamRefused:
            return True

    async def _see_clearing(self, process: Process) -> None:
        """Learn once for each process what no save can tell."""
        if self._seen != process.id:
            self._seen, self._seen_clearing = process.id, None
            self._seen_clearing = await seen_clearing(self._upstream)
        process.note_clearing(clears=self._seen_clearing)

    async def _identify(self, process: Process, props: Props) -> None:
        store, table = self._services.store, process.slots
        room = process.room
        async with AsyncExitStack() as files:
            for busy_slot in await self._busy_slots():
                table.lease(SlotId(busy_slot), time.monotonic())
            adopted = await self._adopt_slots(room, table, files)
            slot_id = await self._empty_slot(table, adopted)
            await self._find_namespace(room, process, slot_id, props)
            await self._find_tenants(store, process)
            process.sizes.extend(known_sizes(store, process))
            process.rates = known_rates(store, process)
            for adopted_id, saved in adopted.items():
                await self._commit(store, process, adopted_id, saved)

    async def _find_tenants(self, store: CheckpointStore, process: Process) -> None:
        """Find out whose states there are; where keys make no difference, they become everybody's."""
        if not process.is_one_tenant:
            process.tenants = known_tenants(store.index, process.model_namespace)
            return await remember_asking(store, process)
        n_united = await unite_tenants(store, process, are_all=bool(self._shares_between_api_keys))
        if n_united:
            self._log.info("states of all API keys are shared now", states=n_united)

    async def _find_namespace(
        self, room: Room, process: Process, slot_id: SlotId, props: Props
    ) -> None:
        """Ask the model for its canary in an empty slot, and leave that slot empty."""
        table = process.slots
        identity = await read_identity(self._upstream, props)
        tokens, last = canary_tokens(identity)
        table.set_content(slot_id, TAINTED)
        canary = await self._upstream.canary(slot_id, tokens)
        is_disturbed = await disturb(self._upstream, table, last)
        probe = await self._probe_save(room, slot_id, tokens)
        has_emptied = await self._has_emptied(table)
        if is_disturbed or has_emptied:
            process.note_clearing(clears=not probe.tokens or not is_disturbed)
        if not probe.tokens:
            await self._upstream.evaluate(slot_id, tokens)
            probe = await self._probe_save(room, slot_id, tokens)
        if probe.tokens[: len(tokens)] != tokens:
            raise SaveRejected("a saved slot holds other tokens than were evaluated in it")
        await self._upstream.erase(slot_id)
        table.set_content(slot_id, Empty())
        static = static_key(identity, (probe.version, probe.layout))
        process.saves_context_checkpoints = bool(probe.restore_points)
        process.model_namespace = await self._namespace(static, canary, self._name(props))

    async def _adopt_slots(self, room: Room, table: SlotTable, files: AsyncExitStack) -> Adopted:
        """Save every idle slot that holds something; the files live as long as *files*.

        A slot that there is no room for stays tainted.
        """
        adopted: Adopted = {}
        for slot in table.free():
            async with AsyncExitStack() as file:
                try:
                    name = await file.enter_async_context(room.for_slot(slot.content))
                    saved = await room.save(slot.id, name)
                except NoRoom:
                    continue
                if saved.state.tokens:
                    adopted[slot.id] = saved
                    files.push_async_exit(file.pop_all())
                else:
                    table.set_content(slot.id, Empty())
        return adopted

    async def _busy_slots(self) -> set[int]:
        try:
            return {slot.id for slot in await self._upstream.slots() if slot.is_processing}
        except UpstreamRefused:
            return set()  # --no-slots: a save of a busy slot just waits for it

    async def _empty_slot(self, table: SlotTable, adopted: Adopted) -> SlotId:
        """Return an empty slot, emptying the smallest adopted one if there is none.

        Where there was no room to adopt any, one of them is lost.
        """
        for slot in table:
            if isinstance(slot.content, Empty):
                return slot.id
        smallest = sorted(adopted, key=lambda slot_id: len(adopted[slot_id].state.tokens))
        candidates = smallest or [slot.id for slot in table.free()]
        if not candidates:
            raise CannotCache(DegradationKind.EVERY_SLOT_BUSY)
        await self._upstream.erase(candidates[0])
        table.set_content(candidates[0], Empty())
        return candidates[0]

    async def _has_emptied(self, table: SlotTable) -> bool:
        """Return whether slots that were full have been emptied meanwhile, and note it."""
        try:
            return note_emptied(table, await self._upstream.slots())
        except UpstreamRefused:
            return False

    async def _probe_save(self, room: Room, slot_id: SlotId, tokens: TokenIds) -> StateFile:
        """Save a slot that holds *tokens*; return what the file says of this server."""
        async with room.probe(slot_id, len(tokens)) as saved:
            return saved.state

    def _name(self, props: Props) -> str:
        """Return what people call the model: its name at its host, or that of its file."""
        return self._upstream.target.model or Path(props.model_path).name.removesuffix(".gguf")

    async def _namespace(
        self, static: str, canary: list[tuple[int, float]], name: str
    ) -> Namespace:
        store = self._services.store
        known = known_namespaces(store.index, static)
        chosen = choose_namespace(known, canary)
        if chosen is None:
            named = new_namespace(static, known, canary, name)
        else:
            named = msgspec.structs.replace(chosen, name=name)
        if named != chosen:
            others = (each for each in known if each is not chosen)
            await store.put_value(namespaces_name(static), [*others, named])
        return Namespace(named.id)

    async def _commit(
        self, store: CheckpointStore, process: Process, slot_id: SlotId, saved: SavedSlot
    ) -> None:
        """Enter an adopted slot's file, for the tenant whose tokens those are."""
        state, table = saved.state, process.slots
        namespace = owner_of(store, process, state.tokens)
        if namespace is None or state.n_media or -1 in state.tokens:
            return
        if not store.holds(namespace, state.tokens):
            new = saved.new_state(namespace, CheckpointKind.CONVERSATION)
            relatives = store.find(namespace, state.tokens)
            family = family_of(namespace, state.tokens, new.kind, new.cuts, relatives)
            checkpoint = await store.commit(replace(new, family=family))
            self._services.metrics.saves.labels("done").inc()
            self._services.metrics.saved_bytes.inc(checkpoint.size_bytes)
        if not isinstance(table[slot_id].content, Empty):
            held = Known(
                state.tokens,
                namespace,
                restore_points=state.restore_points,
                n_saved=len(state.tokens),
                # An earlier proxy may have restored it.
                origin=Origin(0 if state.has_every_position else len(state.tokens)),
                n_points_at_most=len(state.restore_points) or MAX_CONTEXT_CHECKPOINTS,
            )
            table.set_content(slot_id, held)
