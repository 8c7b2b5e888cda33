"""The S3-compatible servers of the lab and the faulty link: each does what other tests rely on."""

import os
from collections.abc import Iterator

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from proxy.errors import SharedStoreFault
from proxy.shared.bucket import Bucket as OfTheProxy
from tests.lab.buckets import Bucket, JuiceFs, Rclone
from tests.lab.faulty_link import Fault, FaultyLink
from tests.lab.objects import open_bucket

LARGE = os.urandom(6 << 20)
HARM_ALL = [Fault.DOWN, Fault.ERROR, Fault.SKEWED]
HARM_UPLOADS = [*HARM_ALL, Fault.CUT_UPLOAD, Fault.FULL]
HARM_DOWNLOADS = [*HARM_ALL, Fault.CUT_DOWNLOAD, Fault.STALLED, Fault.HUNG, Fault.MISSING]


@pytest.fixture(scope="module", params=[Rclone, JuiceFs])
def bucket(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bucket]:
    with request.param(tmp_path_factory.mktemp("bucket")) as bucket:
        yield bucket


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyLink]:
    with Rclone(tmp_path_factory.mktemp("bucket")) as bucket, FaultyLink(bucket.base_url) as link:
        yield link


@pytest.fixture
def through(link: FaultyLink) -> Iterator[S3Store]:
    """A client behind the link, which harms nothing before and after."""
    yield open_bucket(link.base_url)
    link.heal()


def test_a_bucket_does_what_the_tier_needs(bucket: Bucket) -> None:
    store = open_bucket(bucket.base_url, "some")
    # Two parts: S3 wants 5 MiB at least of all but the last one.
    obstore.put(store, "v1/n/a.state", LARGE, use_multipart=True, chunk_size=5 << 20)
    for name in ("a", "b", "c"):
        obstore.put(store, f"v1/n/{name}.meta", name.encode())

    assert bytes(obstore.get(store, "v1/n/a.state").bytes()) == LARGE
    listed = [each["path"] for page in obstore.list(store, "v1/n") for each in page]
    assert sorted(listed) == ["v1/n/a.meta", "v1/n/a.state", "v1/n/b.meta", "v1/n/c.meta"]
    pages = obstore.list(store, "v1/n", offset="v1/n/a.state")
    assert sorted(each["path"] for page in pages for each in page) == ["v1/n/b.meta", "v1/n/c.meta"]

    obstore.delete(store, "v1/n/b.meta")
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "v1/n/b.meta")


async def test_the_proxy_uses_an_endpoint_over_http_that_it_is_given(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    pages = [page async for page in OfTheProxy(bucket.url).list("v1/nothing")]
    assert pages in ([], [[]])


async def test_the_proxy_uses_an_endpoint_of_azure_over_http(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab has none: what it takes for one answers, and only not as Azure does."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "lab")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bGFi")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{bucket.base_url}/lab")
    with pytest.raises(SharedStoreFault) as fault:
        await OfTheProxy("az://states/prefix").write("v1/n/a.meta", [b"1"], 1)
    assert "builder error" not in str(fault.value)


@pytest.mark.parametrize("fault", HARM_UPLOADS)
def test_a_harmed_upload_fails_and_leaves_nothing(
    link: FaultyLink, through: S3Store, fault: Fault
) -> None:
    link.harm(fault)
    with pytest.raises((BaseError, PermissionError)):
        obstore.put(through, f"{fault.name}/a.state", LARGE, use_multipart=False)

    link.heal()
    with pytest.raises(FileNotFoundError):
        obstore.get(through, f"{fault.name}/a.state")


@pytest.mark.parametrize("fault", HARM_DOWNLOADS)
def test_a_harmed_download_fails(link: FaultyLink, through: S3Store, fault: Fault) -> None:
    obstore.put(through, "kept.state", LARGE)
    link.harm(fault, only="kept")
    impatient = open_bucket(link.base_url, patience_seconds=0.3)
    with pytest.raises((BaseError, PermissionError, FileNotFoundError)):
        obstore.get(impatient, "kept.state").bytes()

    link.heal()
    assert bytes(obstore.get(through, "kept.state").bytes()) == LARGE


def test_a_corrupt_download_differs_in_one_byte(link: FaultyLink, through: S3Store) -> None:
    obstore.put(through, "kept.state", LARGE)
    link.harm(Fault.CORRUPT, only=".state")
    found = bytes(obstore.get(through, "kept.state").bytes())
    assert sum(one != other for one, other in zip(found, LARGE, strict=True)) == 1


def test_what_is_not_named_passes(link: FaultyLink, through: S3Store) -> None:
    link.harm(Fault.DOWN, only=".state")
    obstore.put(through, "kept.meta", b"meta")
    assert bytes(obstore.get(through, "kept.meta").bytes()) == b"meta"
