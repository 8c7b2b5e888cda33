"""A scratch store with a real llama-server, and the probes that go beyond the attach.

Owns: which slots probes may use (those whose first save is empty), and the clean-up: afterwards these slots
are empty and no file of a probe is left, whatever happens. A slot that holds work is shown as busy, and the
attach leaves busy slots alone.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from proxy.core.model import SlotId
from proxy.core.tokens import TokenIds, token_ids
from proxy.errors import CacheFault, NoRoom, StateFileMalformed, UpstreamRefused
from proxy.explain.report import Journal
from proxy.health import Degradations
from proxy.llama.client import (
    QUICK_SECONDS,
    Headers,
    LlamaServer,
    Props,
    Saved,
    SlotStatus,
    Timings,
)
from proxy.llama.state_file import StateFile, read_state_file
from proxy.metrics import Metrics
from proxy.servers.server import Server
from proxy.serving.shared import new_shared
from proxy.settings import Settings
from proxy.store.catalogue import Limits
from proxy.store.files import StateFiles
from proxy.store.store import CheckpointStore

_ERASE_ATTEMPTS = 5
_LET_GO_SECONDS = 0.5
_PROBE_TOKENS = 64
"""Short enough for a slow machine, long enough for a clear result."""
_N_MORE = 8


class ProbeFiles(StateFiles):
    """State files that are all deleted afterwards: every name given out is remembered."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.issued: list[str] = []

    def new_temporary_name(self) -> str:
        self.issued.append(super().new_temporary_name())
        return self.issued[-1]


class ProbedServer(LlamaServer):
    """llama-server for probes: a slot that holds work is shown as busy, and is not touched.

    `empty` are the slots that probes may use. `held` are the other idle slots, each with its number of
    tokens in GET /slots, 0 if only a save showed them. `restores` are the bytes and seconds of each
    restore. `first_props` is its first answer to /props, `file` the newest saved file as it was written,
    and `state` the newest state that holds tokens.
    """

    def __init__(self, upstream: LlamaServer, files: ProbeFiles) -> None:
        super().__init__(upstream.session, upstream.target, upstream.api_key)
        self.files = files
        self.first_props: Props | None = None
        self.empty: list[SlotId] = []
        self.held: dict[int, int] = {}
        self.n_busy = 0
        self.restores: list[tuple[int, float]] = []
        self.file: os.stat_result | None = None
        self.state: StateFile | None = None
        self._unfinished: set[asyncio.Future[Saved]] = set()

    async def props(self, seconds: float = QUICK_SECONDS) -> Props:
        props = await super().props(seconds)
        self.first_props = self.first_props or props
        return props

    async def slots(self) -> list[SlotStatus]:
        """Return the slots' states, as if the slots that hold work were busy."""
        statuses = await super().slots()
        self.n_busy = sum(status.is_processing for status in statuses)
        for status in statuses:
            if not status.is_processing and status.n_held and status.id not in self.empty:
                self.held[status.id] = status.n_held
            status.is_processing |= status.id in self.held
        return statuses

    async def save(self, slot_id: SlotId, file_name: str) -> Saved:
        """Save a slot; the save goes on if this is cancelled, so that `clean_up` finds its file.

        A slot that GET /slots shows as empty may hold work: a mere restore does not show there. Raises
        NoRoom for such a slot, so that the attach leaves it alone.
        """
        saving = asyncio.ensure_future(super().save(slot_id, file_name))
        self._unfinished.add(saving)
        saving.add_done_callback(self._unfinished.discard)
        saved = await asyncio.shield(saving)
        with suppress(OSError, StateFileMalformed):
            self.file = self.files.path(file_name).stat()
            state = await asyncio.to_thread(read_state_file, self.files.path(file_name))
            self.state = state if state.tokens else self.state
        if slot_id not in self.empty:
            if saved.n_saved:
                self.held.setdefault(slot_id, 0)
                raise NoRoom("scratch", "what slots hold is not kept")
            self.empty.append(slot_id)
        return saved

    async def restore(self, slot_id: SlotId, file_name: str) -> int:
        began = time.monotonic()
        n_restored = await super().restore(slot_id, file_name)
        seconds = time.monotonic() - began
        self.restores.append((self.files.size_bytes(file_name), seconds))
        return n_restored

    async def erase(self, slot_id: SlotId) -> None:
        """Empty a slot; raises UpstreamRefused for a slot that may hold work."""
        self._require_empty(slot_id)
        await super().erase(slot_id)

    async def evaluate(
        self, slot_id: SlotId, tokens: TokenIds, headers: Headers | None = None
    ) -> Timings:
        """Evaluate tokens in a slot; raises UpstreamRefused for a slot that may hold work."""
        self._require_empty(slot_id)
        return await super().evaluate(slot_id, tokens, headers)

    def _require_empty(self, slot_id: SlotId) -> None:
        if slot_id not in self.empty:
            raise UpstreamRefused(409, f"slot {slot_id} may hold work")

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
        await asyncio.gather(*self._unfinished, return_exceptions=True)
        with suppress(CacheFault):
            for _ in range(_ERASE_ATTEMPTS if self.empty else 0):
                await self.erase_all()
                used = [status for status in await self.slots() if status.id in self.empty]
                if not any(status.is_processing or status.n_held for status in used):
                    break
                await asyncio.sleep(_LET_GO_SECONDS)
        for name in self.files.issued:
            with suppress(OSError):
                self.files.remove(name)


@asynccontextmanager
async def scratch(
    upstream: LlamaServer, settings: Settings
) -> AsyncIterator[tuple[Server, ProbedServer]]:
    """Yield *upstream* with a scratch store; its state files are where llama-server writes.

    The index is in a temporary directory, and the store is opened there too: opening a store removes the
    files that its index does not know. Raises StoreFault.
    """
    probed = ProbedServer(upstream, ProbeFiles(Path(settings.slot_save_path)))
    metrics = Metrics()
    with TemporaryDirectory(prefix="llama-prefix-cache-doctor-") as folder:
        store = CheckpointStore(Path(folder), Limits(settings.max_store_bytes))
        store.files = probed.files
        shared = new_shared(store, metrics, Degradations(metrics), Journal())
        try:
            yield Server(settings, shared.of(probed, "")), probed
        finally:
            await shared.tasks.drain(0)
            await probed.clean_up()
            store.close()


async def has_ram_cache(server: ProbedServer, n_vocab: int) -> bool | None:
    """Displace a prompt, send it again, and return whether it is brought back; raises UpstreamFault.

    Returns None if the model cannot continue such a short state at all.
    """

    async def is_reused(seed: int, n_tokens: int) -> bool:
        ids = ((i * 7919 + seed) % max(2, min(n_vocab, 30011)) for i in range(n_tokens))
        timings = await server.evaluate(server.empty[0], token_ids(ids))
        # Sliding-window models reuse a few tokens less than they hold.
        return timings.cache_n >= _PROBE_TOKENS // 2

    await is_reused(4989, _PROBE_TOKENS)
    is_reused_live = await is_reused(4989, _PROBE_TOKENS + _N_MORE)
    await is_reused(6226, _PROBE_TOKENS + _N_MORE)
    is_brought_back = await is_reused(4989, _PROBE_TOKENS + 2 * _N_MORE)
    await server.erase_all()
    return is_brought_back if is_brought_back or is_reused_live else None
