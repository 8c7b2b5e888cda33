"""Runs a built image as a container engine would: read-only, as its user, as process 1, without rights."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.deployment.dockerfile import Stage

PATIENCE_SECONDS = 120


class Container:
    """One container of an image, on this process's network, with *slots* mounted at /slots."""

    def __init__(self, image: Stage, root: Path, slots: Path, log: Path) -> None:
        self.image = image
        self.root = root
        self.slots = slots
        self.log = log
        self._outer: subprocess.Popen[bytes]

    def start(self, environment: Mapping[str, str], hosts: Path) -> None:
        root = shlex.quote(str(self.root))
        (self.root / "etc" / "hosts").touch()  # an engine mounts its own
        mounts = (
            f"mount --bind {root} {root}",
            f"mount --rbind /dev {root}/dev",
            f"mount -t proc proc {root}/proc",
            f"mount -t tmpfs tmpfs {root}/tmp",
            f"mount --bind {shlex.quote(str(hosts))} {root}/etc/hosts",
            f"mount --bind {shlex.quote(str(self.slots))} {root}/slots",
            f"mount -o remount,ro,bind {root} {root}",
        )
        inner = self._inside([*self.image.entrypoint, *self.image.command], environment)
        script = " && ".join([*mounts, f"exec {shlex.join(inner)}"])
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
        with self.log.open("ab") as log:
            self._outer = subprocess.Popen(command, stdout=log, stderr=log)

    def _inside(self, command: list[str], environment: Mapping[str, str]) -> list[str]:
        uid, _, gid = self.image.user.partition(":")
        variables = [f"{k}={v}" for k, v in {**self.image.environment, **environment}.items()]
        rights = ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        return [
            *("chroot", str(self.root), "/usr/bin/setpriv", f"--reuid={uid}", f"--regid={gid}"),
            *(*rights, "--", "/usr/bin/env", "-i", f"--chdir={self.image.folder}", *variables),
            *command,
        ]

    @property
    def pid(self) -> int:
        """The process that is number 1 in the container, as it is numbered here."""
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        return int(children.read_text().split()[0])

    @property
    def is_running(self) -> bool:
        return self._outer.poll() is None

    def execute(self, command: list[str]) -> int:
        """Run a command in the container beside its own, as its user; return the exit status.

        What it prints goes into the log.
        """
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid"]
        inside = [*enter, *self._inside(command, {})]
        with self.log.open("ab") as log:
            return subprocess.run(inside, stdout=log, stderr=log).returncode

    def stop(self) -> tuple[int, float]:
        """Stop it as the image asks to be stopped; return its exit status, and how long it took."""
        began = time.monotonic()
        os.kill(self.pid, signal.Signals[self.image.stop_signal])
        return self._outer.wait(PATIENCE_SECONDS), time.monotonic() - began

    def kill(self) -> None:
        """Make sure that it is gone; without effect if it has ended."""
        if self.is_running:
            self._outer.kill()
            self._outer.wait()
