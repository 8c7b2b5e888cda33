"""nginx and HAProxy before several sidecars, as deploy/balance has them but for addresses."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.lab.server import REPOSITORY, ServerProcess

FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}
DOCUMENTED = ("192.168.1.11", "192.168.1.12")
_AFFINITY = {
    "nginx": ("    hash $conversation consistent;\n", ""),
    "haproxy": (
        "balance hash var(txn.conversation)\n    hash-type consistent",
        "balance roundrobin",
    ),
}
NGINX = """\
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
{conf}
}}
"""
"""nginx.conf of one process that keeps all its files in a folder, around what a test gives it."""


class Balancer(ServerProcess):
    """One of the two, before hosts of which each is told by its clients' port and its operators' port."""

    def __init__(
        self, name: str, hosts: Sequence[tuple[int, int]], folder: Path, *, has_affinity: bool
    ) -> None:
        super().__init__(log_path=folder / f"{name}.log")
        self._name, self._folder, self._hosts = name, folder, hosts
        text = (REPOSITORY / "deploy" / "balance" / FILES[name]).read_text()
        if not has_affinity:
            text = _replace(text, *_AFFINITY[name])
        for address, (port, admin_port) in zip(DOCUMENTED, hosts, strict=True):
            assert f"{address}:8081" in text
            text = text.replace(f"{address}:8081", f"127.0.0.1:{port}")
            if name == "haproxy":
                text = _replace(text, "check port 8082", f"check port {admin_port}")
        bound = {"nginx": ("listen 8080;", "listen 127.0.0.1:{};")}.get(
            name, ("bind :8080", "bind 127.0.0.1:{}")
        )
        text = _replace(text, bound[0], bound[1].format(self.port))
        self._path = folder / FILES[name]
        self._path.write_text(NGINX.format(folder=folder, conf=text) if name == "nginx" else text)

    def command(self) -> list[str]:
        """Return the command line; raises FileNotFoundError if the program is missing."""
        given = {"nginx": ["-p", str(self._folder), "-c"], "haproxy": ["-f"]}
        return [str(find(self._name)), *given[self._name], str(self._path)]


def find(name: str) -> Path:
    """Return the program: one on PATH, or the fetched one; raises FileNotFoundError."""
    fetched = REPOSITORY / ".lab" / name / name
    program = Path(shutil.which(name) or fetched)
    if not os.access(program, os.X_OK):
        raise FileNotFoundError(f"no {name}: run tests/lab/fetch_{name}.sh {fetched.parent}")
    return program


def _replace(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new, 1)
