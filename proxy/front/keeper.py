"""Keeps a client that waits for its stream: clients give up after minutes without a byte.

A request may be queued, restored and evaluated for long before llama-server sends its headers. From then
on llama-server itself sends comments while it evaluates (--sse-ping-interval).
"""

import asyncio
from types import TracebackType

from aiohttp import web

KEEP_SECONDS = 15.0
"""How long a client waits for the first sign of life, and for each one after that."""
COMMENT = b": waiting\n\n"


class Keeper:
    """Begins the client's stream with comments if llama-server's answer does not begin soon.

    `response` is that stream, None as long as nothing had to be sent.
    """

    def __init__(self, client: web.Request) -> None:
        self._client = client
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.response: web.StreamResponse | None = None

    async def __aenter__(self) -> "Keeper":
        self._task = asyncio.ensure_future(self._keep())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Send nothing any more; again is harmless."""
        task, self._task = self._task, None
        if task is None:
            return
        if self._sending.locked():
            async with self._sending:  # a comment is not cut in two
                pass
        task.cancel()

    async def _keep(self) -> None:
        try:
            while True:
                await asyncio.sleep(KEEP_SECONDS)
                async with self._sending:
                    await self._send_comment()
        except ConnectionResetError:
            pass  # the client left; whoever serves it is told so too

    async def _send_comment(self) -> None:
        if self.response is None:
            headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
            if origin := self._client.headers.get("Origin"):
                headers["Access-Control-Allow-Origin"] = origin  # as llama-server does
            response = web.StreamResponse(headers=headers)
            await response.prepare(self._client)
            self.response = response
        await self.response.write(COMMENT)

    async def end(self, event: bytes) -> None:
        """End the stream with a last event."""
        assert self.response is not None
        await self.response.write(event)
        await self.response.write_eof()
