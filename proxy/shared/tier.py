"""The shared store of one proxy: what others have put there is listed; what comes down, what goes up.

Local caching never waits for it and never fails with it. What is new is listed often, by names that begin
with a time; everything is listed now and then: what a wrong clock has put at an old place, what is gone,
and what nobody has finished.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from math import inf

from proxy.core.model import Checkpoint, CheckpointId, is_same_canary
from proxy.core.sharing import SharedLimits, choose_deletions
from proxy.core.tokens import Namespace
from proxy.errors import CacheFault, SharedStoreFault, StateDamaged
from proxy.shared import objects
from proxy.shared.bucket import Denied, Gone
from proxy.shared.objects import META, ORPHAN_SECONDS, STATE, UNUSED_SECONDS, Listed, Meta
from proxy.shared.remote import Remote
from proxy.shared.transfers import Downloads, Uploads
from proxy.store.index import Entry
from proxy.tasks import wait_for

_LOOK_SECONDS, _FULL_LOOK_SECONDS, _UNSERVED_SECONDS = 10.0, 900.0, 0.5
"""How often what is new is listed, how often everything, and how soon again before a model is served."""
_OVERLAP_SECONDS = 600.0
"""The clocks of machines may differ by less than this."""
_READ_AT_ONCE = 32
_MOST_META_BYTES = 4 << 20
_MAX_NAMESPACES = 64
_APART = "its model predicts differently (other hardware, build or weights)"

Found = tuple[str, int, float]
"""The kinds of a state's objects, their bytes, and when the newest was written. Of a hundred thousand plain
tuples without references the garbage collector takes no notice; other objects would stall the loop."""

Listing = asyncio.Task[float]
"""A listing; its result is the seconds it took, 0 if it failed.

A single slow one is chance: it counts for at most twice as long as the one before."""


class Tier:
    """The shared store, and the work in its background."""

    def __init__(self, remote: Remote, limits: SharedLimits) -> None:
        self.remote, self._capacity = remote, limits.capacity
        self.downloads, self.uploads = Downloads(remote), Uploads(remote, limits)
        self._looks: dict[tuple[str, bool], tuple[float, Listing]] = {}
        self._denied, self._lone, self._apart = set[CheckpointId](), set[CheckpointId](), set[str]()
        """Records that may not be read, and those without a state: the next full look reads them again. And
        the machines whose states cannot be used, of which the log has told."""
        self._seen_at = dict[str, dict[str, float]]()
        """When the objects of an unfinished upload were first seen, by folder and id. Their own times tell
        less: copying keeps them, and S3 gives a large object the time when its upload began."""
        self._gone = set(remote.index.value("gone", list[str]) or ())
        """The states that somebody has deleted there since the last look at the capacity."""
        self._listed_at = dict[str, float]()
        """When the last listing of each folder began, by the clock that goes on while a machine sleeps."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """List and upload until the block is left."""
        self.remote.store.on_commit = self.uploads.note_committed
        for work in (self._keep_looking(), self.uploads.keep_up()):
            self.remote.tasks.start(work)
        try:
            yield
        finally:
            await self.remote.close()

    async def _keep_looking(self) -> None:
        full_at, failed, remote = dict[str, float](), set[str](), self.remote
        while True:
            folders, now = [""], time.monotonic()
            try:
                with suppress(CacheFault):  # it was noted
                    await self.downloads.find_out()
                served = filter(None, map(remote.folder, remote.present().rates_by))
                folders = sorted(dict.fromkeys(served), key=lambda f: self._listed_at.get(f, 0.0))
                # What failed comes last, so that /health tells of it until the next round.
                folders = sorted(folders[:_MAX_NAMESPACES], key=failed.__contains__)
                due = {f for f in folders if now - full_at.get(f, -inf) >= _FULL_LOOK_SECONDS}
                failed = {f for f in folders if not await self.look(f, is_full=f in due)}
                if listed := due - failed:
                    full_at |= dict.fromkeys(listed, time.monotonic())
                    self.uploads.begin(listed)
                    with suppress(CacheFault):  # it was noted
                        await self._keep_capacity()
            except Exception as error:
                remote.faults.record("share", error)
            await wait_for(remote.has_failed, _LOOK_SECONDS if folders else _UNSERVED_SECONDS)
            remote.has_failed.clear()
            await asyncio.sleep(remote.pause_seconds("list", "fetch"))

    def look(self, folder: str, *, is_full: bool = False) -> Listing:
        """List the new states of a namespace, and enter them; a listing that is under way is shared."""
        _, look = self._looks.get((folder, is_full), (0.0, None))
        if look is None or look.done():
            before = 0.0 if look is None or look.cancelled() else look.result()
            look = self.remote.tasks.start(self._look(folder, is_full, 2 * before or inf))
            self._looks[folder, is_full] = time.monotonic(), look
        return look

    def look_since(self, namespace: Namespace, since: float, most_seconds: float) -> Listing | None:
        """Return a listing that is under way, or that began at *since* or later, for a request.

        None if nothing can be fetched now, or if the last listing took longer than *most_seconds*.
        """
        folder = "" if self.downloads.is_off else self.remote.folder(namespace)
        began, look = self._looks.get((folder, False), (0.0, None))
        if look is not None and (began >= since or not look.done()):
            return look
        is_slow = look is not None and not look.cancelled() and look.result() > most_seconds
        return None if is_slow or not folder else self.look(folder)

    async def _look(self, folder: str, is_full: bool, most_seconds: float) -> float:
        began, now = time.monotonic(), time.time()
        try:
            under, found = f"{objects.VERSION}/{folder}", dict[str, Found]()
            if is_full:
                self.remote.known -= self._denied | self._lone
                self._lone.clear()
            known = set(self.remote.known) if is_full else set[CheckpointId]()
            since = min(now, self._listed_at.get(folder, now)) - _OVERLAP_SECONDS
            after = None if is_full else f"{under}/{objects.earliest_id(since)}"
            with self.remote.trying("list"):
                async for batch in self.remote.bucket.list(under, after):
                    metas = (each for each in batch if each.kind == META)
                    new = [e for e in metas if objects.index_id(e.id) not in self.remote.known]
                    await self._read_metas(folder, new)
                    _add(found, batch if is_full else [])
            if is_full:
                await self._compare(folder, found, known)
            self._listed_at[folder] = now
            return min(time.monotonic() - began, most_seconds)
        except CacheFault as fault:
            self.remote.log.debug("listing failed", why=str(fault))
        except Exception as error:
            self.remote.faults.record("share", error)
        return 0.0

    async def _read_metas(self, folder: str, new: list[Listed]) -> None:
        entries, left, apart = list[Entry](), iter(new), set[str]()
        models = self.remote.models_in(folder) if new else []

        async def read() -> None:
            for each in left:
                if (meta := await self._read(each)) is not None:
                    canary = meta.owner.known.canary
                    ours = (n for n, known in models if is_same_canary(known.canary, canary))
                    if (namespace := next(ours, None)) is not None:
                        entries.append(objects.entry_of(meta, each.id, namespace))
                    else:
                        self.remote.known.add(objects.index_id(each.id))  # it is not read again
                        apart.add(meta.host)

        ended = await asyncio.gather(*(read() for _ in new[:_READ_AT_ONCE]), return_exceptions=True)
        if entries:
            await self.remote.enter(*entries)
        for host in apart - self._apart:
            says = f"states of {host!r} are not used: {_APART}"
            self.remote.log.warning("states of another machine are not used", says=says)
        self._apart |= apart
        faults = [fault for fault in ended if fault]
        for fault in faults:  # a few records that cannot be read hide no others
            if len(faults) == _READ_AT_ONCE or not isinstance(fault, SharedStoreFault):
                raise fault
            self.remote.log.info("a record in the shared store cannot be read now", why=str(fault))

    async def _read(self, each: Listed) -> Meta | None:
        checkpoint_id = objects.index_id(each.id)
        try:
            if each.size_bytes > _MOST_META_BYTES:
                raise StateDamaged("it is too large")
            sealed = await self.remote.bucket.read(each.name)
            self._denied.discard(checkpoint_id)
            return objects.decode_meta(self.remote.sealing.open_whole(each.name, sealed))
        except Gone:
            return None
        except (ValueError, RecursionError, StateDamaged) as error:
            self.remote.known.add(checkpoint_id)  # it is not read again
            if not (self._denied and isinstance(error, Denied)):  # one line for all, not thousands
                told = {"name": each.name, "why": str(error)}
                self.remote.log.warning("a record in the shared store is refused", **told)
            if isinstance(error, Denied):
                self._denied.add(checkpoint_id)
            return None

    async def _compare(
        self, folder: str, found: dict[str, Found], known: set[CheckpointId]
    ) -> None:
        """Forget *known* states of a namespace that are gone, and delete objects that nobody finished."""
        remote, now = self.remote, time.monotonic()
        recorded = await asyncio.to_thread(_ids_in, found, {META})
        whole = await asyncio.to_thread(_ids_in, found, {META, STATE})
        self._lone |= recorded - whole
        lost = dict[CheckpointId, str]()
        for checkpoint_id in (known | recorded) - whole:
            record = remote.index.record(checkpoint_id)
            if record is not None and remote.folder(record.namespace) == folder:
                lost[checkpoint_id] = record.shared_id
            await asyncio.sleep(0)
        if gone := {lost[each] for each in known & lost.keys()}:
            self._gone |= gone
            await remote.enter(gone=[*self._gone])  # it may be stopped before they go up again
        for checkpoint_id in lost:
            await remote.forget(checkpoint_id)
            remote.known |= {checkpoint_id} & self._lone
        halves = (i for i, (kinds, *_) in found.items() if not {META, STATE} <= {*kinds.split()})
        before = self._seen_at.get(folder, {})
        seen_at = self._seen_at[folder] = {i: before.get(i, now) for i in halves}
        old = [i for i, at in seen_at.items() if now - at > ORPHAN_SECONDS]
        orphans = [objects.name_of(folder, i, kind) for i in old for kind in found[i][0].split()]
        if orphans:
            with suppress(CacheFault), remote.trying("delete"):  # it was noted
                await remote.bucket.delete(*orphans)

    async def _keep_capacity(self) -> None:
        """Delete a share of what is too much there, whoever has put it there; raises CacheFault.

        What others have deleted goes up again only into room that is left: they may keep the capacity, too.
        """
        found, remote, n_left = dict[str, Found](), self.remote, inf
        if self._capacity:
            with remote.trying("list"):
                async for batch in remote.bucket.list(objects.VERSION):
                    _add(found, batch)
            deletable = await asyncio.to_thread(self._deletable, found)
            n_bytes = sum(n_bytes for _, n_bytes, _ in found.values())
            # The other writers may do the same at this moment.
            share = sum(checkpoint.size_bytes for checkpoint, _ in deletable) / max(1, n_bytes)
            n_over = int(share * (n_bytes - self._capacity))
            for checkpoint in choose_deletions(deletable, n_over, time.time()):
                await remote.delete(checkpoint)
            n_left = self._capacity - n_bytes
        if self._gone:
            await self.uploads.upload_again(self._gone, n_left)
            self._gone.clear()
            await remote.enter(gone=[])

    def _deletable(self, found: dict[str, Found]) -> list[tuple[Checkpoint, float]]:
        """Return the states that this proxy may delete, and when each was last written or read.

        These are its own ones, and those that are not in use any more: their writer may be gone for good.
        """
        read, is_own = self.remote.index.record, self.remote.is_own
        # By the store's own clock, which may have been ahead, as may that of this machine.
        latest = min(time.time(), max((at for *_, at in found.values()), default=0.0))
        ids = (i for i, (*_, at) in found.items() if is_own(i) or at < latest - UNUSED_SECONDS)
        return [(c, found[i][2]) for i in ids if (c := read(objects.index_id(i))) is not None]


def _add(found: dict[str, Found], batch: list[Listed]) -> None:
    for each in batch:
        kinds, size, at = found.get(each.id, ("", 0, 0.0))
        found[each.id] = f"{kinds} {each.kind}", size + each.size_bytes, max(at, each.modified_at)


def _ids_in(found: dict[str, Found], wanted: set[str]) -> set[CheckpointId]:
    return {objects.index_id(i) for i, (kinds, *_) in found.items() if wanted <= {*kinds.split()}}
