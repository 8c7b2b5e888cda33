"""nginx between the proxy and llama-servers, as it is by default but for the lines that a test adds."""

from collections.abc import Sequence
from pathlib import Path

from tests.lab.balancer import NGINX, find
from tests.lab.server import ServerProcess

_CONF = """\
  upstream llama {{ {servers} }}
  server {{ listen 127.0.0.1:{port}; {more} location / {{ proxy_pass http://llama; }} }}"""


class Gateway(ServerProcess):
    """nginx before the llama-servers at these ports; without *more* it takes them in turns."""

    def __init__(self, ports: Sequence[int], folder: Path, more: str = "") -> None:
        super().__init__(log_path=folder / "nginx.log")
        servers = " ".join(f"server 127.0.0.1:{port};" for port in ports)
        self._folder, self._path = folder, folder / "nginx.conf"
        conf = _CONF.format(port=self.port, servers=servers, more=more)
        self._path.write_text(NGINX.format(folder=folder, conf=conf))

    def command(self) -> list[str]:
        """Return the command line; raises FileNotFoundError if the program is missing."""
        return [str(find("nginx")), "-p", str(self._folder), "-c", str(self._path)]

    def _is_ready(self) -> bool:
        try:
            return self.request("GET", "/health", timeout_seconds=2.0)[0] > 0  # 502 also will do
        except OSError:
            return False
