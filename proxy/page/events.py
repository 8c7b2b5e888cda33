"""What keeps the live page up to date: server-sent events, and one look for who cannot have them.

Readers pull: each looks twice a second, and is sent something only if it has changed. Nothing is queued
for them, so that one who does not read costs a full socket buffer until it is cut off, and requests never
wait for any. While nobody looks, nothing is done.
"""

import asyncio
import time
from contextlib import suppress

import msgspec
from aiohttp import web

from proxy.core.views.overview import Overview
from proxy.front.json_answers import json_response, refuse_foreign_pages
from proxy.page.looks import Looks

MAX_READERS = 16
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 10.0
SIGN_OF_LIFE_SECONDS = 15.0
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


class Events:
    """Tells pages what changes."""

    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self._stopping = asyncio.Event()
        self.n_readers = 0

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/overview", self.overview), web.get("/events", self.events)]

    async def stop(self, _: web.Application) -> None:
        """End all streams: the proxy is about to stop, and would wait for them."""
        self._stopping.set()

    async def overview(self, request: web.Request) -> web.Response:
        """Return one look, with the requests since the position in `since`."""
        refuse_foreign_pages(request)
        return json_response(200, self._looks.since(request.query.get("since", "")))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send an overview now and whenever something changes, until the reader leaves or lags behind."""
        refuse_foreign_pages(request)
        if self.n_readers >= MAX_READERS:
            return web.Response(status=503, text="too many pages are open")
        response = web.StreamResponse(headers=_HEADERS)
        self.n_readers += 1
        try:
            await response.prepare(request)
            await self._tell(response, request.query.get("since", ""))
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionResetError:
            pass
        finally:
            self.n_readers -= 1
        return response

    async def _tell(self, response: web.StreamResponse, position: str) -> None:
        told: Overview | None = None
        told_at = time.monotonic()
        while not self._stopping.is_set():
            look = self._looks.since(position)
            if look.requests or told is None or not _is_same(look, told):
                await _write(response, _event(look))
                told, told_at, position = look, time.monotonic(), look.position
            elif time.monotonic() - told_at > SIGN_OF_LIFE_SECONDS:
                await _write(response, b":\n\n")
                told_at = time.monotonic()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOOK_SECONDS)


def _is_same(look: Overview, told: Overview) -> bool:
    return msgspec.structs.replace(look, requests=told.requests) == told


def _event(look: Overview) -> bytes:
    return b"id: %b\ndata: %b\n\n" % (look.position.encode(), msgspec.json.encode(look))


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Write, and wait for the reader; raises TimeoutError if it does not read."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await response.write(data)
