"""A real Docker engine, unpacked and not installed, for one test. Needs root."""

import io
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deployment.namespaces import APT_SETTINGS, CERTIFICATES, DEBIAN, LENT
from tests.lab.server import REPOSITORY

ROOT = REPOSITORY / ".lab" / "engine" / "root"
START_SECONDS, STOP_SECONDS = 60, 120
IN_BUILDS = ("http_proxy", "https_proxy", "no_proxy")
OF_PIP = {"PIP_INDEX_URL": "index-url", "PIP_TRUSTED_HOST": "trusted-host"}


class Engine:
    """Docker's daemon while `running`, and its client; *folder* is /folder there, this project /project."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_path = folder / "engine.log"
        self._pid = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the daemon in the network that this process has now."""
        script = Path(__file__).with_name("engine.sh")
        command = ["unshare", "--mount", str(script), str(ROOT), str(REPOSITORY), str(self.folder)]
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._pid = process.pid
        deadline = time.monotonic() + START_SECONDS
        try:
            while not self._ask("version").returncode == 0:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)

    def docker(self, *arguments: str, stdin: Path | None = None, **environment: str) -> str:
        """Run the client and return what it printed; raises CalledProcessError if it fails."""
        done = self._ask(*arguments, stdin=stdin, **environment)
        if done.returncode:
            print(done.stdout, done.stderr)
        done.check_returncode()
        return done.stdout.strip()

    def fails(self, *arguments: str) -> bool:
        return self._ask(*arguments).returncode != 0

    def _ask(
        self, *arguments: str, stdin: Path | None = None, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        entered = ["nsenter", "--mount", "--target", str(self._pid), "/usr/bin/docker", *arguments]
        with open(stdin or os.devnull, "rb") as file:
            return subprocess.run(
                entered,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **environment},
                stdin=file,
                capture_output=True,
                text=True,
            )


def base_image(path: Path) -> None:
    """Write a bare Debian that reaches the package registries as this machine does."""
    shutil.copyfile(DEBIAN, path)
    dumped = subprocess.check_output(["apt-config", "dump"], text=True).splitlines()
    settings = [f"{to} = {os.environ[name]}" for name, to in OF_PIP.items() if name in os.environ]
    added = {
        "etc/apt/apt.conf.d/99machine": [line for line in dumped if line.startswith(APT_SETTINGS)],
        "etc/pip.conf": ["[global]", "cert = /etc/machine.pem", *settings],
        "etc/machine.pem": Path(LENT[CERTIFICATES[1:]]).read_text().splitlines(),
    }
    with tarfile.open(path, "a") as archive:
        for name, lines in added.items():
            content = "\n".join([*lines, ""]).encode()
            entry = tarfile.TarInfo(f"./{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))


def build_arguments() -> list[str]:
    """Return what a build is told of the way into the network."""
    told = (f"{name}={os.environ[name]}" for name in IN_BUILDS if name in os.environ)
    return ["--network", "host", *(word for each in told for word in ("--build-arg", each))]
