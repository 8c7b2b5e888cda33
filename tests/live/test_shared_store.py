"""Two machines with a directory each, and a shared store between them: a conversation goes from one to the
other."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.core.rates import POSITIONS, Rates, Transfer, UnitCost
from proxy.shared import remote, tier
from proxy.shared.bucket import Bucket
from proxy.shared.objects import Listed
from tests.lab.buckets import Rclone
from tests.lab.conversation import Message, agent_requests, system
from tests.lab.faulty_link import Fault, FaultyLink
from tests.lab.models import least_model
from tests.lab.patience import wait_for_shared_store
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer
from tests.lab.waiting import until
from tests.live.conftest import ONE_KIND
from tests.live.ledger import SLACK_TOKENS, TOOLS, Ledger

HEADER = [system(150)]
QUICK = Transfer(UnitCost(1e-3, 1.0), UnitCost(1e-9, 1.0))
RATES = Rates(
    tokens=(UnitCost(1e-2, 1.0),) * len(POSITIONS), cold_restore=QUICK, warm_restore=QUICK
)


@dataclass(frozen=True)
class Machines:
    """Rigs with a shared store; the first one's llama-server renders what the ledger counts."""

    rigs: list[Rig]

    async def ask(
        self, number: int, messages: list[Message], *, is_shared: bool = True, **fields: Any
    ) -> dict[str, Any]:
        """Send a request to one machine; return its record, once what it made *is shared*."""
        rig = self.rigs[number]
        # Whatever the machine is busy with, evaluating takes longer than fetching.
        rig.running.pool.processes[0].rates = RATES
        await rig.chat(messages, tools=TOOLS, **fields)
        await rig.settled()
        if is_shared:
            await self.shared(number)
        async with rig.client.get(rig.admin_url + "/requests?limit=1") as reply:
            record: dict[str, Any] = (await reply.json())["requests"][0]
            return record

    async def shared(self, number: int) -> None:
        """Wait until all that a machine has stored is in the shared store."""
        store = self.rigs[number].running.store
        assert store is not None
        await until(lambda: len(store) > 0 and all(c.shared_id for c in store))

    async def evaluated(self) -> int:
        return sum([await rig.evaluated() for rig in self.rigs])


StartMachines = Callable[..., AbstractAsyncContextManager[Machines]]


@pytest.fixture
def start_machines(tmp_path: Path) -> StartMachines:
    """Return a function that starts llama-servers with a tiny model, each with a proxy and a directory."""

    @asynccontextmanager
    async def start(kind: str, *, n_machines: int = 2, **settings: Any) -> AsyncIterator[Machines]:
        model, rigs = least_model(kind), list[Rig]()
        (shared := tmp_path / "shared").mkdir()
        settings = {"shared_store": f"file://{shared}"} | settings
        async with AsyncExitStack() as opened:
            for number in range(n_machines):
                directory = tmp_path / f"slots{number}"
                directory.mkdir(mode=0o700, exist_ok=True)
                log_path = tmp_path / f"{number}.log"
                server = LlamaServer(model, directory, n_slots=1, n_ctx=32768, log_path=log_path)
                rigs.append(Rig(server, directory, **settings))
            await asyncio.gather(*map(opened.enter_async_context, rigs))
            yield Machines(rigs)

    return start


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyLink]:
    """Yield a link to a real S3-compatible server, which the environment names."""
    with Rclone(tmp_path / "rclone") as server, FaultyLink(server.base_url) as link:
        for name, value in server.environment(link.base_url).items():
            monkeypatch.setenv(name, value)
        yield link


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_shared_store(monkeypatch, at_any_rate=True)


def sealed_bucket(tmp_path: Path) -> dict[str, str]:
    """Return the setting for the bucket, sealed with a key that is made now."""
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)
    return {"shared_store": f"url = s3://states/prefix, key_file = {key_file}"}


@pytest.mark.usefixtures("_patience")
@ONE_KIND
async def test_conversation_that_alternates_between_machines_evaluates_only_new_tokens(
    start_machines: StartMachines, kind: str
) -> None:
    async with start_machines(kind) as machines:
        await alternate(machines)


@pytest.mark.usefixtures("_patience")
async def test_conversation_alternates_through_a_sealed_bucket(
    start_machines: StartMachines, tmp_path: Path, bucket: FaultyLink
) -> None:
    async with start_machines("hybrid", **sealed_bucket(tmp_path)) as machines:
        await alternate(machines, cache_salt="team")  # each directory has its own name for it


async def alternate(machines: Machines, **fields: Any) -> None:
    """Send a conversation's requests to two machines in turn: as one exact cache would have it."""
    requests = agent_requests(3, 1, header=HEADER)
    ledger, before = Ledger(machines.rigs[0]), await machines.evaluated()
    records = [await machines.ask(n % 2, m, **fields) for n, m in enumerate(requests)]
    n_evaluated = await machines.evaluated() - before
    n_new = sum([await ledger.enter(messages) for messages in requests])
    assert n_evaluated <= 1.05 * n_new
    # Where a template drops old reasoning, the first request of a turn goes on in what is here.
    fetched = [record for record in records if (record["shared"] or "").startswith("fetched")]
    assert len(fetched) >= 3 and {record["chosen"] for record in fetched} == {"restore"}


async def test_slow_listing_is_in_no_request_s_way_that_it_can_spare_nothing(
    start_machines: StartMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_list, lists = Bucket.list, list[Bucket]()

    async def slow_list(
        bucket: Bucket, folder: str, after: str | None = None
    ) -> AsyncIterator[list[Listed]]:
        lists.append(bucket)
        await asyncio.sleep(0.2)  # as a directory of many states
        async for batch in quick_list(bucket, folder, after):
            yield batch

    monkeypatch.setattr(Bucket, "list", slow_list)
    monkeypatch.setattr(tier, "_LOOK_SECONDS", 3600.0)
    first, second, third, _ = agent_requests(2, 1, header=HEADER)
    async with start_machines("hybrid") as machines:
        await machines.ask(0, first)
        here, there = (rig.running.shared.tier for rig in machines.rigs)
        store = machines.rigs[0].running.store
        assert here is not None and there is not None and store is not None
        for each in (here, there):
            await each.look(each.remote.folder(next(iter(store)).namespace))
        n_before = lists.count(here.remote.bucket)
        for _ in range(3):  # all of it is in the slot
            await machines.ask(0, first)
        assert lists.count(here.remote.bucket) == n_before

        wait_for_shared_store(monkeypatch, at_any_rate=True)
        await machines.ask(0, second)
        record, ledger = await machines.ask(1, third), Ledger(machines.rigs[0])
        *_, n_new = [await ledger.enter(messages) for messages in (first, second, third)]
        assert record["shared"].startswith("fetched"), record
        assert record["evaluated"] <= n_new + SLACK_TOKENS


@pytest.mark.usefixtures("_patience")
async def test_what_was_fetched_for_a_turn_is_not_gone_on_with_behind_its_answer(
    start_machines: StartMachines,
) -> None:
    requests = agent_requests(3, 1, header=HEADER)
    async with start_machines("hybrid", ahead_seconds=600.0) as machines:
        goes_on = []
        for number, messages in zip((0, 0, 1, 1, 1), requests, strict=False):
            await machines.ask(number, messages)
            goes_on.append(machines.rigs[number].running.pool.ahead._last is not None)
        assert goes_on == [True, True, False, False, True]


async def test_fault_of_a_listing_costs_no_request_its_answer(
    start_machines: StartMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(tier.Tier, "look_since", fail)
    async with start_machines("hybrid") as machines:
        for number, messages in enumerate(agent_requests(1, 1, header=HEADER)):
            record = await machines.ask(number % 2, messages, is_shared=False)
            assert record["status"] == 200


async def test_fault_of_the_shared_store_costs_no_request_its_answer(
    start_machines: StartMachines, tmp_path: Path, bucket: FaultyLink, monkeypatch: Any
) -> None:
    monkeypatch.setattr(remote, "_MOST_BACKOFF_SECONDS", 0.05)
    async with start_machines("hybrid", **sealed_bucket(tmp_path)) as machines:
        for number, fault in enumerate([Fault.CORRUPT, Fault.STALLED]):
            first, second = agent_requests(1, 1, header=[system(450, seed=number)])
            bucket.heal()
            await machines.rigs[1].reasons_are()
            await machines.ask(0, first)
            bucket.harm(fault)
            record = await machines.ask(1, second, is_shared=False)
            assert record["outcome"] == "miss" and record["evaluated"] == record["n_prompt"]
            assert not (record["shared"] or "").startswith("fetched")
