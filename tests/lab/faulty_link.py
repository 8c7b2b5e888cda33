"""A proxy before a bucket that delays, cuts, stalls, refuses, answers 500 or corrupts, as it is told.

It serves in a thread of its own, so that tests may wait for what passes it. The Host header goes on
unchanged: S3's signatures cover it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web
from yarl import URL

_CHUNK_BYTES = 1 << 16
_PER_HOP = {"connection", "transfer-encoding", "keep-alive", "expect"}
_DENIED = "<Error><Code>{}</Code><Message>told so by the lab</Message></Error>"


class Fault(Enum):
    """What the link does with a request."""

    NONE = "none"
    DOWN = "down"
    """Connections end at once."""
    HUNG = "hung"
    """Nothing is ever answered."""
    SLOW = "slow"
    """Bodies pass at `slow_bytes_per_second`."""
    ERROR = "500"
    CUT_UPLOAD = "half an upload"
    """The bucket gets half a body, and the connection ends."""
    CUT_DOWNLOAD = "half a download"
    STALLED = "stalled"
    """Half a body comes, and then nothing more."""
    CORRUPT = "corrupt"
    """One byte of each downloaded body is another one."""
    FULL = "full"
    """Uploads are refused; the rest works."""
    SKEWED = "wrong clock"
    """All is refused as signed at another time."""
    MISSING = "404"
    """Downloads find nothing, though the list names the object."""


@dataclass
class Conditions:
    """What happens to requests from now on; *only* is what their path must contain to be harmed."""

    fault: Fault = Fault.NONE
    delay_seconds: float = 0.0
    slow_bytes_per_second: float = 100_000.0
    only: str = ""


class FaultyLink:
    """The proxy: its `conditions` may be replaced at any time; `n_seen` counts requests by method."""

    def __init__(self, behind: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.behind, self._host, self._port = behind, host, port
        self.conditions = Conditions()
        self.n_seen: Counter[str] = Counter()
        self.n_harmed = 0
        self.n_bytes_up = self.n_bytes_down = 0
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://{self._host}:{self._port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def heal(self) -> None:
        """Let everything pass again; what hangs goes on hanging."""
        self.conditions = Conditions()

    def harm(self, fault: Fault, only: str = "") -> None:
        self.conditions = Conditions(fault, only=only)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        self._stopping = asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=None)
        self._client = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, self._host, self._port)
        await site.start()
        self._port = int(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
        self._is_up.set()
        await self._stopping.wait()
        await runner.cleanup()
        await self._client.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        conditions = self.conditions
        self.n_seen[request.method] += 1
        fault = conditions.fault if conditions.only in request.raw_path else Fault.NONE
        if not _concerns(fault, request.method):
            fault = Fault.NONE
        self.n_harmed += fault is not Fault.NONE
        await asyncio.sleep(conditions.delay_seconds)
        match fault:
            case Fault.DOWN:
                return _abort(request)
            case Fault.HUNG:
                await self._stopping.wait()
                return _abort(request)
            case Fault.ERROR:
                return web.Response(status=500, text=_DENIED.format("InternalError"))
            case Fault.FULL:
                return web.Response(status=507, text=_DENIED.format("InsufficientStorage"))
            case Fault.SKEWED:
                return web.Response(status=403, text=_DENIED.format("RequestTimeTooSkewed"))
            case Fault.MISSING:
                return web.Response(status=404, text=_DENIED.format("NoSuchKey"))
        return await self._forward(request, fault, conditions)

    async def _forward(
        self, request: web.BaseRequest, fault: Fault, conditions: Conditions
    ) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _PER_HOP}
        body = self._upload(request, fault, conditions) if request.body_exists else None
        try:
            async with self._client.request(
                request.method,
                URL(self.behind + request.raw_path, encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
            ) as reply:
                kept = {k: v for k, v in reply.headers.items() if k.lower() not in _PER_HOP}
                response = web.StreamResponse(status=reply.status, headers=kept)
                await response.prepare(request)
                await self._download(reply, response, fault, conditions)
        except (aiohttp.ClientError, ConnectionError):
            return _abort(request)
        if fault in (Fault.CUT_DOWNLOAD, Fault.STALLED):
            if fault is Fault.STALLED:
                await self._stopping.wait()
            return _abort(request)
        await response.write_eof()
        return response

    async def _upload(
        self, request: web.BaseRequest, fault: Fault, conditions: Conditions
    ) -> AsyncIterator[bytes]:
        n_sent, n_wanted = 0, (request.content_length or 0) // 2
        async for chunk in request.content.iter_chunked(_CHUNK_BYTES):
            if fault is Fault.SLOW:
                await asyncio.sleep(len(chunk) / conditions.slow_bytes_per_second)
            if fault is Fault.CUT_UPLOAD and n_sent + len(chunk) > n_wanted:
                raise ConnectionError("half is enough")
            n_sent += len(chunk)
            self.n_bytes_up += len(chunk)
            yield chunk

    async def _download(
        self,
        reply: aiohttp.ClientResponse,
        response: web.StreamResponse,
        fault: Fault,
        conditions: Conditions,
    ) -> None:
        n_half = (reply.content_length or 0) // 2
        n_sent, is_corrupt = 0, False
        async for chunk in reply.content.iter_chunked(_CHUNK_BYTES):
            if fault is Fault.SLOW:
                await asyncio.sleep(len(chunk) / conditions.slow_bytes_per_second)
            if fault is Fault.CORRUPT and not is_corrupt and n_sent + len(chunk) > n_half:
                at, is_corrupt = max(0, n_half - n_sent), True
                chunk = chunk[:at] + bytes([chunk[at] ^ 0x10]) + chunk[at + 1 :]
            if fault in (Fault.CUT_DOWNLOAD, Fault.STALLED) and n_sent + len(chunk) > n_half:
                return await response.write(chunk[: n_half - n_sent])
            n_sent += len(chunk)
            self.n_bytes_down += len(chunk)
            await response.write(chunk)


def _concerns(fault: Fault, method: str) -> bool:
    """Return whether a fault harms requests of a method."""
    match fault:
        case Fault.CUT_UPLOAD | Fault.FULL:
            return method in ("PUT", "POST")
        case Fault.CUT_DOWNLOAD | Fault.STALLED | Fault.CORRUPT | Fault.MISSING:
            return method == "GET"
    return True


def _abort(request: web.BaseRequest) -> web.StreamResponse:
    """End the connection of a request without a word."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
