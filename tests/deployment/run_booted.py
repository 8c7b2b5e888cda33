"""The second half of `make test-bare`: docs/systemd.md on a Debian that systemd has booted as process 1.

systemd-nspawn boots it, in a network of its own. The root is in memory. Needs root.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from tests.deployment.cached_turn import PATIENCE_SECONDS, ask, wait_until_caching
from tests.deployment.namespaces import (
    enter_network,
    leave_mounts,
    online,
    run_in,
    unmount,
    unpack_debian,
)
from tests.deployment.run_bare import ADMIN, FOLDER, clone, timed
from tests.documents.blocks import blocks_for
from tests.lab.conversation import agent_requests, system
from tests.lab.models import model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, find_llama_server

PACKAGES = "systemd-sysv dbus libnss-systemd systemd-container make python3.11-venv"
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/systemd")
SETTINGS = "etc/llama-prefix-cache/llama-server.env"
PAGE = (REPOSITORY / "docs" / "systemd.md").read_text()
UNITS = ("llama-server", "llama-prefix-cache")
OWN_UNITS = "/etc/systemd/system"
OWN_USER = "User=llama"
URL = "http://127.0.0.1:8081"
TURNS = agent_requests(7, 0, header=[system(600)])
MAX_EVALUATED_BESIDE_NEW = 32


def prepare(root: Path) -> str:
    """Make a root that boots, with the project installed; return the page's command that starts it."""
    block = blocks_for(__file__)[0]
    install, _, _, enable, _ = (line.partition("#")[0].strip() for line in block.text.splitlines())
    unpack_debian(root)
    clone(root)
    with online(root):
        run_in(root, f"apt-get update && apt-get install -y --no-install-recommends {PACKAGES}", {})
        run_in(root, install, {}, FOLDER)
    server = find_llama_server()
    shutil.copytree(server.parent, root / "opt" / "llama-server", symlinks=True)
    (root / "srv" / "models").mkdir()
    model = model_path("hybrid", "tiny", DEFAULT_MODEL_FOLDER)
    shutil.copyfile(model, root / "srv" / "models" / "model.gguf")
    settings, named = (root / SETTINGS).read_text(), f"/opt/llama-server/{server.name}"
    (root / SETTINGS).write_text(settings.replace("/usr/local/bin/llama-server", named))
    return enable


class Machine:
    """A booted Debian; its network becomes this process's, too."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [
                *(str(root / "usr/bin/systemd-nspawn"), "-D", str(root), "--boot"),
                *("--private-network", "--register=no", "--keep-unit", "--console=pipe"),
            ],
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(str(root / each) for each in LIBRARIES)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._pid = 0

    def await_boot(self) -> None:
        self._wait_for(self._has_begun)
        self._wait_for(lambda: self.printed("systemctl is-system-running") == "running")
        enter_network(self._pid)

    def _has_begun(self) -> bool:
        number = self._process.pid
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        self._pid = int(children[0]) if children else 0
        return self._pid > 0 and Path(f"/proc/{self._pid}/comm").read_text() == "systemd\n"

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.is_running and time.monotonic() < deadline
            time.sleep(0.1)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def printed(self, command: str, *, must_succeed: bool = False) -> str:
        """Run a command in it, and return what it printed."""
        entered = ["nsenter", "--all", "--target", str(self._pid), "/bin/sh", "-c", command]
        done = subprocess.run(entered, stdout=subprocess.PIPE, text=True)
        assert not (must_succeed and done.returncode), f"{command}: {self.journal()}"
        return done.stdout.strip()

    def journal(self) -> str:
        return self.printed("journalctl --no-pager -n 60")

    def power_off(self) -> None:
        self.printed("systemctl poweroff")
        assert self._process.wait(PATIENCE_SECONDS) == 0

    def kill(self) -> None:
        """End everything in it; systemd-nspawn alone would leave that running."""
        if self.is_running:
            os.kill(self._pid or self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def booted(root: Path) -> Iterator[Machine]:
    machine = Machine(root)
    try:
        machine.await_boot()
        yield machine
    finally:
        machine.kill()


def turn(machine: Machine, sizes: list[int]) -> None:
    """Send the next turn; raises AssertionError if earlier turns, of these *sizes*, are evaluated again."""
    wait_until_caching(ADMIN, lambda: machine.is_running)
    usage = ask(URL, TURNS[len(sizes)])
    n_evaluated = usage.n_prompt - usage.n_reused
    n_new = usage.n_prompt - (sizes[-1] if sizes else 0)
    sizes.append(usage.n_prompt)
    print(f"        {usage.n_prompt} tokens, {n_new} new, {n_evaluated} evaluated")
    assert n_evaluated <= n_new + MAX_EVALUATED_BESIDE_NEW, machine.journal()


def await_saved(machine: Machine) -> None:
    """Return once no slot holds what would be lost with llama-server."""
    while True:
        health = wait_until_caching(ADMIN, lambda: machine.is_running)
        if not any(slot["n_unsaved"] for each in health["servers"] for slot in each["slots"]):
            return
        time.sleep(0.5)


def main_pid(machine: Machine, unit: str) -> str:
    return machine.printed(f"systemctl show -p MainPID --value {unit}")


def outlive(machine: Machine, ending: str, sizes: list[int]) -> None:
    """End llama-server by a command while the proxy goes on; systemd starts the next one."""
    await_saved(machine)
    server, proxy = (main_pid(machine, unit) for unit in UNITS)
    with timed(ending):
        machine.printed(ending.replace("PID", server), must_succeed=True)
        turn(machine, sizes)
    assert main_pid(machine, UNITS[0]) not in ("0", server), machine.journal()
    assert main_pid(machine, UNITS[1]) == proxy, machine.journal()


def check_as_its_user(machine: Machine) -> None:
    """Run a command on the directory itself, as the page says; the directory stays the units' alone."""
    told = machine.printed(blocks_for(__file__)[1].text, must_succeed=True)
    assert "no problems" in told, told
    owned = machine.printed("stat -c '%a %U' /var/lib/private/llama-prefix-cache")
    assert owned.startswith("700 ") and owned != "700 root", owned


def use_own_server(machine: Machine, root: Path) -> None:
    """Put another unit in the place of the example, and its user into the proxy's, as the page says."""
    drop_in = next(text for text in re.findall(r"```ini\n(.*?)```", PAGE, re.S) if OWN_USER in text)
    unit = (root / f"usr/local/lib/systemd/system/{UNITS[0]}.service").read_text()
    unit = unit.replace("DynamicUser=yes\nUser=llama-prefix-cache\n", f"{OWN_USER}\n")
    assert OWN_USER in unit
    for path, text in ((f"{UNITS[0]}.service", unit), (f"{UNITS[1]}.service.d/own.conf", drop_in)):
        name = f"{OWN_UNITS}/{path}"
        machine.printed(f"mkdir -p $(dirname {name}) && cat >{name} <<'END'\n{dedent(text)}\nEND")
    machine.printed("useradd --system llama && systemctl daemon-reload", must_succeed=True)


def walk_through(root: Path, enable: str) -> None:
    """Start, stop in either order, boot again, remove; one conversation goes on through all of it."""
    both, sizes = " ".join(UNITS), list[int]()
    with booted(root) as machine:
        with timed(enable):
            machine.printed(enable, must_succeed=True)
            turn(machine, sizes)
        for ending in ("kill -9 PID", "systemctl restart llama-server"):
            outlive(machine, ending, sizes)
        for order in (both, " ".join(reversed(UNITS))):
            with timed(f"systemctl stop {order}, and start"):
                again = f"systemctl stop {order} && systemctl start {order}"
                machine.printed(again, must_succeed=True)
                turn(machine, sizes)
        with timed("poweroff"):
            machine.power_off()
    with booted(root) as machine:
        with timed("after the next boot"):
            turn(machine, sizes)
        machine.printed(f"systemctl stop {both}", must_succeed=True)
        check_as_its_user(machine)
        use_own_server(machine, root)
        with timed("a llama-server of one's own, as another user"):
            machine.printed(f"systemctl start {both}", must_succeed=True)
            turn(machine, sizes)
        machine.printed(f"rm -r {OWN_UNITS}/llama-*; systemctl daemon-reload", must_succeed=True)
        machine.printed(f"cd {FOLDER} && make uninstall", must_succeed=True)
        assert "active" not in machine.printed(f"systemctl is-active {both}").split()
        assert not machine.printed("find /etc/systemd /usr/local/lib/systemd -name 'llama-*'")
        machine.power_off()


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("test-bare needs root: it mounts and boots")
    leave_mounts()
    with tempfile.TemporaryDirectory(prefix="test-booted-") as name:
        root = Path(name, "root")
        try:
            with timed("a Debian with systemd, make install"):
                enable = prepare(root)
            walk_through(root, enable)
        finally:
            unmount(root)


if __name__ == "__main__":
    main()
