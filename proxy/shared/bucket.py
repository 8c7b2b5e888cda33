"""The bucket or directory behind `shared_store`: its objects are listed, read, written and deleted.

The only module that knows obstore, which is loaded with the first bucket. Every call ends: a connection on
which nothing comes is given up. Credentials and the endpoint come from the environment, as for any client
of that store (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on), and are in no message.
"""

import asyncio
import atexit
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from proxy.errors import SettingsError, SharedStoreFault, StateDamaged, in_words
from proxy.shared import objects
from proxy.shared.objects import ORPHAN_SECONDS, Listed, listed
from proxy.store.files import Look

_CONNECT_SECONDS, _SILENT_SECONDS, _WRITE_SECONDS = 3, 10, 30
LEAST_BYTES_PER_SECOND = 256 << 10
"""A write that is slower has hung."""
_LISTED_AT_ONCE = 1000
_ANSWER = re.compile(r"<Code>([^<\n]*)</Code>\s*<Message>([^<\n]*)")
_ENDPOINT = re.compile("(AWS|AZURE)_(STORAGE_)?ENDPOINT")
READ_BYTES = 4 << 20
PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
_PART_SECONDS = _PARTS_AT_ONCE * PART_BYTES // LEAST_BYTES_PER_SECOND
"""How long the slowest link takes for a part: for the client nothing comes until the part is sent."""
_NEEDED = "shared_store needs more packages, such as by pipx install --force '.[shared]'"

atexit.register(time.sleep, 0.1)
"""obstore's threads drop Python objects after a call has returned, and there is nothing to join. Before
Python 3.14, a thread that wants the interpreter while that ends aborts the process."""


class Gone(SharedStoreFault):
    """An object is not there, or no longer: a miss, not a fault of the store."""


class Denied(StateDamaged):
    """An object may not be read now."""


class Bucket:
    """The objects under one URL."""

    def __init__(self, url: str) -> None:
        """Raises SettingsError if the URL cannot be used; nothing is asked of the store yet."""
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise SettingsError(_NEEDED) from error
        self._obstore, self._faults = obstore, (BaseError, OSError, ValueError)
        self._look = Look(self._look_at_directory)
        self.url, self.was_mounted = url.rstrip("/"), False
        scheme, _, rest = url.partition("://")
        self._directory = Path(unquote(rest)) if scheme == "file" else None
        if self._directory:
            self._store: Any = None
            return
        options: dict[str, Any] = {}
        if scheme == "s3":  # JuiceFS answers the deletion of several as no other does
            options = {"config": {"disable_bulk_delete": True}}
        endpoints = (url for name, url in os.environ.items() if _ENDPOINT.match(name))
        options |= {
            "client_options": {
                "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                "read_timeout": timedelta(seconds=_PART_SECONDS),
                "timeout": timedelta(days=1),  # of a whole transfer
                "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
            },
            "retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=_PART_SECONDS)},
        }
        try:
            self._store = from_url(url, **options)
        except self._faults as error:
            raise SettingsError(f"shared_store: {_told(error)}") from error

    async def list(self, folder: str, after: str | None = None) -> AsyncIterator[list[Listed]]:
        """Yield the objects below *folder* whose names sort behind *after*, some hundred at a time."""
        with self._translated():
            store = await self._opened()
            stream = self._obstore.list(store, folder, offset=after, chunk_size=_LISTED_AT_ONCE)
            while (batch := await self._next(_whole_page(stream))) is not None:
                found = (
                    listed(each["path"], each["size"], each["last_modified"].timestamp())
                    for each in batch
                )
                yield [each for each in found if each is not None]

    async def read(self, name: str) -> bytes:
        """Return a small object; raises Gone if it is not there, Denied if it may not be read."""
        with self._translated():
            try:
                getting = self._obstore.get_async(await self._opened(), name)
                reply = await _within(_SILENT_SECONDS, getting)
                return bytes(await _within(_SILENT_SECONDS, reply.bytes_async()))
            except self._obstore.exceptions.BaseError as error:
                denied = self._obstore.exceptions.PermissionDeniedError
                # Of a directory only the text tells it.
                if isinstance(error, denied) or "(os error 13)" in str(error):
                    raise Denied(_told(error)) from error
                raise

    async def stream(
        self, name: str, least_bytes: int, first_seconds: float, stall_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield nothing once a large object begins to come, then *least_bytes* and more at once.

        Raises Gone if it is not there.

        Raises SharedStoreFault if it is not begun within *first_seconds*, or nothing comes for
        *stall_seconds*.
        """
        with self._translated():
            store = await _within(first_seconds, self._opened())
            reply = await _within(first_seconds, self._obstore.get_async(store, name))
            yield b""
            stream = reply.stream(min_chunk_size=least_bytes)
            while (chunk := await self._next(anext(stream), stall_seconds)) is not None:
                yield bytes(chunk)

    async def write(
        self, name: str, data: Iterable[bytes], size_bytes: int, bytes_per_second: float = inf
    ) -> None:
        """Store an object; *data* of about *size_bytes* is drawn in another thread, as it is sent."""
        least_seconds, is_small = size_bytes / bytes_per_second, size_bytes <= PART_BYTES
        seconds = least_seconds + _WRITE_SECONDS + size_bytes / LEAST_BYTES_PER_SECOND
        await asyncio.sleep(least_seconds if is_small else 0.0)
        drawn = _drawn(iter(data), bytes_per_second)
        content = await asyncio.to_thread(b"".join, data) if is_small else drawn
        with self._translated():
            store = await self._opened()
            put, at_once = self._obstore.put_async, _PARTS_AT_ONCE
            writing = put(store, name, content, chunk_size=PART_BYTES, max_concurrency=at_once)
            await _within(seconds, writing)

    async def delete(self, *names: str) -> None:
        """Delete objects one after the other; those that are not there are no fault."""
        for name in names:
            with suppress(Gone), self._translated():
                deleting = self._obstore.delete_async(await self._opened(), name)
                await _within(_SILENT_SECONDS, deleting)

    async def _opened(self) -> Any:
        """Return the store; raises SharedStoreFault if its directory is not there, or not mounted."""
        if self._directory:
            await self._look.within(_SILENT_SECONDS)
        return self._store

    def _look_at_directory(self) -> None:
        assert (directory := self._directory) is not None
        if not directory.is_dir():  # obstore would make it anew, on the disk below
            raise SharedStoreFault(
                f"{directory}: no such directory: mount it, or make it (mkdir -m 700)"
            )
        is_mounted = directory.stat().st_dev != directory.parent.stat().st_dev
        if self.was_mounted and not is_mounted:
            raise SharedStoreFault(
                f"{directory} is not mounted as before: mount it, or name another"
            )
        self.was_mounted = is_mounted
        if self._store is None:
            self._store = self._obstore.store.LocalStore(directory)
            # What is written when its process is killed stays under such a name, and is not listed.
            for half in directory.glob(f"{objects.VERSION}/*/*#*"):
                name = str(half.relative_to(directory)).partition("#")[0]
                with suppress(OSError):  # another file there is not ours: a link may lead anywhere
                    is_old = time.time() - half.stat().st_mtime > ORPHAN_SECONDS
                    if is_old and listed(name, 0, 0.0):
                        half.unlink()

    async def _next(self, coming: Any, seconds: float = _SILENT_SECONDS) -> Any:
        """Return what *coming* brings, None at the end; `anext` with a default cannot wait for obstore."""
        with suppress(StopAsyncIteration):
            return await _within(seconds, coming)
        return None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise Gone(_told(error)) from error
        except TimeoutError as error:
            raise SharedStoreFault("it does not answer") from error
        except self._faults as error:
            raise SharedStoreFault(_told(error)) from error


async def _within(seconds: float, waiting: Any) -> Any:
    """Return what is waited for; before Python 3.12, `wait_for` loses a cancellation now and then."""
    async with asyncio.timeout(seconds):
        return await waiting


def _whole_page(listing: Any) -> "asyncio.Future[Any]":
    """Return the next page of a listing, which comes to its end even if nobody waits for the page any more.

    If a listing is dropped when a page has just come, obstore panics, and no request succeeds from then on.
    """
    page = anext(listing)
    # If nobody waits any more, nobody else asks for its error.
    page.add_done_callback(lambda page, _=listing: page.cancelled() or page.exception())
    return asyncio.shield(page)


async def _drawn(data: Iterator[bytes], bytes_per_second: float) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(next, data, b""):
        yield chunk
        await asyncio.sleep(len(chunk) / bytes_per_second)


def _told(error: BaseException) -> str:
    """Return what a library says in its first line, without its numbers, behind what the store answered."""
    if isinstance(error, OSError) and error.errno:
        return in_words(error)
    line = re.sub(r" in [\d.]+\S*s,? ?.*? - ", ": ", str(error).partition("\n")[0])
    if answer := _ANSWER.search(str(error)):  # in S3's XML, mostly not in the first line
        line = f"{': '.join(answer.groups())} ({line.partition(': <')[0]})"
    return line[:300]
