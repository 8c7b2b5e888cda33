"""Waiting for slots: in arrival order, and nothing is lost whatever is cancelled or fails."""

import asyncio

import pytest

from proxy.core.slots import TAINTED, SlotPhase
from proxy.errors import ServerAway, TooManyRequests
from proxy.serving.queue import Choice, Lease, SlotQueue
from tests.unit.queues import ONE, TWO, any_slot, both_slots, join, n_free, queue_of, soon


async def test_lease_of_a_free_slot_is_granted_at_once() -> None:
    queue = queue_of(1)
    with await queue.lease(any_slot(queue)) as lease:
        assert lease.held == (ONE,)
        assert n_free(queue) == 0
    assert n_free(queue) == 1


async def test_lease_left_by_an_exception_is_given_back() -> None:
    queue = queue_of(1)
    with pytest.raises(KeyError):
        with await queue.lease(any_slot(queue)):
            raise KeyError
    assert n_free(queue) == 1


async def test_leases_are_granted_in_arrival_order() -> None:
    queue = queue_of(1)
    order: list[int] = []

    async def use(number: int) -> None:
        with await queue.lease(any_slot(queue)):
            order.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(use(number))
    assert order == [0, 1, 2, 3, 4, 5]
    assert n_free(queue) == 1


async def test_request_that_was_long_in_reading_keeps_the_place_of_its_arrival() -> None:
    queue = queue_of(1)
    held = await queue.lease(any_slot(queue))
    late = await join(queue, any_slot(queue))
    early = asyncio.ensure_future(queue.lease(any_slot(queue), since=0.0))
    await asyncio.sleep(0)
    held.release()
    with await soon(early):
        assert not late.done()
    (await soon(late)).release()


async def test_newcomer_does_not_overtake_one_who_waits_for_more_slots() -> None:
    queue = queue_of(2)
    first = await queue.lease(any_slot(queue))
    wants_both = await join(queue, both_slots(queue))
    newcomer = await join(queue, any_slot(queue))
    assert not newcomer.done()
    first.release()
    both = await soon(wants_both)
    assert both.held and not newcomer.done()
    queue.take_back(both, [TWO])
    assert (await soon(newcomer)).held == (TWO,)


async def test_cancel_while_waiting_leaves_the_queue_to_the_others() -> None:
    queue = queue_of(1)
    held = await queue.lease(any_slot(queue))
    first, second = await join(queue, any_slot(queue)), await join(queue, any_slot(queue))
    first.cancel()
    held.release()
    assert (await soon(second)).held == (ONE,)
    assert first.cancelled() and queue.n_waiting == 0


async def test_cancel_of_the_head_lets_the_next_one_in() -> None:
    queue = queue_of(2)
    held = await queue.lease(any_slot(queue))
    wants_both = await join(queue, both_slots(queue))
    wants_one = await join(queue, any_slot(queue))
    wants_both.cancel()
    assert (await soon(wants_one)).held == (TWO,)
    held.release()


async def test_cancel_between_grant_and_wake_up_does_not_lose_the_slot() -> None:
    queue = queue_of(1)
    held = await queue.lease(any_slot(queue))
    first, second = await join(queue, any_slot(queue)), await join(queue, any_slot(queue))
    held.release()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(first)
    with await soon(second):
        assert n_free(queue) == 0
    assert n_free(queue) == 1


async def test_lease_with_a_full_queue_is_refused() -> None:
    queue = queue_of(1, max_waiting=1)
    held = await queue.lease(any_slot(queue))
    waiting = await join(queue, any_slot(queue))
    with pytest.raises(TooManyRequests):
        await queue.lease(any_slot(queue))
    held.release()
    (await soon(waiting)).release()
    (await queue.lease(any_slot(queue))).release()


async def test_close_sends_everybody_away_and_refuses_newcomers() -> None:
    queue = queue_of(1)
    held = await queue.lease(any_slot(queue))
    waiting = [await join(queue, any_slot(queue)) for _ in range(3)]
    queue.close()
    for task in waiting:
        with pytest.raises(ServerAway):
            await soon(task)
    held.release()
    with pytest.raises(ServerAway):
        await queue.lease(any_slot(queue))
    assert queue.try_lease(ONE) is None


async def test_close_of_a_waiter_that_is_cancelled_too_raises_nothing_else() -> None:
    queue = queue_of(1)
    await queue.lease(any_slot(queue))
    waiting = await join(queue, any_slot(queue))
    queue.close()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(waiting)


async def test_hand_over_gives_the_slot_back_when_the_task_ends() -> None:
    queue = queue_of(1)
    done = asyncio.Event()
    with await queue.lease(any_slot(queue)) as lease:
        task = asyncio.get_running_loop().create_task(done.wait())
        lease.hand_over(task)
        assert lease.held == ()
    assert n_free(queue) == 0
    done.set()
    await soon(task)
    await asyncio.sleep(0)
    assert n_free(queue) == 1


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_hand_over_to_a_task_that_fails_gives_the_slot_back(is_cancelled: bool) -> None:
    queue = queue_of(1)

    async def work() -> None:
        await asyncio.sleep(0)
        raise KeyError

    task = asyncio.get_running_loop().create_task(work())
    with await queue.lease(any_slot(queue)) as lease:
        lease.hand_over(task)
    if is_cancelled:
        task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert n_free(queue) == 1
    assert task.cancelled() or isinstance(task.exception(), KeyError)


async def test_slots_that_are_handed_on_are_given_back_by_the_last_task() -> None:
    queue, saved = queue_of(1), asyncio.get_running_loop().create_future()
    with await queue.lease(any_slot(queue)) as lease:
        task = asyncio.get_running_loop().create_task(asyncio.sleep(0))
        lease.hand_over(task)
        lease.hand_over(saved)
    await soon(task)
    await asyncio.sleep(0)
    assert n_free(queue) == 0
    saved.set_result(None)
    await asyncio.sleep(0)
    assert n_free(queue) == 1


async def test_hand_over_after_a_partial_release_passes_on_the_rest() -> None:
    queue = queue_of(2)
    lease = await queue.lease(both_slots(queue))
    queue.take_back(lease, [ONE])
    task = asyncio.get_running_loop().create_task(asyncio.sleep(0))
    lease.hand_over(task)
    assert [slot.id for slot in queue.table.free()] == [ONE]
    await soon(task)
    await asyncio.sleep(0)
    assert n_free(queue) == 2


async def test_release_twice_does_not_free_somebody_elses_lease() -> None:
    queue = queue_of(1)
    lease = await queue.lease(any_slot(queue))
    lease.release()
    successor = await queue.lease(any_slot(queue))
    lease.release()
    assert n_free(queue) == 0
    successor.release()


async def test_exception_in_choose_reaches_who_asks() -> None:
    def broken() -> Choice | None:
        raise KeyError("broken")

    with pytest.raises(KeyError):
        await queue_of(1).lease(broken)


async def test_exception_in_choose_of_a_waiter_reaches_it_and_the_queue_moves_on() -> None:
    queue = queue_of(1)
    held = await queue.lease(any_slot(queue))

    def broken() -> Choice | None:
        raise KeyError("broken")

    unlucky, lucky = await join(queue, broken), await join(queue, any_slot(queue))
    held.release()
    with pytest.raises(KeyError):
        await soon(unlucky)
    assert (await soon(lucky)).held == (ONE,)
    assert queue.n_waiting == 0


async def test_choice_of_a_leased_slot_harms_the_one_who_made_it_only() -> None:
    queue = queue_of(2)
    held, other = await queue.lease(any_slot(queue)), await queue.lease(any_slot(queue))
    choices = iter([None, Choice((ONE, TWO))])
    mistaken = await join(queue, lambda: next(choices))
    lucky = await join(queue, any_slot(queue))
    held.release()
    with pytest.raises(ValueError, match="leased already"):
        await soon(mistaken)
    assert (await soon(lucky)).held == (ONE,)
    other.release()


async def test_try_lease_takes_a_free_slot_only_when_nobody_waits() -> None:
    queue = queue_of(2)
    lease = queue.try_lease(ONE)
    assert lease is not None and queue.try_lease(ONE) is None
    waiting = await join(queue, both_slots(queue))
    assert queue.try_lease(TWO) is None
    lease.release()
    (await soon(waiting)).release()
    assert queue.try_lease(TWO) is not None


async def placement(queue: SlotQueue) -> Lease:
    """Return the lease of a request that llama-server may put into any idle slot."""

    def all_free() -> Choice | None:
        free = tuple(slot.id for slot in queue.table.free())
        return Choice(free) if free else None

    return await queue.lease(all_free, is_placement=True)


async def test_nothing_is_granted_while_a_request_may_land_in_any_slot() -> None:
    queue = queue_of(2)
    running = await queue.lease(any_slot(queue))
    placing = await placement(queue)
    newcomer = await join(queue, any_slot(queue))
    running.release()
    assert placing.held == (ONE, TWO) and not newcomer.done()
    assert queue.try_lease(ONE) is None
    queue.end_placement(placing, [ONE])
    assert list(placing.held) == [ONE]
    assert (await soon(newcomer)).held == (TWO,)
    assert queue.table[ONE].phase is SlotPhase.RUNNING and not queue.is_placing


async def test_placement_that_ends_with_its_request_frees_every_slot() -> None:
    queue = queue_of(2)
    running = await queue.lease(any_slot(queue))
    with await placement(queue):
        running.release()
        assert n_free(queue) == 0
    assert n_free(queue) == 2 and not queue.is_placing


async def test_abandoned_placement_taints_the_slots_that_come_free_meanwhile() -> None:
    queue = queue_of(2)
    running = await queue.lease(any_slot(queue))
    let_go = asyncio.Event()
    task = asyncio.get_running_loop().create_task(let_go.wait())
    (await placement(queue)).hand_over(task)
    assert queue.is_placing
    running.release()
    assert (n_free(queue), queue.table[ONE].content) == (0, TAINTED)
    let_go.set()
    await soon(task)
    await asyncio.sleep(0)
    assert n_free(queue) == 2 and not queue.is_placing


async def test_placement_that_uses_every_slot_keeps_them() -> None:
    queue = queue_of(1)
    with await placement(queue) as placing:
        queue.end_placement(placing, [ONE])
        assert (placing.held, n_free(queue), queue.is_placing) == ((ONE,), 0, False)
    assert n_free(queue) == 1


async def test_slot_that_joins_an_abandoned_placement_is_reserved_with_it() -> None:
    queue = queue_of(2)
    running, placing = await queue.lease(any_slot(queue)), await placement(queue)
    let_go = asyncio.Event()
    placing.hand_over(asyncio.get_running_loop().create_task(let_go.wait()))
    running.release()
    assert (placing.held, set(placing.reserved)) == ((), {ONE, TWO})
    let_go.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert n_free(queue) == 2


def calls_of(queue: SlotQueue) -> list[SlotQueue]:
    """Return a list that grows whenever the queue tells that a slot is left over."""
    calls: list[SlotQueue] = []
    queue.on_idle = calls.append
    return calls


async def test_slot_that_came_free_during_a_hold_is_told_when_the_hold_ends() -> None:
    queue = queue_of(2)
    idle = calls_of(queue)
    lease, hold = await queue.lease(any_slot(queue)), await queue.hold()
    lease.release()
    assert idle == []
    hold.end()
    assert idle == [queue]
    await queue.until_unheld()
    assert idle == [queue]  # no other slot has come free


async def test_slot_that_a_request_left_without_is_told() -> None:
    queue = queue_of(2)
    idle = calls_of(queue)
    first, second = await queue.lease(any_slot(queue)), await queue.lease(any_slot(queue))
    wants_both = await join(queue, both_slots(queue))
    first.release()
    assert idle == []
    wants_both.cancel()
    await asyncio.wait([wants_both])
    assert idle == [queue]
    second.release()
    assert idle == [queue, queue]


async def test_slot_that_a_request_takes_is_not_told() -> None:
    queue = queue_of(1)
    idle = calls_of(queue)
    lease, hold = await queue.lease(any_slot(queue)), await queue.hold()
    waiting = await join(queue, any_slot(queue))
    lease.release()
    hold.end()
    taken = await soon(waiting)
    assert idle == []
    taken.release()
    assert idle == [queue]
