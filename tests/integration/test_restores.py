"""Restores that go wrong: the request is evaluated from what is left, the checkpoint is judged fairly."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.core.eviction import Removal
from proxy.core.model import Candidate, Checkpoint, SlotId
from proxy.core.plan import Start
from proxy.core.slots import Empty
from proxy.explain.causes import Cause
from proxy.servers import background
from proxy.serving import planning
from proxy.store.files import StateFiles
from tests.fakes.faults import Faults
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig, evaluate_ahead_at_once
from tests.integration.rig import Rig, hang_up, next_question, question, text
from tests.lab.waiting import HANG_SECONDS, until

FULL_PROMPT = 309


async def displace(rig: Rig, name: str = "b") -> None:
    """Have the only slot used by another conversation, with everything saved."""
    await rig.settled()
    await rig.chat(name)
    await rig.settled()


async def save_a(rig: Rig) -> None:
    await rig.chat("a")
    await displace(rig)


def damage_states(rig: Rig) -> list[Path]:
    """Change the last byte of each state file; return the files."""
    paths = list(rig.server.directory.glob("lpc-*.state"))
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    return paths


def restore_ahead(monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint) -> None:
    """Have the proxy begin with a restore where it evaluates ahead, and do that for any prompt."""

    def restore(_: Any, __: Any, slot_id: SlotId) -> Any:
        restored = Candidate(checkpoint, checkpoint.n_tokens)
        return SimpleNamespace(start=Start(slot_id, 1, restored=restored))

    evaluate_ahead_at_once(monkeypatch)
    monkeypatch.setattr(background, "plan_in", restore)


async def test_displaced_conversation_is_restored(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        reply = await rig.chat("a")
        assert reply.n_reused == FULL_PROMPT - 1
        assert rig.sample("restores_total", result="done") == 1
        assert rig.sample("requests_total", outcome="hit") >= 1


async def test_refused_restore_degrades_and_is_not_tried_again(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.refuse["restore"] = 400
        reply = await rig.chat("a")
        assert reply.n_reused == 0
        said = f"reused=0 evaluated={FULL_PROMPT} cause=restore-refused"
        assert reply.headers["X-Prefix-Cache"] == said
        assert rig.sample("restores_total", result="refused") == 1
        assert rig.sample("requests_total", outcome="degraded") == 1
        assert rig.sample("cache_faults_total", stage="prepare") == 1
        n_restores = len(rig.server.seen_at("restore"))
        await hang_up(rig.begin_chat("c"))
        assert len(rig.server.seen_at("restore")) == n_restores


async def test_refused_checkpoint_is_quarantined(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=0.05) as rig:
        await save_a(rig)
        rig.server.faults.refuse.update(restore=400, save=500)
        await rig.chat("a")
        await rig.settled()
        await rig.chat("c")  # a's own slot is displaced, and its second save failed
        rig.server.faults = Faults()
        n_restores = len(rig.server.seen_at("restore"))
        assert (await rig.chat("a")).n_reused <= 4
        assert len(rig.server.seen_at("restore")) == n_restores


async def test_ineffective_restore_quarantines_the_checkpoint(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.restores_are_inert = True
        rig.server.faults.refuse["save"] = 500
        reply = await rig.chat("a")
        assert (reply.status, reply.n_reused) == (200, 0)
        await until(lambda: rig.sample("restore_ineffective_total") == 1)
        assert rig.sample("requests_total", outcome="degraded") == 0
        await displace(rig, "c")
        n_restores = len(rig.server.seen_at("restore"))
        assert (await rig.chat("a")).n_reused <= 4
        assert len(rig.server.seen_at("restore")) == n_restores
        assert rig.sample("restore_ineffective_total") == 1


async def test_ineffective_restore_before_a_stop_is_noticed(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, memory=Memory.RESTORE_POINTS) as rig:
        first = await rig.chat("a")
        await displace(rig)
        rig.server.faults.restores_are_inert = True
        said = first.content["choices"][0]["message"]
        more = {"role": "user", "content": "".join(f" more{i}" for i in range(200))}
        reply = await rig.chat([*question("a"), said, more])
        assert reply.status == 200
        await until(lambda: rig.sample("restore_ineffective_total") == 1)


@pytest.mark.parametrize(
    ("memory", "n_words"),
    [(Memory.ANY_PREFIX, 200), (Memory.RESTORE_POINTS, 2500)],
    ids=["send", "stop"],
)
@pytest.mark.parametrize("is_restored", [True, False], ids=["after", "before"])
async def test_checkpoint_is_not_blamed_for_a_restart_that_nobody_noticed(
    start_rig: StartRig,
    monkeypatch: pytest.MonkeyPatch,
    is_restored: bool,
    memory: Memory,
    n_words: int,
) -> None:
    async with start_rig(n_slots=1, memory=memory) as rig:
        first = await rig.chat("a")
        await displace(rig)
        process = await rig.settled()
        await rig.unwatched(monkeypatch)
        restore = process.restore

        async def restart(*given: Any) -> None:
            if is_restored:
                await restore(*given)
            rig.server.replace_process()
            if not is_restored:  # the new process has other flags, and refuses
                rig.server.faults.refuse["restore"] = 400
                try:
                    await restore(*given)
                finally:
                    rig.server.faults.refuse.clear()

        monkeypatch.setattr(process, "restore", restart)
        said = first.content["choices"][0]["message"]
        more = {"role": "user", "content": text("more", n_words)}
        await rig.chat([*question("a"), said, more])
        rig.running.server.poke()
        await rig.settled()
        store = rig.running.store
        assert store is not None and not any(map(store.is_quarantined, store))
        assert rig.sample("restore_ineffective_total") == 0
        assert rig.sample("restores_total", result="done") == 1


async def test_restore_that_never_answers_degrades(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        gate = rig.server.hold("restore")
        asked = rig.begin_chat("a")
        await gate.reached()
        rig.running.server.upstream.cut_silent(0.0)  # as its time limit does
        await until(lambda: rig.sample("restores_total", result="refused"))
        rig.server.release("restore")
        assert (await asked).status == 200
        assert rig.sample("requests_total", outcome="degraded") == 1


async def test_slow_restore_is_waited_for(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        rig.server.faults.slow_seconds["restore"] = 0.1
        assert (await rig.chat("a")).n_reused == FULL_PROMPT - 1


async def test_restore_refused_by_a_loading_server_does_not_condemn_the_checkpoint(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        gate = rig.server.hold("restore")
        asked = rig.begin_chat("a")
        await gate.reached()
        await hang_up(asked)  # so that the only state of it is the one in the store
        rig.server.faults.refuse["restore"] = 503
        rig.server.release("restore")
        await until(lambda: rig.sample("restores_total", result="refused"))
        rig.server.faults.refuse.clear()
        await rig.attached()
        assert (await rig.chat("a")).n_reused == FULL_PROMPT - 1


async def test_checkpoint_in_another_file_of_the_same_content_is_restored(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        for path in rig.server.directory.glob("lpc-*.state"):
            path.write_bytes(path.read_bytes())
        assert (await rig.chat("a")).n_reused == FULL_PROMPT - 1


async def test_checkpoint_whose_content_was_changed_is_not_restored_and_the_next_best_one_is(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        forks = [[*question("a"), *question(other, 100)] for other in ("c", "d")]
        for fork in forks:
            await rig.chat(fork)
            await displace(rig)
        store = rig.running.store
        assert store is not None and len(store) == 3
        by_age = sorted(store, key=lambda checkpoint: checkpoint.created_at)
        path = store.files.path(by_age[-1].file_name)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        reply = await rig.chat(forks[1])
        assert reply.n_reused >= FULL_PROMPT - 5
        assert rig.sample("restores_total", result="missing") == 1
        assert rig.sample("damaged_checkpoints_total") == 1
        assert await rig.reasons() == []


async def test_tokens_of_a_state_that_was_damaged_while_the_proxy_was_away_are_missed(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        await rig.stop_proxy()
        damage_states(rig)
        await rig.start_proxy()
        await rig.chat("a")
        (record,) = rig.running.shared.journal.latest(1)
        assert record.cause is Cause.RESTORE_REFUSED and record.n_missed >= FULL_PROMPT - 5


async def test_state_that_the_disk_does_not_bring_in_time_is_used_once_it_has_come(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        await rig.stop_proxy()
        rig.options["idle_save_seconds"] = HANG_SECONDS
        await rig.start_proxy()
        back, read = threading.Event(), StateFiles.n_changed

        def read_late(*given: Any, **how: Any) -> int:
            back.wait(HANG_SECONDS)
            return read(*given, **how)

        monkeypatch.setattr(StateFiles, "n_changed", read_late)
        try:
            with monkeypatch.context() as impatient:
                impatient.setattr(planning, "LEAST_DISK_SECONDS", 0.1)
                assert (await rig.chat("a")).n_reused < 5
        finally:
            back.set()
        store = rig.running.store
        assert store is not None
        await until(lambda: not store._verifying)
        await rig.chat("c")
        assert (await rig.chat("a")).n_reused == FULL_PROMPT - 1


async def test_no_request_waits_for_a_state_that_the_disk_does_not_bring_to_evaluate_ahead(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "LEAST_DISK_SECONDS", 0.1)
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        await rig.stop_proxy()
        rig.options["ahead_seconds"] = HANG_SECONDS
        await rig.start_proxy()
        store = rig.running.store
        assert store is not None
        checkpoint, *_ = store
        back = threading.Event()
        restore_ahead(monkeypatch, checkpoint)
        monkeypatch.setattr(StateFiles, "n_changed", lambda *_, **__: back.wait(HANG_SECONDS))
        try:
            asked = question("c")
            answer = await rig.chat(asked)
            await until(lambda: store._verifying)
            await rig.chat(next_question(asked, answer))
            assert not back.is_set() and store._verifying
        finally:
            back.set()


async def test_state_stays_until_it_is_restored_to_evaluate_ahead(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of another slot may want to take its place meanwhile."""
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        await rig.stop_proxy()
        rig.options["ahead_seconds"] = HANG_SECONDS
        await rig.start_proxy()
        store = rig.running.store
        assert store is not None
        checkpoint, removals = next(c for c in store if c.n_tokens > 300), list[bool]()
        restore_ahead(monkeypatch, checkpoint)

        async def verify(*_: Any) -> None:
            removals.append(await store.remove(checkpoint, Removal.SUPERSEDED))

        monkeypatch.setattr(background, "verify", verify)
        await rig.chat("c")
        await until(lambda: removals)
        assert removals == [False]


async def test_file_that_changes_while_it_is_restored_is_not_reused(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        gate = rig.server.hold("restore")
        asked = rig.begin_chat("a")
        await gate.reached()
        damage_states(rig)
        rig.server.release("restore")
        reply = await asked
        assert (reply.status, reply.n_reused) == (200, 0)


async def test_file_that_a_backup_links_to_while_it_is_restored_is_kept(
    start_rig: StartRig, tmp_path: Path
) -> None:
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        gate = rig.server.hold("restore")
        asked = rig.begin_chat("a")
        await gate.reached()
        for path in rig.server.directory.glob("lpc-*.state"):
            (tmp_path / path.name).hardlink_to(path)  # the content is the same, the ctime is not
        rig.server.release("restore")
        assert (await asked).n_reused == 0, "a file that changed may have loaded anything"
        await displace(rig)
        assert (await rig.chat("a")).n_reused == FULL_PROMPT - 1
        assert rig.sample("evictions_total", reason="broken") == 0


async def test_damage_is_found_in_the_background_before_anybody_asks_for_the_state(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "VERIFY_SECONDS", 0.05)
    async with start_rig(n_slots=1) as rig:
        await save_a(rig)
        paths = damage_states(rig)
        await until(lambda: rig.sample("damaged_checkpoints_total") == len(paths))
        await until(lambda: not any(path.exists() for path in paths))
        assert rig.sample("restores_total", result="missing") == 0


async def test_two_requests_for_one_checkpoint_are_both_served(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2) as rig:
        await rig.chat("a")
        await rig.settled()
        rig.server.replace_process()
        await rig.attached()
        gate = rig.server.hold("restore")
        asked = [rig.begin_chat("a"), rig.begin_chat("a")]
        await until(lambda: gate.n_reached == 2)
        rig.server.release("restore")
        assert [(await reply).n_reused for reply in asked] == [FULL_PROMPT - 1] * 2


async def test_slot_that_is_given_back_meanwhile_is_emptied_for_a_restore(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=3, idle_save_seconds=60.0) as rig:
        for name in "abc":
            await rig.chat(name)
        process = await rig.attached()
        monkeypatch.setattr(process, "shares_cells", True)
        first, second = sorted(process.slots[1:], key=lambda slot: slot.used_at)
        lease = process.queue.try_lease(second.id)
        assert lease is not None

        async def empty(slot_id: SlotId) -> None:
            if slot_id == first.id:  # which cannot be erased
                return lease.release()
            process.slots.set_content(slot_id, Empty())

        monkeypatch.setattr(process, "empty", empty)
        assert await process.empty_oldest(SlotId(0))
