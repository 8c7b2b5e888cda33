"""What goes up: states that were committed here, what spares most per byte first; and what goes from there.

An upload that was cut off, by whatever, is made again from its beginning under a new name.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from secrets import token_hex
from socket import gethostname

from proxy.core.eviction import Removal
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.saving import Claim, Written
from proxy.core.sharing import SharedLimits, spared_per_byte
from proxy.errors import CacheFault, in_words
from proxy.shared import objects
from proxy.shared.bucket import READ_BYTES
from proxy.shared.objects import META, STATE
from proxy.shared.remote import Remote

_UPLOADED = "uploaded"


class Uploads:
    """Uploads what is worth it, within limits."""

    def __init__(self, remote: Remote, limits: SharedLimits) -> None:
        self._remote, self._store, self._limits = remote, remote.store, limits
        self._uploaded = remote.index.value(_UPLOADED, Written) or Written()
        self._pending = {c.id for c in self._store if not c.shared_id}
        self._outdated: list[Checkpoint] = []
        self._uploading: CheckpointId | None = None
        """What is on its way, None once it is needless."""
        self._wake, self._is_busy = asyncio.Event(), False
        self._wake.set()

    def note_committed(self, checkpoint: Checkpoint) -> None:
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
            if objects.writer_of(checkpoint.shared_id) == self._remote.writer:
                self._outdated.append(checkpoint)
                self._wake.set()

    async def drain(self, seconds: float) -> None:
        """Upload what waits, in at most so many *seconds*."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._is_busy or self._next() is not None:
                    if self._remote.is_failing("upload"):
                        break
                    self._wake.set()
                    await asyncio.sleep(0.02)

    async def keep_up(self) -> None:
        """Upload what was committed, then delete what is outdated, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._is_busy = True
            try:
                while (checkpoint := self._next()) is not None:
                    self._uploading = checkpoint.id
                    with self._remote.trying("upload"):
                        await self._upload(checkpoint)
                    self._pending.discard(checkpoint.id)
                while self._outdated:
                    await self._remote.delete(self._outdated[-1])
                    self._outdated.pop()
            except CacheFault as fault:
                self._remote.log.info("an upload waits", why=str(fault))
                await asyncio.sleep(self._remote.pause_seconds("upload", "delete") or 1.0)
                self._wake.set()
            except Exception as error:
                self._remote.faults.record("share", error)
            self._is_busy, self._uploading = False, None

    def _next(self) -> Checkpoint | None:
        """Return the checkpoint that is worth most per byte there; what is worth nothing is passed over."""
        present, best, most = self._remote.present(), None, 0.0
        for checkpoint_id in tuple(self._pending):
            checkpoint = self._store.get(checkpoint_id)
            if checkpoint is None or checkpoint.shared_id or self._store.is_quarantined(checkpoint):
                self._pending.discard(checkpoint_id)
            elif (rates := present.rates_by.get(checkpoint.namespace)) is not None:
                worth = spared_per_byte(checkpoint, rates, self._remote.link)
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
        remote, namespace = self._remote, checkpoint.namespace
        owner, tokens = remote.owner(namespace), self._store.index.tokens(checkpoint.id)
        if owner is None or tokens is None:
            return
        shared_id = objects.new_id(time.time(), remote.writer, token_hex(8))
        folder = remote.folder_of(owner)
        name = objects.name_of(folder, shared_id, STATE)
        try:
            # Its removal meanwhile does no harm: an open file stays.
            with self._store.files.path(checkpoint.file_name).open("rb") as file:
                data = self._paced(iter(partial(file.read, READ_BYTES), b""))
                sealed = remote.sealing.seal(name, data)
                await remote.bucket.write(name, sealed, checkpoint.size_bytes)
        except OSError as error:
            self._remote.log.info("a state is not there to be uploaded", why=in_words(error))
            return
        remote.metrics.shared_bytes.labels("up").inc(checkpoint.size_bytes)
        claim = Claim(checkpoint.size_bytes, remote.present())
        self._uploaded = self._uploaded.after(checkpoint.size_bytes, claim, time.time())
        await remote.write(partial(remote.index.put_value, _UPLOADED, self._uploaded))
        meta = objects.meta_of(checkpoint, owner, tokens, folder, gethostname())
        name = objects.name_of(folder, shared_id, META)
        record = b"".join(remote.sealing.seal(name, [objects.encode_meta(meta)]))
        await remote.bucket.write(name, [record], len(record))
        entry = objects.entry_of(meta, shared_id, namespace)
        await remote.enter(entry)
        remote.metrics.shared_states.labels("up").inc()
        self._store.change(checkpoint.id, shared_id=shared_id)
        if self._uploading != checkpoint.id:
            self._outdated.append(entry[0])

    def _paced(self, data: Iterable[bytes]) -> Iterator[bytes]:
        """Yield *data* no faster than the limit allows; for a thread."""
        for chunk in data:
            if limit := self._limits.upload_bytes_per_second:
                time.sleep(len(chunk) / limit)
            yield chunk
