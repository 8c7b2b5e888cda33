"""Two hosts with a bucket on a real S3 server between them: in mid-conversation, asleep, under faults."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import obstore
import pytest

from proxy.core.rates import POSITIONS, Rates, Transfer, UnitCost
from proxy.shared import tier
from tests.lab.buckets import Bucket, JuiceFs, Rclone
from tests.lab.conversation import Message, agent_requests, system
from tests.lab.faulty_link import Fault, FaultyLink
from tests.lab.models import least_model
from tests.lab.objects import open_bucket
from tests.lab.patience import wait_for_shared_store
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer
from tests.lab.waiting import HANG_SECONDS, until
from tests.live.ledger import SLACK_TOKENS, TOOLS, Ledger

REQUESTS = agent_requests(9, 1, header=[system(300)])
_QUICK = Transfer(UnitCost(1e-3, 1.0), UnitCost(1e-9, 1.0))
_RATES = Rates(
    tokens=(UnitCost(1e-1, 1.0),) * len(POSITIONS), cold_restore=_QUICK, warm_restore=_QUICK
)
"""A token is dear, whatever the machine is busy with: fetching always pays."""


class Pair:
    """Two rigs with a directory each, a bucket for both, and the link between."""

    def __init__(self, rigs: list[Rig], link: FaultyLink) -> None:
        self.rigs, self.link = rigs, link
        self._ledger = Ledger(rigs[1])

    async def ask(self, number: int, messages: list[Message]) -> tuple[int, int]:
        """Send a request to one host; return its new tokens, and how many were evaluated for it."""
        rig = self.rigs[number]
        rig.running.pool.processes[0].rates = _RATES
        n_new, before = await self._ledger.enter(messages), await rig.evaluated()
        await rig.chat(messages, tools=TOOLS)
        return n_new, await rig.evaluated() - before

    async def uploaded(self, number: int) -> None:
        """Wait until all that a host has stored is in the bucket."""
        store = self.rigs[number].running.store
        assert store is not None
        await until(lambda: len(store) > 0 and all(each.shared_id for each in store))


@asynccontextmanager
async def open_pair(
    kind: str, served: Bucket, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    """Open two hosts with a bucket that serves, or else is started for them."""
    key_file = folder / "key"
    key_file.write_bytes(os.urandom(32))
    async with AsyncExitStack() as stack:
        if not served.is_running:
            stack.enter_context(served)
        link = stack.enter_context(FaultyLink(served.base_url))
        for name, value in served.environment(link.base_url).items():
            monkeypatch.setenv(name, value)
        told = f"url = {served.url}, key_file = {key_file}"
        rigs = []
        for name in ("one", "two"):
            directory = folder / name
            directory.mkdir(mode=0o700)
            model = least_model(kind)
            log_path = folder / f"{name}.log"
            server = LlamaServer(model, directory, n_slots=1, n_ctx=16384, log_path=log_path)
            rig = Rig(server, directory, shared_store=told, drain_seconds=HANG_SECONDS)
            rigs.append(await stack.enter_async_context(rig))
        yield Pair(rigs, link)


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_shared_store(monkeypatch, at_any_rate=True)


@pytest.mark.usefixtures("_patience")
@pytest.mark.parametrize(("kind", "bucket"), [("hybrid", JuiceFs), ("full", Rclone)])
async def test_a_conversation_goes_on_at_the_other_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bucket: type[Bucket]
) -> None:
    async with open_pair(kind, bucket(tmp_path / "bucket"), tmp_path, monkeypatch) as pair:
        for turn in range(4):
            here = turn // 2 % 2
            n_new, n_evaluated = await pair.ask(here, REQUESTS[turn])
            assert n_evaluated <= n_new + SLACK_TOKENS
            await pair.uploaded(here)
        stored = [each for page in obstore.list(open_bucket(pair.link.behind)) for each in page]
        kinds = {each["path"].rpartition(".")[2] for each in stored}
        assert {"state", "meta"} <= kinds
        for each in stored:  # nobody who has the bucket reads a word
            with suppress(FileNotFoundError):  # a newer state has taken its place
                found = bytes(obstore.get(open_bucket(pair.link.behind), each["path"]).bytes())
                assert b"ggsq" not in found[:64] and b"full" not in found


@pytest.mark.usefixtures("_patience")
async def test_a_laptop_that_sleeps_is_missed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pair("hybrid", Rclone(tmp_path / "bucket"), tmp_path, monkeypatch) as pair:
        laptop, desktop = pair.rigs
        await pair.ask(0, REQUESTS[0])
        await laptop.stop_proxy()  # what it has goes up before it ends
        n_new, n_evaluated = await pair.ask(1, REQUESTS[1])
        assert n_evaluated <= n_new + SLACK_TOKENS
        assert desktop.sample("shared_fetches_total", result="done") == 1


@pytest.mark.usefixtures("_patience")
async def test_a_state_that_has_made_way_for_a_newer_one_leads_to_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "_LOOK_SECONDS", 3600.0)
    async with open_pair("hybrid", Rclone(tmp_path / "bucket"), tmp_path, monkeypatch) as pair:
        await pair.ask(0, REQUESTS[0])
        await pair.uploaded(0)
        store, other = pair.rigs[0].running.store, pair.rigs[1].running.shared.tier
        assert store is not None and other is not None
        (older,) = store
        await other.look(other.remote.folder(older.namespace))
        assert len(other.remote.known) == 1
        await pair.ask(0, REQUESTS[1])
        await pair.uploaded(0)
        await until(lambda: _states(pair.link.behind) == 1)  # the older one is superseded

        n_new, n_evaluated = await pair.ask(1, REQUESTS[2])
        assert n_evaluated <= n_new + SLACK_TOKENS


def _states(endpoint: str) -> int:
    pages = obstore.list(open_bucket(endpoint))
    return sum(each["path"].endswith(".state") for page in pages for each in page)


@pytest.mark.long  # the breaker waits longer after each
async def test_no_fault_of_the_bucket_reaches_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pair("hybrid", Rclone(tmp_path / "bucket"), tmp_path, monkeypatch) as pair:
        await pair.ask(0, REQUESTS[0])
        await pair.uploaded(0)
        faults = [fault for fault in Fault if fault is not Fault.NONE]
        for number, fault in enumerate(faults):
            n_before = pair.link.n_harmed
            pair.link.harm(fault)
            # Whoever asks, it is not the one that asked before.
            messages = REQUESTS[1 + number % (len(REQUESTS) - 1)]
            n_new, n_evaluated = await pair.ask((number + 1) % 2, messages)
            assert n_evaluated >= min(n_new, 1)
            await until(lambda: pair.link.n_harmed > n_before)  # noqa: B023
            pair.link.heal()
        for rig in pair.rigs:
            await rig.reasons_are()
        n_new, n_evaluated = await pair.ask(1, REQUESTS[-1])
        await pair.uploaded(1)
