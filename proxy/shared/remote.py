"""The shared store as this proxy knows it: the bucket, the states in it, and whether it answers.

The records of the states are kept in an index of their own, so that a lookup asks nobody. That index only
hints: a state may be gone, and its tokens are compared only once it is here.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from secrets import token_hex

import msgspec

from proxy.core.conditions import DegradationKind
from proxy.core.eviction import Present
from proxy.core.model import Candidate, Checkpoint, CheckpointId, KnownNamespace, keyed_tenant
from proxy.core.rates import Transfer
from proxy.core.sharing import UNMEASURED, after_transfer
from proxy.core.tokens import Namespace, TokenIds, hash_steps, hash_whole
from proxy.errors import CacheFault, IndexDamaged, SharedStoreFault
from proxy.health import Degradations, Faults
from proxy.log import get_logger
from proxy.metrics import Metrics
from proxy.shared import objects
from proxy.shared.bucket import Bucket, Gone
from proxy.shared.objects import META, STATE, USED, Sealing
from proxy.store.index import Entry, Index, Newer
from proxy.store.known_models import Owner, owners
from proxy.store.store import CheckpointStore
from proxy.tasks import Tasks

_FOLDER = "shared-index"
_WRITER, _LINK, _TENANTS = "writer", "link", "tenants "
_PLACE, _MOUNTED, _REFUSED = "place", "mounted", "refused"
_MAX_TENANTS, _MAX_REFUSED, _MAX_FOUND = 4096, 4096, 32
_MOST_BACKOFF_SECONDS = 60.0
_TRUSTED_SECONDS, _MOST_TRUSTED_SECONDS = 15.0, 3600.0
"""For how long the first measurement of a link counts, and the fifth and later ones: the machine may have
been busy with something else, and where nothing is fetched nothing would ever correct that."""


@dataclass(eq=False)
class Remote:
    """The bucket, an index of its states, and which operations fail there now.

    Each operation is given up for a while when it fails; only background work finds out that it works
    again. `present` tells which models are served, and how fast.
    """

    store: CheckpointStore
    bucket: Bucket
    sealing: Sealing
    present: Callable[[], Present]
    metrics: Metrics
    degradations: Degradations
    faults: Faults

    def __post_init__(self) -> None:
        """Open the index; raises StoreFault."""
        self.tasks, self.has_failed, self.log = Tasks(), asyncio.Event(), get_logger("shared")
        self.index = _opened(self.store.files.directory / _FOLDER)
        self._place = self.sealing.name(b"place", self.bucket.url.encode())
        if self.index.value(_PLACE, str) not in (None, self._place):
            # The states of another place or key are forgotten: own states are uploaded again.
            up = [replace(c, shared_id="") for c in self.store if c.shared_id and not c.is_fetched]
            self.store.index.put(newer=Newer(up))
            self.index.clear()
        self.bucket.was_mounted = self.index.value(_MOUNTED, str) == self._place
        self.known = set(self.index.ids())
        # In both indexes: where one is damaged, the other still tells which states are the proxy's own.
        there, here = (each.value(_WRITER, str) for each in (self.index, self.store.index))
        self.writer = there or here or token_hex(4)
        self.store.index.put_value(_WRITER, self.writer)
        self.refused = set(self.index.value(_REFUSED, list[str]) or ())
        """States that are needless or not wanted; own ones until they are deleted there."""
        # Until 29 November 2026 own ones had a place of their own.
        earlier = self.index.value("outdated", list[Checkpoint]) or []
        self.refused.update(checkpoint.shared_id for checkpoint in earlier)
        values = {_PLACE: self._place, _WRITER: self.writer, _REFUSED: [*self.refused]}
        self.index.put(newer=Newer(values={**values, "outdated": []}))
        own = map(objects.index_id, filter(self.is_own, self.refused))
        self.outdated = [record for record in map(self.index.record, own) if record]
        self.link = self.index.value(_LINK, Transfer) or UNMEASURED
        self.measured_until, self._trusted_seconds = 0.0, _TRUSTED_SECONDS
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shared-index")
        self.secret = self.sealing.secret(b"tenants") if self.sealing.key else self.store.secret
        self._tenants_name = _TENANTS + keyed_tenant(self.secret, b"").hex()
        self.tenants = self.index.value(self._tenants_name, dict[bytes, bytes]) or {}
        """The names of this directory's tenants on all machines that have the key file."""
        self._owners: dict[Namespace, Owner] = {}
        self._failing: dict[str, int] = {}

    async def close(self) -> None:
        """End all tasks, and close the index."""
        await self.tasks.drain(0)
        self._thread.shutdown(wait=True)
        with suppress(CacheFault):
            self.index.put(newer=Newer(values={_LINK: self.link, _REFUSED: [*self.refused]}))
        self.index.close()

    # Names.

    async def note_tenant(self, tenant: bytes, name: bytes) -> None:
        """Note the common *name* of a tenant of this directory."""
        if len(self.tenants) < _MAX_TENANTS:
            self.tenants[tenant] = name
            await self.write(partial(self.index.put_value, self._tenants_name, {**self.tenants}))

    def owner(self, namespace: Namespace) -> Owner | None:
        """Return the owner of a namespace by names that all machines use; None if it was not met here."""
        if namespace not in self._owners:
            self._owners = dict(owners(self.store.index))
        if (owner := self._owners.get(namespace)) is None or not owner.tenant:
            return owner
        name = self.tenants.get(owner.tenant)
        return msgspec.structs.replace(owner, tenant=name) if name else None

    def models_in(self, folder: str) -> list[tuple[Namespace, KnownNamespace]]:
        """Return the namespaces of this directory whose shared folder is *folder*, with their models."""
        self._owners = dict(owners(self.store.index))
        found = ((n, self.owner(n)) for n in self._owners)
        return [(n, o.known) for n, o in found if o and self.folder_of(o) == folder]

    def folder_of(self, owner: Owner) -> str:
        """Return the shared folder of a model and tenant."""
        return self.sealing.name(owner.static.encode(), owner.tenant)

    def folder(self, namespace: Namespace) -> str:
        """Return the shared folder of a namespace of this directory; empty if its model is not known."""
        owner = self.owner(namespace)
        return self.folder_of(owner) if owner else ""

    def name(self, checkpoint: Checkpoint, kind: str) -> str:
        """Return the name of an object of a shared state."""
        return objects.name_of(self.folder(checkpoint.namespace), checkpoint.shared_id, kind)

    # Whether the shared store answers.

    @contextmanager
    def trying(self, operation: str) -> Iterator[None]:
        """Note whether an operation works; its faults pass through."""
        try:
            yield
        except SharedStoreFault as fault:
            if isinstance(fault, Gone) and operation == "fetch":
                raise  # else the bucket itself is not there
            self._failing[operation] = self._failing.get(operation, 0) + 1
            if operation in ("list", "fetch"):
                self.has_failed.set()
            self.metrics.shared_faults.labels(operation).inc()
            self.degradations.begin(DegradationKind.SHARED_STORE_AWAY, f"{operation}: {fault}")
            raise
        if self._failing.pop(operation, 0) and not self._failing:
            self.degradations.end(DegradationKind.SHARED_STORE_AWAY)

    def pause_seconds(self, *operations: str) -> float:
        """Return how long to leave operations alone; 0 if all of them worked when they were last tried."""
        return backoff_seconds(max(self._failing.get(each, 0) for each in operations))

    def note_transfer(self, call_seconds: float, n_bytes: int, seconds: float) -> None:
        """Learn from a transfer that answered after *call_seconds*, and sent *n_bytes* in *seconds*."""
        self.measured_until = time.monotonic() + self._trusted_seconds
        self._trusted_seconds = min(_MOST_TRUSTED_SECONDS, 4 * self._trusted_seconds)
        self.link = after_transfer(self.link, call_seconds, n_bytes, seconds)

    # The states in the shared store.

    def find(self, namespace: Namespace, tokens: TokenIds) -> Iterator[Candidate]:
        """Yield the shared states that share a prefix with *tokens*, by their hashes, the longest first.

        What was quarantined here is not offered again, nor what is about to be deleted there.
        """
        if not self.known or not (folder := self.folder(namespace)):
            return
        seed = Namespace(bytes.fromhex(folder))
        refused = self.refused.union(c.shared_id for c in self.store.quarantined)
        digest = cache(partial(hash_whole, seed, tokens))
        reaching = self.index.reaching(hash_steps(seed, tokens, objects.STEP_TOKENS), _MAX_FOUND)
        for checkpoint_id, n_steps in reaching.items():
            record = self.index.record(checkpoint_id)
            if record is None or record.namespace != namespace or record.shared_id in refused:
                continue
            n_common = n_steps * objects.STEP_TOKENS
            ends = sorted(n for n in objects.ends_in(record) if n_common < n <= len(tokens))[::-1]
            matches = (n for n in ends if not self.index.n_missing(checkpoint_id, [digest(n)]))
            yield Candidate(record, next(matches, n_common))

    async def enter(self, *entries: Entry, **values: object) -> None:
        """Enter states, so that `find` yields them, and named values into the index."""
        values |= {_MOUNTED: self._place} if self.bucket.was_mounted else {}
        await self.write(partial(self.index.put, *entries, newer=Newer(values=values)))
        self.known.update(checkpoint.id for checkpoint, *_ in entries)

    async def forget(self, checkpoint_id: CheckpointId) -> None:
        """Do not find a state again, unless it is listed again."""
        hashes = objects.hashes_of(self.index.tokens(checkpoint_id))
        await self.write(partial(self.index.delete, checkpoint_id, hashes))
        self.known.discard(checkpoint_id)

    def is_own(self, shared_id: str) -> bool:
        """Return whether this proxy has put a state there."""
        return f"-{self.writer}-" in shared_id

    def refuse(self, checkpoint: Checkpoint) -> None:
        """Do not find a state again, nor after a restart; an own one is to be deleted there."""
        self.refused.add(checkpoint.shared_id)
        if self.is_own(checkpoint.shared_id):
            self.outdated.append(checkpoint)
        # Where nothing may be deleted there are ever more: the others are written at the end.
        if len(self.refused) < _MAX_REFUSED:
            with suppress(RuntimeError):  # it is ending
                self._thread.submit(self.index.put_value, _REFUSED, [*self.refused])

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a state there, its record first; raises SharedStoreFault.

        One of a tenant that this key does not name stays there: nobody can tell where.
        """
        if self.folder(checkpoint.namespace):
            with self.trying("delete"):
                await self.bucket.delete(*(self.name(checkpoint, k) for k in (META, STATE, USED)))
        await self.forget(objects.index_id(checkpoint.shared_id))
        self.refused.discard(checkpoint.shared_id)

    async def write(self, work: Callable[[], object]) -> None:
        """Write to the index, one after the other."""
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))


def backoff_seconds(n_faults: int) -> float:
    """Return how long to wait after so many faults in a row."""
    return min(_MOST_BACKOFF_SECONDS, 2.0 ** min(n_faults, 6)) if n_faults else 0.0


def _opened(path: Path) -> Index:
    """Return the index of the shared store; a damaged one is begun anew, for all of it is there."""
    try:
        return Index(path)
    except IndexDamaged as damage:
        says = f"the index of the shared store is begun anew ({damage.flaw}): all there is listed again"
        get_logger("shared").warning("index made anew", says=says)
        shutil.rmtree(path)
        return Index(path)
