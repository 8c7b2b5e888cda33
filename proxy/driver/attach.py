"""First contact with a llama-server process: what it is, what its slots hold, what may be shared.

In this order: save whatever the slots hold (it may be hours of work), then find an empty slot, ask the
model for its canary there, save a probe to learn the cache's layout, and only then decide which
namespace all of it belongs to.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from proxy.core.model import CheckpointKind, SlotId
from proxy.core.namespace import CANARY_TOKENS, KnownNamespace, choose_namespace
from proxy.core.prefix import Namespace, TokenIds, token_ids
from proxy.core.slots import (
    MAX_CONTEXT_CHECKPOINTS,
    TAINTED,
    Content,
    Empty,
    Known,
    SlotTable,
)
from proxy.driver.attachment import Attachment
from proxy.driver.leases import LeaseDesk
from proxy.driver.memory import known_sizes, known_tenants, owner_of
from proxy.driver.room import Room
from proxy.driver.services import Services
from proxy.driver.slot_work import RewriteStateFile, new_state
from proxy.errors import CacheFault, NoRoom, StoreFault, UpstreamRefused
from proxy.store.store import CheckpointStore
from proxy.upstream.fingerprint import fingerprint_model
from proxy.upstream.replies import Props
from proxy.upstream.state_file import StateFile, read_state_file
from proxy.upstream.state_sections import Section


@dataclass(frozen=True, slots=True)
class _Adopted:
    """A slot's content as its save told it; the file, and the room for it, wait for its namespace."""

    slot_id: SlotId
    file_name: str
    state: StateFile


class _Identity(msgspec.Struct, frozen=True):
    """What can be said of a model without evaluating anything."""

    model: str
    n_vocab: int
    n_params: int
    size_bytes: int
    modalities: dict[str, object]
    adapters: tuple[tuple[int, str, float], ...]


class Attacher:
    """Attaches the proxy to a llama-server process."""

    def __init__(self, services: Services, *, max_waiting: int, rewrite: RewriteStateFile) -> None:
        self._services = services
        self._upstream = services.upstream
        self._max_waiting = max_waiting
        self._rewrite = rewrite

    async def attach(self, props: Props, process_id: str, *, may_adopt: bool) -> Attachment:
        """Return the attachment; where caching is impossible its reasons say why.

        Without *may_adopt* the slots' states are not to be trusted: adapters were changed.
        """
        contents: list[Content] = [TAINTED for _ in range(props.total_slots)]
        attachment = Attachment(
            process_id=process_id,
            desk=LeaseDesk(SlotTable(contents), self._max_waiting),
            n_ctx=props.default_generation_settings.n_ctx,
        )
        try:
            if not process_id:
                raise StoreFault(
                    "a restart of llama-server cannot be told: unset LLAMA_MEDIA_MARKER or give --metrics"
                )
            await self._identify(attachment, props, may_adopt=may_adopt)
        except CacheFault as fault:
            self._services.faults.record("attach", fault)
            attachment.reasons.append(str(fault))
        return attachment

    async def _identify(self, attachment: Attachment, props: Props, *, may_adopt: bool) -> None:
        store, table = self._services.store, attachment.desk.table
        room = Room(self._services, attachment)
        adopted: list[_Adopted] = []
        async with AsyncExitStack() as files:
            for busy_slot in await self._busy_slots():
                table.lease(SlotId(busy_slot), time.monotonic())
            if may_adopt:
                await self._adopt_slots(room, table, adopted, files)
            else:
                await self._erase_slots(table)
            slot_id = await self._empty_slot(table, adopted)
            attachment.model_namespace = await self._find_namespace(room, table, slot_id, props)
            attachment.tenants = known_tenants(store, attachment)
            attachment.sizes.extend(known_sizes(store, attachment))
            for item in adopted:
                await self._commit(store, attachment, item)

    async def _find_namespace(
        self, room: Room, table: SlotTable, slot_id: SlotId, props: Props
    ) -> Namespace:
        """Ask the model for its canary in an empty slot, and leave that slot empty."""
        identity = await self._read_identity(props)
        tokens = token_ids(token % max(1, identity.n_vocab) for token in CANARY_TOKENS)
        table.set_content(slot_id, TAINTED)
        canary = await self._upstream.canary(slot_id, tokens)
        await self._disturb(table, tokens)
        layout = await self._probe_layout(room, slot_id, tokens)
        await self._upstream.erase(slot_id)
        table.set_content(slot_id, Empty())
        static = xxhash.xxh3_128_hexdigest(msgspec.json.encode([identity, layout]))
        return await self._namespace(self._services.store, static, canary)

    async def _adopt_slots(
        self, room: Room, table: SlotTable, adopted: list[_Adopted], files: AsyncExitStack
    ) -> None:
        """Save every idle slot that holds something, and note in *adopted* what each one holds.

        Leaving *files* deletes what was not committed. A slot that there is no room for stays tainted.
        """
        for slot in table.free():
            async with AsyncExitStack() as file:
                try:
                    name = await file.enter_async_context(room.for_slot(slot.content))
                    state = await self._save(room, slot.id, name)
                except NoRoom:
                    continue
                if state.tokens:
                    adopted.append(_Adopted(slot.id, name, state))
                    files.push_async_exit(file.pop_all())
                else:
                    table.set_content(slot.id, Empty())

    async def _erase_slots(self, table: SlotTable) -> None:
        for slot in table:
            if not slot.is_leased:
                await self._upstream.erase(slot.id)
                table.set_content(slot.id, Empty())

    async def _busy_slots(self) -> set[int]:
        try:
            return {slot.id for slot in await self._upstream.slots() if slot.is_processing}
        except UpstreamRefused:
            return set()  # --no-slots: a save of a busy slot just waits for it

    async def _save(self, room: Room, slot_id: SlotId, name: str) -> StateFile:
        try:
            saved = await self._upstream.save(slot_id, name)
        except UpstreamRefused as refusal:
            if refusal.status == 501:
                raise StoreFault("llama-server has no --slot-save-path") from refusal
            raise
        path = self._services.store.files.path(name)
        state = await asyncio.to_thread(self._read, path)
        if state is None or len(state.tokens) != saved.n_saved:
            raise StoreFault(
                f"llama-server saved a slot, but not to {path.parent}: its --slot-save-path "
                "must be this directory, as the proxy sees it"
            )
        await room.settle(name, state, saved.n_written)
        return state

    def _read(self, path: Path) -> StateFile | None:
        try:
            self._rewrite(path)
            return read_state_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreFault(f"{path} cannot be read: {error.strerror}") from error

    async def _empty_slot(self, table: SlotTable, adopted: list[_Adopted]) -> SlotId:
        """Return an empty slot, emptying the smallest adopted one if there is none.

        Where there was no room to adopt any, one of them is lost.
        """
        for slot in table:
            if isinstance(slot.content, Empty):
                return slot.id
        smallest = sorted(adopted, key=lambda item: len(item.state.tokens))
        candidates = [item.slot_id for item in smallest] or [slot.id for slot in table.free()]
        if not candidates:
            raise UpstreamRefused(503, "every slot is busy; the model cannot be identified yet")
        await self._upstream.erase(candidates[0])
        table.set_content(candidates[0], Empty())
        return candidates[0]

    async def _read_identity(self, props: Props) -> _Identity:
        meta = await self._upstream.model_meta()
        adapters = await self._upstream.lora_adapters()
        path = Path(props.model_path)
        fingerprint = await asyncio.to_thread(fingerprint_model, path)
        return _Identity(
            model=fingerprint or f"{path} {meta.size}",
            n_vocab=meta.n_vocab,
            n_params=meta.n_params,
            size_bytes=meta.size,
            modalities=props.modalities,
            adapters=tuple((a.id, a.path, a.scale) for a in adapters),
        )

    async def _disturb(self, table: SlotTable, tokens: TokenIds) -> None:
        """Run another empty slot for a token, upon which some servers clear all idle ones."""
        for slot in table:
            if isinstance(slot.content, Empty):
                await self._upstream.evaluate(slot.id, tokens[:2])
                await self._upstream.erase(slot.id)
                return

    async def _probe_layout(
        self, room: Room, slot_id: SlotId, tokens: TokenIds
    ) -> tuple[int, tuple[Section, ...] | None]:
        """Save a slot that holds *tokens*; return the file version and the cache's layout."""
        async with room.for_probe(len(tokens)) as name:
            state = await self._save(room, slot_id, name)
        if state.tokens[: len(tokens)] != tokens:
            raise StoreFault(
                "llama-server clears idle slots, so there is nothing to save: start it with an explicit "
                "-np and with --cache-ram 0 (or --no-cache-idle-slots)"
            )
        return state.version, state.layout

    async def _namespace(
        self, store: CheckpointStore, static: str, canary: list[tuple[int, float]]
    ) -> Namespace:
        known = store.index.value(f"namespaces {static}", list[KnownNamespace]) or []
        chosen = choose_namespace(known, canary)
        if chosen is None:
            digest = xxhash.xxh3_128_digest(f"{static} {len(known)}".encode())
            chosen = KnownNamespace(digest, canary)
            await store.put_value(f"namespaces {static}", [*known, chosen])
        return Namespace(chosen.id)

    async def _commit(self, store: CheckpointStore, attachment: Attachment, item: _Adopted) -> None:
        """Enter an adopted slot's file, for the tenant whose tokens those are."""
        state, table = item.state, attachment.desk.table
        namespace = owner_of(store, attachment, state.tokens)
        if namespace is None or state.n_media or -1 in state.tokens:
            return
        if not store.holds(namespace, state.tokens):
            kind = CheckpointKind.CONVERSATION
            await store.commit(new_state(item.file_name, namespace, kind, state))
        if not isinstance(table[item.slot_id].content, Empty):
            held = Known(
                state.tokens,
                namespace,
                restore_points=state.restore_points,
                n_saved=len(state.tokens),
                n_points_at_most=len(state.restore_points) or MAX_CONTEXT_CHECKPOINTS,
            )
            table.set_content(item.slot_id, held)
