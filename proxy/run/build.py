"""What has to be asked of the machine before llama-server is started: its build, and its port."""

import shutil
import socket
import subprocess
from collections.abc import Sequence

from proxy.errors import SettingsError

_HELP_SECONDS = 60.0
"""Builds for GPUs load their libraries first."""


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command's program, its subcommands included (`llama serve`), and its arguments."""
    n_program = next((i for i, part in enumerate(command) if part.startswith("-")), len(command))
    return list(command[:n_program]), list(command[n_program:])


def read_help(program: Sequence[str]) -> str:
    """Return a build's --help; raises SettingsError if there is no such program or it does not answer."""
    if not program or shutil.which(program[0]) is None:
        raise SettingsError(f"{' '.join(program) or 'no program'}: command not found")
    try:
        done = subprocess.run(
            [*program, "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_HELP_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"{program[0]} --help: {error}") from error
    return done.stdout.decode(errors="replace")


def find_free_port(host: str) -> int:
    """Return a port of *host* that nothing listens on; raises OSError if the host is not ours."""
    return _bind(host, 0)


def require_free_port(host: str, port: int) -> None:
    """Raise OSError if something listens on *port* of *host* already.

    Builds of llama-server that share ports would start all the same, and answer every other request.
    """
    try:
        _bind(host, port)
    except OSError as error:
        raise OSError(
            f"llama-server cannot listen on {host}:{port}: {error.strerror or error}"
        ) from error


def _bind(host: str, port: int) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or "127.0.0.1", port, type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        return int(probe.getsockname()[1])
