"""Hosts as network namespaces: an address and a link of limited rate for each, on one switch.

Needs root and `ip`, `tc`, `unshare` and `nsenter`. The switch lies in a network of this process's own, so
that nothing of all this is seen outside, or outlives it.
"""

import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.deployment.namespaces import leave_network
from tests.lab.waiting import wait_until

_NET = "10.77.0."
HARNESS = f"{_NET}254"
"""The address of this process on the switch."""
_BURST_SECONDS, _LEAST_BURST_BYTES = 1 / 125, 16 << 10
"""A limited link passes so much at once: what the kernel's clock needs, and no whole state."""
_LATENCY = "40ms"


@dataclass(frozen=True, slots=True)
class Machine:
    """A host: begin a command with *inside* to run it there."""

    number: int
    address: str
    inside: tuple[str, ...]

    def limit(self, bits_per_second: float | None) -> None:
        """Limit its link in both directions; None is no limit."""
        here, there = f"v{self.number}", (*self.inside, "tc", "qdisc")
        for command, device in ((("tc", "qdisc"), here), (there, "eth0")):
            subprocess.run([*command, "del", "dev", device, "root"], capture_output=True)
            if bits_per_second is not None:
                burst = max(_LEAST_BURST_BYTES, int(bits_per_second / 8 * _BURST_SECONDS))
                rate = (
                    "rate",
                    f"{bits_per_second:.0f}bit",
                    "burst",
                    f"{burst}",
                    "latency",
                    _LATENCY,
                )
                _run(*command, "replace", "dev", device, "root", "tbf", *rate)


class Network:
    """The switch; this process reaches all hosts without a limit."""

    def __init__(self, leftovers: ExitStack) -> None:
        """Leave this machine's network for good: no thread may have been started."""
        leave_network()
        self._leftovers, self._n_machines = leftovers, 0
        _run("ip", "link", "add", "switch", "type", "bridge")
        _run("ip", "address", "add", f"{HARNESS}/24", "dev", "switch")
        _run("ip", "link", "set", "switch", "up")

    def attach(self, bits_per_second: float | None = None) -> Machine:
        """Return another host."""
        self._n_machines += 1
        number = self._n_machines
        keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._leftovers.callback(keeper.wait)
        self._leftovers.callback(keeper.kill)
        mine, its = Path("/proc/self/ns/net"), Path(f"/proc/{keeper.pid}/ns/net")
        wait_until(lambda: its.exists() and its.readlink() != mine.readlink())
        inside = ("nsenter", f"--net=/proc/{keeper.pid}/ns/net")
        machine = Machine(number, f"{_NET}{number}", inside)
        here = f"v{number}"
        _run("ip", "link", "add", here, "type", "veth", "peer", "eth0", "netns", str(keeper.pid))
        _run("ip", "link", "set", here, "master", "switch", "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        machine.limit(bits_per_second)
        return machine


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
