"""The shared store between two directories: what goes up comes down as it was, or not at all."""

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import obstore
import pytest
from structlog.testing import capture_logs

from proxy.core.conditions import DegradationKind
from proxy.core.cuts import CONTEXT_CHECKPOINT_MARGIN
from proxy.core.eviction import Present, Removal
from proxy.core.model import Candidate, Checkpoint, KnownNamespace, Quarantine, tenant_namespace
from proxy.core.rates import POSITIONS, Rates, Transfer, UnitCost
from proxy.core.sharing import ENTERING, UNMEASURED, SharedLimits
from proxy.core.tokens import Namespace, TokenIds
from proxy.errors import SharedStoreFault, StoreFault
from proxy.health import Degradations, Faults
from proxy.metrics import Metrics
from proxy.shared import bucket as shared_bucket
from proxy.shared import remote as shared_remote
from proxy.shared import tier as shared_tier
from proxy.shared import transfers
from proxy.shared.bucket import Bucket, Gone
from proxy.shared.objects import UNUSED_SECONDS, Listed, Sealing, decode_meta, index_id, read_key
from proxy.shared.remote import Remote
from proxy.shared.tier import Tier
from proxy.store.catalogue import UNREAD_SECONDS
from proxy.store.known_models import namespaces_name, tenants_name
from proxy.store.offline import read_records
from proxy.store.store import CheckpointStore
from tests.lab.buckets import Rclone
from tests.lab.faulty_link import Conditions, Fault, FaultyLink
from tests.lab.patience import wait_for_shared_store
from tests.lab.samples import sample
from tests.lab.waiting import HANG_SECONDS, until
from tests.store.conftest import branch, mount, new_state, opened, run_of
from tests.store.test_store import hold_writer
from tests.unit.state_files import attention, state_file, words

MODEL = Namespace(b"m" * 16)
OTHER_MODEL = Namespace(b"o" * 16)
OURS, THEIRS = tenant_namespace(MODEL, b""), tenant_namespace(OTHER_MODEL, b"")
CANARY, OTHER_CANARY = [(5, -0.5), (6, -1.5)], [(7, -0.5), (8, -1.5)]
RATES = Rates(tokens=(UnitCost(1.0, 1.0),) * len(POSITIONS))
SECOND = 60.0
NO_LIMITS = SharedLimits()
KEY = Sealing(b"k" * 64)


@dataclass(frozen=True)
class Machine:
    """A directory with its proxy's side of the shared store."""

    store: CheckpointStore
    tier: Tier
    metrics: Metrics
    degradations: Degradations
    served: list[Namespace]

    async def save(self, tokens: TokenIds, **facts: Any) -> Checkpoint:
        """Commit a state, and wait until it is in the shared store."""
        saved = await self.commit(tokens, **facts)
        await until(lambda: self.n_up == self.n_saved)
        return self.store.get(saved.id) or saved

    async def commit(self, tokens: TokenIds, **facts: Any) -> Checkpoint:
        content = state_file(words(tokens), attention(len(tokens)))
        usual: dict[str, Any] = {"namespace": OURS, "has_every_position": True, "content": content}
        return await self.store.commit(*new_state(self.store, tokens, **usual | facts))

    @property
    def n_saved(self) -> int:
        return sum(not checkpoint.is_fetched for checkpoint in self.store)

    @property
    def n_up(self) -> float:
        return self.sample("shared_states_total", direction="up")

    async def find(self, tokens: TokenIds, *, is_full: bool = False) -> list[Candidate]:
        """List the shared store now; return what it has of a prompt."""
        for _ in range(2):  # the first may be one that was under way
            await self.tier.look(self.tier.remote.folder(OURS), is_full=is_full)
        return list(self.tier.remote.find(OURS, tokens))

    async def fetch(self, tokens: TokenIds, seconds: float = SECOND) -> Checkpoint | None:
        (found, *_) = self.tier.remote.find(OURS, tokens)
        return await self.tier.downloads.fetch(found.checkpoint, seconds)

    def sample(self, name: str, **labels: str) -> float:
        return sample(self.metrics, name, **labels)

    def fetches(self, result: str) -> float:
        return self.sample("shared_fetches_total", result=result)


Start = Callable[..., AbstractAsyncContextManager[Machine]]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_shared_store(monkeypatch)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return a function that opens a directory, which knows a model, with the shared store of the test."""
    (tmp_path / "shared").mkdir()

    @asynccontextmanager
    async def start(
        name: str,
        url: str = "",
        *,
        canary: list[tuple[int, float]] = CANARY,
        sealing: Sealing = KEY,
        limits: SharedLimits = NO_LIMITS,
        has_other_model: bool = False,
        tenant: bytes = b"",
        serves: bool = True,
    ) -> AsyncIterator[Machine]:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        with opened(directory, 64 << 20) as store:
            known = [KnownNamespace(MODEL, canary, "coder")]
            await store.put_value(namespaces_name("static"), known)
            other = [KnownNamespace(OTHER_MODEL, canary, "chatter")]
            await store.put_value(namespaces_name("other"), other)
            await store.put_value(tenants_name(MODEL), [tenant])
            served = [OURS, THEIRS] if has_other_model else [OURS]
            served.append(tenant_namespace(MODEL, tenant))
            if not serves:
                served.clear()
            metrics = Metrics()
            degradations = Degradations(metrics)
            remote = Remote(
                store,
                Bucket(url or f"file://{tmp_path / 'shared'}"),
                sealing,
                lambda: Present(time.time(), RATES, dict.fromkeys(served, RATES)),
                metrics,
                degradations,
                Faults(metrics),
            )
            tier = Tier(remote, limits)
            store.on_removal = lambda checkpoint, _, reason: tier.uploads.note_removed(
                checkpoint, reason
            )
            async with tier.running():
                yield Machine(store, tier, metrics, degradations, served)

    return start


def objects_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def state_and_record_in(folder: Path) -> tuple[Path, Path]:
    """Return the two objects of the only state in a folder."""
    record, state = sorted(objects_in(folder), key=lambda path: path.suffix)
    return state, record


def content_of(machine: Machine, checkpoint: Checkpoint) -> bytes:
    return machine.store.files.path(checkpoint.file_name).read_bytes()


async def test_prompt_behind_another_answer_finds_all_of_the_prompt_before(start: Start) -> None:
    async with start("a") as a, start("b") as b:
        await a.save(run_of(3000), n_prompt=2900)  # the last 100 were generated
        (found,) = await b.find(branch(2898, 5000))
        assert found.n_common == 2900 - CONTEXT_CHECKPOINT_MARGIN


@pytest.mark.parametrize("sealing", [KEY, Sealing()], ids=["sealed", "plain"])
async def test_state_of_one_machine_is_found_and_fetched_by_another(
    start: Start, sealing: Sealing
) -> None:
    tokens, longer = run_of(3000), branch(2500, 5000)
    async with start("a", sealing=sealing) as a, start("b", sealing=sealing) as b:
        saved = await a.save(tokens, header=2450, restore_points=(2450,))
        (found,) = await b.find(longer)
        assert found.n_common == 2450, "at a cut: between them nobody knows"
        fetched = await b.fetch(longer)
        assert fetched is not None and fetched.is_fetched and fetched.shared_id == saved.shared_id
        assert content_of(b, fetched) == content_of(a, saved)
        (local,) = b.store.find(OURS, longer)
        assert local.checkpoint.id == fetched.id and local.n_common == 2500, "token by token"
        assert b.sample("shared_states_total", direction="down") == 1
        assert b.tier.downloads.entering != ENTERING, "measured"
        # What came from there does not go there again.
        await b.tier.uploads.drain(SECOND)
        assert b.n_up == 0


async def test_sealed_store_tells_nothing_and_takes_nothing_of_others(
    start: Start, tmp_path: Path
) -> None:
    tokens = run_of(3000)
    async with start("a") as a, start("b", sealing=Sealing(b"x" * 64)) as stranger:
        await a.save(tokens, header=2450)
        stored = b"".join(path.read_bytes() for path in objects_in(tmp_path / "shared"))
        assert words(tokens)[100:200] not in stored and b"static" not in stored
        assert await stranger.find(tokens) == [], "under another key, not even the names are known"
        # Whoever puts something there, even what was sealed with the key under another name, is refused.
        (meta,) = (p for p in objects_in(tmp_path / "shared") if p.suffix == ".meta")
        copy = meta.with_name(meta.name.replace(meta.name[:12], "f" * 12))
        copy.write_bytes(meta.read_bytes())
        meta.with_name("e" * 12 + meta.name[12:]).write_bytes(os.urandom(500))
        async with start("b2") as b:
            assert [c.checkpoint.shared_id for c in await b.find(tokens)] == [meta.stem]


def harm(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "cut off":
        path.write_bytes(content[: len(content) // 2])
    elif how == "longer":
        path.write_bytes(content + b"more")
    else:
        at = len(content) // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@pytest.mark.parametrize("sealing", [KEY, Sealing()], ids=["sealed", "plain"])
@pytest.mark.parametrize("how", ["gone", "cut off", "longer", "changed"])
async def test_state_that_is_not_what_was_put_there_is_a_miss_and_not_asked_for_again(
    start: Start, tmp_path: Path, how: str, sealing: Sealing
) -> None:
    tokens = run_of(3000)
    async with start("a", sealing=sealing) as a, start("b", sealing=sealing) as b:
        await a.save(tokens)
        assert await b.find(tokens)
        (state,) = (p for p in objects_in(tmp_path / "shared") if p.suffix == ".state")
        harm(state, how)
        assert await b.fetch(tokens) is None
        assert b.fetches("gone" if how == "gone" else "damaged") == 1
        assert list(b.tier.remote.find(OURS, tokens)) == [] and len(b.store) == 0
        assert b.tier.downloads.is_off is (how != "gone") and not b.degradations.kinds, (
            "it is there"
        )
        assert {p.suffix for p in b.store.files.directory.glob("lpc-*")} == set()


@pytest.mark.parametrize("parts", [(), ((-5, b""), (5, b"")), ((1 << 63, b""),)])
async def test_record_of_impossible_parts_is_refused_and_hides_no_other(
    start: Start, tmp_path: Path, parts: tuple[Any, ...]
) -> None:
    tokens = run_of(3000)
    async with start("a", sealing=Sealing()) as a, start("b", sealing=Sealing()) as b:
        await a.save(tokens)
        (meta,) = (p for p in objects_in(tmp_path / "shared") if p.suffix == ".meta")
        told = decode_meta(meta.read_bytes())
        record = told.checkpoint
        lying = replace(record, parts=(*parts, *record.parts) if parts else (), checksum="none")
        written = msgspec.msgpack.encode(msgspec.structs.replace(told, checkpoint=lying))
        meta.with_name("f" * 12 + meta.name[12:]).write_bytes(written)
        assert [c.checkpoint.shared_id for c in await b.find(tokens)] == [meta.stem]


async def test_state_that_its_machine_has_quarantined_is_judged_here_anew(
    start: Start, tmp_path: Path
) -> None:
    async with start("a", sealing=Sealing()) as a:
        await a.save(run_of(3000))
        (meta,) = (p for p in objects_in(tmp_path / "shared") if p.suffix == ".meta")
        told = decode_meta(meta.read_bytes())
        lying = replace(told.checkpoint, quarantine=Quarantine("so it says", 1.0))
        meta.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(told, checkpoint=lying)))
    async with start("b", sealing=Sealing()) as b:
        assert await b.find(run_of(3000))
        fetched = await b.fetch(run_of(3000))
        assert fetched is not None and not b.store.is_quarantined(fetched)


async def test_record_nested_too_deeply_is_refused_and_hides_no_other(
    start: Start, tmp_path: Path
) -> None:
    tokens = run_of(3000)
    async with start("a", sealing=Sealing()) as a, start("b", sealing=Sealing()) as b:
        await a.save(tokens)
        (meta,) = (p for p in objects_in(tmp_path / "shared") if p.suffix == ".meta")
        name = b"\xa5later"  # a field that this version does not know
        fields = meta.read_bytes()[1:]
        deep = bytes([meta.read_bytes()[0] + 1]) + name + b"\x91" * 5000 + b"\x00" + fields
        meta.with_name("f" * 12 + meta.name[12:]).write_bytes(deep)
        assert [c.checkpoint.shared_id for c in await b.find(tokens)] == [meta.stem]
        assert await b.tier.look(b.tier.remote.folder(OURS), is_full=True), "a listing has failed"


async def test_name_of_another_machine_writes_no_line_of_its_own_into_the_log(
    start: Start, tmp_path: Path
) -> None:
    with capture_logs() as logs:
        async with start("a", sealing=Sealing()) as a:
            await a.save(run_of(3000))
        (meta,) = (p for p in objects_in(tmp_path / "shared") if p.suffix == ".meta")
        told = msgspec.structs.replace(decode_meta(meta.read_bytes()), host="nas\n12:00  ready")
        meta.write_bytes(msgspec.msgpack.encode(told))
        async with start("b", sealing=Sealing(), canary=OTHER_CANARY) as b:
            await b.find(run_of(3000))
    (says,) = (line["says"] for line in logs if "another machine" in line["event"])
    assert "nas" in says and "\n" not in says


async def test_log_tells_once_of_a_machine_whose_states_cannot_be_used(start: Start) -> None:
    with capture_logs() as logs:
        async with start("a") as a, start("b", canary=OTHER_CANARY) as b:
            for mark in range(3):
                await a.save(run_of(3000, start=10_000 * mark))
                assert not await b.find(run_of(3000))
    assert len([line for line in logs if "another machine" in line["event"]]) == 1


async def test_only_what_a_write_has_left_there_is_swept(start: Start, tmp_path: Path) -> None:
    """Whoever may write to the folder can also lay a link there."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    async with start("a") as a:
        await a.save(run_of(3000))
    (state,) = (p for p in objects_in(tmp_path / "shared") if p.suffix == ".state")
    (state.parent.parent / "link").symlink_to(elsewhere)
    half, others = state.with_name(f"{state.name}#1"), elsewhere / "#notes#"
    for path in (half, others):
        path.touch()
        os.utime(path, (0, 0))
    async with start("a") as a:
        await a.find(run_of(3000))
        assert not half.exists() and others.exists()


async def test_slow_listing_is_begun_only_for_a_request_that_may_be_spared_more(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("a") as a, start("b") as b:
        await a.save(run_of(3000))
        await b.find(run_of(3000))
        look, folder = b.tier.look_since(OURS, time.monotonic(), SECOND), b.tier.remote.folder(OURS)
        assert look is not None and 0 < await look < HANG_SECONDS
        slow = asyncio.get_running_loop().create_future()
        slow.set_result(HANG_SECONDS)
        monkeypatch.setitem(b.tier._looks, (folder, False), (time.monotonic(), slow))
        assert b.tier.look_since(OURS, time.monotonic(), 0.5) is None
        look = b.tier.look_since(OURS, time.monotonic(), 2 * HANG_SECONDS)
        assert look is not None and await look < HANG_SECONDS, "it is quick again"


async def test_single_slow_listing_keeps_no_request_from_the_next_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("a") as a:
        await a.find(run_of(3000))
        folder, quick = a.tier.remote.folder(OURS), asyncio.get_running_loop().create_future()
        quick.set_result(0.005)
        monkeypatch.setitem(a.tier._looks, (folder, False), (time.monotonic(), quick))
        listed = a.tier.remote.bucket.list

        async def slow(*arguments: Any) -> AsyncIterator[list[Listed]]:
            await asyncio.sleep(0.05)
            async for batch in listed(*arguments):
                yield batch

        monkeypatch.setattr(a.tier.remote.bucket, "list", slow)
        assert [await a.tier.look(folder) for _ in range(3)] == [0.01, 0.02, 0.04]
        assert a.tier.look_since(OURS, time.monotonic(), 0.03) is None
        assert a.tier.look_since(OURS, time.monotonic(), 0.05) is not None


async def test_state_without_its_record_is_not_there_and_swept_after_an_hour(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hour begins when it is seen: S3 gives a large state the time when its upload began."""
    async with start("a") as a, start("b") as b:
        await a.save(run_of(3000))
        state, meta = state_and_record_in(tmp_path / "shared")
        half = state.with_name("0" * 12 + state.name[12:])
        half.write_bytes(b"half an upload")
        os.utime(half, (0, 0))
        assert len(await b.find(run_of(3000), is_full=True)) == 1 and half.exists()
        monkeypatch.setattr(shared_tier, "ORPHAN_SECONDS", 0.0)
        await b.find(run_of(3000), is_full=True)
        assert objects_in(tmp_path / "shared") == sorted([state, meta])
        # What a process was writing when it was killed has such a name, and is not listed.
        halves = [state.with_name(f"{state.name}#{n}") for n in (1, 2)]
        for path in halves:
            path.write_bytes(b"half an upload")
        os.utime(halves[0], (0, 0))
        assert [page async for page in Bucket(f"file://{tmp_path / 'shared'}").list("")]
        assert [path.exists() for path in halves] == [False, True]


async def test_record_without_its_state_is_not_found_and_swept_after_an_hour(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a rule of the bucket deletes large objects."""
    async with start("a") as a, start("b") as b:
        gone = await a.save(run_of(3000))
        kept = await a.save(run_of(3000, start=10_000))
        assert await b.find(run_of(3000))
        (tmp_path / "shared" / a.tier.remote.name(gone, "state")).unlink()
        record = tmp_path / "shared" / a.tier.remote.name(gone, "meta")
        os.utime(record, (0, 0))  # as by cp -a, which may still bring the state
        assert not await b.find(run_of(3000), is_full=True) and record.exists()
        monkeypatch.setattr(shared_tier, "ORPHAN_SECONDS", 0.0)
        await b.find(run_of(3000), is_full=True)
        left = {path.stem for path in objects_in(tmp_path / "shared")}
        assert left == {kept.shared_id}


async def test_state_that_lacks_its_record_again_has_its_hour_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a program that copies folders takes what it has copied back, and copies it again."""
    async with start("a") as a, start("b") as b:
        await a.save(run_of(3000))
        state, meta = state_and_record_in(tmp_path / "shared")
        record = meta.read_bytes()
        meta.unlink()
        await b.find(run_of(3000), is_full=True)  # it is first seen
        meta.write_bytes(record)
        assert await b.find(run_of(3000), is_full=True)
        meta.unlink()
        monkeypatch.setattr(shared_tier, "ORPHAN_SECONDS", 0.0)
        await b.tier.look(b.tier.remote.folder(OURS), is_full=True)
        assert state.exists()
        await b.find(run_of(3000), is_full=True)
        assert not state.exists()


def refuse_deletions(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise SharedStoreFault("access denied")

    monkeypatch.setattr(machine.tier.remote.bucket, "delete", fail)


async def remove_in_vain(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a state, and remove it while the shared store lets nothing be deleted."""
    saved = await machine.save(run_of(3000))
    refuse_deletions(machine, monkeypatch)
    assert await machine.store.remove(saved, Removal.OPERATOR)


async def test_listing_is_whole_where_nothing_may_be_deleted(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else everything would be listed every ten seconds."""
    async with start("a") as a:
        await a.save(run_of(3000))
        state, meta = state_and_record_in(tmp_path / "shared")
        half = state.with_name("0" * 12 + state.name[12:])
        half.write_bytes(b"half an upload")
        monkeypatch.setattr(shared_tier, "ORPHAN_SECONDS", 0.0)
        refuse_deletions(a, monkeypatch)
        assert await a.find(run_of(3000), is_full=True) and half.exists() and meta.exists()
        assert a.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY}
        assert await a.tier.look(a.tier.remote.folder(OURS), is_full=True) > 0


async def test_stop_does_not_wait_for_what_may_not_be_deleted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("a") as a:
        await remove_in_vain(a, monkeypatch)
        await until(lambda: a.sample("shared_faults_total", operation="delete"))
        async with asyncio.timeout(HANG_SECONDS / 2):
            await a.tier.uploads.drain(HANG_SECONDS)


async def test_deletion_that_is_refused_holds_up_no_upload(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_remote, "backoff_seconds", lambda n_faults: HANG_SECONDS * n_faults)
    async with start("a") as a:
        await remove_in_vain(a, monkeypatch)
        await until(lambda: a.sample("shared_faults_total", operation="delete"))
        async with asyncio.timeout(HANG_SECONDS / 10):
            await a.commit(run_of(3000, start=10_000))
            await until(lambda: a.n_up == 2)


async def test_bucket_that_somebody_deletes_is_told_of_and_not_asked_each_second(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise Gone("NoSuchBucket")  # for S3 it is the object that is not there

    async with start("a") as a:
        await a.save(run_of(3000))
        monkeypatch.setattr(a.tier.remote.bucket, "write", fail)
        await a.commit(run_of(3000, start=10_000))
        await until(lambda: a.tier.remote.pause_seconds("upload"))
        assert a.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY}


@pytest.mark.parametrize("capacity", [0, 1])
async def test_tenant_that_is_unknown_under_a_new_key_file_holds_up_nothing(
    start: Start, tmp_path: Path, capacity: int
) -> None:
    tenant, tokens, limits = b"t" * 24, run_of(3000), SharedLimits(capacity=capacity)
    async with start("a", sealing=Sealing(), tenant=tenant) as a:
        await a.tier.remote.note_tenant(tenant, b"u" * 24)
        before = await a.save(run_of(9000), namespace=tenant_namespace(MODEL, tenant))
    async with start("b") as b, start("a", limits=limits, tenant=tenant) as a:
        await b.save(tokens)
        assert await a.find(tokens)
        await a.tier.downloads.find_out()
        assert not a.degradations.kinds and await a.fetch(tokens)
        await a.store.remove(before, Removal.OPERATOR)
        newer = await a.save(branch(2000, 4000))
        await a.store.remove(newer, Removal.OPERATOR)
        await until(
            lambda: not [p for p in objects_in(tmp_path / "shared") if newer.shared_id in p.name]
        )


async def test_fault_that_nobody_foresaw_does_not_end_the_listing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    unforeseen, tokens = iter((TypeError("unforeseen"),)), run_of(3000)

    async def find_out(_: object) -> None:
        for error in unforeseen:
            raise error

    monkeypatch.setattr(transfers.Downloads, "find_out", find_out)
    monkeypatch.setattr(shared_tier, "_LOOK_SECONDS", 0.01)
    async with start("a") as a, start("b") as b:
        await b.save(tokens)
        await until(lambda: bool(list(a.tier.remote.find(OURS, tokens))))


async def test_record_that_may_not_be_read_hides_no_other(start: Start, link: FaultyLink) -> None:
    async with start("a", S3) as a, start("b", S3) as b:
        refused = await a.save(run_of(3000))
        await a.save(run_of(3000, start=10_000))
        link.harm(Fault.SKEWED, only=f"{refused.shared_id}.meta")
        assert await b.find(run_of(3000, start=10_000)) and not await b.find(run_of(3000))
        assert not b.degradations.kinds
        link.heal()
        assert not await b.find(run_of(3000)), (
            "it is asked for with everything, not every ten seconds"
        )
        assert await b.find(run_of(3000), is_full=True)


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.HUNG])
async def test_record_that_cannot_be_read_now_hides_no_other_and_is_read_later(
    start: Start, link: FaultyLink, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """As where a part of the bucket is away."""
    monkeypatch.setattr(shared_bucket, "_SILENT_SECONDS", 1)
    async with start("a", S3) as a, start("b", S3) as b:
        away = await a.save(run_of(3000))
        await a.save(run_of(3000, start=10_000))
        link.harm(fault, only=f"{away.shared_id}.meta")
        assert await b.find(run_of(3000, start=10_000)) and not await b.find(run_of(3000))
        assert await b.tier.look(b.tier.remote.folder(OURS), is_full=True) > 0
        assert not b.degradations.kinds
        link.heal()
        assert await b.find(run_of(3000))


async def test_records_that_may_not_be_read_have_one_line_in_the_log(
    start: Start, link: FaultyLink
) -> None:
    async with start("a", S3) as a:
        for mark in range(3):
            await a.save(run_of(3000, start=10_000 * mark))
        link.harm(Fault.SKEWED, only=".meta")
        with capture_logs() as logs:
            async with start("b", S3) as b:
                await b.find(run_of(3000), is_full=True)
        told = [line["why"] for line in logs if "is refused" in line["event"]]
        assert len(told) == 1 and told[0].startswith("RequestTimeTooSkewed"), told


async def test_record_of_another_user_in_a_directory_hides_no_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = obstore.get_async

    async def get_if_allowed(store: Any, name: str) -> Any:
        if name.endswith(f"{refused.shared_id}.meta"):  # root may read all: this is what others get
            told = f"Unable to open file {name}: Permission denied (os error 13)"
            raise obstore.exceptions.GenericError(told)
        return await get(store, name)

    async with start("a") as a, start("b") as b:
        refused = await a.save(run_of(3000))
        await a.save(run_of(3000, start=10_000))
        monkeypatch.setattr(obstore, "get_async", get_if_allowed)
        assert await b.find(run_of(3000, start=10_000)) and not await b.find(run_of(3000))
        assert not b.degradations.kinds


async def test_canary_of_other_hardware_keeps_states_apart(start: Start) -> None:
    async with start("a") as a, start("b", canary=OTHER_CANARY) as b:
        await a.save(run_of(3000))
        assert await b.find(run_of(3000)) == []
        assert len(b.tier.remote.known) == 1, "and its record is not read again"
        # Nor kept: nobody would ever forget it.
        assert list(b.tier.remote.index.ids()) == []


async def test_quarantined_state_is_not_offered_again_and_leaves_the_shared_store(
    start: Start, tmp_path: Path
) -> None:
    tokens = run_of(3000)
    async with start("a") as a, start("b") as b:
        saved = await a.save(tokens)
        await b.find(tokens)
        fetched = await b.fetch(tokens)
        assert fetched is not None
        await b.store.change_on_disk(
            fetched.id, quarantine=Quarantine("it ended llama-server", 1.0)
        )
        assert list(b.tier.remote.find(OURS, tokens)) == []
        await b.store.remove(fetched, Removal.BUDGET)
        assert list(b.tier.remote.find(OURS, tokens)) == [], "it would end llama-server again"
        await a.store.change_on_disk(saved.id, quarantine=Quarantine("it ended llama-server", 1.0))
        a.tier.uploads.withdraw(saved)  # as long as it is there, it ends those of other machines
        await until(lambda: {p.suffix for p in objects_in(tmp_path / "shared")} <= {".used"})
        await a.store.remove(saved, Removal.BUDGET)


async def test_state_that_was_withdrawn_for_nothing_is_there_again(
    start: Start, tmp_path: Path
) -> None:
    tokens, why = run_of(3000), Quarantine("it seemed to end llama-server", 1.0)
    async with start("a") as a, start("b") as b:
        saved = await a.save(tokens)
        assert await b.find(tokens) and (fetched := await b.fetch(tokens))
        for machine, state, n_up in ((b, fetched, 1), (a, saved, 2)):
            await machine.store.change_on_disk(state.id, quarantine=why)
            machine.tier.uploads.withdraw(state)
            assert list(machine.tier.remote.find(OURS, tokens)) == []
            await machine.tier.uploads.drain(SECOND)
            await machine.store.change_on_disk(state.id, quarantine=None)
            await machine.tier.uploads.readmit(state)
            await machine.tier.uploads.drain(SECOND)
            assert len(await machine.find(tokens, is_full=True)) == 1
            assert (a.n_up, b.n_up) == (n_up, 0)
        assert len({path.stem for path in objects_in(tmp_path / "shared")}) == 1


async def test_state_that_is_withdrawn_for_nothing_while_it_goes_up_stays_there(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("a") as a:
        enter, why = a.tier.remote.enter, Quarantine("it seemed to end llama-server", 1.0)

        async def withdraw_and_enter(*entries: Any, **values: Any) -> None:
            if entries:
                await a.store.change_on_disk(saved.id, quarantine=why)
                a.tier.uploads.withdraw(saved)
                await a.store.change_on_disk(saved.id, quarantine=None)
                await a.tier.uploads.readmit(saved)
            await enter(*entries, **values)

        monkeypatch.setattr(a.tier.remote, "enter", withdraw_and_enter)
        saved = await a.commit(run_of(3000))
        await until(lambda: (a.store.get(saved.id) or saved).shared_id)
        await a.tier.uploads.drain(SECOND)
        assert len(await a.find(run_of(3000), is_full=True)) == 1


async def test_look_that_finds_nothing_new_writes_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be written, each look would fail, and everything would be listed at each look."""

    def fail(*_: Any, **__: Any) -> None:
        raise StoreFault("no space left on device")

    async with start("a") as a:
        await a.save(run_of(3000))
        await a.find(run_of(3000), is_full=True)
        monkeypatch.setattr(a.tier.remote.index, "put", fail)
        assert await a.tier.look(a.tier.remote.folder(OURS), is_full=True)
        monkeypatch.undo()


async def test_states_that_are_withdrawn_while_another_is_being_deleted_go_too(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, is_let_go = asyncio.Event(), asyncio.Event()
    async with start("a") as a:
        delete = a.tier.remote.delete

        async def delete_late(checkpoint: Checkpoint) -> None:
            is_asked.set()
            await is_let_go.wait()
            await delete(checkpoint)

        monkeypatch.setattr(a.tier.remote, "delete", delete_late)
        saved = [await a.save(run_of(3000, start=n)) for n in (0, 50_000, 100_000)]
        for checkpoint in saved:
            a.tier.uploads.withdraw(checkpoint)
            await is_asked.wait()
        is_let_go.set()
        await until(lambda: {p.suffix for p in objects_in(tmp_path / "shared")} <= {".used"})


async def test_superseded_state_goes_from_the_shared_store_and_one_that_made_room_stays(
    start: Start, tmp_path: Path
) -> None:
    async with start("a") as a, start("b") as b:
        first = await a.save(run_of(3000))
        await a.store.remove(first, Removal.BUDGET)
        second = await a.save(run_of(3000, start=50_000))
        fetched = await a.fetch(run_of(3000))
        assert fetched is not None, "its own state comes back"
        await b.find(run_of(3000))
        await a.store.remove(second, Removal.SUPERSEDED)
        await until(lambda: len({p.stem for p in objects_in(tmp_path / "shared")}) == 1)
        assert await b.find(run_of(3000, start=50_000), is_full=True) == []


async def test_state_that_is_superseded_as_its_upload_ends_goes_from_the_shared_store(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("a") as a:
        enter, removals = a.tier.remote.enter, list[asyncio.Future[bool]]()

        async def enter_and_remove(*entries: Any, **values: Any) -> None:
            await enter(*entries, **values)
            if removals:
                return
            go_on = hold_writer(a.store)
            removals.append(asyncio.ensure_future(a.store.remove(saved, Removal.SUPERSEDED)))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.02, go_on.set)

        monkeypatch.setattr(a.tier.remote, "enter", enter_and_remove)
        saved = await a.commit(run_of(3000))
        await until(lambda: removals and removals[0].done())
        await until(lambda: objects_in(tmp_path / "shared") == [])


async def test_writer_keeps_the_capacity_and_readers_keep_what_they_use(
    start: Start, tmp_path: Path
) -> None:
    async with start("a") as a, start("b") as b:
        first, second = [await a.save(run_of(3000, start=10_000 * n)) for n in range(2)]
        limits = SharedLimits(capacity=first.size_bytes + second.size_bytes // 2)
        await b.find(run_of(3000))
        assert await b.fetch(run_of(3000))
        await until(lambda: [p for p in objects_in(tmp_path / "shared") if p.suffix == ".used"])
        ahead = time.time() + 3600
        for path in objects_in(tmp_path / "shared"):
            if path.suffix == ".used":
                os.utime(path, (ahead, ahead))
    async with start("a", limits=limits) as a:
        await until(lambda: len(a.tier.remote.known) == 1)
        assert [c.checkpoint.shared_id for c in await a.find(run_of(3000))] == [first.shared_id]
        await a.find(run_of(3000), is_full=True)
        await a.tier.uploads.drain(SECOND)
        assert a.n_up == 0, "what was too much does not come back"


async def test_states_of_a_writer_that_is_gone_go_once_nobody_uses_them(
    start: Start, tmp_path: Path
) -> None:
    """As where a machine, or a container without a volume, is set up anew."""
    async with start("gone") as gone:
        unused = await gone.save(run_of(3000))
    for path in objects_in(tmp_path / "shared"):
        os.utime(path, (0, 0))
    limits = SharedLimits(capacity=unused.size_bytes * 3 // 2)
    async with start("a", limits=limits) as a:
        used = await a.save(run_of(3000, start=10_000))
        await a.tier._keep_capacity()
        assert {path.stem for path in objects_in(tmp_path / "shared")} == {used.shared_id}


async def test_states_in_use_go_up_again_where_somebody_has_deleted_them(
    start: Start, tmp_path: Path
) -> None:
    """As where a bucket is emptied, or a rule of the bucket deletes what is old."""
    async with start("a") as a, start("b") as b:
        used, unused = [await a.save(run_of(3000, start=10_000 * n)) for n in range(2)]
        await a.store.change_on_disk(unused.id, last_used_at=time.time() - UNUSED_SECONDS)
        assert await b.find(run_of(3000)) and await b.fetch(run_of(3000))
    for path in objects_in(tmp_path / "shared"):
        path.unlink()
    async with start("b") as b, start("a") as a:
        await until(lambda: a.n_up == 1)
        for machine in (a, b):
            await machine.find(run_of(3000), is_full=True)
            await machine.tier.uploads.drain(SECOND)
        [again] = await b.find(run_of(3000))
        assert (a.n_up, b.n_up) == (1, 0)
        assert (a.store.get(used.id) or used).shared_id == again.checkpoint.shared_id


async def test_states_that_are_found_deleted_before_a_stop_go_up_again_after_it(
    start: Start, tmp_path: Path
) -> None:
    async with start("a") as a:
        await a.save(run_of(3000))
        for path in objects_in(tmp_path / "shared"):
            path.unlink()
        assert await a.find(run_of(3000), is_full=True) == []
    async with start("a") as a:
        await until(lambda: a.n_up == 1)
        assert await n_uploads_after(2, a) == [1]
    async with start("a") as a:
        assert await n_uploads_after(1, a) == [0]


async def n_uploads_after(n_rounds: int, *machines: Machine) -> list[float]:
    """Let each machine in turn look at all that is there, keep the capacity, and upload what waits."""
    for _ in range(n_rounds):
        for machine in machines:
            await machine.find(run_of(3000), is_full=True)
            await machine.tier._keep_capacity()
            await machine.tier.uploads.drain(SECOND)
    return [machine.n_up for machine in machines]


async def test_what_a_copy_of_a_machine_deletes_for_the_capacity_does_not_come_back(
    start: Start, tmp_path: Path
) -> None:
    """Both have the same id, so that each deletes what the other has put there."""
    async with start("a") as a:
        saved = [await a.save(run_of(3000, start=10_000 * n)) for n in range(6)]
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    limits = SharedLimits(capacity=saved[0].size_bytes * 7 // 2)
    async with start("a", limits=limits) as a, start("copy", limits=limits) as copy:
        before = await n_uploads_after(3, a, copy)
        assert await n_uploads_after(2, a, copy) == before
        assert len({path.stem for path in objects_in(tmp_path / "shared")}) <= 3


async def test_object_with_a_time_in_the_future_makes_no_other_one_unused(
    start: Start, tmp_path: Path
) -> None:
    """As where the clock of a NAS was ahead, or a folder was copied with its times."""
    async with start("a") as a:
        first, *_ = [await a.save(run_of(3000, start=10_000 * n)) for n in range(3)]
        later = time.time() + 1e8
        os.utime(tmp_path / "shared" / a.tier.remote.name(first, "state"), (later, later))
        async with start("b", limits=SharedLimits(capacity=first.size_bytes)) as b:
            await n_uploads_after(1, b)
            assert len(await a.find(run_of(3000))) == 1
            assert len({path.stem for path in objects_in(tmp_path / "shared")}) == 3


async def test_saves_wait_for_no_more_than_one_of_the_states_that_go_up_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is synced to the disk, and all writes to the store are made one after the other."""
    async with start("a") as a:
        for n in range(3):
            await a.save(run_of(3000, start=10_000 * n))
        n_written, update = list[int](), a.store._directory.update

        def note_and_update(checkpoints: Sequence[Checkpoint]) -> None:
            n_written.append(len(checkpoints))
            update(checkpoints)

        monkeypatch.setattr(a.store._directory, "update", note_and_update)
        for path in objects_in(tmp_path / "shared"):
            path.unlink()
        assert await n_uploads_after(1, a) == [6]
        assert max(n_written) == 1


async def test_state_that_goes_up_again_is_not_passed_over_meanwhile(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next upload is chosen in another thread, where a state with a name counts as uploaded."""
    async with start("a") as a:
        await a.save(run_of(3000))
        uploads, change = a.tier.uploads, a.store.change

        def look_and_change(*arguments: Any, **changes: Any) -> Checkpoint | None:
            uploads._next(a.tier.remote.present())
            return change(*arguments, **changes)

        monkeypatch.setattr(a.store, "change", look_and_change)
        for path in objects_in(tmp_path / "shared"):
            path.unlink()
        assert await n_uploads_after(1, a) == [2]


async def test_states_of_more_models_and_keys_than_are_listed_at_once_go_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tier, "_MAX_NAMESPACES", 1)
    monkeypatch.setattr(shared_tier, "_LOOK_SECONDS", 0.01)
    async with start("a", has_other_model=True) as a:
        await a.commit(run_of(3000))
        await a.commit(run_of(3000), namespace=THEIRS)
        await until(lambda: a.n_up == 2)


async def test_writers_that_find_too_much_at_once_delete_no_more_than_that(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a smaller capacity is set on all machines, and they start again."""
    async with start("a") as a, start("b") as b:
        for n in range(4):
            saved = await a.save(run_of(3000, start=20_000 * n))
            await b.save(run_of(3000, start=20_000 * n + 10_000))
        chosen = list[Checkpoint]()

        async def choose(_: Remote, checkpoint: Checkpoint) -> None:
            chosen.append(checkpoint)

        monkeypatch.setattr(Remote, "delete", choose)
        for machine in (a, b):
            machine.tier._capacity = 5 * saved.size_bytes
            await machine.tier._keep_capacity()
        assert len(chosen) == 4


async def test_capacity_is_that_of_all_models_together(start: Start, tmp_path: Path) -> None:
    async with start("a", has_other_model=True) as a:
        first = await a.save(run_of(3000))
        await a.save(run_of(3000, start=10_000), namespace=THEIRS)
        await a.save(run_of(3000, start=20_000), namespace=THEIRS)
    limits = SharedLimits(capacity=2 * first.size_bytes + first.size_bytes // 2)
    async with start("a", limits=limits) as a:
        await until(lambda: len(a.tier.remote.known) == 2)
        await until(lambda: len({p.stem for p in objects_in(tmp_path / "shared")}) == 2)


async def test_id_of_a_shared_state_outlives_a_crash_and_the_loss_of_the_index(
    start: Start,
) -> None:
    async with start("a") as a:
        saved = await a.commit(run_of(3000))

        def told() -> tuple[str, ...]:
            record = a.store.index.record(saved.id)
            (beside,) = read_records(a.store.files)
            return tuple({record.shared_id if record else "", beside.checkpoint.shared_id})

        # Otherwise the next start would upload it again, and nobody would delete the first one.
        await until(lambda: told() != ("",))
        await until(lambda: len(told()) == 1)


async def test_what_to_upload_is_chosen_beside_requests(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[threading.Thread]()

    def worth(*_: object) -> float:
        threads.add(threading.current_thread())
        return 1.0

    monkeypatch.setattr(transfers, "spared_per_byte", worth)
    async with start("a") as a:
        await a.save(run_of(3000))
    assert threads and threading.main_thread() not in threads


async def test_disk_is_asked_for_what_is_uploaded_beside_requests(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = Path.open

    def open_elsewhere(path: Path, *arguments: Any, **options: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        assert path.suffix != ".state" or not is_main, "it may hang"
        return open_file(path, *arguments, **options)

    async with start("a") as a:
        monkeypatch.setattr(Path, "open", open_elsewhere)
        await a.commit(run_of(3000))
        await a.tier.uploads.drain(SECOND)
        assert a.n_up == 1


async def test_budget_of_a_day_holds_across_a_restart(start: Start) -> None:
    async with start("a") as a:
        size_bytes = (await a.save(run_of(3000))).size_bytes
    limits = SharedLimits(upload_bytes_per_day=size_bytes + size_bytes // 2)
    async with start("a", limits=limits) as a:
        await a.commit(run_of(3000, start=10_000))
        await a.tier.uploads.drain(SECOND)
        assert a.n_up == 0


@pytest.mark.parametrize("part_bytes", [1 << 10, 8 << 20])
async def test_upload_that_is_slow_for_a_limit_is_not_taken_for_hung(
    start: Start, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Whether it is sent in one piece or in several."""
    monkeypatch.setattr(shared_bucket, "PART_BYTES", part_bytes)
    monkeypatch.setattr(transfers, "READ_BYTES", 4 << 10)
    async with start("a") as a:
        size_bytes = (await a.save(run_of(3000))).size_bytes
    monkeypatch.setattr(shared_bucket, "_WRITE_SECONDS", 1.2)
    monkeypatch.setattr(shared_bucket, "LEAST_BYTES_PER_SECOND", 1 << 40)
    async with start("b", limits=SharedLimits(upload_bytes_per_second=size_bytes * 2 // 3)) as b:
        began = time.monotonic()
        await b.save(run_of(3000, start=10_000))
        assert time.monotonic() - began > 1.2, "longer than it may hang"
        assert b.sample("shared_faults_total", operation="upload") == 0


@pytest.mark.parametrize("part_bytes", [64 << 10, 8 << 20])
async def test_upload_over_a_slow_link_is_not_taken_for_hung(
    start: Start, link: FaultyLink, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Nothing is answered until a part is sent, and the parts under way share the link."""
    monkeypatch.setattr(shared_bucket, "_SILENT_SECONDS", 1)
    monkeypatch.setattr(shared_bucket, "PART_BYTES", part_bytes)
    async with start("a", S3) as a:
        link.conditions = Conditions(Fault.SLOW, slow_bytes_per_second=40_000, only=".state")
        await a.commit(run_of(3000))
        await until(lambda: a.n_up or a.degradations.kinds)
        assert a.n_up == 1


async def test_upload_that_breaks_off_again_and_again_is_counted_against_the_limit(
    start: Start, link: FaultyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (shared_bucket, transfers):
        monkeypatch.setattr(module, "PART_BYTES", 4 << 10)
    monkeypatch.setattr(transfers, "READ_BYTES", 4 << 10)
    monkeypatch.setattr(shared_remote, "_MOST_BACKOFF_SECONDS", 0.0)
    tokens = run_of(3000)
    size_bytes = len(state_file(words(tokens), attention(len(tokens))))
    limits = SharedLimits(upload_bytes_per_day=2 * size_bytes)
    async with start("a", S3, limits=limits) as a:
        link.harm(Fault.CUT_UPLOAD)
        await a.commit(tokens)
        await until(lambda: a.sample("shared_bytes_total", direction="up") > size_bytes)
        n_faults = a.sample("shared_faults_total", operation="upload")
        await until(lambda: not a.tier.uploads._is_busy)
        a.tier.uploads._wake.set()
        await until(lambda: not a.tier.uploads._wake.is_set() and not a.tier.uploads._is_busy)
        assert a.sample("shared_faults_total", operation="upload") == n_faults


async def test_state_is_uploaded_once_though_the_disk_takes_no_note_of_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreFault("no space left on device")

    async with start("a") as a, start("b") as b:
        monkeypatch.setattr(a.tier.remote.index, "put", fail)
        await a.commit(run_of(3000))
        await a.tier.uploads.drain(SECOND)
        a.tier.uploads._wake.set()
        await until(lambda: not a.tier.uploads._wake.is_set())
        await a.tier.uploads.drain(SECOND)
        assert len(objects_in(tmp_path / "shared")) == 2
        assert await b.find(run_of(3000))
        monkeypatch.undo()


async def test_stop_does_not_wait_for_what_a_limit_holds_back(start: Start) -> None:
    async with start("a", limits=SharedLimits(upload_bytes_per_second=1 << 10)) as a:
        saved = await a.commit(run_of(3000))
        await until(lambda: a.tier.uploads._uploading == saved.id)
    began = time.monotonic()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert time.monotonic() - began < saved.size_bytes / (2 << 10)


async def test_state_stays_there_while_the_budget_has_no_room_for_what_replaces_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("a") as a:
        first = await a.save(run_of(3000))
    limits = SharedLimits(upload_bytes_per_day=first.size_bytes * 3 // 2)
    async with start("a", limits=limits) as a:
        second = await a.commit(run_of(4000))
        await a.tier.uploads.drain(HANG_SECONDS)
        await a.store.remove(first, Removal.SUPERSEDED)
        await a.tier.uploads.drain(HANG_SECONDS)
        (found,) = await a.find(run_of(4000), is_full=True)
        assert found.checkpoint.shared_id == first.shared_id
        monkeypatch.setattr("time.time", lambda now=time.time: now() + 2 * 86400)
        await a.commit(run_of(1500, start=50_000))  # whatever wakes the uploads on another day
        await until(lambda: (a.store.get(second.id) or second).shared_id)


async def test_state_that_a_slow_link_holds_back_goes_up_over_a_faster_one(start: Start) -> None:
    async with start("a") as a:
        a.tier.remote.link = Transfer(UnitCost(1.0), UnitCost(1.0))
        await a.commit(run_of(3000))
        await a.tier.uploads.drain(SECOND)
        assert a.n_up == 0
        a.tier.remote.link = UNMEASURED
        await a.tier.uploads.drain(SECOND)
        assert a.n_up == 1


async def test_upload_that_was_not_done_is_done_after_a_restart(start: Start) -> None:
    async with start("a", limits=SharedLimits(upload_bytes_per_day=1)) as a:
        await a.commit(run_of(3000))
    async with start("a") as a, start("b") as b:
        await until(lambda: a.n_up == 1)
        assert await b.find(run_of(3000))


_LISTS = """
import asyncio, sys
from proxy.shared.bucket import Bucket
from proxy.shared.objects import Listed

async def list_all():
    return [batch async for batch in Bucket(sys.argv[1]).list("v1")]

asyncio.run(list_all())
"""


async def test_limit_of_a_call_loses_no_cancellation() -> None:
    waiting = asyncio.get_running_loop().create_future()
    call = asyncio.ensure_future(shared_bucket._within(SECOND, waiting))
    await asyncio.sleep(0)
    waiting.set_result(None)  # just when the call is cancelled
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_program_ends_well_just_after_it_used_the_shared_store(
    start: Start, tmp_path: Path
) -> None:
    async with start("a") as a:
        await a.save(run_of(3000))
    # obstore's threads drop Python objects a moment after a call: without a pause, one end in two aborts.
    program = sys.executable, "-c", _LISTS, f"file://{tmp_path / 'shared'}"
    ended = [await asyncio.create_subprocess_exec(*program) for _ in range(4)]
    assert [await each.wait() for each in ended] == [0] * 4


# The same with a real S3-compatible server, and a link before it that does harm.


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyLink]:
    with Rclone(tmp_path / "rclone") as server, FaultyLink(server.base_url) as link:
        for name, value in server.environment(link.base_url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(shared_remote, "_MOST_BACKOFF_SECONDS", 0.05)
        yield link


S3 = "s3://states/prefix"


_UNREADABLE = [Fault.DOWN, Fault.HUNG, Fault.ERROR, Fault.CUT_DOWNLOAD, Fault.STALLED]


@pytest.mark.parametrize("fault", _UNREADABLE)
async def test_fault_is_named_and_stops_fetches_until_it_is_over(
    start: Start, link: FaultyLink, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is tried again but by this test.
    monkeypatch.setattr(shared_remote, "backoff_seconds", lambda n_faults: HANG_SECONDS * n_faults)
    tokens = run_of(3000)
    async with start("a", S3) as a, start("b", S3) as b:
        await a.save(tokens)
        assert await b.find(tokens)
        link.harm(fault, only=".state")
        with monkeypatch.context() as impatient:
            impatient.setattr(transfers, "_STALL_SECONDS", 0.25)
            assert await b.fetch(tokens) is None
        assert b.tier.downloads.is_off
        assert b.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY}
        assert b.sample("shared_faults_total", operation="fetch") == 1
        link.heal()
        await b.tier.downloads.find_out()
        assert not b.tier.downloads.is_off and not b.degradations.kinds
        assert await b.fetch(tokens) is not None


async def test_what_the_bucket_answers_is_told(
    start: Start, link: FaultyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    async with start("a", S3) as a:
        await until(lambda: bool(a.degradations.kinds))
        (away,) = a.degradations.active
        assert "list: SignatureDoesNotMatch: The request signature" in away.detail


async def test_model_whose_states_cannot_be_listed_is_told_of_and_holds_up_no_other(
    start: Start, link: FaultyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_remote, "backoff_seconds", lambda n_faults: HANG_SECONDS * n_faults)
    async with start("a", S3, has_other_model=True, serves=False) as a:
        link.harm(Fault.ERROR, only=a.tier.remote.folder(THEIRS))
        a.served.extend([THEIRS, OURS])
        await a.commit(run_of(3000), namespace=THEIRS)
        await a.commit(run_of(4000))
        await until(lambda: a.n_up == 1)
        await until(lambda: a.sample("shared_faults_total", operation="list") == 2)
        assert a.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY}
        assert link.n_seen["PUT"] == 2, "the other model's state may be there from before"


async def test_shared_store_can_be_asked_after_a_listing_was_given_up(link: FaultyLink) -> None:
    bucket = Bucket(S3)

    async def list_all() -> list[list[Listed]]:
        return [batch async for batch in bucket.list("v1")]

    link.conditions = Conditions(delay_seconds=0.1)
    listing = asyncio.ensure_future(list_all())
    await until(lambda: link.n_seen["GET"] == 1)
    listing.cancel()
    with pytest.raises(asyncio.CancelledError) as given_up:
        await listing
    await until(lambda: link.n_bytes_down > 0)
    await asyncio.sleep(0.05)  # obstore has the page, and drops it with the frames of the error
    del listing, given_up
    gc.collect()
    link.heal()
    assert await list_all() == []


async def test_upload_that_a_stop_broke_off_is_made_at_the_next_start(
    start: Start, link: FaultyLink
) -> None:
    tokens = run_of(3000)
    async with start("a", S3) as a:
        link.harm(Fault.HUNG, only=".state")
        await a.commit(tokens)
        await until(lambda: link.n_harmed > 0)
    link.heal()
    async with start("a", S3) as a, start("b", S3) as b:
        await until(lambda: a.n_up == 1)
        assert await b.find(tokens) and await b.fetch(tokens) is not None


async def test_transfer_that_becomes_too_slow_is_given_up(start: Start, link: FaultyLink) -> None:
    tokens = run_of(60_000)
    async with start("a", S3) as a, start("b", S3) as b:
        await a.save(tokens)
        assert await b.find(tokens)
        link.harm(Fault.SLOW, only=".state")
        assert await b.fetch(tokens, seconds=0.2) is None
        await until(lambda: b.fetches("late") == 1)
        assert len(b.store) == 0


async def test_state_that_cannot_be_read_keeps_no_others_from_being_fetched_for_long(
    start: Start, link: FaultyLink
) -> None:
    async with start("a", S3) as a, start("b", S3) as b:
        away = await a.save(run_of(6000))
        await a.save(run_of(3000, start=10_000))
        assert await b.find(run_of(6000)) and await b.find(run_of(3000, start=10_000))
        link.harm(Fault.ERROR, only=f"{away.shared_id}.state")
        assert await b.fetch(run_of(6000)) is None
        await until(lambda: not b.tier.downloads.is_off)
        assert await b.fetch(run_of(3000, start=10_000))


async def test_link_is_measured_before_a_request_needs_it(start: Start) -> None:
    tokens = run_of(60_000)
    async with start("a") as a, start("b") as b:
        await a.save(tokens)
        assert await b.find(tokens)
        assert not b.tier.remote.link.bytes_per_second
        await b.tier.downloads.find_out()
        measured = b.tier.remote.link
        assert measured.bytes_per_second and b.fetches("done") == 0
        await b.tier.downloads.find_out()
        assert b.tier.remote.link == measured, "only now and then"


async def test_link_is_measured_again_soon_and_then_each_time_later(start: Start) -> None:
    tokens = run_of(60_000)
    async with start("a") as a, start("b") as b:
        await a.save(tokens)
        assert await b.find(tokens)
        remote, trusted_seconds = b.tier.remote, list[float]()
        for _ in range(5):
            remote.measured_until = 0.0
            await b.tier.downloads.find_out()
            trusted_seconds.append(remote.measured_until - time.monotonic())
        assert trusted_seconds == sorted(trusted_seconds)
        assert 0 < trusted_seconds[0] < 60 < 600 < trusted_seconds[-1]


async def test_slow_link_is_found_out_soon_and_is_no_fault(start: Start, link: FaultyLink) -> None:
    tokens = run_of(60_000)
    async with start("a", S3) as a, start("b", S3) as b:
        await a.save(tokens)
        assert await b.find(tokens)
        link.harm(Fault.SLOW, only=".state")
        assert await b.fetch(tokens, seconds=4.0) is None
        assert b.fetches("late") == 1 and not b.degradations.kinds


@pytest.mark.parametrize(
    "fault, only",
    [(Fault.FULL, ""), (Fault.FULL, ".meta"), (Fault.CUT_UPLOAD, ""), (Fault.SKEWED, "")],
)
async def test_upload_that_fails_is_repeated_and_local_caching_goes_on(
    start: Start, link: FaultyLink, fault: Fault, only: str
) -> None:
    tokens = run_of(3000)
    async with start("a", S3) as a, start("b", S3) as b:
        await a.tier.uploads.drain(SECOND)  # so far it is listed, and uploads may begin
        link.harm(fault, only=only)
        saved = await a.commit(tokens)
        assert [c.checkpoint.id for c in a.store.find(OURS, tokens)] == [saved.id]
        await until(lambda: a.sample("shared_faults_total", operation="upload") > 0)
        assert a.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY}
        link.heal()
        await until(lambda: a.n_up == 1)
        assert await b.find(tokens) and await b.fetch(tokens)


async def test_marker_that_cannot_be_written_is_no_failing_upload(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would try it again: /health would tell of it, and a stop would wait for no upload."""
    tokens, is_asked = run_of(3000), asyncio.Event()

    async def fail(*_: object) -> None:
        is_asked.set()
        raise SharedStoreFault("it does not answer")

    async with start("a") as a, start("b") as b:
        await a.save(tokens)
        assert await b.find(tokens)
        monkeypatch.setattr(b.tier.remote.bucket, "write", fail)
        assert await b.fetch(tokens)
        await is_asked.wait()
        await asyncio.sleep(0)
        assert not b.degradations.kinds and not b.tier.remote.pause_seconds("upload")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that opens and cannot be read")
@pytest.mark.parametrize("part_bytes", [8 << 20, 32 << 10], ids=["whole", "in parts"])
async def test_state_that_cannot_be_read_holds_up_no_other_upload_and_goes_up_once_it_can(
    start: Start, link: FaultyLink, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(shared_bucket, "PART_BYTES", part_bytes)
    async with start("a", S3) as a:
        link.harm(Fault.DOWN)
        unreadable = a.store.files.path((await a.commit(run_of(9000))).file_name)
        content = unreadable.read_bytes()
        unreadable.unlink()
        unreadable.symlink_to("/proc/self/mem")
        await a.commit(branch(2000, 3000))
        link.heal()
        await until(lambda: a.n_up == 1)
        await a.tier.uploads.drain(SECOND)
        assert not a.degradations.kinds
        unreadable.unlink()
        unreadable.write_bytes(content)
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + UNREAD_SECONDS)
        await a.commit(branch(1500, 2000, mark=2_000_000))
        await until(lambda: a.n_up == 3)


async def test_directory_may_have_a_name_that_a_url_quotes(start: Start, tmp_path: Path) -> None:
    (folder := tmp_path / "my nas#1").mkdir()
    (tmp_path / "my nas").mkdir()
    async with start("a", f"file://{quote(str(folder))}") as a:
        await a.save(run_of(3000))
    assert objects_in(folder) and not objects_in(tmp_path / "my nas")


async def test_directory_that_is_unmounted_is_not_made_anew(start: Start, tmp_path: Path) -> None:
    tokens, shared, away = run_of(3000), tmp_path / "shared", tmp_path / "away"
    async with start("a") as a, start("b") as b:
        shared.rename(away)
        await a.commit(tokens)
        await until(lambda: a.sample("shared_faults_total", operation="upload") > 0)
        assert not shared.exists()
        await b.tier.look(b.tier.remote.folder(OURS))
        for machine in (a, b):
            assert machine.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY}
        away.rename(shared)
        await until(lambda: a.n_up == 1)
        assert await b.find(tokens)


async def test_directory_that_is_mounted_after_the_start_is_used_from_then_on(
    start: Start, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.rmdir()
    async with start("a") as a:
        await a.commit(run_of(3000))
        await until(lambda: a.sample("shared_faults_total", operation="list") > 0)
        assert a.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY}
        shared.mkdir()
        await until(lambda: a.n_up == 1)
        await until(lambda: not a.degradations.kinds)


async def test_mount_point_that_nothing_is_mounted_at_any_more_is_not_written(
    start: Start, tmp_path: Path, disk: Path
) -> None:
    """Not after a restart either, as after a power cut from which the machine is back before the NAS."""
    place, below = tmp_path / "place", tmp_path / "below"
    below.mkdir()
    mount(disk, place)
    async with start("a", f"file://{place}") as a:
        await a.save(run_of(3000))
        mount(below, place)
        await a.commit(run_of(3000, start=5000))
        await until(lambda: a.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY})
    async with start("a", f"file://{place}") as a:
        await until(lambda: a.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY})
        assert not objects_in(below)
        mount(disk, place)
        await until(lambda: a.n_up == 1)


async def test_states_go_to_another_shared_store_or_under_another_key_once(
    start: Start, tmp_path: Path
) -> None:
    tokens, other = run_of(3000), tmp_path / "other"
    other.mkdir()
    async with start("a") as a, start("b") as b:
        await a.save(tokens)
        assert await b.find(tokens) and await b.fetch(tokens)
    for url, key in ((f"file://{other}", KEY), ("", Sealing(b"o" * 64))):
        async with start("a", url, sealing=key) as a:
            assert not list(a.tier.remote.find(OURS, tokens))
            await a.tier.uploads.drain(SECOND)
            assert a.n_up == 1
        async with start("a", url, sealing=key) as a, start("b", url, sealing=key) as b:
            assert await b.find(tokens) and await a.find(tokens)
            await a.tier.uploads.drain(SECOND)
            await b.tier.uploads.drain(SECOND)
    assert len([each for each in objects_in(other) if each.suffix == ".state"]) == 1
    assert len([each for each in objects_in(tmp_path / "shared") if each.suffix == ".state"]) == 2


async def test_states_that_are_there_from_before_do_not_go_up_again(
    start: Start, tmp_path: Path
) -> None:
    tokens, other = run_of(3000), tmp_path / "other"
    other.mkdir()
    async with start("a") as a:
        saved = await a.save(tokens)
    async with start("a", f"file://{other}") as a:
        await a.tier.uploads.drain(SECOND)
        assert a.n_up == 1
    async with start("a") as a:
        await a.tier.uploads.drain(SECOND)
        assert a.sample("shared_bytes_total", direction="up") == 0
        [back] = a.store
        assert back.shared_id == saved.shared_id
        assert await a.store.remove(back, Removal.OPERATOR)
        await until(lambda: not objects_in(tmp_path / "shared"))


async def test_state_that_is_removed_while_no_model_is_served_is_deleted_there(
    start: Start, tmp_path: Path
) -> None:
    """An operator removes a state before llama-server has come up, and stops the proxy again."""
    async with start("a") as a:
        await a.save(run_of(3000))
        assert objects_in(tmp_path / "shared")
    async with start("a", serves=False) as a:
        [saved] = a.store
        assert await a.store.remove(saved, Removal.OPERATOR)
        await until(lambda: not objects_in(tmp_path / "shared"))


async def test_only_a_state_of_the_same_bytes_is_taken_for_one_that_is_there(start: Start) -> None:
    tokens = run_of(3000)
    other = state_file(words(tokens), bytes(reversed(attention(len(tokens)))))
    async with start("a") as a, start("b") as b, start("c") as c:
        saved = await a.save(tokens)
        assert await b.find(tokens) and await c.find(tokens)
        same = await b.commit(tokens)
        await until(lambda: (b.store.get(same.id) or same).shared_id)
        assert (b.store.get(same.id) or same).shared_id == saved.shared_id
        assert b.sample("shared_bytes_total", direction="up") == 0
        assert (await c.save(tokens, content=other)).shared_id not in ("", saved.shared_id)


async def test_state_in_a_directory_that_is_unmounted_is_not_gone(
    start: Start, tmp_path: Path
) -> None:
    tokens, shared, away = run_of(3000), tmp_path / "shared", tmp_path / "away"
    async with start("a") as a, start("b") as b:
        await a.save(tokens)
        assert await b.find(tokens)
        shared.rename(away)
        assert await b.fetch(tokens) is None and b.fetches("failed") == 1
        away.rename(shared)
        assert await b.fetch(tokens)


async def test_directory_that_hangs_keeps_one_thread_and_leaves_no_traceback(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Else it would soon have all those that states are read and checked on."""
    bucket, back, told = Bucket(f"file://{tmp_path}"), threading.Event(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    monkeypatch.setattr(shared_bucket, "_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(Path, "is_dir", lambda _: not back.wait(HANG_SECONDS))
    n_threads = threading.active_count()
    try:
        for _ in range(3):
            with pytest.raises(SharedStoreFault, match="does not answer"):
                async for _ in bucket.list("v1"):
                    pass
        assert threading.active_count() <= n_threads + 1
    finally:
        back.set()
    await until(lambda: threading.active_count() <= n_threads)
    del bucket
    gc.collect()
    assert not told


_HANGS = """
import asyncio, pathlib, time
from proxy.shared import bucket
bucket._SILENT_SECONDS = 0.05
pathlib.Path.is_dir = lambda _: time.sleep(3600)
async def main():
    try:
        await bucket.Bucket("file:///nowhere").read("name")
    except bucket.SharedStoreFault as fault:
        print(fault)
asyncio.run(main())
"""


async def test_directory_that_hangs_does_not_hold_up_the_end() -> None:
    program = sys.executable, "-c", _HANGS
    ended = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE)
    async with asyncio.timeout(HANG_SECONDS):
        told, _ = await ended.communicate()
    assert (told, ended.returncode) == (b"it does not answer\n", 0)


async def test_wrong_clock_hides_nothing_for_long(start: Start, monkeypatch: Any) -> None:
    tokens, real = run_of(3000), time.time
    async with start("a") as a, start("b") as b:
        assert await b.find(tokens, is_full=True) == []
        monkeypatch.setattr(time, "time", lambda: real() - 86400)
        await a.save(tokens)
        monkeypatch.setattr(time, "time", real)
        b.tier._listed_at.clear()  # its clock is right
        assert await b.find(tokens) == []
        assert await b.find(tokens, is_full=True)


async def test_state_whose_upload_takes_long_is_found_once_it_is_there(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passed = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + passed)
    monkeypatch.setattr(transfers, "LEAST_BYTES_PER_SECOND", 100)
    async with start("a") as a, start("b") as b:
        write = a.tier.remote.bucket.write

        async def write_long(name: str, *arguments: Any) -> None:
            nonlocal passed
            if name.endswith(".state"):
                passed += 1200.0
                assert await b.find(run_of(3000)) == []
            await write(name, *arguments)

        monkeypatch.setattr(a.tier.remote.bucket, "write", write_long)
        await a.save(run_of(3000))
        assert await b.find(run_of(3000))


async def test_laptop_that_wakes_finds_what_was_put_there_while_it_slept(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next listing of everything may be a quarter of an hour away."""
    tokens, real = run_of(3000), time.time
    async with start("a") as a, start("b") as b:
        assert await b.find(tokens) == []
        await a.save(tokens)
        monkeypatch.setattr(time, "time", lambda: real() + 8 * 3600)
        assert await b.find(tokens)


async def test_model_that_is_met_later_finds_what_was_put_there_long_before(
    start: Start, monkeypatch: Any
) -> None:
    """Such as the second model of a router, or the states of an API key that was not used here so far."""
    real = time.time
    async with start("a", has_other_model=True) as a:
        monkeypatch.setattr(time, "time", lambda: real() - 86400)
        await a.save(run_of(3000))
        await a.save(run_of(3000), namespace=THEIRS)
        monkeypatch.setattr(time, "time", real)
    async with start("b") as b:
        await until(lambda: len(b.tier.remote.known) == 1)
        b.served.append(THEIRS)
        await until(lambda: len(b.tier.remote.known) == 2)


async def test_listing_of_what_is_new_does_not_stand_for_one_of_everything(start: Start) -> None:
    async with start("a") as a:
        await a.save(run_of(3000))
        folder = a.tier.remote.folder(OURS)
        new, same = a.tier.look(folder), a.tier.look(folder)
        everything = a.tier.look(folder, is_full=True)
        assert new is same is not everything
        assert await new and await everything


async def test_several_who_want_a_state_fetch_it_once(start: Start) -> None:
    tokens = run_of(3000)
    async with start("a") as a, start("b") as b:
        await a.save(tokens)
        await b.find(tokens)
        first, second = await asyncio.gather(b.fetch(tokens), b.fetch(tokens))
        assert first is second is not None and len(b.store) == 1


async def test_damaged_index_of_the_shared_store_is_begun_anew(
    start: Start, tmp_path: Path
) -> None:
    async with start("a") as a:
        saved = await a.save(run_of(3000))
    (tmp_path / "a" / "shared-index" / "data.mdb").write_bytes(b"nonsense" * 4096)
    async with start("a") as a:
        (found,) = await a.find(run_of(3000), is_full=True)
        assert found.checkpoint == replace(found.checkpoint, shared_id=saved.shared_id)
        # It is known as this proxy's own.
        assert await a.store.remove(saved, Removal.OPERATOR)
        assert not await a.find(run_of(3000), is_full=True)
        await until(lambda: not objects_in(tmp_path / "shared"))


def test_line_ends_of_a_key_file_are_no_part_of_the_key(tmp_path: Path) -> None:
    """openssl writes one, a Secret of Kubernetes has none. A key of random bytes is taken whole."""

    def key(content: bytes) -> bytes:
        (tmp_path / "key").write_bytes(content)
        return read_key(tmp_path / "key")

    text, random = b"a" * 43 + b"=", b"\xff" * 40
    assert key(text) == key(text + b"\n") == key(text + b"\r\n") != key(text + b"b\n")
    assert key(random) != key(random + b"\n")


async def test_state_that_is_deleted_while_the_shared_store_is_away_goes_after_a_restart(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its text would stay there for good, and come back with its next request."""
    async with start("a") as a:
        await remove_in_vain(a, monkeypatch)
        await until(lambda: a.degradations.kinds == {DegradationKind.SHARED_STORE_AWAY})
    assert objects_in(tmp_path / "shared")
    async with start("a"):
        await until(lambda: not objects_in(tmp_path / "shared"))


async def test_state_that_is_deleted_while_the_shared_store_is_away_does_not_come_back_after_a_kill(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("a") as a:
        await remove_in_vain(a, monkeypatch)
        await a.tier.remote.write(lambda: None)  # behind what is being written
        shutil.copytree(tmp_path / "a", tmp_path / "as a kill leaves it")
        monkeypatch.undo()
    async with start("as a kill leaves it") as a:
        assert not await a.find(run_of(3000))
        await until(lambda: not objects_in(tmp_path / "shared"))


async def test_state_that_an_earlier_proxy_could_not_delete_there_does_not_come_back(
    start: Start, tmp_path: Path
) -> None:
    async with start("a") as a:
        saved = await a.save(run_of(3000))
        own = a.tier.remote.index.record(index_id(saved.shared_id))
        a.tier.remote.index.put_value("outdated", [own])
    async with start("a") as a:
        assert not await a.find(run_of(3000))
        await until(lambda: not objects_in(tmp_path / "shared"))


async def test_state_that_is_deleted_is_not_fetched_before_it_is_gone_there(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes up goes first, which may take hours."""
    is_let_go = asyncio.Event()
    async with start("a") as a:
        saved, delete = await a.save(run_of(3000)), a.tier.remote.delete

        async def delete_late(checkpoint: Checkpoint) -> None:
            await is_let_go.wait()
            await delete(checkpoint)

        monkeypatch.setattr(a.tier.remote, "delete", delete_late)
        assert await a.store.remove(saved, Removal.OPERATOR)
        assert objects_in(tmp_path / "shared") and not await a.find(run_of(3000))
        is_let_go.set()
        await until(lambda: not objects_in(tmp_path / "shared"))


async def test_state_that_ended_llama_server_is_not_offered_after_a_restart_either(
    start: Start,
) -> None:
    tokens = run_of(3000)
    async with start("a") as a, start("b") as b:
        await a.save(tokens)
        await b.find(tokens)
        fetched = await b.fetch(tokens)
        assert fetched is not None
        await b.store.change_on_disk(
            fetched.id, quarantine=Quarantine("it ended llama-server", 1.0)
        )
        await b.store.remove(fetched, Removal.BUDGET)
    async with start("b") as b:
        assert await b.find(tokens, is_full=True) == []


async def test_state_that_comes_after_its_record_is_found(start: Start, tmp_path: Path) -> None:
    """As where another program copies one folder into the other."""
    async with start("a") as a, start("b") as b:
        saved = await a.save(run_of(3000))
        assert await b.find(run_of(3000))
        state = tmp_path / "shared" / a.tier.remote.name(saved, "state")
        away = state.rename(tmp_path / "away")
        assert not await b.find(run_of(3000), is_full=True)
        assert not await b.find(run_of(3000)), "each request would ask for it"
        away.rename(state)
        assert await b.find(run_of(3000), is_full=True)
