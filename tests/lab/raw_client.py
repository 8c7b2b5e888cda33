"""A client that reads its answer as slowly as it is told to, or not at all."""

import asyncio
import json
import socket
from typing import Any, Self

RECEIVE_BUFFER_BYTES = 128 << 10
"""Few bytes for megabytes of answers, and enough for the loopback device's large segments."""


class RawClient:
    """One POST over a socket that takes little by itself; `answer` is what was read, framing included."""

    def __init__(self, base_url: str, path: str, body: dict[str, Any]) -> None:
        host, _, port = base_url.removeprefix("http://").partition(":")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._socket.connect((host, int(port)))
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        self._request = head.encode() + raw
        self.ask()
        self._socket.setblocking(False)

    def ask(self) -> None:
        """Send the request, again on the same connection if it was answered."""
        self._socket.sendall(self._request)
        self.answer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    async def read(self, n_bytes: int) -> None:
        """Read up to so many bytes; raises ConnectionError if the server has closed the connection."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, n_bytes)
        if not data:
            raise ConnectionError("the server has closed the connection")
        self.answer += data

    async def read_to_end(self) -> bytes:
        """Read the rest of a chunked answer and return its body; raises as `read` does."""
        while not self.answer.endswith(b"\r\n0\r\n\r\n"):
            await self.read(1 << 20)
        begin, pieces = self.answer.index(b"\r\n\r\n") + 4, []
        while begin < len(self.answer):
            end_of_size = self.answer.index(b"\r\n", begin)
            end = end_of_size + 2 + int(self.answer[begin:end_of_size], 16)
            pieces.append(bytes(self.answer[end_of_size + 2 : end]))
            begin = end + 2
        return b"".join(pieces)
