"""Hosts with a llama-server and a sidecar each, and a bucket that all of them use, or none.

Owns their processes, addresses and folders, and what they cost. Knows no requests.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import obstore

from tests.bench.moving import new_folder
from tests.bench.processes import ProxyProcess, Setup, proxy_environment
from tests.bench.shared.network import Machine, Network
from tests.lab.buckets import Bucket, Rclone
from tests.lab.models import model_path
from tests.lab.objects import open_bucket
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, LlamaServer

QUIET_SECONDS = 2.5
"""A bucket in which nothing appears for so long has got all that idle hosts upload."""
OPTIONS = ("--idle-save-seconds", "0.5", "--ahead-seconds", "0")
"""What is evaluated ahead is lost when the next request goes elsewhere: it is left out of the counts."""
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which models are measured, and how the rows begin that are; empty: as the part has it, and all."""

    kinds: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    def has(self, row: str) -> bool:
        return not self.rows or row.startswith(self.rows)


class HostedServer(LlamaServer):
    """A llama-server in a host's network."""

    machine: Machine

    @property
    def base_url(self) -> str:
        return f"http://{self.machine.address}:{self.port}"

    def command(self) -> list[str]:
        return [*self.machine.inside, *super().command(), "--host", self.machine.address]


class Sidecar(ProxyProcess):
    """A proxy in a host's network, with the variables that the bucket needs."""

    def __init__(
        self, machine: Machine, upstream: str, folder: Path, tier: "Tier | None", setup: Setup
    ) -> None:
        super().__init__(upstream, folder / "slots", folder / "proxy.log", setup)
        self.variables = dict(tier.environment) if tier else {}
        listen, admin = f"{machine.address}:8081", f"{machine.address}:8082"
        self.base_url, self._admin_url = f"http://{listen}", f"http://{admin}"
        self._command = [*machine.inside, sys.executable, "-m", *setup.launcher]
        self._command += ["--upstream", upstream, "--slot-save-path", str(folder / "slots")]
        self._command += ["--listen", listen, "--admin", admin, "--admin-open", "health, metrics"]
        self._command += setup.proxy_options
        if tier:
            self._command += ["--shared-store", tier.url]

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=proxy_environment() | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def cpu_seconds(self) -> float:
        """Return what the process has computed so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


@dataclass(frozen=True, slots=True)
class Tier:
    """What sidecars are told of a bucket, and how the bench looks into it."""

    url: str
    environment: Mapping[str, str]
    endpoint: str

    def sizes(self) -> dict[str, int]:
        """Return the size of each object by its name."""
        if self.url.startswith("file://"):
            folder = Path(self.url.removeprefix("file://"))
            paths = [path for path in folder.rglob("*") if path.is_file()]
            return {str(path.relative_to(folder)): path.stat().st_size for path in paths}
        pages = obstore.list(open_bucket(self.endpoint))
        return {each["path"]: each["size"] for page in pages for each in page}


class Host:
    """One machine; its llama-server and sidecar can be stopped and started again."""

    def __init__(
        self,
        machine: Machine,
        kind: str,
        size: str,
        leftovers: ExitStack,
        tier: Tier | None,
        setup: Setup,
    ) -> None:
        self.machine, self.folder = machine, new_folder(leftovers)
        self.server = HostedServer(
            model_path(kind, size, DEFAULT_MODEL_FOLDER),
            self.folder / "slots",
            n_slots=setup.n_slots,
            n_ctx=setup.n_ctx,
            extra_args=setup.server_arguments,
            log_path=self.folder / "llama-server.log",
            n_threads=setup.n_threads,
        )
        self.server.machine = machine
        self.proxy = Sidecar(machine, self.server.base_url, self.folder, tier, setup)
        leftovers.callback(self.server.kill)
        leftovers.callback(self.proxy.kill)
        self._n_of_contact = 0

    @property
    def base_url(self) -> str:
        return self.proxy.base_url

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)
        self.proxy.start()
        await self.proxy.ready()
        await self.proxy.settled()
        self._n_of_contact = await asyncio.to_thread(self.server.evaluated_tokens)

    async def stop(self) -> None:
        await asyncio.to_thread(self.proxy.stop)
        await asyncio.to_thread(self.server.stop)

    async def evaluated_tokens(self) -> int:
        """Return what was evaluated since the start, first contact left out."""
        return await asyncio.to_thread(self.server.evaluated_tokens) - self._n_of_contact


class Hosts:
    """Some hosts on a network, with a bucket or without one."""

    def __init__(
        self,
        network: Network,
        leftovers: ExitStack,
        kind: str,
        *,
        n_hosts: int = 2,
        size: str = "tiny",
        bits_per_second: float | None = 1e9,
        bucket: type[Bucket] | Tier | Path | None = Rclone,
        setup: Setup | None = None,
    ) -> None:
        self._own = leftovers.enter_context(ExitStack())
        self.bucket: Bucket | None = None
        self.tier: Tier | None = None
        if isinstance(bucket, Path):
            self.tier = Tier(f"file://{bucket}", {}, "")
        elif isinstance(bucket, Tier):
            self.tier = bucket
        elif bucket:
            machine = network.attach()
            self.bucket = bucket(new_folder(self._own) / "bucket", machine.address, machine.inside)
            self._own.callback(self.bucket.kill)
            self.bucket.start()
            self.tier = Tier(self.bucket.url, self.bucket.environment(), self.bucket.base_url)
        setup = setup or Setup(n_threads=1, proxy_options=OPTIONS)
        self.all = [
            Host(network.attach(bits_per_second), kind, size, self._own, self.tier, setup)
            for _ in range(n_hosts)
        ]

    async def __aenter__(self) -> "Hosts":
        for host in self.all:
            await host.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._own.close)

    def reach_bucket_by(self, endpoint: str) -> None:
        """Have sidecars use another endpoint, before they are started."""
        for host in self.all:
            host.proxy.variables["AWS_ENDPOINT_URL"] = endpoint

    async def evaluated_tokens(self) -> int:
        return sum([await host.evaluated_tokens() for host in self.all])

    async def settled(self) -> None:
        """Wait until no host has work left, and nothing more appears in the bucket."""
        for host in self.all:
            await host.proxy.settled()
        if self.tier:
            await self.bucket_is_quiet(self.tier)

    async def bucket_is_quiet(self, tier: Tier) -> None:
        seen, since = await asyncio.to_thread(tier.sizes), time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            await asyncio.sleep(0.2)
            now = await asyncio.to_thread(tier.sizes)
            if now != seen:
                seen, since = now, time.monotonic()
