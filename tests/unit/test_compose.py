"""deploy/compose.yaml: its schema, and what its services must have in common."""

import json
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from proxy.core.launch import plan_launch
from proxy.settings import ENVIRONMENT_PREFIX, NAMES, SCHEMA
from tests.deployment.dockerfile import Copy, read_dockerfile
from tests.documents.blocks import blocks_for
from tests.documents.files import REPOSITORY
from tests.unit.test_launch import KNOWN
from tests.unit.test_systemd import PROXY as PROXY_UNIT
from tests.unit.test_systemd import SERVER as SERVER_UNIT

DEPLOY = REPOSITORY / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
EXAMPLE = (DEPLOY / "env.example").read_text()
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
BACKENDS = {"cpu", "cuda", "rocm", "vulkan"}


def fill(text: str, variables: dict[str, str]) -> str:
    """Return a text as compose sees it; raises KeyError for a variable that must be given."""
    return VARIABLE.sub(
        lambda m: variables[m[1]] if m[1] in variables or m[2] != "-" else m[3], text
    )


def settings_in(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.M))


FILLED: dict[str, Any] = yaml.safe_load(fill(COMPOSE.read_text(), settings_in(EXAMPLE)))
SERVICES: dict[str, dict[str, Any]] = FILLED["services"]
SERVERS = {name: service for name, service in SERVICES.items() if name.startswith("llama-server-")}
PROXY = SERVICES["proxy"]


def test_compose_file_fits_the_schema_of_compose() -> None:
    checked = CliRunner().invoke(
        check_jsonschema, ["--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    )
    assert checked.exit_code == 0, checked.output


def test_example_shows_every_variable_with_its_default() -> None:
    shown = settings_in(re.sub(r"^#(?=\w+=)", "", EXAMPLE, flags=re.M))
    used = {m[1]: m[3] if m[2] == "-" else None for m in VARIABLE.finditer(COMPOSE.read_text())}
    assert shown.keys() == used.keys() | {"COMPOSE_PROFILES"}
    given = settings_in(EXAMPLE).keys() - {"COMPOSE_PROFILES"}
    assert given == {name for name, default in used.items() if default is None}
    assert {name: shown[name] for name in used.keys() - given} == {
        name: default for name, default in used.items() if default is not None
    }


def test_proxy_ends_before_any_llama_server_and_has_the_time_for_it() -> None:
    assert {service["profiles"][0] for service in SERVERS.values()} == BACKENDS
    for name in SERVERS:
        assert PROXY["depends_on"][name] == {"condition": "service_started", "required": False}
    drain_seconds = SCHEMA["drain_seconds"]["default"]
    assert int(PROXY["stop_grace_period"].rstrip("s")) >= 5 * drain_seconds
    assert PROXY["stop_grace_period"] == PROXY_UNIT["TimeoutStopSec"][0] + "s"


def test_both_write_into_one_volume_as_one_user() -> None:
    for service in SERVERS.values():
        assert PROXY["volumes"][0] in service["volumes"]
        assert service["user"] == PROXY["user"]
        assert "--slot-save-path /slots" in service["command"]
        assert "--port 8080" in service["command"]
        assert service["networks"]["model"]["aliases"] == ["llama-server"]
    assert PROXY["volumes"] == SERVICES["slots-owner"]["volumes"] == ["slots:/slots"]
    assert SERVICES["slots-owner"]["command"] == [
        f"chown {PROXY['user']} /slots && chmod 0700 /slots"
    ]


def test_owner_can_set_the_group_bit_and_memory_belongs_to_the_proxys_user() -> None:
    """A real engine makes 0770 of 2770 without FSETID, and mounts a tmpfs anew for each container."""
    assert SERVICES["slots-owner"]["cap_add"] == ["CHOWN", "FOWNER", "FSETID"]
    mounted = FILLED["volumes"]["slots-in-memory"]["driver_opts"]["o"].split(",")[1:]
    uid, gid = PROXY["user"].split(":")
    assert mounted == [f"uid={uid}", f"gid={gid}", "mode=0700"]


def test_image_has_what_the_compose_file_counts_on() -> None:
    image = read_dockerfile(DEPLOY / "Dockerfile")[-1]
    assert (image.user, image.stop_signal) == (PROXY["user"], "SIGTERM")
    assert [*image.entrypoint, *image.command] == ["llama-prefix-cache", "serve"]
    settings = {"upstream": "http://llama-server:8080", "slot_save_path": "/slots"}
    for name, value in settings.items():
        assert image.environment["LLAMA_PREFIX_CACHE_" + name.upper()] == value
    ports = [mapping.rpartition(":")[2] for mapping in PROXY["ports"]]
    listeners = [image.environment[f"LLAMA_PREFIX_CACHE_{name}"] for name in ("LISTEN", "ADMIN")]
    assert listeners == [f"0.0.0.0:{port}" for port in ports]
    assert f"'127.0.0.1', {ports[1]}" in image.health[-1]


def test_image_says_what_it_is_and_needs_no_new_layer_of_libraries_for_each_change() -> None:
    build, image = read_dockerfile(DEPLOY / "Dockerfile")
    told = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=debian:bookworm-\d{8}-slim$", told, re.M)
    assert image.labels.keys() >= {
        f"org.opencontainers.image.{name}" for name in ("title", "licenses", "revision")
    }
    steps = [" ".join(s.names) if isinstance(s, Copy) else s.command for s in build.steps]
    assert steps.index("proxy") > next(
        i for i, s in enumerate(steps) if "-r requirements.lock" in s
    )
    assert image.environment[ENVIRONMENT_PREFIX + "ADMIN_OPEN"] == "health,metrics"


@pytest.mark.parametrize(("state", "status"), [("caching", 0), ("degraded", 0), ("forwarding", 1)])
def test_image_is_healthy_only_if_it_caches(state: str, status: int) -> None:
    image = read_dockerfile(DEPLOY / "Dockerfile")[-1]
    reasons = [] if state == "caching" else [{"reason": "llama-server does not answer."}]

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"state": state, "reasons": reasons}).encode())

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, *image.health[1:]]
        command[-1] = command[-1].replace("8082", str(server.server_port))
        done = subprocess.run(command, capture_output=True, text=True)
        server.shutdown()
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.split() == [state, *" ".join(r["reason"] for r in reasons).split()]


def test_compose_and_unit_start_llama_server_as_run_does() -> None:
    launch = plan_launch(
        {}, KNOWN, own_path=None, default_path="/slots", free_port=8080, working_directory="/"
    )
    added = " ".join(launch.added).replace("-np", "--parallel")
    unit = SERVER_UNIT["ExecStart"][0] + " " + (DEPLOY / "systemd" / "llama-server.env").read_text()
    variables = {
        "--ctx-checkpoints": "LLAMA_ARG_CTX_CHECKPOINTS=",
        "--flash-attn": "LLAMA_ARG_FLASH_ATTN=",
    }
    for flag in ("--slot-save-path", "--cache-ram 0", "--ctx-checkpoints 16", "--metrics"):
        assert flag in added
        name, _, value = flag.partition(" ")
        for service in SERVERS.values():
            assert f" {flag}" in service["command"] and "--flash-attn on" in service["command"]
        assert flag in unit or variables[name] + value in unit
    assert variables["--flash-attn"] + "on" in unit


def test_nothing_is_open_to_other_machines_and_llama_server_to_nobody() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert not any("ports" in service for service in SERVERS.values())
    assert FILLED["networks"]["model"]["internal"] is True
    for service in (*SERVERS.values(), PROXY, SERVICES["slots-owner"]):
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert PROXY["read_only"] is True
    assert PROXY["user"].split(":")[0] != "0"


def test_monitoring_is_that_of_the_machine_but_for_addresses() -> None:
    for name, path in (
        ("prometheus", "prometheus/prometheus.yml"),
        ("grafana-data-source", "grafana/provisioning/datasources/prometheus.yml"),
    ):
        theirs = (DEPLOY / path).read_text().replace("127.0.0.1:8082", "proxy:8082")
        theirs = theirs.replace("127.0.0.1:9090", "prometheus:9090")
        assert yaml.safe_load(FILLED["configs"][name]["content"]) == yaml.safe_load(theirs)
    for name in ("prometheus", "grafana"):
        mounted = [Path(volume.split(":")[0]) for volume in SERVICES[name]["volumes"]]
        assert all((DEPLOY / path).exists() for path in mounted if path.name != name)


def test_settings_for_both_are_read_by_them() -> None:
    (block,) = blocks_for(__file__)
    theirs, ours = settings_in(block.text)
    assert theirs == "LLAMA_API_KEY"
    assert ours.removeprefix(ENVIRONMENT_PREFIX).lower() in NAMES
    for service in (*SERVERS.values(), PROXY):
        assert any("settings.env" in str(file) for file in service["env_file"])
