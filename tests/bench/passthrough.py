"""Requests that are no generations: llama-server alone, and with nginx or the proxy in front of it."""

import asyncio
import os
import selectors
import shutil
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from urllib.parse import urlsplit

from tests.bench.hot import where
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.sides import Sides
from tests.lab.server import REPOSITORY, ServerProcess

N_CONNECTIONS = (1, 16)
N_REQUESTS = 300
"""In each round, over all connections."""
_HEAD = "HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
_TOKENIZE = b'{"content": "How many tokens is this?"}'
REQUESTS = {
    "GET /v1/models": f"GET /v1/models {_HEAD}0\r\n\r\n".encode(),
    "POST /tokenize": f"POST /tokenize {_HEAD}{len(_TOKENIZE)}\r\n\r\n".encode() + _TOKENIZE,
}
_NGINX = REPOSITORY / ".lab" / "nginx" / "nginx"
_CONFIGURATION = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream llama {{ server {upstream}; keepalive 32; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://llama; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


class Nginx(ServerProcess):
    """One nginx that passes everything on, over connections that it keeps."""

    def __init__(self, upstream: str, folder: Path) -> None:
        super().__init__(log_path=folder / "nginx.log")
        self._configuration = folder / "nginx.conf"
        self._configuration.write_text(
            _CONFIGURATION.format(
                folder=folder, upstream=upstream.removeprefix("http://"), port=self.port
            )
        )

    def command(self) -> list[str]:
        """Return the command line; raises FileNotFoundError if there is no nginx."""
        program = shutil.which("nginx") or _NGINX
        if not os.access(program, os.X_OK):
            raise FileNotFoundError(f"no nginx: run tests/lab/fetch_nginx.sh {_NGINX.parent}")
        return [str(program), "-c", str(self._configuration), "-p", str(self._configuration.parent)]


class _Connection:
    """Sends one request again and again; llama-server closes each connection after a hundred."""

    def __init__(self, base_url: str, request: bytes) -> None:
        address = urlsplit(base_url)
        self._address = address.hostname, address.port
        self._request = request
        self._connect()

    def _connect(self) -> None:
        self.socket = socket.create_connection(self._address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        self._answer = b""
        self._began = time.perf_counter()
        self.socket.sendall(self._request)

    def read(self) -> float | None:
        """Read what has come; return the seconds since the request if the answer is whole."""
        data = self.socket.recv(1 << 16)
        self._answer += data
        if not data:
            raise ConnectionError(f"closed in mid-answer: {self._answer!r}")
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        if not separator:
            return None
        head = head.lower()
        if not head.startswith(b"http/1.1 200"):
            raise ConnectionError(f"answered {head!r}")
        _, _, length = head.partition(b"\r\ncontent-length:")
        if len(body) < int(length.split(b"\r\n")[0]):
            return None
        return time.perf_counter() - self._began

    def has_to_be_replaced(self) -> bool:
        return b"connection: close" in self._answer.partition(b"\r\n\r\n")[0].lower()

    def replace(self) -> None:
        self.socket.close()
        self._connect()


@dataclass(slots=True)
class _Measured:
    """All rounds of one target: requests a second of each, and the seconds of each request."""

    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def send_all(base_url: str, request: bytes, n_connections: int) -> tuple[float, list[float]]:
    """Return the requests a second of one round, and how long each took; raises ConnectionError."""
    connections = [_Connection(base_url, request) for _ in range(n_connections)]
    seconds: list[float] = []
    n_to_send = N_REQUESTS - n_connections
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        began = time.perf_counter()
        for connection in connections:
            connection.send()
        while len(seconds) < N_REQUESTS:
            for key, _ in selector.select():
                connection = key.data
                if (took := connection.read()) is None:
                    continue
                seconds.append(took)
                if n_to_send <= 0:
                    selector.unregister(connection.socket)
                    continue
                n_to_send -= 1
                if connection.has_to_be_replaced():
                    selector.unregister(connection.socket)
                    connection.replace()
                    selector.register(connection.socket, selectors.EVENT_READ, connection)
                connection.send()
        rate = N_REQUESTS / (time.perf_counter() - began)
    for connection in connections:
        connection.socket.close()
    return rate, seconds


async def measure_passthrough(
    leftovers: ExitStack, n_rounds: int, *, is_pinned: bool
) -> list[Section]:
    """Return the table; rounds go by turns."""
    section = Section(
        f"Requests that are passed through ({where(is_pinned)}), {n_rounds} rounds of {N_REQUESTS}",
        "",
        (
            *("request", "connections", "alone: a second", "nginx", "proxy"),
            *("alone: median, ms", "nginx", "proxy", "alone: p99, ms", "nginx", "proxy"),
        ),
    )
    async with Sides(leftovers, is_pinned=is_pinned) as sides:
        nginx = Nginx(sides.alone.base_url, sides.alone.stack.slots.parent)
        leftovers.callback(nginx.kill)
        await asyncio.to_thread(nginx.start)
        urls = [sides.alone.base_url, nginx.base_url, sides.ours.base_url]
        for name, request in REQUESTS.items():
            for n_connections in N_CONNECTIONS:
                tell(f"passing through {name}, {n_connections} connections, {where(is_pinned)}")
                measured = await asyncio.to_thread(_play, urls, request, n_connections, n_rounds)
                section.add(
                    *(name, n_connections),
                    *(f"{median(each.rates):,.0f}" for each in measured),
                    *(f"{1000 * median(each.seconds):.2f}" for each in measured),
                    *(f"{1000 * quantiles(each.seconds, n=100)[-1]:.2f}" for each in measured),
                    is_met=None,
                )
        await asyncio.to_thread(nginx.stop)
    return [section]


def _play(urls: list[str], request: bytes, n_connections: int, n_rounds: int) -> list[_Measured]:
    measured = [_Measured() for _ in urls]
    for _ in range(n_rounds):
        for url, each in zip(urls, measured, strict=True):
            rate, seconds = send_all(url, request, n_connections)
            each.rates.append(rate)
            each.seconds += seconds
    return measured
