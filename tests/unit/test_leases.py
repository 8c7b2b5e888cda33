"""Waiting for slots: in arrival order, and nothing is lost whatever is cancelled or fails."""

import asyncio

import pytest

from proxy.core.slots import TAINTED
from proxy.errors import ServerAway, TooManyRequests
from proxy.serving.desk import Choice, Lease, LeaseDesk
from tests.unit.desks import (
    ONE,
    TWO,
    any_slot,
    both_slots,
    desk_of,
    n_free,
    queue,
    soon,
)


async def test_lease_of_a_free_slot_is_granted_at_once() -> None:
    desk = desk_of(1)
    with await desk.lease(any_slot(desk, "why")) as lease:
        assert (lease.slot_ids, lease.reason, lease.held) == ((ONE,), "why", (ONE,))
        assert n_free(desk) == 0
    assert n_free(desk) == 1


async def test_lease_left_by_an_exception_is_given_back() -> None:
    desk = desk_of(1)
    with pytest.raises(KeyError):
        with await desk.lease(any_slot(desk)):
            raise KeyError
    assert n_free(desk) == 1


async def test_leases_are_granted_in_arrival_order() -> None:
    desk = desk_of(1)
    order: list[int] = []

    async def use(number: int) -> None:
        with await desk.lease(any_slot(desk)):
            order.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(use(number))
    assert order == [0, 1, 2, 3, 4, 5]
    assert n_free(desk) == 1


async def test_newcomer_does_not_overtake_one_who_waits_for_more_slots() -> None:
    desk = desk_of(2)
    first = await desk.lease(any_slot(desk))
    wants_both = await queue(desk, both_slots(desk))
    newcomer = await queue(desk, any_slot(desk))
    assert not newcomer.done()
    first.release()
    both = await soon(wants_both)
    assert both.held and not newcomer.done()
    both.give_up([TWO])
    assert (await soon(newcomer)).slot_ids == (TWO,)


async def test_cancel_while_waiting_leaves_the_queue_to_the_others() -> None:
    desk = desk_of(1)
    held = await desk.lease(any_slot(desk))
    first, second = await queue(desk, any_slot(desk)), await queue(desk, any_slot(desk))
    first.cancel()
    held.release()
    assert (await soon(second)).slot_ids == (ONE,)
    assert first.cancelled() and desk.n_waiting == 0


async def test_cancel_of_the_head_lets_the_next_one_in() -> None:
    desk = desk_of(2)
    held = await desk.lease(any_slot(desk))
    wants_both = await queue(desk, both_slots(desk))
    wants_one = await queue(desk, any_slot(desk))
    wants_both.cancel()
    assert (await soon(wants_one)).slot_ids == (TWO,)
    held.release()


async def test_cancel_between_grant_and_wake_up_does_not_lose_the_slot() -> None:
    desk = desk_of(1)
    held = await desk.lease(any_slot(desk))
    first, second = await queue(desk, any_slot(desk)), await queue(desk, any_slot(desk))
    held.release()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(first)
    with await soon(second):
        assert n_free(desk) == 0
    assert n_free(desk) == 1


async def test_lease_with_a_full_queue_is_refused() -> None:
    desk = desk_of(1, max_waiting=1)
    held = await desk.lease(any_slot(desk))
    waiting = await queue(desk, any_slot(desk))
    with pytest.raises(TooManyRequests):
        await desk.lease(any_slot(desk))
    held.release()
    (await soon(waiting)).release()
    (await desk.lease(any_slot(desk))).release()


async def test_close_sends_everybody_away_and_refuses_newcomers() -> None:
    desk = desk_of(1)
    held = await desk.lease(any_slot(desk))
    waiting = [await queue(desk, any_slot(desk)) for _ in range(3)]
    desk.close()
    for task in waiting:
        with pytest.raises(ServerAway):
            await soon(task)
    held.release()
    with pytest.raises(ServerAway):
        await desk.lease(any_slot(desk))
    assert desk.try_lease(ONE) is None


async def test_close_of_a_waiter_that_is_cancelled_too_raises_nothing_else() -> None:
    desk = desk_of(1)
    await desk.lease(any_slot(desk))
    waiting = await queue(desk, any_slot(desk))
    desk.close()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(waiting)


async def test_hand_over_gives_the_slot_back_when_the_task_ends() -> None:
    desk = desk_of(1)
    done = asyncio.Event()
    with await desk.lease(any_slot(desk)) as lease:
        task = asyncio.get_running_loop().create_task(done.wait())
        lease.hand_over(task)
        assert lease.held == ()
    assert n_free(desk) == 0
    done.set()
    await soon(task)
    await asyncio.sleep(0)
    assert n_free(desk) == 1


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_hand_over_to_a_task_that_fails_gives_the_slot_back(is_cancelled: bool) -> None:
    desk = desk_of(1)

    async def work() -> None:
        await asyncio.sleep(0)
        raise KeyError

    task = asyncio.get_running_loop().create_task(work())
    with await desk.lease(any_slot(desk)) as lease:
        lease.hand_over(task)
    if is_cancelled:
        task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert n_free(desk) == 1
    assert task.cancelled() or isinstance(task.exception(), KeyError)


async def test_hand_over_after_a_partial_release_passes_on_the_rest() -> None:
    desk = desk_of(2)
    lease = await desk.lease(both_slots(desk))
    lease.give_up([ONE])
    task = asyncio.get_running_loop().create_task(asyncio.sleep(0))
    lease.hand_over(task)
    assert [slot.id for slot in desk.table.free()] == [ONE]
    await soon(task)
    await asyncio.sleep(0)
    assert n_free(desk) == 2


async def test_release_twice_does_not_free_somebody_elses_lease() -> None:
    desk = desk_of(1)
    lease = await desk.lease(any_slot(desk))
    lease.release()
    successor = await desk.lease(any_slot(desk))
    lease.release()
    assert n_free(desk) == 0
    successor.release()


async def test_exception_in_choose_reaches_who_asks() -> None:
    def broken() -> Choice[str] | None:
        raise KeyError("broken")

    with pytest.raises(KeyError):
        await desk_of(1).lease(broken)


async def test_exception_in_choose_of_a_waiter_reaches_it_and_the_queue_moves_on() -> None:
    desk = desk_of(1)
    held = await desk.lease(any_slot(desk))

    def broken() -> Choice[str] | None:
        raise KeyError("broken")

    unlucky, lucky = await queue(desk, broken), await queue(desk, any_slot(desk))
    held.release()
    with pytest.raises(KeyError):
        await soon(unlucky)
    assert (await soon(lucky)).slot_ids == (ONE,)
    assert desk.n_waiting == 0


async def test_choice_of_a_leased_slot_harms_the_one_who_made_it_only() -> None:
    desk = desk_of(2)
    held, other = await desk.lease(any_slot(desk)), await desk.lease(any_slot(desk))
    choices = iter([None, Choice((ONE, TWO), "wrong")])
    mistaken = await queue(desk, lambda: next(choices))
    lucky = await queue(desk, any_slot(desk))
    held.release()
    with pytest.raises(ValueError, match="leased already"):
        await soon(mistaken)
    assert (await soon(lucky)).slot_ids == (ONE,)
    other.release()


async def test_try_lease_takes_a_free_slot_only_when_nobody_waits() -> None:
    desk = desk_of(2)
    lease = desk.try_lease(ONE)
    assert lease is not None and desk.try_lease(ONE) is None
    waiting = await queue(desk, both_slots(desk))
    assert desk.try_lease(TWO) is None
    lease.release()
    (await soon(waiting)).release()
    assert desk.try_lease(TWO) is not None


async def placement(desk: LeaseDesk) -> Lease[str]:
    """Return the lease of a request that llama-server may put into any idle slot."""

    def all_free() -> Choice[str] | None:
        free = tuple(slot.id for slot in desk.table.free())
        return Choice(free, "anywhere") if free else None

    return await desk.lease(all_free, is_placement=True)


async def test_nothing_is_granted_while_a_request_may_land_in_any_slot() -> None:
    desk = desk_of(2)
    running = await desk.lease(any_slot(desk))
    placing = await placement(desk)
    newcomer = await queue(desk, any_slot(desk))
    running.release()
    assert placing.held == (ONE, TWO) and not newcomer.done()
    assert desk.try_lease(ONE) is None
    desk.end_placement(placing, [ONE])
    assert list(placing.held) == [ONE]
    assert (await soon(newcomer)).slot_ids == (TWO,)
    assert desk.table[ONE].is_running and not desk.is_placing


async def test_placement_that_ends_with_its_request_frees_every_slot() -> None:
    desk = desk_of(2)
    running = await desk.lease(any_slot(desk))
    with await placement(desk):
        running.release()
        assert n_free(desk) == 0
    assert n_free(desk) == 2 and not desk.is_placing


async def test_abandoned_placement_taints_the_slots_that_come_free_meanwhile() -> None:
    desk = desk_of(2)
    running = await desk.lease(any_slot(desk))
    let_go = asyncio.Event()
    task = asyncio.get_running_loop().create_task(let_go.wait())
    (await placement(desk)).hand_over(task)
    assert desk.is_placing
    running.release()
    assert (n_free(desk), desk.table[ONE].content) == (0, TAINTED)
    let_go.set()
    await soon(task)
    await asyncio.sleep(0)
    assert n_free(desk) == 2 and not desk.is_placing


async def test_placement_that_uses_every_slot_keeps_them() -> None:
    desk = desk_of(1)
    with await placement(desk) as placing:
        desk.end_placement(placing, [ONE])
        assert (placing.held, n_free(desk), desk.is_placing) == ((ONE,), 0, False)
    assert n_free(desk) == 1


async def test_slot_that_joins_an_abandoned_placement_is_reserved_with_it() -> None:
    desk = desk_of(2)
    running, placing = await desk.lease(any_slot(desk)), await placement(desk)
    let_go = asyncio.Event()
    placing.hand_over(asyncio.get_running_loop().create_task(let_go.wait()))
    running.release()
    assert (placing.held, set(placing.reserved)) == ((), {ONE, TWO})
    let_go.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert n_free(desk) == 2
