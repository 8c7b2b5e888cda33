"""The shared store as this proxy uses it: what is known of it, what goes up, what comes down.

Local caching never waits for it and never fails with it. States go up once they are committed here. What
others have put there is listed, and its small records are kept in an index of their own, so that a lookup
asks nobody. The index only hints: a state that is fetched is compared with its checksums as it comes, read
by the parser of state files, and becomes an ordinary checkpoint; only then its tokens count.
"""

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from secrets import token_hex
from socket import gethostname
from typing import Any

from proxy.core.conditions import DegradationKind
from proxy.core.eviction import Present, Removal
from proxy.core.model import Candidate, Checkpoint, CheckpointId
from proxy.core.rates import Transfer
from proxy.core.saving import Claim, Written
from proxy.core.sharing import (
    UNMEASURED,
    believed,
    choose_deletions,
    is_still_in_time,
    spared_per_byte,
)
from proxy.core.tokens import Namespace, PrefixHash, TokenIds, hash_whole
from proxy.errors import (
    CacheFault,
    IndexDamaged,
    SharedStoreFault,
    StateDamaged,
    StateFileMalformed,
    in_words,
)
from proxy.health import Degradations, Faults
from proxy.llama.state_file import StateFile, read_state_file
from proxy.log import get_logger
from proxy.metrics import Metrics
from proxy.shared import objects
from proxy.shared.arrival import Arrival
from proxy.shared.bucket import LEAST_READ_BYTES, READ_BYTES, Bucket, Gone
from proxy.shared.objects import META, STATE, USED, Listed
from proxy.shared.sealing import Sealing
from proxy.store.index import Entry, Index
from proxy.store.known_models import namespace_of, owners
from proxy.store.store import CheckpointStore
from proxy.store.transfer import entered_as
from proxy.tasks import Tasks

_FOLDER = "shared-index"
_LOOK_SECONDS, _FULL_LOOK_SECONDS = 10.0, 900.0
"""How often what is new is listed, and how often everything: what a wrong clock has put at an old place,
what is gone, and what nobody has finished."""
_UNSERVED_SECONDS, _EXPECTED_LOOK_SECONDS = 0.5, 0.05
_OVERLAP_SECONDS = 600.0
"""Clocks that differ by less are no matter."""
_MOST_BACKOFF_SECONDS = 60.0
_READ_AT_ONCE = 32
_ENTERED_AT_ONCE = 256
_MOST_META_BYTES = 4 << 20
_MAX_NAMESPACES = 64
_MAX_FOUND = 32
_ORPHAN_SECONDS = 3600.0
_TOUCHED_SECONDS = 3600.0
_STALL_SECONDS, _SILENT_CALLS = 0.25, 4
"""A store that answers nothing for so long, or for so many times as long as ever, is taken for hung."""
_APART = "states of {} are not used: its model predicts differently (`doctor --shared` says why)"
_WRITER, _LINK, _UPLOADED = "writer", "link", "uploaded"


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """What may be put into the shared store, and how fast; 0 is no limit.

    `capacity` is for all states there, whoever has put them there; each writer deletes its own.
    """

    upload_bytes_per_day: int = 0
    upload_bytes_per_second: int = 0
    capacity: int = 0


class Tier:
    """The shared store of one proxy."""

    def __init__(
        self,
        store: CheckpointStore,
        bucket: Bucket,
        sealing: Sealing,
        limits: SharedLimits,
        present: Callable[[], Present],
        metrics: Metrics,
        degradations: Degradations,
        faults: Faults,
    ) -> None:
        """*present* tells which models are served, and how fast. Raises StoreFault."""
        self._store, self._bucket, self._sealing, self._limits = store, bucket, sealing, limits
        self._present, self._metrics = present, metrics
        self._degradations, self._faults = degradations, faults
        self._index = _opened(store.files.directory / _FOLDER)
        self._writer_thread = ThreadPoolExecutor(1, thread_name_prefix="shared-index")
        self._writer = self._index.value(_WRITER, str) or token_hex(4)
        self._index.put_value(_WRITER, self._writer)
        self._link = self._index.value(_LINK, Transfer) or UNMEASURED
        self._link_at = time.monotonic()
        self._uploaded = self._index.value(_UPLOADED, Written) or Written()
        self._known = set(self._index.ids())
        self._names: dict[Namespace, str] = {}
        self._pending = {c.id for c in store if not c.shared_id}
        self._outdated: list[Checkpoint] = []
        self._uploading: CheckpointId | None = None
        """What is on its way, None once it is needless."""
        self._failing: dict[str, int] = {}
        self._has_failed = asyncio.Event()
        self._n_damaged, self._damaged_until = 0, 0.0
        self._looks: dict[str, asyncio.Task[None]] = {}
        self.look_seconds = _EXPECTED_LOOK_SECONDS
        """What it took lately to list what is new."""
        self._fetches: dict[CheckpointId, asyncio.Task[Checkpoint | None]] = {}
        self._touched: dict[str, float] = {}
        self._wake, self._is_uploading, self._tasks = asyncio.Event(), False, Tasks()
        self._log = get_logger("shared")
        store.on_commit = self._note_committed

    @property
    def n_known(self) -> int:
        """Return how many states of the shared store are known."""
        return len(self._known)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """List and upload until the block is left."""
        background = [self._tasks.start(work) for work in (self._keep_looking(), self._keep_up())]
        self._wake.set()
        try:
            yield
        finally:
            for task in background:
                task.cancel()
            await self._tasks.drain(0)
            await self._bucket.close()
            self._store.on_commit = lambda _: None
            self._writer_thread.shutdown(wait=True)
            with suppress(CacheFault):
                self._index.put_value(_LINK, self._link)
            self._index.close()

    async def _write(self, work: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.run_in_executor(self._writer_thread, work))

    # Whether the store is there. Each operation is given up for a while when it fails; only background
    # work finds out that it works again.

    @property
    def is_away(self) -> bool:
        """Whether nothing is to be fetched now: the store fails, or what came from there was damaged."""
        is_failing = bool(self._failing.keys() & {"list", "fetch"})
        return is_failing or time.monotonic() < self._damaged_until

    @contextmanager
    def _trying(self, operation: str) -> Iterator[None]:
        try:
            yield
        except Gone:
            raise
        except SharedStoreFault as fault:
            self._note_fault(operation, str(fault))
            raise
        if self._failing.pop(operation, 0) and not self._failing:
            self._degradations.end(DegradationKind.SHARED_STORE_AWAY)

    def _note_fault(self, operation: str, why: str) -> None:
        self._failing[operation] = self._failing.get(operation, 0) + 1
        if operation in ("list", "fetch"):
            self._has_failed.set()
        self._metrics.shared_faults.labels(operation).inc()
        self._degradations.begin(DegradationKind.SHARED_STORE_AWAY, f"{operation}: {why}")

    def _pause_seconds(self, *operations: str) -> float:
        n_faults = max(self._failing.get(operation, 0) for operation in operations)
        return _backoff_seconds(n_faults) if n_faults else 0.0

    # What others have put there.

    async def _keep_looking(self) -> None:
        full_at = -_FULL_LOOK_SECONDS
        while True:
            is_full = time.monotonic() - full_at >= _FULL_LOOK_SECONDS
            try:
                await self._find_out()
                for namespace in self._served():
                    await self.look(namespace, is_full=is_full)
                if is_full and self._served():
                    full_at = time.monotonic()
            except CacheFault as fault:
                self._log.debug("listing failed", why=str(fault))
            except Exception as error:
                self._faults.record("share", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS if self._served() else _UNSERVED_SECONDS):
                    await self._has_failed.wait()
            self._has_failed.clear()
            await asyncio.sleep(self._pause_seconds("list", "fetch"))

    async def _find_out(self) -> None:
        """If a fetch has failed, find out whether the beginning of a state can be read again."""
        if "fetch" in self._failing:
            known = (c for i in self._known if (c := self._index.record(i)) is not None)
            some = next((c for c in known if c.namespace), None)
            with self._trying("fetch"), suppress(Gone):
                if some is not None:
                    async with aclosing(self._stream(some)) as stream:
                        await anext(stream, b"")

    def _served(self) -> list[str]:
        """Return the shared names of the namespaces that are served here."""
        names = (self._name(namespace) for namespace in self._present().rates_by)
        return list(dict.fromkeys(name for name in names if name))[:_MAX_NAMESPACES]

    def _name(self, namespace: Namespace) -> str:
        """Return what a namespace is called in the shared store; empty if its model is not known here."""
        if namespace not in self._names:
            self._names = {
                local: self._sealing.name(owner.static.encode(), owner.tenant)
                for local, owner in owners(self._store.index)
            }
        return self._names.get(namespace, "")

    async def look(self, name: str, *, is_full: bool = False) -> None:
        """List what is new in a shared namespace, and enter it; raises CacheFault.

        Whoever asks while that is being done waits for the same listing.
        """
        if name not in self._looks:
            self._looks[name] = look = self._tasks.start(self._look(name, is_full=is_full))

            def end(look: "asyncio.Task[None]") -> None:
                self._looks.pop(name, None)
                if not look.cancelled():
                    look.exception()  # nobody need have waited for it

            look.add_done_callback(end)
        await asyncio.shield(self._looks[name])

    async def _look(self, name: str, *, is_full: bool) -> None:
        after, found, new, began = None, list[Listed](), list[Listed](), time.monotonic()
        if not is_full:
            since = objects.earliest_id(time.time() - _OVERLAP_SECONDS)
            after = f"{objects.folder_of(name)}/{since}"
        with self._trying("list"):
            async for batch in self._bucket.list(objects.folder_of(name), after):
                found += batch
                metas = (each for each in batch if each.kind == META)
                new += [each for each in metas if objects.index_id(each.id) not in self._known]
            await self._read_metas(new)
        if not is_full:
            self.look_seconds += (time.monotonic() - began - self.look_seconds) / 2
        else:
            await self._compare(name, found)

    async def _read_metas(self, new: list[Listed]) -> None:
        at_once = asyncio.Semaphore(_READ_AT_ONCE)

        async def read(each: Listed) -> Entry | None:
            name = objects.name_of(each.namespace, each.id, META)
            try:
                if each.size_bytes > _MOST_META_BYTES:
                    raise StateDamaged("it is too large")
                async with at_once:
                    sealed = await self._bucket.read(name)
                meta = objects.decode_meta(self._sealing.open_whole(name, sealed))
            except Gone:
                return None
            except (ValueError, StateDamaged) as error:
                self._known.add(objects.index_id(each.id))  # it is not read again
                self._log.warning(
                    "a record in the shared store is refused", name=name, why=str(error)
                )
                return None
            if not owned or owned[0] != meta.owner:  # most often all are of one model
                name = self._sealing.name(meta.owner.static.encode(), meta.owner.tenant)
                is_ours = name == each.namespace
                local = namespace_of(self._store.index, meta.owner) if is_ours else None
                owned[:] = meta.owner, local
                if local is None:
                    told = {"host": meta.host, "says": _APART.format(meta.host)}
                    self._log.warning("states of another machine are not used", **told)
            return objects.entry_of(meta, each.id, owned[1])

        owned, entering = list[Any](), asyncio.ensure_future(self._enter())
        for begin in range(0, len(new), _ENTERED_AT_ONCE):
            found = await asyncio.gather(*map(read, new[begin : begin + _ENTERED_AT_ONCE]))
            await entering  # while the next are read
            entering = asyncio.ensure_future(self._enter(*(e for e in found if e is not None)))
        await entering

    async def _enter(self, *entries: Entry) -> None:
        await self._write(partial(self._index.put, *entries))
        self._known.update(checkpoint.id for checkpoint, *_ in entries)

    async def _forget(self, checkpoint: Checkpoint, *, is_gone: bool = True) -> None:
        """Do not find a state again; one that is not *gone* stays known, so that it is not read again."""
        hashes = objects.hashes_of(self._index.tokens(checkpoint.id))
        await self._write(partial(self._index.delete, checkpoint.id, hashes))
        if is_gone:
            self._known.discard(checkpoint.id)

    async def _compare(self, name: str, found: list[Listed]) -> None:
        """Hold what is known of a namespace against all that is there; delete what is over."""
        there, halves = await asyncio.to_thread(_grouped, found)
        own = list[tuple[Checkpoint, float]]()
        for checkpoint_id in self._known - there.keys():
            record = self._index.record(checkpoint_id)
            if record is not None and self._name(record.namespace) == name:
                await self._forget(record)
            await asyncio.sleep(0)
        for checkpoint_id, kinds in there.items():
            if kinds[META].writer == self._writer and (record := self._index.record(checkpoint_id)):
                own.append((record, max(each.modified_at for each in kinds.values())))
        now = max((each.modified_at for each in found), default=0.0)
        for kinds in halves:
            if now - max(each.modified_at for each in kinds.values()) > _ORPHAN_SECONDS:
                names = [objects.name_of(name, each.id, each.kind) for each in kinds.values()]
                with self._trying("delete"):
                    await self._bucket.delete(*names)
        if self._limits.capacity:
            n_bytes = sum(each.size_bytes for each in found) - self._limits.capacity
            for checkpoint in choose_deletions(own, n_bytes, now):
                await self._delete(checkpoint)

    # Looking states up.

    def find(self, namespace: Namespace, tokens: TokenIds) -> Iterator[Candidate]:
        """Yield the shared states that share a prefix with *tokens*, by their hashes, the longest first.

        What was quarantined here is not offered again.
        """
        if not (name := self._name(namespace)) or not self._known:
            return
        seed = objects.seed_of(name)
        refused = {c.shared_id for c in self._store.quarantined if c.shared_id}

        @cache
        def digest(n_tokens: int) -> PrefixHash:
            return hash_whole(seed, tokens, n_tokens)

        reaching = self._index.reaching(objects.steps(seed, tokens), _MAX_FOUND)
        for checkpoint_id, n_steps in reaching.items():
            record = self._index.record(checkpoint_id)
            if record is None or record.namespace != namespace or record.shared_id in refused:
                continue
            n_common = n_steps * objects.STEP_TOKENS
            ends = (n for n in objects.ends_beyond(record, n_common) if n <= len(tokens))
            matches = (n for n in ends if not self._index.n_missing(checkpoint_id, [digest(n)]))
            yield Candidate(record, next(matches, n_common))

    def knows(self, checkpoint: Checkpoint) -> bool:
        """Return whether a state is still taken to be in the shared store."""
        return checkpoint.id in self._known

    @property
    def link(self) -> Transfer:
        """What a fetch takes, as far as it was measured."""
        return believed(self._link, time.monotonic() - self._link_at)

    async def look_again(self, namespace: Namespace, seconds: float) -> None:
        """List what is new for a request, in at most so many *seconds*, if that works."""
        if (name := self._name(namespace)) and not self.is_away:
            with suppress(CacheFault, TimeoutError):
                await asyncio.wait_for(self.look(name), seconds)

    # Fetching.

    async def fetch(self, checkpoint: Checkpoint, limit_seconds: float) -> Checkpoint | None:
        """Return the local checkpoint that a shared state has become; None if not within the limit.

        Whoever asks for a state that is on its way waits for it. Never raises a CacheFault.
        """
        if (fetching := self._fetches.get(checkpoint.id)) is None:
            fetching = self._tasks.start(self._fetch(checkpoint, limit_seconds))
            self._fetches[checkpoint.id] = fetching
            fetching.add_done_callback(lambda _: self._fetches.pop(checkpoint.id, None))
        try:
            return await asyncio.wait_for(asyncio.shield(fetching), limit_seconds)
        except TimeoutError:
            return None

    async def _fetch(self, checkpoint: Checkpoint, limit_seconds: float) -> Checkpoint | None:
        result, why, fetched, began = "failed", "", None, time.monotonic()
        try:
            async with asyncio.timeout(limit_seconds):
                fetched = await self._receive(checkpoint, limit_seconds)
            result, self._n_damaged = ("done", 0) if fetched else ("late", self._n_damaged)
        except TimeoutError:
            result = "late"
        except Gone:
            result = "gone"
            await self._forget(checkpoint)
        except (StateFileMalformed, StateDamaged) as error:
            result, why, self._n_damaged = "damaged", str(error), self._n_damaged + 1
            self._damaged_until = time.monotonic() + _backoff_seconds(self._n_damaged)
            await self._forget(checkpoint, is_gone=False)
        except (CacheFault, OSError) as fault:
            why = in_words(fault)
        except Exception as error:
            self._faults.record("share", error)
        self._metrics.shared_fetches.labels(result).inc()
        seconds = round(time.monotonic() - began, 3)
        size, name = checkpoint.size_bytes, checkpoint.shared_id
        self._log.info("fetched", result=result, id=name, size_bytes=size, seconds=seconds, why=why)
        return fetched

    async def _receive(self, checkpoint: Checkpoint, limit_seconds: float) -> Checkpoint | None:
        """Fetch a state into a temporary file and commit it; None if it would not be here in time."""
        store, files = self._store, self._store.files
        name = await store.reserve(Claim(checkpoint.size_bytes, self._present()))
        try:
            if not await self._download(checkpoint, files.path(name), limit_seconds):
                return None
            state = await asyncio.to_thread(_checked, files.path(name), checkpoint)
            await store.settle(name, checkpoint.size_bytes)
            entered = entered_as(checkpoint, name, checkpoint.namespace, state)
            committed = await store.commit(replace(entered, is_fetched=True), state.tokens)
        finally:
            await store.discard(name)
        self._metrics.shared_states.labels("down").inc()
        self._tasks.start(self._touch(checkpoint))
        return committed

    def _stream(self, checkpoint: Checkpoint) -> AsyncGenerator[bytes, None]:
        name = objects.name_of(self._name(checkpoint.namespace), checkpoint.shared_id, STATE)
        first_seconds = max(_STALL_SECONDS, 2 * _SILENT_CALLS * self._link.call.seconds)
        return self._bucket.stream(name, first_seconds, _STALL_SECONDS)

    async def _download(self, checkpoint: Checkpoint, path: Path, limit_seconds: float) -> bool:
        name = objects.name_of(self._name(checkpoint.namespace), checkpoint.shared_id, STATE)
        began, n_received, held = time.monotonic(), 0, list[bytes]()
        arrival = Arrival(path, checkpoint.content, self._sealing.opening(name))
        try:
            with self._trying("fetch"):
                async with aclosing(self._stream(checkpoint)) as stream:
                    async for chunk in stream:
                        held.append(chunk)
                        n_received += len(chunk)
                        self._metrics.shared_bytes.labels("down").inc(len(chunk))
                        elapsed, size = time.monotonic() - began, checkpoint.size_bytes
                        if not is_still_in_time(n_received, size, elapsed, limit_seconds):
                            return False
                        if sum(map(len, held)) >= READ_BYTES:
                            await asyncio.to_thread(arrival.take, b"".join(held))
                            held.clear()
            await asyncio.to_thread(arrival.take, b"".join(held))
            await asyncio.to_thread(arrival.end)
            return True
        except asyncio.CancelledError:
            # A limit that is short for a store that is there is long for one that is silent.
            if (
                not n_received
                and time.monotonic() - began > _SILENT_CALLS * self._link.call.seconds
            ):
                self._note_fault("fetch", "it does not answer")
            raise
        finally:
            seconds = time.monotonic() - began
            self._link = self._link.after(n_received or LEAST_READ_BYTES, seconds)
            self._link_at = time.monotonic()
            arrival.close()

    async def _touch(self, checkpoint: Checkpoint) -> None:
        """Let the writer of a state know, at most once an hour, that somebody has read it."""
        shared_id, now = checkpoint.shared_id, time.monotonic()
        if now - self._touched.get(shared_id, -_TOUCHED_SECONDS) < _TOUCHED_SECONDS:
            return
        self._touched[shared_id] = now
        name = objects.name_of(self._name(checkpoint.namespace), shared_id, USED)
        with suppress(CacheFault), self._trying("upload"):
            await self._bucket.write(name, [b"1"], 1)

    # Uploading.

    def _note_committed(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.shared_id:
            self._pending.add(checkpoint.id)
            self._wake.set()

    def note_removed(self, checkpoint: Checkpoint, reason: Removal) -> None:
        """Delete a state that this proxy has put there once it is needless, refused or not wanted here.

        One that only had to make room stays there: that is what the shared store is for.
        """
        is_over = reason in (Removal.SUPERSEDED, Removal.OPERATOR) or checkpoint.quarantine
        if is_over and checkpoint.id == self._uploading:
            self._uploading = None
        if is_over and checkpoint.shared_id:
            if objects.writer_of(checkpoint.shared_id) == self._writer:
                self._outdated.append(checkpoint)
                self._wake.set()

    async def drain(self, seconds: float) -> None:
        """Upload what waits, in at most so many *seconds*."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._is_uploading or self._next_upload() is not None:
                    if "upload" in self._failing:
                        break
                    self._wake.set()
                    await asyncio.sleep(0.02)

    async def _keep_up(self) -> None:
        """Upload what was committed, what spares most per byte first; then delete what is outdated."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._is_uploading = True
            try:
                while (checkpoint := self._next_upload()) is not None:
                    self._uploading = checkpoint.id
                    with self._trying("upload"):
                        await self._upload(checkpoint)
                    self._pending.discard(checkpoint.id)
                while self._outdated:
                    await self._delete(self._outdated[-1])
                    self._outdated.pop()
            except CacheFault as fault:
                self._log.info("an upload waits", why=str(fault))
                await asyncio.sleep(self._pause_seconds("upload", "delete") or 1.0)
                self._wake.set()
            except Exception as error:
                self._faults.record("share", error)
            self._is_uploading, self._uploading = False, None

    def _next_upload(self) -> Checkpoint | None:
        """Return the checkpoint that is worth most per byte there; what is worth nothing is passed over."""
        present, best, most = self._present(), None, 0.0
        for checkpoint_id in tuple(self._pending):
            checkpoint = self._store.get(checkpoint_id)
            if checkpoint is None or checkpoint.shared_id or self._store.is_quarantined(checkpoint):
                self._pending.discard(checkpoint_id)
            elif (rates := present.rates_by.get(checkpoint.namespace)) is not None:
                worth = spared_per_byte(checkpoint, rates, self.link)
                is_too_short = checkpoint.n_tokens < objects.STEP_TOKENS
                if not worth or is_too_short or not self._may_upload(checkpoint.size_bytes):
                    self._pending.discard(checkpoint_id)
                elif worth > most:
                    best, most = checkpoint, worth
        return best

    def _may_upload(self, n_bytes: int) -> bool:
        limit = self._limits.upload_bytes_per_day
        return not limit or self._uploaded.last_day_bytes(time.time()) + n_bytes <= limit

    async def _upload(self, checkpoint: Checkpoint) -> None:
        """Put a state there, then its record; raises CacheFault."""
        namespace = self._name(checkpoint.namespace)
        owner = dict(owners(self._store.index)).get(checkpoint.namespace)
        tokens = self._store.index.tokens(checkpoint.id)
        if not namespace or owner is None or tokens is None:
            return
        shared_id = objects.new_id(time.time(), self._writer, token_hex(8))
        name = objects.name_of(namespace, shared_id, STATE)
        try:
            # Its removal meanwhile does no harm: an open file stays.
            with self._store.files.path(checkpoint.file_name).open("rb") as file:
                data = self._paced(iter(partial(file.read, READ_BYTES), b""))
                sealed = self._sealing.seal(name, data)
                await self._bucket.write(name, sealed, checkpoint.size_bytes)
        except OSError as error:
            self._log.info("a state is not there to be uploaded", why=in_words(error))
            return
        self._metrics.shared_bytes.labels("up").inc(checkpoint.size_bytes)
        claim = Claim(checkpoint.size_bytes, self._present())
        self._uploaded = self._uploaded.after(checkpoint.size_bytes, claim, time.time())
        await self._write(partial(self._index.put_value, _UPLOADED, self._uploaded))
        meta = objects.meta_of(checkpoint, owner, tokens, namespace, gethostname())
        name = objects.name_of(namespace, shared_id, META)
        record = b"".join(self._sealing.seal(name, [objects.encode_meta(meta)]))
        await self._bucket.write(name, [record], len(record))
        entry = objects.entry_of(meta, shared_id, checkpoint.namespace)
        await self._enter(entry)
        self._metrics.shared_states.labels("up").inc()
        self._store.change(checkpoint.id, shared_id=shared_id)
        if self._uploading != checkpoint.id:
            self._outdated.append(entry[0])

    def _paced(self, data: Iterable[bytes]) -> Iterator[bytes]:
        """Yield *data* no faster than the limit allows; for a thread."""
        for chunk in data:
            if limit := self._limits.upload_bytes_per_second:
                time.sleep(len(chunk) / limit)
            yield chunk

    async def _delete(self, checkpoint: Checkpoint) -> None:
        """Delete a state there, its record first; raises SharedStoreFault."""
        namespace, shared_id = self._name(checkpoint.namespace), checkpoint.shared_id
        names = [objects.name_of(namespace, shared_id, kind) for kind in (META, STATE, USED)]
        with self._trying("delete"):
            await self._bucket.delete(*names)
        if (record := self._index.record(objects.index_id(shared_id))) is not None:
            await self._forget(record)


def _grouped(
    found: Iterable[Listed],
) -> tuple[dict[CheckpointId, dict[str, Listed]], list[dict[str, Listed]]]:
    """Return the objects of each state by kind: of states that are there, and of those without a record."""
    by_id = defaultdict[str, dict[str, Listed]](dict)
    for each in found:
        by_id[each.id][each.kind] = each
    there = {objects.index_id(i): kinds for i, kinds in by_id.items() if META in kinds}
    return there, [kinds for kinds in by_id.values() if META not in kinds]


def _backoff_seconds(n_faults: int) -> float:
    return min(_MOST_BACKOFF_SECONDS, 2.0 ** min(n_faults, 6))


def _opened(path: Path) -> Index:
    """Return the index of the shared store; a damaged one is begun anew, for all of it is there."""
    try:
        return Index(path)
    except IndexDamaged:
        shutil.rmtree(path)
        return Index(path)


def _checked(path: Path, checkpoint: Checkpoint) -> StateFile:
    """Return what a file is that has come; raises StateFileMalformed if it is not what was told."""
    state = read_state_file(path)
    if len(state.tokens) != checkpoint.n_tokens:
        raise StateFileMalformed(f"{checkpoint.shared_id} has {len(state.tokens)} tokens")
    return state
