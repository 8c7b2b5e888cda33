"""`make test-image`: a real engine builds deploy/Dockerfile and runs compose's services.

Three times: both as one user, llama-server as root, and states in memory. llama-server's image is made of
the lab's own. The engine can make no networks here: all containers share one that has loopback only.
Needs root; mounts and network are its own.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.deployment.cached_turn import PATIENCE_SECONDS, TURNS, Usage, ask, wait_until_caching
from tests.deployment.engine import Engine, base_image, build_arguments
from tests.deployment.namespaces import leave_mounts, leave_network
from tests.lab.models import model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, find_llama_server

MAX_ADDED_BYTES = 145_000_000
MAX_EVALUATED_BESIDE_NEW = 32
STOP_GRACE_SECONDS = 150
DOCKERFILE = (REPOSITORY / "deploy" / "Dockerfile").read_text()
BASE = re.findall(r"^ARG BASE=(\S+)", DOCKERFILE, re.M)[0]
IMAGE, LLAMA_IMAGE = "llama-prefix-cache", "ghcr.io/ggml-org/llama.cpp"
URL, ADMIN = "http://127.0.0.1:8081", "http://127.0.0.1:8082"
ON_LOOPBACK = """
services:
  llama-server-cpu: { network_mode: host, networks: !reset [] }
  proxy:
    network_mode: host
    networks: !reset []
    ports: !reset []
    extra_hosts: ["llama-server:127.0.0.1"]
    # Nothing is saved but at the end.
    environment: { LLAMA_PREFIX_CACHE_IDLE_SAVE_SECONDS: 86400 }
"""
LLAMA_SERVER = f"""
FROM {BASE}
COPY . /opt/llama-server
ENTRYPOINT ["/opt/llama-server/llama-server"]
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a user writes into deploy/.env, and what becomes of it in /slots."""

    name: str
    settings: dict[str, str] = field(default_factory=dict)
    slots: str = "1000:1000 700"


AS_ROOT = {"LLAMA_USER": "0:1000", "SLOTS_OWNER": "0:1000", "SLOTS_MODE": "2770"}
IN_MEMORY = {"SLOTS": "slots-in-memory", "MEMORY_FOR_SLOTS": "1g"}
ON_DISK = (Setup("one user"), Setup("llama-server as root", AS_ROOT, "0:1000 2770"))


def build(engine: Engine) -> None:
    """Build both images; raises AssertionError if ours is too big."""
    base_image(engine.folder / "base.tar")
    engine.docker("import", "-", BASE, stdin=engine.folder / "base.tar")
    began = time.monotonic()
    dockerfile = ("-f", "/project/deploy/Dockerfile", "-t", IMAGE, "/project")
    engine.docker("build", *build_arguments(), *dockerfile)
    sizes = (engine.docker("image", "inspect", "-f", "{{.Size}}", name) for name in (IMAGE, BASE))
    n_bytes = int(next(sizes)) - int(next(sizes))
    seconds = time.monotonic() - began
    print(f"built in {seconds:.0f} s: {n_bytes / 1e6:.1f} MB beyond its base")
    assert n_bytes <= MAX_ADDED_BYTES
    shutil.copytree(find_llama_server().parent, engine.folder / "server", symlinks=True)
    (engine.folder / "server.Dockerfile").write_text(LLAMA_SERVER)
    file = ("-f", "/folder/server.Dockerfile", "-t", f"{LLAMA_IMAGE}:server", "/folder/server")
    engine.docker("build", *file)


class Project:
    """compose's services with the settings of one setup."""

    def __init__(self, engine: Engine, setup: Setup) -> None:
        self._engine = engine
        (engine.folder / "loopback.yaml").write_text(ON_LOOPBACK)
        told = {"MODELS": "/folder/models", **setup.settings}
        (engine.folder / "env").write_text("".join(f"{k}={v}\n" for k, v in told.items()))

    def compose(self, *arguments: str) -> str:
        files = ("-f", "/project/deploy/compose.yaml", "-f", "/folder/loopback.yaml")
        settings = ("--env-file", "/project/deploy/env.example", "--env-file", "/folder/env")
        return self._engine.docker("compose", *files, *settings, *arguments)

    def start(self) -> None:
        self.compose("up", "--detach", "--no-build")
        wait_until_caching(ADMIN, lambda: self.state("Running") == "true")

    def state(self, what: str) -> str:
        return self._engine.docker("inspect", "-f", f"{{{{.State.{what}}}}}", self._container())

    def inside(self, code: str) -> str:
        """Return what a line of Python prints in the proxy's container."""
        return self._engine.docker("exec", self._container(), "python3.11", "-c", code)

    def cannot(self, code: str) -> bool:
        return self._engine.fails("exec", self._container(), "python3.11", "-c", code)

    def _container(self) -> str:
        return self.compose("ps", "--all", "--quiet", "proxy")


def require_healthy(project: Project) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while project.state("Health.Status") != "healthy":
        assert time.monotonic() < deadline
        time.sleep(0.5)


def require_no_rights(project: Project, setup: Setup) -> None:
    """Check what the proxy may do in its container: write its slots, and nothing else."""
    read = "print(open('/proc/1/status').read())"
    facts = dict(
        line.split(":\t", 1) for line in project.inside(read).splitlines() if ":\t" in line
    )
    assert facts["Uid"].split() == ["1000"] * 4
    assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
    assert facts["NoNewPrivs"] == "1"
    for path in ("/x", "/opt/llama-prefix-cache/x", "/var/x", "/etc/x"):
        assert project.cannot(f"open({path!r}, 'w')")
    look = (
        "import os; s = os.stat('/slots'); print(f'{s.st_uid}:{s.st_gid} {s.st_mode & 0o7777:o}')"
    )
    assert project.inside(look) == setup.slots, project.inside(look)


def try_out(engine: Engine, setup: Setup) -> None:
    """One turn, stop, start, the next turn; raises AssertionError."""
    project = Project(engine, setup)
    try:
        project.start()
        require_no_rights(project, setup)
        require_healthy(project)
        first = ask(URL, TURNS[0])
        began = time.monotonic()
        project.compose("stop")
        seconds = time.monotonic() - began
        assert seconds < STOP_GRACE_SECONDS
        project.start()
        second = ask(URL, TURNS[1])
    except BaseException:
        print(project.compose("logs", "--tail", "40"), file=sys.stderr)
        raise
    finally:
        project.compose("down", "--volumes")
    report(setup, first, second, seconds)
    n_new = second.n_prompt - first.n_prompt
    assert second.n_prompt - second.n_reused <= n_new + MAX_EVALUATED_BESIDE_NEW


def try_in_memory(engine: Engine) -> None:
    """Look whether the tmpfs is the proxy's, and whether states are kept there."""
    setup = Setup("states in memory", IN_MEMORY)
    project = Project(engine, setup)
    try:
        project.start()
        require_no_rights(project, setup)
        print(f"{setup.name}: caching")
    finally:
        project.compose("down", "--volumes")


def report(setup: Setup, first: Usage, second: Usage, seconds: float) -> None:
    print(
        f"{setup.name}: healthy, stopped in {seconds:.1f} s; next turn {second.n_prompt} tokens,"
        f" {second.n_prompt - first.n_prompt} of them new, {second.n_prompt - second.n_reused} evaluated"
    )


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("test-image needs root: it mounts and changes users")
    leave_mounts()
    with tempfile.TemporaryDirectory(prefix="test-image-") as name:
        engine = Engine(Path(name))
        engine.folder.chmod(0o755)
        (engine.folder / "models").mkdir()
        model = model_path("hybrid", "tiny", DEFAULT_MODEL_FOLDER)
        shutil.copyfile(model, engine.folder / "models" / "model.gguf")
        with engine.running():
            build(engine)
        leave_network()
        with engine.running():
            for setup in ON_DISK:
                try_out(engine, setup)
            try_in_memory(engine)


if __name__ == "__main__":
    main()
