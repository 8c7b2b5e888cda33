"""nginx between the proxy and llama-servers, as it is by default but for the lines that a test adds."""

from collections.abc import Sequence
from pathlib import Path

from tests.lab.balancer import find
from tests.lab.server import ServerProcess

_CONF = """\
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream llama {{ {servers} }}
  server {{ listen 127.0.0.1:{port}; {more} location / {{ proxy_pass http://llama; }} }}
}}
"""


class Gateway(ServerProcess):
    """nginx before the llama-servers at these ports; without *more* it takes them in turns."""

    def __init__(self, ports: Sequence[int], folder: Path, more: str = "") -> None:
        super().__init__(log_path=folder / "nginx.log")
        servers = " ".join(f"server 127.0.0.1:{port};" for port in ports)
        self._folder, self._path = folder, folder / "nginx.conf"
        text = _CONF.format(folder=folder, port=self.port, servers=servers, more=more)
        self._path.write_text(text)

    def command(self) -> list[str]:
        """Return the command line; raises FileNotFoundError if the program is missing."""
        return [str(find("nginx")), "-p", str(self._folder), "-c", str(self._path)]

    def _is_ready(self) -> bool:
        try:
            return self.request("GET", "/health", timeout_seconds=2.0)[0] > 0  # 502 also will do
        except OSError:
            return False
