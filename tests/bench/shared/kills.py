"""Kills a host at random points of upload, download and delete, and counts what that leaves wrong.

Two directories use one bucket by turns. Each time a process of its own stores, replaces, evicts and fetches
states without a pause until kill -9; the next one opens what that left. Every state's content follows from
its first token, so that whoever fetches one can tell whether it is right.
"""

import asyncio
import multiprocessing
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

from proxy.core.eviction import Present, Removal
from proxy.core.model import Checkpoint, KnownNamespace, tenant_namespace
from proxy.core.rates import POSITIONS, Rates, UnitCost
from proxy.core.sharing import SharedLimits
from proxy.core.tokens import Namespace
from proxy.health import Degradations, Faults
from proxy.metrics import Metrics
from proxy.shared import tier as shared_tier
from proxy.shared.bucket import Bucket
from proxy.shared.objects import Sealing
from proxy.shared.remote import Remote
from proxy.shared.tier import Tier
from proxy.store.known_models import namespaces_name
from proxy.store.store import CheckpointStore
from tests.bench.moving import new_folder
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.shared.hosts import Wanted
from tests.bench.shared.network import HARNESS, Network
from tests.lab.buckets import Rclone
from tests.lab.faulty_link import Conditions, FaultyLink
from tests.store.conftest import new_state, run_of
from tests.unit.state_files import attention, state_file, words

N_POINTS = 100
PHASES = "upload", "delete", "download"
N_TOKENS = 2000
DELAY_SECONDS = 0.02
"""Of each request to the bucket: phases that end at once would hardly be met."""
MAX_SECONDS = 2.0
"""A kill comes at most so long after the store is open."""
ROW_BYTES = (256, 1536)
"""States of 2 and 12 MB: in one part, and in two."""
LIMITS, CAPACITY = 40 << 20, SharedLimits(capacity=120 << 20)
MODEL = Namespace(b"m" * 16)
OURS = tenant_namespace(MODEL, b"")
RATES = Rates(tokens=(UnitCost(1.0, 1.0),) * len(POSITIONS))
KEY = Sealing(b"k" * 64)
_PARENT_SECONDS = 120.0


def content_of(start: int) -> bytes:
    """Return the state whose prompt begins with token *start*."""
    n_bytes = ROW_BYTES[start // N_TOKENS % 2]
    tokens = run_of(N_TOKENS, start)
    return state_file(words(tokens), attention(N_TOKENS, first=start % 97, row_bytes=n_bytes))


def is_right(store: CheckpointStore, fetched: Checkpoint) -> bool:
    tokens = store.index.tokens(fetched.id)
    content = store.files.path(fetched.file_name).read_bytes()
    return tokens is not None and content == content_of(tokens[0])


async def opened(directory: Path, url: str) -> tuple[CheckpointStore, Tier]:
    store, metrics = CheckpointStore(directory, LIMITS), Metrics()
    await store.put_value(namespaces_name("static"), [KnownNamespace(MODEL, [(5, -0.5)], "coder")])
    degradations, present = Degradations(metrics), Present(time.time(), RATES, {OURS: RATES})
    faults = Faults(metrics)
    remote = Remote(store, Bucket(url), KEY, lambda: present, metrics, degradations, faults)
    tier = Tier(remote, CAPACITY)
    store.on_removal = lambda checkpoint, _, reason: tier.uploads.note_removed(checkpoint, reason)
    return store, tier


def _work(
    directory: Path, variables: dict[str, str], url: str, seed: int, told: Connection
) -> None:
    os.environ |= variables
    asyncio.run(_keep_working(directory, url, random.Random(seed), told))


async def _keep_working(directory: Path, url: str, rng: random.Random, told: Connection) -> None:
    """Store and fetch until killed; tell the outcome of each fetch."""
    store, tier = await opened(directory, url)

    async def store_and_replace() -> None:
        while True:
            tokens = run_of(N_TOKENS, N_TOKENS * rng.randrange(1 << 16))
            facts = {"namespace": OURS, "has_every_position": True}
            content = await asyncio.to_thread(content_of, tokens[0])
            await store.commit(*new_state(store, tokens, content=content, **facts))
            older = [c for c in store if c.shared_id and not c.is_fetched]
            for one in older[:-1]:
                await store.remove(one, Removal.SUPERSEDED)
            await asyncio.sleep(rng.uniform(0, 0.4))

    async def fetch() -> None:
        while True:
            local = {c.shared_id for c in store}
            there = filter(None, map(tier.remote.index.record, tuple(tier.remote.known)))
            if wanted := [c for c in there if c.namespace and c.shared_id not in local]:
                fetched = await tier.downloads.fetch(rng.choice(wanted), 30.0)
                told.send("missed" if fetched is None else str(is_right(store, fetched)))
            await asyncio.sleep(0.01)

    async with tier.running(), asyncio.timeout(_PARENT_SECONDS):
        told.send("open")
        await asyncio.gather(store_and_replace(), fetch())


async def measure_kills(network: Network, leftovers: ExitStack, wanted: Wanted) -> Section:
    """Return the table; the numbers are of points, states and objects."""
    section = Section(
        f"A host killed at {N_POINTS} random points of its transfers (rclone, sealed)",
        "0 wrong, 0 unreadable, 0 records without a state, all orphans swept",
        (
            *("killed in an upload", "a delete", "a download", "else", "states fetched", "wrong"),
            *("not to be read", "records without a state", "orphans", "after the sweep"),
        ),
    )
    folder, rng, counts = new_folder(leftovers), random.Random(18), Counter[str]()
    directories = [new_folder(leftovers) for _ in range(3)]
    served = leftovers.enter_context(Rclone(folder / "bucket", HARNESS))
    link = leftovers.enter_context(FaultyLink(served.base_url, HARNESS))
    link.conditions = Conditions(delay_seconds=DELAY_SECONDS)
    variables = served.environment(link.base_url)
    stored, seen, orphans = folder / "bucket" / "objects", set[str](), set[str]()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    for point in range(N_POINTS):
        directory = directories[point % 2]
        here, there = processes.Pipe(duplex=False)
        work = directory, variables, served.url, rng.randrange(1 << 30), there
        host = processes.Process(target=_work, args=work, daemon=True)
        host.start()
        there.close()
        assert here.recv() == "open"
        await asyncio.sleep(rng.uniform(0, MAX_SECONDS))
        host.kill()
        host.join()
        while here.poll():
            try:
                counts[here.recv()] += 1
            except EOFError:
                break
        await asyncio.sleep(0.1)  # the server ends what it was sent
        names = {kind: _ids(stored, kind) for kind in (".state", ".meta")}
        new = names[".state"] - names[".meta"] - orphans
        phases = bool(new - seen), bool(new & seen), any(directory.glob("*.saving"))
        counts["else"] += not any(phases)
        counts.update(name for name, is_so in zip(PHASES, phases, strict=True) if is_so)
        orphans |= new
        seen |= names[".meta"]
        counts["headless"] += len(names[".meta"] - names[".state"])
        if point % 10 == 9:
            tell(f"{point + 1} points: {dict(counts)}")
    n_unreadable, n_left = await _read_all(directories[2], served, stored, counts)
    counts["headless"] = max(counts["headless"], 0)
    section.add(
        *(*map(counts.__getitem__, PHASES), counts["else"]),
        *(counts["True"], counts["False"], n_unreadable, counts["headless"]),
        *(len(orphans), n_left),
        is_met=not (counts["False"] or n_unreadable or counts["headless"] or n_left),
    )
    return section


@patch.object(shared_tier, "ORPHAN_SECONDS", 0.0)
async def _read_all(
    directory: Path, served: Rclone, stored: Path, counts: Counter[str]
) -> tuple[int, int]:
    """Fetch all there is into a new directory; return how many failed, and the orphans after a sweep."""
    os.environ |= served.environment()
    store, tier = await opened(directory, served.url)
    n_unreadable = 0
    folder = tier.remote.folder(OURS)
    async with tier.running():
        await tier.look(folder)  # one that is under way
        for _ in range(2):  # what is not finished is seen, then swept
            assert await tier.look(folder, is_full=True)
        for checkpoint_id in sorted(tier.remote.known):
            record = tier.remote.index.record(checkpoint_id)
            assert record is not None
            fetched = await tier.downloads.fetch(record, 60.0)
            n_unreadable += fetched is None
            if fetched is not None:
                counts[str(is_right(store, fetched))] += 1
    store.close()
    return n_unreadable, len(_ids(stored, ".state") - _ids(stored, ".meta"))


def _ids(stored: Path, kind: str) -> set[str]:
    return {path.stem for path in stored.rglob(f"*{kind}")}
