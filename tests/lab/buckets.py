"""S3-compatible servers, each with one bucket, and what clients need to know to use it.

rclone and the gateway of JuiceFS come with the development environment; `make test-shared` fetches moto
and Ceph. They disagree where S3's rules are often bent: rclone answers a request for a range with
everything; JuiceFS ignores a conditional PUT, and its answer to DeleteObjects is not what obstore expects.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.lab.server import REPOSITORY, ServerProcess

BUCKET = "states"
KEY_ID, SECRET = "key-of-the-lab", "secret-of-the-lab"
MOTO = REPOSITORY / ".lab" / "moto"
MOTO_PACKAGE = "moto[server]==5.2.5"
_BINARIES = Path(sys.executable).parent
RCLONE = str(_BINARIES / "rclone")


class Bucket(ServerProcess):
    """An S3-compatible server and its folder; stopped and started again, it still has the objects."""

    name = ""
    ready_path = "/"
    """What is answered without a key, with whatever status."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", inside: tuple[str, ...] = ()) -> None:
        """Describe it; *inside* is the beginning of a command that enters a network namespace."""
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(log_path=folder / f"{self.name}.log")
        self.folder, self.host, self.inside = folder, host, inside

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """What `shared_store` says to use the bucket."""
        return f"s3://{BUCKET}/prefix"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Return the variables that a client needs; *endpoint* is a proxy in between."""
        return {
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": endpoint or self.base_url,
            "AWS_REGION": "us-east-1",
        }

    def _is_ready(self) -> bool:
        try:
            self.request("GET", self.ready_path, timeout_seconds=2)
        except OSError:
            return False
        return True


class Rclone(Bucket):
    """`rclone serve s3` on a folder."""

    name = "rclone"

    def command(self) -> list[str]:
        objects = self.folder / "objects"
        (objects / BUCKET).mkdir(parents=True, exist_ok=True)
        address = ("--addr", f"{self.host}:{self.port}", "--auth-key", f"{KEY_ID},{SECRET}")
        program = (RCLONE, "serve", "s3", "--config", os.devnull)
        return [*self.inside, *program, *address, str(objects)]


class JuiceFs(Bucket):
    """The S3 gateway of JuiceFS, which is MinIO's of 2021, on SQLite and files."""

    name = "juicefs"
    ready_path = "/minio/health/live"

    def command(self) -> list[str]:
        keys = ("env", f"MINIO_ROOT_USER={KEY_ID}", f"MINIO_ROOT_PASSWORD={SECRET}")
        settings = ("--no-usage-report", "--cache-size", "0", self._metadata)
        address = f"{self.host}:{self.port}"
        return [*self.inside, *keys, self._program, "gateway", *settings, address]

    def start(self) -> None:
        if not (self.folder / "metadata.db").exists():
            blocks = ("--storage", "file", "--bucket", f"{self.folder}/blocks/")
            command = [
                self._program,
                "format",
                *blocks,
                "--trash-days",
                "0",
                self._metadata,
                BUCKET,
            ]
            subprocess.run(command, check=True, capture_output=True)
        super().start()

    @property
    def _program(self) -> str:
        return str(_BINARIES / "juicefs")

    @property
    def _metadata(self) -> str:
        return f"sqlite3://{self.folder}/metadata.db"


class Moto(Bucket):
    """moto's server: objects in its memory, gone when it stops."""

    name = "moto"

    def command(self) -> list[str]:
        address = ("-H", self.host, "-p", str(self.port))
        return [
            *self.inside,
            "env",
            f"PYTHONPATH={MOTO}",
            sys.executable,
            "-m",
            "moto.server",
            *address,
        ]

    def start(self) -> None:
        install(MOTO_PACKAGE, MOTO)
        super().start()
        status, _ = self.request("PUT", f"/{BUCKET}")  # it asks for no key
        assert status == 200, status


def install(package: str, folder: Path) -> None:
    """Put a package and what it needs into a folder of their own, unless it is there."""
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        unfinished = folder.with_suffix(".unfinished")
        subprocess.run([*pip, "--upgrade", "--target", str(unfinished), package], check=True)
        unfinished.rename(folder)
