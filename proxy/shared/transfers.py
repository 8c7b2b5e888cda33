"""The transfers of states: from the shared store to this machine, and back.

What comes down is opened and written as it comes, and then compared with its checksums. Then the parser of
state files reads it, and it becomes an ordinary checkpoint; only then its tokens count. What goes up are
states that were committed here, what spares most per byte first. An upload that was cut off, by whatever,
is made again from its beginning under a new name.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import cache
from itertools import islice
from math import inf
from pathlib import Path
from random import random
from secrets import token_hex
from typing import BinaryIO

import msgspec

from proxy.core.eviction import Present, Removal
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.saving import Claim, Written
from proxy.core.sharing import ENTERING, SharedLimits, bytes_at_once, seconds_for, spared_per_byte
from proxy.errors import CacheFault, StateDamaged, StateFileMalformed, StoreFault, in_words
from proxy.llama.files import read_state_file
from proxy.shared import objects
from proxy.shared.bucket import LEAST_BYTES_PER_SECOND, PART_BYTES, READ_BYTES, Gone
from proxy.shared.objects import META, STATE, UNUSED_SECONDS, USED, Opening
from proxy.shared.remote import Remote, backoff_seconds
from proxy.store.offline import entered_as
from proxy.tasks import wait_for

_STALL_SECONDS, _SILENT_CALLS = 0.25, 4
"""A store that answers nothing for so long, or for so many times as long as ever, is taken for hung."""
_TRIAL_SECONDS, _N_TRIALS = 0.25, 16
"""How long a state is read to measure the link, and among how many, the larger ones the likelier."""


class Downloads:
    """Fetches states of the shared store."""

    def __init__(self, remote: Remote) -> None:
        self._remote, self.entering = remote, ENTERING
        self._fetches: dict[CheckpointId, asyncio.Task[Checkpoint | None]] = {}
        self._n_damaged, self._damaged_until = 0, 0.0

    @property
    def is_off(self) -> bool:
        """Whether nothing is to be fetched now: the store fails, or what came from there was damaged."""
        return time.monotonic() < self._damaged_until or self._remote.pause_seconds("fetch") > 0

    async def find_out(self) -> None:
        """Read the beginning of a state if a fetch has failed, or the link was not measured for long."""
        remote = self._remote
        if remote.pause_seconds("fetch") or time.monotonic() > remote.measured_until:
            known, folder = map(remote.index.record, remote.index.ids()), cache(remote.folder)
            named = (c for c in known if c and folder(c.namespace))
            # By chance: a state that cannot be read must not stand for all of them each time.
            few = islice(named, _N_TRIALS)
            chosen = max(few, key=lambda c: c.size_bytes * random(), default=None)
            with remote.trying("fetch"), suppress(Gone):
                if chosen is not None:
                    until = time.monotonic() + _TRIAL_SECONDS
                    async with aclosing(self._stream(chosen)) as stream:
                        async for _ in stream:
                            if time.monotonic() > until:
                                break

    async def fetch(self, checkpoint: Checkpoint, limit_seconds: float) -> Checkpoint | None:
        """Return the local checkpoint that a shared state has become; None if it comes much later.

        A call for a state that is on its way waits for that transfer. Never raises a CacheFault.
        """
        if (fetching := self._fetches.get(checkpoint.id)) is None:
            fetching = self._remote.tasks.start(self._fetch(checkpoint, limit_seconds))
            self._fetches[checkpoint.id] = fetching
            fetching.add_done_callback(lambda _: self._fetches.pop(checkpoint.id, None))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds_for(1, 1, limit_seconds, self._remote.link)):
                return await asyncio.shield(fetching)
        return None

    async def _fetch(self, checkpoint: Checkpoint, limit_seconds: float) -> Checkpoint | None:
        result, why, fetched, began = "failed", "", None, time.monotonic()
        try:
            fetched = await self._receive(checkpoint, limit_seconds)
            result, self._n_damaged = ("done", 0) if fetched else ("late", self._n_damaged)
        except Gone:
            result = "gone"
            await self._remote.forget(checkpoint.id)
        except (StateFileMalformed, StateDamaged) as error:
            result, why, self._n_damaged = "damaged", str(error), self._n_damaged + 1
            self._damaged_until = time.monotonic() + backoff_seconds(self._n_damaged)
            await self._remote.forget(checkpoint.id)
            self._remote.known.add(checkpoint.id)  # it is not read again
        except (CacheFault, OSError) as fault:
            why = in_words(fault)
        except Exception as error:
            self._remote.faults.record("share", error)
        self._remote.metrics.shared_fetches.labels(result).inc()
        seconds = round(time.monotonic() - began, 3)
        told = {"result": result, "id": checkpoint.shared_id, "why": why}
        self._remote.log.info("fetched", size_bytes=checkpoint.size_bytes, seconds=seconds, **told)
        return fetched

    async def _receive(self, checkpoint: Checkpoint, limit_seconds: float) -> Checkpoint | None:
        """Fetch a state into a temporary file and commit it; None if it would not be here in time."""
        store, files = self._remote.store, self._remote.store.files
        name = await store.reserve(Claim(checkpoint.size_bytes, self._remote.present()))
        try:
            if not await self._download(checkpoint, files.path(name), limit_seconds):
                return None
            came_at = time.monotonic()
            stamp = await asyncio.to_thread(files.stamp, name)
            if not await asyncio.to_thread(files.is_intact, name, checkpoint.content):
                raise StateFileMalformed("it is not what its record says")
            state = await asyncio.to_thread(read_state_file, files.path(name))
            if len(state.tokens) != checkpoint.n_tokens:
                raise StateFileMalformed(f"{checkpoint.shared_id} has {len(state.tokens)} tokens")
            await store.settle(name, checkpoint.size_bytes)
            entered = entered_as(checkpoint, name, checkpoint.namespace, state)
            committed = await store.commit(replace(entered, is_fetched=True), state.tokens, stamp)
            self.entering = self.entering.after(checkpoint.size_bytes, time.monotonic() - came_at)
        finally:
            await store.discard(name)
        self._remote.metrics.shared_states.labels("down").inc()
        self._remote.tasks.start(self._touch(checkpoint))
        return committed

    async def _stream(self, checkpoint: Checkpoint) -> AsyncGenerator[bytes, None]:
        """Yield a state as it comes, and learn from it how fast the link is."""
        name, link = self._remote.name(checkpoint, STATE), self._remote.link
        n_next, n_bytes = bytes_at_once(checkpoint.size_bytes, link), 0
        first_seconds = max(_STALL_SECONDS, 2 * _SILENT_CALLS * link.call.seconds)
        began, begun_at = time.monotonic(), 0.0
        stream = self._remote.bucket.stream(name, n_next, first_seconds, _STALL_SECONDS)
        async with aclosing(stream):
            try:
                async for chunk in stream:
                    begun_at, n_bytes = begun_at or time.monotonic(), n_bytes + len(chunk)
                    yield chunk
            finally:
                if begun_at:
                    seconds = time.monotonic() - begun_at
                    self._remote.note_transfer(begun_at - began, n_bytes or n_next, seconds)

    async def _download(self, checkpoint: Checkpoint, path: Path, limit_seconds: float) -> bool:
        began, n_received, link = time.monotonic(), 0, self._remote.link
        opening = Opening(self._remote.sealing, self._remote.name(checkpoint, STATE))
        size, n_next = checkpoint.size_bytes, bytes_at_once(checkpoint.size_bytes, link)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, suppress(TimeoutError):
            with self._remote.trying("fetch"):
                async with (
                    aclosing(self._stream(checkpoint)) as stream,
                    asyncio.timeout(None) as left,
                ):
                    async for chunk in stream:
                        n_received += len(chunk)
                        self._remote.metrics.shared_bytes.labels("down").inc(len(chunk))
                        seconds = seconds_for(n_received + n_next, size, limit_seconds, link)
                        left.reschedule(began + seconds)
                        await asyncio.to_thread(_write, file, opening.take(chunk), size)
            await asyncio.to_thread(_write, file, opening.last(), size)
            return True
        return False

    async def _touch(self, checkpoint: Checkpoint) -> None:
        """Let the writer of a state know that somebody has read it; nobody tries it again."""
        with suppress(CacheFault):
            await self._remote.bucket.write(self._remote.name(checkpoint, USED), [b"1"], 1)


def _write(file: BinaryIO, pieces: Iterable[bytes], most_bytes: int) -> None:
    """Write what has come; raises StateFileMalformed or StateDamaged if it was not saved so."""
    for piece in pieces:
        file.write(piece)
        if file.tell() > most_bytes:
            raise StateFileMalformed("it is longer than its record says")


def _read(path: Path, note: Callable[[int], object]) -> Iterator[bytes]:
    """Yield the pieces of a state, and note their bytes; raises StoreFault, which no bucket raises."""
    try:
        with path.open("rb") as file:  # here, because a disk may hang
            while piece := file.read(READ_BYTES):
                note(len(piece))
                yield piece
    except OSError as error:
        raise StoreFault(in_words(error)) from error


class Uploads:
    """Uploads what is worth it, within limits."""

    def __init__(self, remote: Remote, limits: SharedLimits) -> None:
        self._remote, self._store, self._limits = remote, remote.store, limits
        self._uploaded = remote.index.value("uploaded", Written) or Written()
        self._seconds_per_byte = 1 / LEAST_BYTES_PER_SECOND  # until one has been sent
        self._pending = {c.id for c in self._store if not c.shared_id}
        self._uploading: CheckpointId | None = None
        """The checkpoint that is being uploaded; None once its upload is needless."""
        self._wake, self._is_busy, self._listed = asyncio.Event(), False, set[str]()
        self._wake.set()

    def begin(self, folders: Iterable[str]) -> None:
        """Upload to these folders from now on: they have been listed, so that nothing goes up twice."""
        self._listed.update(folders)
        self._wake.set()

    def note_committed(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.shared_id:
            self._pending.add(checkpoint.id)
            self._wake.set()

    async def upload_again(self, gone: Collection[str], n_left: float) -> None:
        """Upload own states that somebody else has deleted there, and that were lately in use here.

        All of them together may have *n_left* bytes; what was used last comes first.
        """
        states, used_at = await asyncio.to_thread(list, self._store), time.time() - UNUSED_SECONDS
        own = (c for c in states if c.shared_id in gone and not c.is_fetched)
        used = (c for c in own if c.last_used_at > used_at)
        for each in sorted(used, key=lambda c: -c.last_used_at):
            if (n_left := n_left - each.size_bytes) >= 0:
                await self._upload_anew(each)  # one by one: saves wait for the write under way

    async def _upload_anew(self, checkpoint: Checkpoint) -> None:
        await self._store.change_on_disk(checkpoint.id, shared_id="")
        self._pending.add(checkpoint.id)  # while it has its old name it is taken for uploaded
        self._wake.set()

    def note_removed(self, checkpoint: Checkpoint, reason: Removal) -> None:
        """Delete a state that this proxy has put there once it is needless or not wanted here.

        One that only had to make room stays there: that is what the shared store is for. So does one whose
        successor will not be uploaded today.
        """
        is_replaced = reason is Removal.SUPERSEDED and self._may_upload(checkpoint.size_bytes)
        if checkpoint.quarantine or is_replaced or reason is Removal.OPERATOR:
            self.withdraw(checkpoint)

    def withdraw(self, checkpoint: Checkpoint) -> None:
        """Delete a state that this proxy has put there; a quarantined one is not fetched again either."""
        checkpoint = self._store.get(checkpoint.id) or checkpoint  # uploaded or quarantined since
        if checkpoint.id == self._uploading:
            self._uploading = None
        if checkpoint.quarantine or self._remote.is_own(checkpoint.shared_id):
            self._remote.refuse(checkpoint)
            self._wake.set()

    async def readmit(self, checkpoint: Checkpoint) -> None:
        """Undo `withdraw`: an own state gets another name, because it may be deleted there already."""
        checkpoint = self._store.get(checkpoint.id) or checkpoint
        if self._remote.is_own(checkpoint.shared_id):
            await self._upload_anew(checkpoint)
        else:
            self._remote.refused.discard(checkpoint.shared_id)

    async def drain(self, seconds: float) -> None:
        """Upload what waits, in at most so many *seconds*."""
        self._wake.set()
        is_served = bool(self._remote.present().rates_by)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._is_busy or self._wake.is_set() or (is_served and not self._listed):
                    if self._remote.pause_seconds("upload", "list"):
                        return
                    await asyncio.sleep(0.02)

    async def keep_up(self) -> None:
        """Upload what was committed, then delete what is outdated, until cancelled."""
        pause_seconds = inf
        while True:
            await wait_for(self._wake, pause_seconds)
            self._wake.clear()
            self._is_busy, pause_seconds = True, inf
            try:
                while checkpoint := await asyncio.to_thread(self._next, self._remote.present()):
                    self._uploading = checkpoint.id
                    with self._remote.trying("upload"):
                        await self._upload(checkpoint)
                while outdated := self._remote.outdated:
                    await self._remote.delete(outdated[0])  # meanwhile others are appended
                    outdated.pop(0)
            except CacheFault as fault:
                self._remote.log.info("an upload waits", why=str(fault))
                if seconds := self._remote.pause_seconds("upload"):
                    await asyncio.sleep(seconds)
                    self._wake.set()
                # A deletion that is refused holds up no upload.
                pause_seconds = self._remote.pause_seconds("delete") or 1.0
            except Exception as error:
                self._remote.faults.record("share", error)
            self._is_busy, self._uploading = False, None

    def _next(self, present: Present) -> Checkpoint | None:
        """Return the checkpoint that is worth most per byte there.

        What is worth nothing over the link as it is now waits. For another thread: thousands may wait.
        """
        best, most, folder = None, 0.0, cache(self._remote.folder)
        for checkpoint_id in tuple(self._pending) if self._listed else ():
            checkpoint = self._store.get(checkpoint_id)
            if not checkpoint or checkpoint.shared_id or checkpoint.n_tokens < objects.STEP_TOKENS:
                self._pending.discard(checkpoint_id)
            elif (rates := present.rates_by.get(checkpoint.namespace)) is not None:
                worth = spared_per_byte(checkpoint, rates, self._remote.link)
                if worth > most and self._may_upload(checkpoint.size_bytes):
                    is_out = self._store.is_quarantined(checkpoint)  # perhaps only for a while
                    if not is_out and folder(checkpoint.namespace) in self._listed:
                        best, most = checkpoint, worth
        return best

    def _may_upload(self, n_bytes: int) -> bool:
        limit = self._limits.upload_bytes_per_day
        return not limit or self._uploaded.last_day_bytes(time.time()) + n_bytes <= limit

    async def _upload(self, checkpoint: Checkpoint) -> None:
        """Put a state there, then its record, unless it is there from before; raises CacheFault."""
        remote, namespace = self._remote, checkpoint.namespace
        owner, tokens = remote.owner(namespace), self._store.index.tokens(checkpoint.id)
        if owner is None or tokens is None:
            return self._pending.discard(checkpoint.id)
        there = (found.checkpoint for found in remote.find(namespace, tokens))
        if same := next((c for c in there if c.content == checkpoint.content), None):
            # As where shared_store is again what it was.
            return await self._store.change_on_disk(checkpoint.id, shared_id=same.shared_id)
        # Named after the time when it will be there: others list what is new by its name.
        there_at = time.time() + checkpoint.size_bytes * self._seconds_per_byte
        shared_id = objects.new_id(there_at, remote.writer, token_hex(8))
        folder = remote.folder_of(owner)
        name = objects.name_of(folder, shared_id, STATE)
        path = self._store.files.path(checkpoint.file_name)
        n_read, n_unsent, began = list[int](), PART_BYTES, time.monotonic()
        sealed = remote.sealing.seal(name, _read(path, n_read.append))
        try:
            pace = self._limits.upload_bytes_per_second or inf
            await remote.bucket.write(name, sealed, checkpoint.size_bytes, pace)
            n_unsent = 0
            self._seconds_per_byte = (time.monotonic() - began) / checkpoint.size_bytes
        except StoreFault as error:  # the fault is not the bucket's
            remote.log.info("a state cannot be read to be uploaded", why=in_words(error))
            self._store.note_unreadable(checkpoint)
            return
        finally:  # what broke off has cost its bytes, too, but perhaps for the part under way
            n_bytes = max(0, sum(n_read) - n_unsent)
            remote.metrics.shared_bytes.labels("up").inc(n_bytes)
            claim = Claim(n_bytes, remote.present())
            self._uploaded = self._uploaded.after(n_bytes, claim, time.time())
        meta = objects.meta_of(checkpoint, owner, tokens, folder)
        name = objects.name_of(folder, shared_id, META)
        record = b"".join(remote.sealing.seal(name, [msgspec.msgpack.encode(meta)]))
        await remote.bucket.write(name, [record], len(record))
        # It is there, though a full disk may take no note of that.
        self._pending.discard(checkpoint.id)
        entry = objects.entry_of(meta, shared_id, namespace)
        await remote.enter(entry, uploaded=self._uploaded)
        remote.metrics.shared_states.labels("up").inc()
        # Behind a removal under way, which then has told its reason.
        await self._store.change_on_disk(checkpoint.id, shared_id=shared_id)
        kept = self._store.get(checkpoint.id)
        if self._uploading != checkpoint.id and (kept is None or kept.quarantine):
            remote.refuse(entry[0])
