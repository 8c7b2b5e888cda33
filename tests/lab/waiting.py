"""Waits for states, as long as a busy machine may need for them."""

import asyncio
import inspect
import time
from collections.abc import Callable

HANG_SECONDS = 300.0
"""What takes longer never comes."""
_POLL_SECONDS = 0.01


async def until(is_so: Callable[[], object]) -> None:
    """Wait until something is so, which may have to be awaited; raises TimeoutError if it never is."""
    async with asyncio.timeout(HANG_SECONDS):
        while not await _value(is_so()):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(_POLL_SECONDS)


async def _value(found: object) -> object:
    return await found if inspect.isawaitable(found) else found


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait until something is so; raises TimeoutError if it never is."""
    deadline = time.monotonic() + HANG_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_SECONDS)
