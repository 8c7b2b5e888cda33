"""Who goes on with what a slot holds is preferred to whom it would be emptied for, within bounds."""

import asyncio

import pytest

from proxy.serving.queue import MAX_LOOKED_AT, MAX_OVERTAKES, Choice
from tests.unit.queues import ONE, TWO, Queue, any_slot, fitting, join, queue_of, soon


async def test_slot_goes_first_to_who_goes_on_with_what_it_holds() -> None:
    queue = queue_of(1)
    waiting = Queue(queue)
    with await queue.lease(any_slot(queue)):
        await waiting.join("one", any_slot(queue))
        await waiting.join("two", any_slot(queue))
        await waiting.join("warm", fitting(queue))
        await waiting.join("three", any_slot(queue))
    assert await waiting.order() == ["warm", "one", "two", "three"]


async def test_warm_requests_among_each_other_keep_their_order() -> None:
    queue = queue_of(1)
    waiting = Queue(queue)
    with await queue.lease(any_slot(queue)):
        for name in ("one", "two", "three"):
            await waiting.join(name, fitting(queue))
    assert await waiting.order() == ["one", "two", "three"]


async def test_nobody_is_passed_more_often_than_the_limit() -> None:
    queue = queue_of(1, max_waiting=100)
    waiting = Queue(queue)
    with await queue.lease(any_slot(queue)):
        await waiting.join("one", any_slot(queue))
        await waiting.join("two", any_slot(queue))
        for _ in range(3 * MAX_OVERTAKES):
            await waiting.join("warm", fitting(queue))
    order = await waiting.order()
    assert order == [*["warm"] * MAX_OVERTAKES, "one", "two", *["warm"] * 2 * MAX_OVERTAKES]


async def test_who_declines_a_slot_is_passed_no_more_often_by_those_whom_it_fits() -> None:
    queue = queue_of(2, max_waiting=100)
    busy, held = await queue.lease(fitting(queue, TWO)), await queue.lease(fitting(queue, ONE))
    picky = await join(queue, fitting(queue, TWO), may_be_overtaken=True)
    waiting = Queue(queue)
    await waiting.join("cold", any_slot(queue))
    for _ in range(3 * MAX_OVERTAKES):
        await waiting.join("warm", fitting(queue))
    held.release()
    for _ in range(10 * MAX_OVERTAKES):  # all that can be granted is granted by then
        await asyncio.sleep(0)
    assert waiting.so_far == ["warm"] * MAX_OVERTAKES
    busy.release()
    (await soon(picky)).release()
    assert len(await waiting.order()) == 3 * MAX_OVERTAKES + 1


async def test_slot_that_does_not_fit_is_left_to_who_came_first() -> None:
    queue = queue_of(2)
    first, second = await queue.lease(fitting(queue, ONE)), await queue.lease(fitting(queue, TWO))
    cold = await join(queue, any_slot(queue), may_be_overtaken=True)
    fits_two = await join(queue, fitting(queue, TWO), may_be_overtaken=True)
    first.release()
    assert (await soon(cold)).held == (ONE,)
    assert not fits_two.done()
    second.release()
    assert (await soon(fits_two)).held == (TWO,)


async def test_only_the_next_few_are_asked_whether_a_slot_fits_them() -> None:
    queue = queue_of(1, max_waiting=100)
    waiting = Queue(queue)
    with await queue.lease(any_slot(queue)):
        for _ in range(MAX_LOOKED_AT + 1):
            await waiting.join("cold", any_slot(queue))
        await waiting.join("warm", fitting(queue))
    order = await waiting.order()
    assert order == ["cold", "warm", *["cold"] * MAX_LOOKED_AT]


async def test_who_must_not_be_passed_is_not() -> None:
    queue = queue_of(1)
    waiting = Queue(queue)
    with await queue.lease(any_slot(queue)):
        await waiting.join("strict", any_slot(queue), may_be_overtaken=False)
        await waiting.join("warm", fitting(queue))
    assert await waiting.order() == ["strict", "warm"]


async def test_who_must_not_be_passed_keeps_its_place_behind_another() -> None:
    queue = queue_of(1)
    waiting = Queue(queue)
    with await queue.lease(any_slot(queue)):
        await waiting.join("cold", any_slot(queue))
        await waiting.join("strict", any_slot(queue), may_be_overtaken=False)
        await waiting.join("warm", fitting(queue))
    assert await waiting.order() == ["cold", "strict", "warm"]


@pytest.mark.parametrize("n_ahead", [0, 1])
async def test_placement_is_not_passed(n_ahead: int) -> None:
    queue = queue_of(1)
    waiting = Queue(queue)
    with await queue.lease(any_slot(queue)):
        for _ in range(n_ahead):
            await waiting.join("cold", any_slot(queue))
        await waiting.join("placement", any_slot(queue), is_placement=True)
        await waiting.join("warm", fitting(queue))
    assert await waiting.order() == [*["cold"] * n_ahead, "placement", "warm"]


async def test_exception_of_one_who_is_asked_early_reaches_it_at_its_own_turn() -> None:
    def broken() -> Choice | None:
        raise KeyError("broken")

    queue = queue_of(1)
    held = await queue.lease(any_slot(queue))
    cold = await join(queue, any_slot(queue), may_be_overtaken=True)
    unlucky = await join(queue, broken, may_be_overtaken=True)
    warm = await join(queue, fitting(queue), may_be_overtaken=True)
    held.release()
    (await soon(warm)).release()
    (await soon(cold)).release()
    with pytest.raises(KeyError):
        await soon(unlucky)
    assert queue.n_waiting == 0


async def test_reconsider_asks_those_again_who_declined() -> None:
    queue = queue_of(1)
    choices: list[Choice | None] = [None, None, Choice((ONE,))]
    waiting = await join(queue, lambda: choices.pop(0), may_be_overtaken=True)
    assert not waiting.done()
    queue.reconsider()
    assert (await soon(waiting)).held == (ONE,)
