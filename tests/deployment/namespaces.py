"""Namespaces and roots: what stands in for a container engine. Needs root."""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.lab.server import REPOSITORY

_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 1
DEBIAN = REPOSITORY / ".lab" / "debian.tar"
CERTIFICATES = "/run/certificates.pem"
LENT = {
    "dev": "/dev",
    "proc": "/proc",
    "etc/resolv.conf": "/etc/resolv.conf",
    "etc/hosts": "/etc/hosts",
    CERTIFICATES[1:]: os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"),
}
"""What a root borrows from this machine as long as something is fetched in it, and where it is."""
NETWORK_VARIABLES = (
    *("PIP_INDEX_URL", "PIP_TRUSTED_HOST", "npm_config_registry"),
    *("http_proxy", "https_proxy", "no_proxy"),
)
APT_SETTINGS = ("Acquire::Check-Valid-Until ", "Acquire::http::Proxy ", "Acquire::https::Proxy ")
"""How this machine reaches its archive: a root asks no more of it than the machine itself."""
CERTIFICATE_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO")


def leave_mounts() -> None:
    """Give this process a mount namespace of its own: what it mounts from now on goes with it."""
    _unshare(_NEW_MOUNTS)
    mount("--make-rprivate", "/")


def leave_network() -> None:
    """Give this process a network of its own, in which there is nothing but loopback."""
    _unshare(_NEW_NETWORK)
    with socket.socket() as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _IS_UP))


def enter_network(pid: int) -> None:
    """Give this process the network of another one."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as network:
        if libc.setns(network.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def unpack_debian(root: Path, packed: Path = DEBIAN) -> None:
    """Put a bare Debian into memory, at *root*."""
    root.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", "mode=755", "root", str(root))
    subprocess.run(["tar", "-C", root, "-xf", packed, "--exclude=./dev/*"], check=True)
    dumped = subprocess.check_output(["apt-config", "dump"], text=True).splitlines()
    borrowed = [line for line in dumped if line.startswith(APT_SETTINGS)]
    (root / "etc/apt/apt.conf.d/99machine").write_text("\n".join([*borrowed, ""]))


def unmount(path: Path) -> None:
    """Take away what is mounted at *path*, and below it."""
    subprocess.run(["umount", "--recursive", "--lazy", path], check=True)


@contextmanager
def online(root: Path) -> Iterator[None]:
    """Lend a root this machine's devices, processes and way into the network."""
    lent = {root / name: source for name, source in LENT.items()}
    new = [path for path in lent if not path.exists()]
    for path in new:
        path.touch()
    for path, source in lent.items():
        mount("--rbind", source, str(path))
    try:
        yield
    finally:
        for path in lent:
            unmount(path)
        for path in new:
            path.unlink()


def run_in(root: Path, command: str, environment: Mapping[str, str], folder: str = "/") -> None:
    """Run a shell command in a root that is online; raises CalledProcessError if it fails."""
    borrowed = {name: os.environ[name] for name in NETWORK_VARIABLES if name in os.environ}
    borrowed |= dict.fromkeys(CERTIFICATE_VARIABLES, CERTIFICATES)
    own = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    done = subprocess.run(
        ["/usr/sbin/chroot", root, "/bin/sh", "-c", f"cd {folder} && {{ {command}; }}"],
        env={**own, "DEBIAN_FRONTEND": "noninteractive", **borrowed, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    done.check_returncode()
