"""A scratch store before a real llama-server, and what is tried out there beside the attach.

Owns: which slots probes may use (those that were found empty), and that these slots are empty and no file
of a probe is left afterwards, whatever happens. A slot that holds work looks busy from here, and the attach
leaves busy slots alone.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from proxy.core.conditions import DegradationKind
from proxy.core.model import SlotId
from proxy.core.tokens import TokenIds, token_ids
from proxy.doctor.facts import Layout, LlamaServerFacts
from proxy.errors import CacheFault, UpstreamRefused, UpstreamUnreachable
from proxy.explain.report import Journal
from proxy.health import CannotCache, Degradations
from proxy.llama.client import LlamaServer, Saved, SlotStatus
from proxy.llama.state_file import read_state_file
from proxy.metrics import Metrics
from proxy.serving.saver import RewriteStateFile, Saver, keep_as_saved
from proxy.serving.shared import Services, new_shared
from proxy.store.catalogue import Limits
from proxy.store.files import StateFiles, final_name_of
from proxy.store.store import CheckpointStore

_ERASE_ATTEMPTS = 5
_LET_GO_SECONDS = 0.5
_PROBE_TOKENS = 64
"""Short enough for a slow machine, long enough to tell from nothing."""
_N_MORE = 8


class ProbeFiles(StateFiles):
    """State files of which none is to stay: every name given out is remembered."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.issued: list[str] = []

    def new_temporary_name(self) -> str:
        name = super().new_temporary_name()
        # The attach commits a slot that somebody's request has used meanwhile.
        self.issued += [name, final_name_of(name)]
        return name

    def remove_all(self) -> str:
        """Remove every file; return the name of one that may not be removed, empty if none is left."""
        left = ""
        for name in self.issued:
            try:
                self.remove(name)
            except OSError:
                left = name
        return left


class ProbedServer(LlamaServer):
    """llama-server as probes see it: a slot that holds work looks busy.

    `empty` are the slots that probes may use. `held` are the other idle ones, with how many tokens GET
    /slots says they hold; 0 if only a save showed it. `restores` are the bytes and seconds of each.
    """

    def __init__(self, upstream: LlamaServer, files: ProbeFiles) -> None:
        super().__init__(upstream.session, upstream.target, upstream.api_key)
        self.files = files
        self.n_slots = 0
        self.n_vocab = 2
        self.shows_slots = True
        self.empty: list[SlotId] = []
        self.held: dict[int, int] = {}
        self.restores: list[tuple[int, float]] = []
        self._unfinished: set[asyncio.Future[Saved]] = set()

    async def slots(self) -> list[SlotStatus]:
        """Return the slots' states; under --no-slots, as if they held what saves have shown."""
        try:
            statuses = await super().slots()
        except UpstreamRefused:
            self.shows_slots = False
            statuses = [SlotStatus(slot_id) for slot_id in range(self.n_slots)]
        for status in statuses:
            status.is_processing = status.is_processing or status.id in self.held
        return statuses

    async def save(self, slot_id: SlotId, file_name: str) -> Saved:
        """Save a slot; the save goes on if this is cancelled, so that `clean_up` finds its file."""
        saving = asyncio.ensure_future(super().save(slot_id, file_name))
        self._unfinished.add(saving)
        saving.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(saving)

    async def restore(self, slot_id: SlotId, file_name: str) -> int:
        began = time.monotonic()
        n_restored = await super().restore(slot_id, file_name)
        seconds = time.monotonic() - began
        self.restores.append((self.files.size_bytes(file_name), seconds))
        return n_restored

    def text(self, seed: int, n_tokens: int) -> TokenIds:
        """Return tokens that begin differently for each *seed*."""
        n = max(2, min(self.n_vocab, 30011))
        return token_ids((i * 7919 + seed * 1237 + 41) % n for i in range(n_tokens))

    async def erase_all(self) -> None:
        """Empty the slots that probes may use; raises UpstreamFault."""
        for slot_id in self.empty:
            await self.erase(slot_id)

    async def clean_up(self) -> None:
        """Leave the slots of probes empty, and no file behind.

        A save may still be writing, and the slots are erased behind it: files go last. A request that was
        given up while llama-server still parsed it starts after the first erase, so slots are looked at.
        """
        await asyncio.gather(*self._unfinished, return_exceptions=True)
        with suppress(CacheFault):
            for _ in range(_ERASE_ATTEMPTS if self.empty else 0):
                await self.erase_all()
                used = [status for status in await self.slots() if status.id in self.empty]
                if not any(status.is_processing or status.n_held for status in used):
                    break
                await asyncio.sleep(_LET_GO_SECONDS)
        self.files.remove_all()


class Scratch:
    """What an attach to a llama-server needs; `layout` is that of the files that it has saved."""

    def __init__(self, services: Services, server: ProbedServer, rewrite: RewriteStateFile) -> None:
        self.services = services
        self.server = server
        self.saver = Saver(services, self._note_state)
        self.layout: Layout | None = None
        self._rewrite = rewrite

    def _note_state(self, path: Path) -> None:
        self._rewrite(path)
        state = read_state_file(path)
        if state.tokens:
            self.layout = state.version, state.layout

    async def find_empty_slots(self, facts: LlamaServerFacts) -> None:
        """Sort the slots into busy, held and empty; stops if the first save shows that none is of use.

        What GET /slots calls empty is saved to be sure: a restore alone does not show there. Raises
        UpstreamUnreachable.
        """
        server = self.server
        server.n_slots = facts.n_slots
        statuses = await server.slots()
        if not server.shows_slots:
            self.services.degradations.begin(DegradationKind.SLOTS_NOT_SHOWN)
        for status in statuses:
            slot_id = SlotId(status.id)
            if status.is_processing:
                facts.n_busy += 1
            elif status.n_held:
                server.held[slot_id] = status.n_held
            else:
                n_saved = await self._probe_save(slot_id, facts)
                if facts.probe_problem:
                    return
                if n_saved:
                    server.held[slot_id] = 0
                else:
                    server.empty.append(slot_id)
        facts.n_empty, facts.n_held = len(server.empty), len(server.held)

    async def _probe_save(self, slot_id: SlotId, facts: LlamaServerFacts) -> int:
        """Save a slot that is believed to be empty, and note what became of the file."""
        files, n_saved = self.server.files, 0
        name = files.new_temporary_name()
        try:
            n_saved = len((await self.saver.save(slot_id, name)).state.tokens)
        except UpstreamUnreachable:
            raise
        except CacheFault as fault:
            facts.probe_problem = str(fault)
            if isinstance(fault, CannotCache):
                self.services.degradations.begin(fault.kind, fault.detail)
        with suppress(OSError):
            status = files.path(name).stat()
            facts.probe_mode, facts.probe_owner_uid = status.st_mode & 0o7777, status.st_uid
        facts.probe_name = name
        if not facts.probe_problem and (left := files.remove_all()):
            facts.probe_problem = f"uid {os.geteuid()} cannot remove it: {left} is still there"
        return n_saved


@asynccontextmanager
async def scratch(
    upstream: LlamaServer,
    directory: Path,
    rewrite: RewriteStateFile = keep_as_saved,
    max_bytes: int = sys.maxsize,
) -> AsyncIterator[Scratch]:
    """Yield a scratch store before *upstream*; its files lie in *directory*, where llama-server writes.

    Its index lies elsewhere. It is opened there, too: opening a store removes the files that its index does
    not know. Raises StoreFault.
    """
    server = ProbedServer(upstream, ProbeFiles(directory))
    metrics = Metrics()
    with TemporaryDirectory(prefix="llama-prefix-cache-doctor-") as folder:
        store = CheckpointStore(Path(folder), Limits(max_bytes))
        store.files = server.files
        shared = new_shared(store, metrics, Degradations(metrics), Journal())
        try:
            yield Scratch(shared.of(server, ""), server, rewrite)
        finally:
            await shared.tasks.drain(0)
            await server.clean_up()
            store.close()


async def has_ram_cache(server: ProbedServer) -> bool | None:
    """Displace a prompt, ask for it again, and see whether it is brought back; raises UpstreamFault.

    Returns None if the model continues no state that is so short, wherever it comes from.
    """

    async def is_reused(seed: int, n_tokens: int) -> bool:
        timings = await server.evaluate(server.empty[0], server.text(seed, n_tokens))
        # Sliding-window models reuse a few tokens less than they hold.
        return timings.cache_n >= _PROBE_TOKENS // 2

    await is_reused(4, _PROBE_TOKENS)
    is_reused_live = await is_reused(4, _PROBE_TOKENS + _N_MORE)
    await is_reused(5, _PROBE_TOKENS + _N_MORE)
    is_brought_back = await is_reused(4, _PROBE_TOKENS + 2 * _N_MORE)
    await server.erase_all()
    return is_brought_back if is_brought_back or is_reused_live else None
