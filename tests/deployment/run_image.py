"""`make test-image`: builds the image's steps on a bare Debian, and runs it before a real llama-server.

Twice: with llama-server under the proxy's uid in a directory of mode 0700, and with llama-server as root,
as in llama.cpp's own images, in one of mode 2770. Needs root; mounts and network are its own.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deployment.cached_turn import TURNS, Usage, ask, n_states, wait_until_caching
from tests.deployment.container import Container
from tests.deployment.dockerfile import Stage, read_dockerfile
from tests.deployment.image import build_stage
from tests.deployment.namespaces import leave_mounts, leave_network, unmount
from tests.lab.models import model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, LlamaServer, find_llama_server

MAX_ADDED_BYTES = 135_000_000
MAX_EVALUATED_BESIDE_NEW = 32
STOP_GRACE_SECONDS = 150
URL, ADMIN = "http://127.0.0.1:8081", "http://127.0.0.1:8082"
ENVIRONMENT = {
    # Nothing is saved but at the end, and the disk of a tester may be nearly full.
    "LLAMA_PREFIX_CACHE_IDLE_SAVE_SECONDS": "86400",
    "LLAMA_PREFIX_CACHE_MIN_FREE_BYTES": "0",
}


@dataclass(frozen=True, slots=True)
class Users:
    """Who llama-server runs as, and how the shared directory is made for that."""

    name: str
    server_uid: int
    directory_mode: int


BOTH = (
    Users("one uid, 0700", server_uid=1000, directory_mode=0o700),
    Users("llama-server as root, 2770", server_uid=0, directory_mode=0o2770),
)


def build(folder: Path) -> tuple[Stage, Path]:
    """Return the image and the folder that holds its files; raises AssertionError if it is too big."""
    stages = read_dockerfile(REPOSITORY / "deploy" / "Dockerfile")
    roots: dict[str | None, Path] = {}
    n_bytes = 0
    for number, stage in enumerate(stages):
        root = folder / f"stage-{number}"
        n_bytes = build_stage(stage, root, roots)
        roots[stage.name] = root
    print(f"image: {n_bytes / 1e6:.1f} MB beyond its base, of at most {MAX_ADDED_BYTES / 1e6:.0f}")
    assert n_bytes <= MAX_ADDED_BYTES
    return stages[-1], root


def new_slots(folder: Path, users: Users) -> Path:
    slots = Path(tempfile.mkdtemp(dir=folder, prefix="slots-"))
    os.chown(slots, users.server_uid, 1000)
    slots.chmod(users.directory_mode)
    return slots


def new_server(folder: Path, slots: Path, users: Users) -> LlamaServer:
    """Return the llama-server at the address that the image expects, under its user."""
    start = Path(tempfile.mkdtemp(dir=folder), "llama-server")
    uid = users.server_uid
    start.write_text(
        f"#!/bin/sh\nexec setpriv --reuid={uid} --regid={uid} --clear-groups "
        f'{find_llama_server()} "$@"\n'
    )
    start.chmod(0o755)
    start.parent.chmod(0o755)
    model = model_path("hybrid", "tiny", DEFAULT_MODEL_FOLDER)
    return LlamaServer(model, slots, port=8080, binary=start, log_path=folder / "server.log")


@contextmanager
def running(container: Container, hosts: Path) -> Iterator[None]:
    container.start(ENVIRONMENT, hosts)
    try:
        health = wait_until_caching(ADMIN, lambda: container.is_running)
        assert health["state"] == "caching", health
        yield
    finally:
        container.kill()


def require_no_rights(container: Container) -> None:
    """Check what a container of this image may do: nothing."""
    status = Path(f"/proc/{container.pid}/status").read_text()
    facts = dict(line.split(":\t", 1) for line in status.splitlines())
    assert facts["Uid"].split() == ["1000"] * 4
    assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
    assert facts["NoNewPrivs"] == "1"
    assert facts["NSpid"].split()[-1] == "1"
    for path in ("/x", "/opt/llama-prefix-cache/x", "/var/x", "/etc/x"):
        assert container.execute(["python3.11", "-c", f"open({path!r}, 'w')"]) != 0
    assert container.execute(["python3.11", "-c", "open('/slots/x', 'w')"]) == 0


def try_out(image: Stage, root: Path, folder: Path, users: Users) -> None:
    """One turn, SIGTERM, both processes anew, the next turn; raises AssertionError."""
    slots = new_slots(folder, users)
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost llama-server\n")
    container = Container(image, root, slots, folder / "proxy.log")
    server = new_server(folder, slots, users)
    with server, running(container, hosts):
        require_no_rights(container)
        assert container.execute(image.health) == 0
        first = ask(URL, TURNS[0])
        before = n_states(slots)
        status, seconds = container.stop()
        written_back = n_states(slots) - before
        assert status == 0
        assert written_back > 0
        assert seconds < STOP_GRACE_SECONDS
    with server, running(container, hosts):
        second = ask(URL, TURNS[1])
        assert container.stop()[0] == 0
    report(users, first, second, written_back, seconds)
    n_new = second.n_prompt - first.n_prompt
    assert second.n_prompt - second.n_reused <= n_new + MAX_EVALUATED_BESIDE_NEW


def report(users: Users, first: Usage, second: Usage, n_written: int, seconds: float) -> None:
    print(
        f"{users.name}: {n_written} states written back within {seconds:.1f} s of SIGTERM; next turn "
        f"{second.n_prompt} tokens, {second.n_prompt - first.n_prompt} of them new, "
        f"{second.n_prompt - second.n_reused} evaluated"
    )


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("test-image needs root: it mounts and changes users")
    leave_mounts()
    with tempfile.TemporaryDirectory(prefix="test-image-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        began = time.monotonic()
        try:
            image, root = build(folder)
            print(f"built in {time.monotonic() - began:.0f} s")
            leave_network()
            for users in BOTH:
                try_out(image, root, folder, users)
        except BaseException:
            for log in folder.glob("*.log"):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}", file=sys.stderr)
            raise
        finally:
            for stage in folder.glob("stage-*"):
                unmount(stage)


if __name__ == "__main__":
    main()
