"""A bucket of many states: how soon a fresh proxy knows them, and what its requests feel of that."""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from statistics import median

import aiohttp
import msgspec
import numpy as np

from proxy.core.tokens import Namespace, hash_steps, token_ids
from proxy.metrics import PREFIX
from proxy.shared import objects
from tests.bench.moving import new_folder
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.shared.hosts import Host, Hosts, Wanted
from tests.bench.shared.network import Network
from tests.bench.traces.chat import chat
from tests.bench.traces.session import Session, header

N_STATES = 100_000
BAR_SECONDS = 60.0
BAR_FACTOR = 1.1
N_REQUESTS, PAUSE_SECONDS = 15, 1.0
N_TOKENS = 4000
"""Of each state's prompt: their hashes are what is read."""


async def measure_known(network: Network, leftovers: ExitStack, wanted: Wanted) -> Section:
    """Return the table: a fresh host and an old bucket."""
    section = Section(
        f"A bucket of {N_STATES:,} states, and a fresh proxy in a directory (tiny hybrid model)",
        f"known within {BAR_SECONDS:.0f} s; requests as quick as locally, within {BAR_FACTOR}",
        (
            *("states", "of tokens", "records", "known after", "CPU of the proxy", "resident"),
            *("new prompt: an empty bucket", "meanwhile", "all known"),
        ),
    )
    folder = new_folder(leftovers)  # rclone takes minutes to list so many
    async with Hosts(network, leftovers, "hybrid", bucket=folder) as hosts:
        old, fresh = hosts.all
        await asyncio.to_thread(fresh.proxy.stop)
        await _ask(old, 0)
        await hosts_are_quiet(hosts)
        before = await _asked(old, 1)  # the bucket is as good as empty
        await hosts_are_quiet(hosts)
        n_bytes = await asyncio.to_thread(_multiply, folder)
        tell("a fresh proxy starts")
        began = time.monotonic()
        fresh.proxy.start()
        await fresh.proxy.ready()
        meanwhile: list[float] = []
        while (n_known := await known(fresh)) < N_STATES and time.monotonic() - began < 300:
            meanwhile.append(await _ask(fresh, 100 + len(meanwhile)))
            await asyncio.sleep(1.0)
        seconds = time.monotonic() - began
        after = await _asked(fresh, 50)
        cpu, resident = fresh.proxy.cpu_seconds(), _resident_bytes(fresh.proxy.pid)
    in_between = median(meanwhile) if meanwhile else 0.0
    section.add(
        *(int(n_known), N_TOKENS, f"{n_bytes / 1e6:.0f} MB", f"{seconds:.0f} s", f"{cpu:.0f} s"),
        *(f"{resident / 1e6:.0f} MB", f"{before * 1e3:.0f} ms", f"{in_between * 1e3:.0f} ms"),
        f"{after * 1e3:.0f} ms",
        is_met=n_known >= N_STATES and seconds <= BAR_SECONDS and after <= BAR_FACTOR * before,
    )
    return section


async def known(host: Host) -> float:
    """Return how many shared states a proxy knows."""
    lines = (await host.proxy.metrics()).splitlines()
    name = f"{PREFIX}_shared_known_states "
    return sum(float(line.split()[1]) for line in lines if line.startswith(name))


async def hosts_are_quiet(hosts: Hosts) -> None:
    """Wait until the one host that runs has uploaded all."""
    await hosts.all[0].proxy.settled()
    assert hosts.tier is not None
    await hosts.bucket_is_quiet(hosts.tier)


async def _asked(host: Host, first: int) -> float:
    """Return the median of many requests, with pauses in which a person reads."""
    seconds = []
    for number in range(first, first + N_REQUESTS):
        seconds.append(await _ask(host, number))
        await asyncio.sleep(PAUSE_SECONDS)
    return median(seconds)


async def _ask(host: Host, number: int) -> float:
    """Return the seconds to the first token of a new conversation behind the same header."""
    session = Session(f"n{number}", header(60, 6000), 50_000 + 10 * number).ask()
    async with aiohttp.ClientSession() as http:
        return (await chat(http, host.base_url, session.request().body())).first_token_seconds


def _multiply(bucket: Path) -> int:
    """Put records beside a real one, as if many conversations were there; return their bytes."""
    real = next(bucket.rglob("*.meta"))
    meta, namespace = objects.decode_meta(real.read_bytes()), real.parent.name
    seed, rng, n_bytes = Namespace(bytes.fromhex(namespace)), np.random.default_rng(18), 0
    for number in range(N_STATES):
        tokens = token_ids(rng.integers(0, 1 << 15, N_TOKENS).tolist())
        told = replace(
            meta.checkpoint, n_tokens=N_TOKENS, header=0, turn_start=0, marks=(), restore_points=()
        )
        hashes = list(map(bytes, hash_steps(seed, tokens, objects.STEP_TOKENS)))
        made = objects.Meta(told, meta.owner, hashes, {})
        shared_id = objects.new_id(time.time() - number, token_hex(4), token_hex(8))
        data = msgspec.msgpack.encode(made)
        n_bytes += len(data)
        real.with_name(f"{shared_id}.meta").write_bytes(data)
        real.with_name(f"{shared_id}.state").touch()
    return n_bytes


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0
