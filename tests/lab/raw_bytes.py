"""Requests as bytes, and what a server answers to them: for what no HTTP client would send."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from tests.lab.waiting import HANG_SECONDS

HOST = b"Host: localhost\r\n"


def get(path: bytes, headers: bytes = b"", *, host: bytes = HOST) -> bytes:
    """Return a GET; *headers* are whole lines."""
    return b"GET " + path + b" HTTP/1.1\r\n" + host + headers + b"\r\n"


def post(path: bytes, body: bytes, headers: bytes = b"", *, host: bytes = HOST) -> bytes:
    """Return a POST of JSON with the length of its body; *headers* are whole lines."""
    head = b"POST " + path + b" HTTP/1.1\r\n" + host + b"Content-Type: application/json\r\n"
    return head + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chat(**fields: Any) -> bytes:
    """Return the body of a short chat."""
    messages = [{"role": "user", "content": "hello"}]
    return json.dumps({"messages": messages, "max_tokens": 2, **fields}).encode()


class RawConnection:
    """One connection that sends and receives bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, base_url: str) -> "RawConnection":
        host, _, port = base_url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def send(self, data: bytes, *, is_all: bool = False) -> None:
        """Send bytes; if that *is_all*, close the sending side."""
        self._writer.write(data)
        if is_all:
            self._writer.write_eof()

    async def status(self) -> int:
        """Return the status of the next answer that is no interim one, 0 if the server closes instead."""
        with suppress(ConnectionError):
            async with asyncio.timeout(HANG_SECONDS):
                while line := await self._reader.readline():
                    if line.startswith(b"HTTP/") and not line.split()[1].startswith(b"1"):
                        return int(line.split()[1])
        return 0

    async def until(self, end: bytes) -> bytes:
        """Return what comes until *end* has come."""
        async with asyncio.timeout(HANG_SECONDS):
            return await self._reader.readuntil(end) if end else b""

    async def rest(self) -> bytes:
        """Return what comes until the server closes the connection."""
        async with asyncio.timeout(HANG_SECONDS):
            return await self._reader.read()

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def status_of(base_url: str, raw: bytes, *, is_all: bool = False) -> int:
    """Return the status of the answer to *raw*, 0 if the connection is closed without one."""
    connection = await RawConnection.open(base_url)
    try:
        connection.send(raw, is_all=is_all)
        return await connection.status()
    finally:
        await connection.close()
