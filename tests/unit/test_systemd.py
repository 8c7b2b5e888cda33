"""The units of systemd: what must agree between them, and what systemd itself says of them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from proxy.settings import SCHEMA
from tests.documents.blocks import blocks_for
from tests.documents.files import REPOSITORY

UNITS = REPOSITORY / "deploy" / "systemd"
BLOCKS = [block.text for block in blocks_for(__file__) if block.words != "docker"]
(DOCKER,) = [block.text for block in blocks_for(__file__) if block.words == "docker"]
DEFAULTS = {name: said["default"] for name, said in SCHEMA.items() if "default" in said}


def read_unit(text: str) -> dict[str, list[str]]:
    """Return every value of every key; the sections share no keys."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    values: dict[str, list[str]] = {}
    for key, equals, value in (line.partition("=") for line in lines):
        if equals and not key.startswith("#"):
            values.setdefault(key, []).append(value)
    return values


PROXY = read_unit((UNITS / "llama-prefix-cache.service").read_text())
SERVER = read_unit((UNITS / "llama-server.service").read_text())


def test_proxy_ends_before_llama_server_and_has_the_time_for_it() -> None:
    assert "llama-server.service" in PROXY["After"][0].split()
    assert PROXY["StopPropagatedFrom"] == ["llama-prefix-cache-stop.service"]
    assert "llama-prefix-cache-stop.service" in PROXY["Wants"][0].split()
    # Of llama-server itself it would come when that dies, too, and the proxy would stay down.
    stop = read_unit((UNITS / "llama-prefix-cache-stop.service").read_text())
    assert stop["PartOf"] == stop["After"] == ["llama-server.service"]
    # Requests, what they have started, and saves; each may take drain_seconds.
    assert int(PROXY["TimeoutStopSec"][0]) >= 5 * DEFAULTS["drain_seconds"]
    both = next(block for block in BLOCKS if " run " in block)
    assert "KillMode=mixed" in both
    assert read_unit(both)["TimeoutStopSec"] == PROXY["TimeoutStopSec"]


def test_both_write_into_one_directory_as_one_user() -> None:
    for key in ("User", "StateDirectory", "StateDirectoryMode", "DynamicUser"):
        assert PROXY[key] == SERVER[key]
    directory = f"/var/lib/{PROXY['StateDirectory'][0]}"
    assert f"--slot-save-path {directory}" in SERVER["ExecStart"][0]
    example = (REPOSITORY / "deploy" / "config.example.yaml").read_text()
    assert f"slot_save_path: {directory}\n" in example
    assert (
        f"--host 127.0.0.1 --port {DEFAULTS['upstream'].rpartition(':')[2]}"
        in (SERVER["ExecStart"][0])
    )


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units and the guide's own one, with programs that are there."""
    folder = tmp_path_factory.mktemp("units")
    units = {path.name: path.read_text() for path in UNITS.glob("*.service")}
    units["llama-prefix-cache-run.service"] = next(b for b in BLOCKS if " run " in b)
    units["llama-prefix-cache-docker.service"] = DOCKER
    units["docker.service"] = "[Service]\nExecStart=/bin/true\n"
    for number, drop_in in enumerate(block for block in BLOCKS if " run " not in block):
        path = folder / "llama-prefix-cache.service.d" / f"{number}.conf"
        path.parent.mkdir(exist_ok=True)
        path.write_text(drop_in)
    for name, text in units.items():
        (folder / name).write_text(re.sub(r"(?<=ExecSt)(art|op)=\S+", r"\1=/bin/true", text))
    return folder


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed here")
def test_systemd_accepts_the_units_and_finds_them_closed(rendered: Path) -> None:
    for name in sorted(path.name for path in rendered.glob("*.service")):
        assert systemd_analyze("verify", "--man=no", name, folder=rendered) == ""
    for name, worst in (("llama-prefix-cache", 15), ("llama-server", 40)):
        unit = f"{name}.service"
        systemd_analyze("security", "--offline=yes", f"--threshold={worst}", unit, folder=rendered)


def systemd_analyze(*arguments: str, folder: Path) -> str:
    """Return what it complains of; raises CalledProcessError if it fails."""
    done = subprocess.run(
        ["systemd-analyze", *arguments[:-1], str(folder / arguments[-1])],
        env={"SYSTEMD_UNIT_PATH": f"{folder}:", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr
