"""Turns: one at a time, in the order of asking. Deadlines: they may come nearer."""

import asyncio

import pytest

from proxy.errors import ProxyStopped
from proxy.tasks import Deadline, Turns


async def test_turns_are_had_in_the_order_of_asking() -> None:
    turns, had = Turns(), []

    async def ask(name: str) -> None:
        turn = await turns.take()
        had.append(name)
        await asyncio.sleep(0)
        turn.end()

    await asyncio.gather(*(ask(name) for name in "abc"))
    assert had == ["a", "b", "c"]


async def test_taken_turn_is_not_had_until_it_ends() -> None:
    turns = Turns()
    first = turns.try_take()
    assert first is not None and turns.is_taken
    assert turns.try_take() is None
    second = asyncio.ensure_future(turns.take())
    await asyncio.sleep(0)
    assert (turns.n_waiting, second.done()) == (1, False)
    first.end()
    first.end()  # harmless: the turn is the second's now
    assert turns.try_take() is None
    (await second).end()
    assert turns.try_take() is not None


async def test_who_leaves_the_queue_is_passed_over() -> None:
    turns = Turns()
    first = await turns.take()
    leaving, staying = (asyncio.ensure_future(turns.take()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert turns.n_waiting == 1
    first.end()
    assert (await staying).has_come.is_set()


async def test_turn_that_comes_as_one_leaves_is_passed_on() -> None:
    turns = Turns()
    first = await turns.take()
    leaving, staying = (asyncio.ensure_future(turns.take()) for _ in range(2))
    await asyncio.sleep(0)
    first.end()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    (await staying).end()
    assert turns.try_take() is not None


async def test_deadline_that_comes_nearer_leaves_blocks_alone_that_are_ending() -> None:
    """As at a second signal."""
    deadline, is_ending, may_end = Deadline(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with deadline.ends_block():
            try:
                await asyncio.Event().wait()
            finally:
                is_ending.set()
                await may_end.wait()

    working = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    deadline.set(0)
    await is_ending.wait()
    deadline.set(0)
    may_end.set()
    with pytest.raises(ProxyStopped):
        await working
