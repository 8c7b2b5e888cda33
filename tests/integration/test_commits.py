"""What goes wrong between llama-server's write of a file and its commit, while its slot serves others."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.conditions import DegradationKind
from proxy.core.model import Candidate, Checkpoint, SlotId
from proxy.core.saving import StateSize, is_write_back_due
from proxy.core.slots import TAINTED, Known, SlotPhase
from proxy.errors import NoRoom
from proxy.llama.files import read_state_file
from proxy.servers.background import is_due
from proxy.serving import planning, saver
from proxy.serving.process import Process
from proxy.store.files import StateFiles
from proxy.store.store import N_NEWEST, CheckpointStore
from tests.fakes.faults import Faults, Gate
from tests.fakes.slots import Memory
from tests.integration.conftest import StartRig, evaluate_ahead_at_once
from tests.integration.rig import CHAT, COMPLETION, Rig, question, text
from tests.lab.steady import measure_an_idle_machine
from tests.lab.waiting import HANG_SECONDS, until

FIRST = SlotId(0)


def hold_commits(monkeypatch: pytest.MonkeyPatch, n_calls: int | None = None) -> Gate:
    """Hold the next *n_calls* commits, or all, until the gate is opened."""
    gate, commit = Gate(n_calls), CheckpointStore.commit

    async def held(store: CheckpointStore, *new: Any) -> Any:
        await gate.arrive()
        return await commit(store, *new)

    monkeypatch.setattr(CheckpointStore, "commit", held)
    return gate


async def displace_and_hold(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, n_calls: int | None = None
) -> Gate:
    """Have conversation b displace conversation a, and hold the commit of a's state."""
    await rig.chat("a")
    commits = hold_commits(monkeypatch, n_calls)
    await rig.chat("b")
    await commits.reached()
    return commits


class HeldCheck:
    """Holds the next check of a file that llama-server has written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go_on = threading.Event()
        monkeypatch.setattr(saver, "read_state_file", self._read_late)
        self.has_come = False

    def go_on(self) -> None:
        self._may_go_on.set()

    def _read_late(self, path: Any) -> Any:
        self.has_come = True
        self._may_go_on.wait(HANG_SECONDS)
        return read_state_file(path)


@pytest.fixture
def held_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HeldCheck]]:
    """Let all checks go on in the end: a thread that waits would keep the test from ending."""
    held: list[HeldCheck] = []
    yield held
    for check in held:
        check.go_on()


async def saves_failed(rig: Rig) -> None:
    await until(lambda: rig.sample("saves_total", result="failed"))
    await until(lambda: not rig.temporary_files())


async def test_request_is_answered_while_what_it_and_one_before_displaced_is_committed(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        commits = hold_commits(monkeypatch)
        for name in "abc":
            assert (await rig.chat(name)).status == 200
        assert rig.checkpoints == []
        commits.open()
        await until(lambda: len(rig.checkpoints) == 2)
        assert (await rig.chat("a")).n_reused > 300


@pytest.mark.parametrize(("n_slots", "fields"), [(1, {"n_cache_reuse": 8}), (2, {})])
async def test_request_is_answered_while_what_it_empties_is_committed(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, n_slots: int, fields: dict[str, int]
) -> None:
    faults = Faults(clears_idle_slots=n_slots > 1)
    async with start_rig(n_slots=n_slots, faults=faults, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        commits = hold_commits(monkeypatch)
        asked = rig.begin_chat("b", **fields)
        await commits.reached()
        await until(asked.done)
        assert rig.checkpoints == []
        commits.open()
        await until(lambda: rig.checkpoints)


async def test_disk_that_commits_nothing_gets_no_more_files_of_a_slot(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        commits = hold_commits(monkeypatch)
        for name in "abc":
            await rig.chat(name)
        process, behind = await rig.attached(), rig.begin_chat("d")
        await until(lambda: len(process.saves.under_way) == 3)
        await asyncio.wait({behind}, timeout=0.1)  # time for a third file, if it can come
        assert len(rig.temporary_files()) == 2
        commits.open()
        assert (await behind).status == 200
        await until(lambda: len(rig.checkpoints) == 3)


async def test_idle_slot_is_not_saved_while_two_of_its_files_wait_for_the_disk(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=0.1) as rig:
        commits, process = hold_commits(monkeypatch), await rig.attached()

        def is_dirty() -> bool:
            return is_write_back_due(process.rule, process.slots[FIRST].content)

        for _ in range(2):
            await rig.chat("a", max_tokens=40)
            await until(lambda: not is_dirty() and process.slots.free())
        await until(lambda: len(rig.temporary_files()) == 2)
        await rig.chat("a", max_tokens=40)
        assert is_dirty()
        assert not is_due(process, process.slots[FIRST], 0.0), "the next request would wait"
        commits.open()
        await rig.settled()
        assert len(rig.checkpoints) == 1


async def test_nothing_is_evaluated_ahead_over_what_the_disk_cannot_take_yet(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = evaluate_ahead_at_once(monkeypatch)
    async with start_rig(n_slots=1, **how) as rig:
        process = await rig.attached()
        for _ in range(2):
            await process.saves.uncommitted[FIRST].acquire()
        await rig.chat("a", max_tokens=40)
        await rig.running.pool.accounted()
        await until(lambda: process.slots.free() and not process.tasks)
        assert is_write_back_due(process.rule, process.slots[FIRST].content)
        for _ in range(2):
            process.saves.uncommitted[FIRST].release()


async def test_state_that_the_disk_does_not_take_in_time_is_evaluated_again(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        monkeypatch.setattr(planning, "LEAST_DISK_SECONDS", 0.1)
        commits = await displace_and_hold(rig, monkeypatch)
        assert (await rig.chat("a")).n_reused <= 4
        commits.open()
        await rig.settled()


async def test_relatives_of_a_state_are_found_beside_requests(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, find = set[threading.Thread](), CheckpointStore.find

    def noted(store: CheckpointStore, *prompt: Any) -> Iterator[Candidate]:
        threads.add(threading.current_thread())
        yield from find(store, *prompt)

    monkeypatch.setattr(CheckpointStore, "find", noted)
    async with start_rig(n_slots=1) as rig:
        await rig.chat("a")
        await rig.settled()
        assert threads > {threading.main_thread()}, "a request's own lookup needs few of them"


async def test_sizes_of_stored_states_are_read_only_as_long_as_few_were_saved(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, newest = list[int](), CheckpointStore.newest

    def noted(store: CheckpointStore, n_at_most: int) -> Iterator[Checkpoint]:
        asked.append(n_at_most)
        return newest(store, n_at_most)

    async with start_rig(n_slots=1) as rig:
        assert rig.process is not None
        sizes = rig.process.sizes
        sizes.extend([StateSize(300, 0, 1000)] * 300)
        monkeypatch.setattr(CheckpointStore, "newest", noted)
        await rig.chat("a")
        await rig.settled()
        # The time that a state needs to be read is measured once, with some of the newest.
        assert set(asked) - {N_NEWEST} == {0} and sizes[-1].n_tokens > 300


async def test_conversation_goes_on_in_its_slot_while_its_state_is_committed(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1) as rig:
        commits = hold_commits(monkeypatch)
        await rig.chat("a")
        process = await rig.attached()
        await until(lambda: process.saves.under_way and not process.slots[FIRST].is_leased)
        assert (await rig.chat("a", max_tokens=40)).n_reused > 300
        assert (rig.checkpoints, rig.sample("drift_total")) == ([], 0)
        commits.open()
        await rig.settled()
        [(_, n_tokens)] = rig.checkpoints
        assert n_tokens > 340
        assert rig.sample("saves_total", result="done") == 2


async def test_file_that_is_rejected_after_its_slot_was_given_away_harms_nobody(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, held_checks: list[HeldCheck]
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        held_checks.append(check := HeldCheck(monkeypatch))
        rig.server.faults.saves_other_tokens = True
        # A request that begins with a token of the slot waits for the check: this one does not.
        other = {"prompt": list(range(500, 900)), "n_predict": 4}
        assert (await rig.post(COMPLETION, other)).n_reused == 0
        await until(lambda: check.has_come)
        rig.server.faults.saves_other_tokens = False
        check.go_on()
        await saves_failed(rig)
        assert (rig.checkpoints, rig.sample("drift_total")) == ([], 1)
        assert (await rig.post(COMPLETION, other)).n_reused == 399
        await rig.chat("a")
        await until(lambda: rig.checkpoints)
        assert (await rig.post(COMPLETION, other)).n_reused == 399


async def test_request_that_runs_is_not_disturbed_by_what_a_save_of_its_slot_tells(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        commits, process = hold_commits(monkeypatch), await rig.attached()
        await process.saves.begin(FIRST)
        chunks = rig.server.hold("chunk")
        body = {"messages": question("a"), "stream": True, "max_tokens": 40}
        streaming = asyncio.ensure_future(rig.post(CHAT, body))
        await until(lambda: process.slots[FIRST].phase is SlotPhase.RUNNING)
        commits.open()
        await until(lambda: not process.saves.under_way)
        content = process.slots[FIRST].content
        assert isinstance(content, Known)
        assert content.n_tail == 0  # the file has told the answer's tokens
        assert process.slots[FIRST].phase is SlotPhase.RUNNING
        chunks.open()
        assert (await streaming).status == 200


@pytest.mark.parametrize("fault", ["rejected", "not committed"])
async def test_conversation_that_went_on_in_its_slot_is_saved_after_a_save_that_failed_late(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, held_checks: list[HeldCheck], fault: str
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        held_checks.append(check := HeldCheck(monkeypatch))
        process = await rig.attached()
        rig.server.faults.saves_other_tokens = fault == "rejected"
        with monkeypatch.context() as full:
            if fault != "rejected":
                full.setattr(StateFiles, "seal", _fail)
            await process.saves.begin(FIRST)
            assert (await rig.chat("a", max_tokens=40)).n_reused > 300
            check.go_on()
            await saves_failed(rig)
        rig.server.faults = Faults()
        assert (await rig.chat("b")).status == 200
        await until(lambda: rig.checkpoints)
        assert (await rig.chat("a", max_tokens=40)).n_reused > 300


def _fail(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize(("owner", "step"), [(StateFiles, "seal"), (saver.Saver, "thin")])
async def test_disk_that_is_full_at_the_commit_costs_the_next_request_nothing(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, owner: type[Any], step: str
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        with monkeypatch.context() as full:
            full.setattr(owner, step, _fail)
            assert (await rig.chat("b")).status == 200
            await saves_failed(rig)
        assert await rig.reasons() == [DegradationKind.SAVES_FAIL]
        assert rig.sample("requests_total", outcome="degraded") == 0
        assert (await rig.chat("a")).n_reused <= 4  # which saves b
        await until(lambda: rig.checkpoints)
        await until(lambda: DegradationKind.SAVES_FAIL not in rig.running.degradations)
        assert (await rig.chat("b")).n_reused > 300


async def test_save_with_no_room_for_its_real_size_is_made_up_for(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise NoRoom("budget", "larger than expected")

    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        process = await rig.attached()
        with monkeypatch.context() as full:
            full.setattr(CheckpointStore, "settle", refuse)
            await process.saves.begin(FIRST)
            await until(lambda: not process.saves.under_way)
        lease = process.queue.try_lease(FIRST)
        assert lease is not None
        with lease:  # a request that is given up before it is sent leaves the slot as it was
            process.saves.take_up_postponed()
        await process.saves.begin(FIRST)
        await until(lambda: not process.saves.under_way)
        assert len(rig.checkpoints) == 1


async def test_states_of_one_slot_are_committed_in_the_order_of_their_saves(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        commits, process = hold_commits(monkeypatch, 1), await rig.attached()
        await process.saves.begin(FIRST)
        reply = await rig.chat("a", max_tokens=40)
        behind = rig.begin_chat("b")
        await until(lambda: len(process.saves.under_way) == 2)
        await asyncio.wait({behind}, timeout=0.3)  # time for the second to overtake, if it can
        commits.open()
        assert (await behind).status == 200
        await until(lambda: not process.saves.under_way)
        assert rig.checkpoints == [("conversation", reply.n_prompt + 39)]


async def test_file_that_is_changed_before_its_commit_is_not_restored(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        commits = await displace_and_hold(rig, monkeypatch)
        [name] = rig.temporary_files()
        path = rig.server.directory / name
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        with path.open("r+b") as file:
            file.write(content)
            os.fsync(file.fileno())
        commits.open()
        await until(lambda: rig.checkpoints)
        assert (await rig.chat("a")).n_reused <= 4
        assert rig.sample("restores_total", result="done") == 0


async def test_state_of_a_process_that_ended_before_the_commit_is_kept(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        commits = await displace_and_hold(rig, monkeypatch, 1)
        before = rig.process
        rig.server.replace_process()
        await until(lambda: rig.process not in (None, before))
        assert (await rig.chat("c")).status == 200
        commits.open()
        await until(lambda: rig.checkpoints)
        assert (await rig.chat("a")).n_reused > 300
        assert rig.sample("saves_total", result="failed") == 0


async def test_process_that_ends_while_it_writes_leaves_nothing(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        gate = rig.server.hold("save", n_calls=1)
        behind = rig.begin_chat("b")
        await gate.reached()
        rig.server.replace_process()
        gate.open()
        assert (await behind).status == 200
        await saves_failed(rig)
        assert rig.checkpoints == []


async def test_stop_waits_for_a_commit_beside_requests(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        commits = await displace_and_hold(rig, monkeypatch)
        stopping = asyncio.ensure_future(rig.stop_proxy())
        await asyncio.wait({stopping}, timeout=0.1)
        assert not stopping.done()
        commits.open()
        await stopping
        await rig.start_proxy()
        assert len(rig.checkpoints) == 2
        assert (await rig.chat("a")).n_reused > 300


async def lose_points_that_a_file_has(rig: Rig) -> tuple[Process, tuple[str, int]]:
    """Save a conversation, go on, and drop older points of the slot; return the process and the state."""
    process = await rig.attached()
    asked = [*question("a"), {"role": "user", "content": text("b", 1500)}]
    await rig.chat(asked)
    await process.saves.begin(FIRST)
    await until(lambda: not process.saves.under_way)
    (saved,) = rig.checkpoints
    await rig.chat([*asked, *question("c", 1500)])
    rig.server.slots[0].points = rig.server.slots[0].points[-1:]
    return process, saved


async def test_state_is_kept_without_the_points_of_an_older_file_that_there_is_no_room_for(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_an_idle_machine(monkeypatch)
    settle, more = CheckpointStore.settle, list[int]()

    async def settle_if_no_larger(store: CheckpointStore, name: str, n_bytes: int) -> None:
        if n_bytes > store.files.size_bytes(name):
            more.append(n_bytes)
            n_bytes = store.writes.max_bytes + 1
        await settle(store, name, n_bytes)

    async with start_rig(n_slots=1, memory=Memory.RESTORE_POINTS, idle_save_seconds=60.0) as rig:
        process, before = await lose_points_that_a_file_has(rig)
        monkeypatch.setattr(CheckpointStore, "settle", settle_if_no_larger)
        await process.saves.begin(FIRST)
        await until(lambda: not process.saves.under_way)
        assert more and max(rig.checkpoints) > before


async def test_state_is_kept_without_the_points_of_an_older_file_that_the_disk_does_not_bring(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_an_idle_machine(monkeypatch)
    monkeypatch.setattr(planning, "LEAST_DISK_SECONDS", 0.1)
    back = threading.Event()
    async with start_rig(n_slots=1, memory=Memory.RESTORE_POINTS, idle_save_seconds=60.0) as rig:
        process, before = await lose_points_that_a_file_has(rig)
        process.store._verification.verified.clear()
        monkeypatch.setattr(StateFiles, "n_changed", lambda *_, **__: back.wait(HANG_SECONDS))
        try:
            await process.saves.begin(FIRST)
            await until(lambda: process.store._verifying)
            await until(lambda: not process.saves.under_way)
            assert max(rig.checkpoints) > before
        finally:
            back.set()


async def test_slot_that_went_on_learns_the_restore_points_of_its_file(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig(n_slots=1, memory=Memory.RESTORE_POINTS, idle_save_seconds=60.0) as rig:
        process = await rig.attached()
        process.n_kept_points = 32  # nothing is saved before its time
        await rig.chat("a")
        commits = hold_commits(monkeypatch)
        await process.saves.begin(FIRST)
        await rig.chat("a", max_tokens=40)
        commits.open()
        await until(lambda: not process.saves.under_way)
        assert rig.running.store is not None
        [checkpoint] = rig.running.store
        content = process.slots[FIRST].content
        assert isinstance(content, Known)
        assert set(content.saved_points) & set(checkpoint.restore_points)


@pytest.mark.parametrize("is_rejected", [False, True])
async def test_commit_leaves_to_a_newer_save_of_the_slot_what_the_slot_holds(
    start_rig: StartRig,
    monkeypatch: pytest.MonkeyPatch,
    held_checks: list[HeldCheck],
    is_rejected: bool,
) -> None:
    async with start_rig(n_slots=1, memory=Memory.RESTORE_POINTS, idle_save_seconds=60.0) as rig:
        process = await rig.attached()
        process.n_kept_points = 32  # nothing is saved before its time
        await rig.chat("a")
        commits = hold_commits(monkeypatch, 1)
        await process.saves.begin(FIRST)
        await rig.chat("a", max_tokens=40)
        await commits.reached()
        held_checks.append(check := HeldCheck(monkeypatch))
        rig.server.faults.saves_other_tokens = is_rejected
        await process.saves.begin(FIRST)
        commits.open()
        await until(lambda: rig.checkpoints)
        check.go_on()
        await until(lambda: not process.saves.under_way)
        content = process.slots[FIRST].content
        if is_rejected:
            assert content == replace(TAINTED, origin=content.origin)
        else:
            assert isinstance(content, Known)
            assert (content.n_tail, content.is_given_up) == (0, False)  # as the file has told


async def test_save_that_found_no_room_is_not_forgotten_for_an_older_one_of_its_slot(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, held_checks: list[HeldCheck]
) -> None:
    async def refuse(*_: Any) -> None:
        raise NoRoom("budget", "there is none")

    async with start_rig(n_slots=1, idle_save_seconds=60.0) as rig:
        await rig.chat("a")
        held_checks.append(check := HeldCheck(monkeypatch))
        process = await rig.attached()
        await process.saves.begin(FIRST)
        await rig.chat("a", max_tokens=40)
        with monkeypatch.context() as full:
            full.setattr(CheckpointStore, "_make_room", refuse)
            full.setattr(CheckpointStore, "settle", refuse)
            await process.saves.begin(FIRST)
            check.go_on()
            await until(lambda: not process.saves.under_way)
        process.saves.take_up_postponed()
        await process.saves.begin(FIRST)
        await until(lambda: not process.saves.under_way)
        assert len(rig.checkpoints) == 1
