"""Runs a program that starts processes, such that none outlives it.

Owns: SIGINT and SIGTERM, from the first to the last process. The first signal cancels the program;
what it entered in its `ExitStack` is undone after the event loop and its threads have ended, so that a
process that was just being started is ended as well.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from types import FrameType
from typing import Any

from tests.bench.section import Section

Program = Callable[[ExitStack], Coroutine[Any, Any, int]]


def run_section(measure: Callable[[ExitStack], Coroutine[Any, Any, Section]]) -> int:
    """Run what measures one table to its end and print it; return 1 if a bar is missed."""

    async def program(leftovers: ExitStack) -> int:
        section = await measure(leftovers)
        print(section.markdown(), flush=True)
        return 1 if section.n_missed else 0

    return run_to_the_end(program)


def run_to_the_end(program: Program) -> int:
    """Run *program* until it ends or is told to; return its exit status."""
    told: list[int] = []

    async def cancel_when_told(leftovers: ExitStack) -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def tell(number: int, frame: FrameType | None) -> None:
            if not told and task is not None and not loop.is_closed():
                told.append(number)
                loop.call_soon_threadsafe(task.cancel)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, tell)
        return await program(leftovers)

    with ExitStack() as leftovers:
        try:
            return asyncio.run(cancel_when_told(leftovers))
        except asyncio.CancelledError:
            return 128 + (told[0] if told else signal.SIGTERM)
