"""deploy/kubernetes against Kubernetes' own schemas, and against what the proxy and the pages say."""

import re
import stat
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import kubernetes_validate
import pytest
import yaml

from proxy.settings import SCHEMA, split_address
from proxy.store.files import is_private
from tests.documents.dashboard.tables import alert_rules
from tests.documents.files import REPOSITORY
from tests.lab.settings import load_settings

FOLDER = REPOSITORY / "deploy" / "kubernetes"
OLDEST = "1.29"
"""Containers that start before the others and end after them came with it."""
DOCUMENTS = {
    f"{document['kind']} {document['metadata']['name']}": document
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}
MONITOR = DOCUMENTS["PodMonitor llama"]
POD: dict[str, Any] = DOCUMENTS["StatefulSet llama"]["spec"]["template"]
STATES, LLAMA_SERVER = POD["spec"]["initContainers"]
(PROXY,) = POD["spec"]["containers"]


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if DOCUMENTS[name] is not MONITOR])
def test_the_schema_of_kubernetes_allows_it(name: str, version: str) -> None:
    kubernetes_validate.validate(DOCUMENTS[name], version, strict=True)


def test_what_the_schema_does_not_know_is_refused() -> None:
    service = {**DOCUMENTS["Service llama"], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, OLDEST, strict=True)


def test_the_proxy_takes_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    written = DOCUMENTS["ConfigMap llama-prefix-cache"]["data"]["config.yaml"]
    (tmp_path / "states").mkdir()
    path.write_text(written.replace("/slots", str(tmp_path)))
    settings = load_settings({}, {}, path)
    ports = {port["name"]: port["containerPort"] for port in PROXY["ports"]}
    assert split_address(settings.listen)[1] == ports["clients"]
    assert split_address(settings.admin)[1] == ports["admin"]
    assert f"--port={settings.upstream.rpartition(':')[2]}" in LLAMA_SERVER["args"]
    assert {"health", "metrics"} <= set(settings.admin_open.split(", "))
    directory = settings.slot_save_path.replace(str(tmp_path), "/slots")
    assert (
        f"--slot-save-path={directory}" in LLAMA_SERVER["args"] and directory in STATES["command"]
    )


def test_all_that_is_named_is_there() -> None:
    ports = {port["name"] for port in PROXY["ports"]}
    labels = POD["metadata"]["labels"]
    for service in (DOCUMENTS["Service llama"], DOCUMENTS["Service llama-pods"]):
        assert service["spec"]["selector"] == labels
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert MONITOR["spec"]["selector"]["matchLabels"] == labels
    assert {each["port"] for each in MONITOR["spec"]["podMetricsEndpoints"]} <= ports

    claims = DOCUMENTS["StatefulSet llama"]["spec"]["volumeClaimTemplates"]
    volumes = {each["name"] for each in POD["spec"]["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in claims}
    for container in (PROXY, LLAMA_SERVER, STATES):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for volume in POD["spec"]["volumes"]:
        if secret := volume.get("secret"):
            assert f"Secret {secret['secretName']}" in DOCUMENTS
        if config := volume.get("configMap"):
            assert f"ConfigMap {config['name']}" in DOCUMENTS
    for source in PROXY["envFrom"]:
        assert f"Secret {source['secretRef']['name']}" in DOCUMENTS


def test_prometheus_has_the_pods_under_the_job_that_the_alerts_name() -> None:
    (named,) = {job for rule in alert_rules() for job in re.findall(r'job="(.+?)"', rule["expr"])}
    for endpoint in MONITOR["spec"]["podMetricsEndpoints"]:
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": named}]


def test_llama_server_outlives_the_proxy() -> None:
    assert LLAMA_SERVER["restartPolicy"] == "Always"


def test_only_the_pods_user_can_read_the_states(tmp_path: Path) -> None:
    """A new file system is root's, mode 0755; fsGroup makes that 2775 (kubelet, SetVolumeOwnership)."""
    tmp_path.chmod(0o2775)
    command = [word.replace("/slots", str(tmp_path)) for word in STATES["command"]]
    for _ in "ab":  # a pod that is started again has it already
        subprocess.run(command, check=True)
    (directory,) = tmp_path.iterdir()
    assert is_private(stat.S_IMODE(directory.stat().st_mode))


def test_the_proxy_listens_until_no_node_sends_it_anything() -> None:
    """Endpoints are taken out of the Service while the pod is told to stop, not before."""
    program, seconds = PROXY["lifecycle"]["preStop"]["exec"]["command"]
    left = POD["spec"]["terminationGracePeriodSeconds"] - int(seconds)
    assert program == "sleep" and left >= 5 * SCHEMA["drain_seconds"]["default"]


class Loading(BaseHTTPRequestHandler):
    """Answers as a llama-server that loads its model for a while."""

    n_asked = 0

    def do_GET(self) -> None:
        Loading.n_asked += 1
        self.send_response(503 if Loading.n_asked == 1 else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def test_a_pod_is_not_ready_before_llama_server_is() -> None:
    """Else a rolling update would stop the next pod while the model of this one is loaded."""
    _, *command = PROXY["startupProbe"]["exec"]["command"]
    asked = LLAMA_SERVER["args"][1].partition("=")[2]

    def status(port: int) -> int:
        probe = [word.replace(asked, str(port)) for word in command]
        return subprocess.run([sys.executable, *probe], stderr=subprocess.DEVNULL).returncode

    with HTTPServer(("127.0.0.1", 0), Loading) as server:
        port = server.server_address[1]
        Thread(target=server.serve_forever, daemon=True).start()
        assert [status(port) for _ in range(2)] == [1, 0]
        server.shutdown()
    assert status(port) == 1, "nothing listens"
