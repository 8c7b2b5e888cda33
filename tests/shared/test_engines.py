"""What `make test-shared` adds: Ceph and moto as buckets, and the Prometheus operator's own types."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from tests.documents.files import REPOSITORY
from tests.integration.test_buckets import test_a_bucket_does_what_the_tier_needs as tier_needs
from tests.lab.buckets import Bucket, Moto, install
from tests.lab.ceph import Ceph
from tests.lab.objects import open_bucket
from tests.lab.patience import wait_for_shared_store
from tests.live.ledger import SLACK_TOKENS
from tests.live.test_shared_hosts import REQUESTS, open_pair

OPERATOR = "cloudcoil-models-prometheus-operator==0.80.1.0"


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    ceph = Ceph(tmp_path_factory.mktemp("ceph"))
    try:
        ceph.start()
        yield ceph
    finally:
        ceph.close()


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    with Moto(tmp_path_factory.mktemp("moto")) as moto:
        yield moto


@pytest.mark.parametrize("engine", ["moto", "ceph"])
def test_an_engine_does_what_the_tier_needs(engine: str, request: pytest.FixtureRequest) -> None:
    bucket: Bucket = request.getfixturevalue(engine)
    tier_needs(bucket)


async def test_a_conversation_goes_on_at_the_other_host_by_ceph_that_has_lost_an_osd(
    ceph: Ceph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_shared_store(monkeypatch, at_any_rate=True)  # Ceph answers late after a loss
    async with open_pair("hybrid", ceph, tmp_path, monkeypatch) as pair:
        await pair.ask(0, REQUESTS[0])
        await pair.uploaded(0)
        ceph.kill_osd()
        n_new, n_evaluated = await pair.ask(1, REQUESTS[1])
        assert n_evaluated <= n_new + SLACK_TOKENS
        await pair.uploaded(1)


def test_objects_outlive_an_osd(ceph: Ceph) -> None:
    store, data = open_bucket(ceph.base_url), os.urandom(20 << 20)
    obstore.put(store, "kept.state", data)
    assert bytes(obstore.get(store, "kept.state").bytes()) == data


def test_the_operator_knows_every_field_of_the_pod_monitor() -> None:
    folder = REPOSITORY / ".lab" / "prometheus-operator"
    install(OPERATOR, folder)
    program = """
import sys, yaml
from cloudcoil.models.prometheus_operator.v1 import PodMonitor
told = yaml.safe_load(open(sys.argv[1]))
read = PodMonitor.model_validate(told).model_dump(by_alias=True, exclude_unset=True, mode="json")
assert read == told, (read, told)
"""
    path = REPOSITORY / "deploy" / "kubernetes" / "podmonitor.yaml"
    subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=True,
    )
