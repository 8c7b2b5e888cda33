"""Requests that run at the same time, however busy the machine is."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from proxy.serving.cached import CachedRequest
from tests.lab.waiting import HANG_SECONDS


@contextmanager
def sent_at_once(n_requests: int) -> Iterator[None]:
    """Send no request of a block before so many have a slot, each its own."""
    send, barrier = CachedRequest._send, asyncio.Barrier(n_requests)

    async def wait_and_send(request: CachedRequest, **how: Any) -> Any:
        async with asyncio.timeout(HANG_SECONDS):
            await barrier.wait()
        return await send(request, **how)

    with patch.object(CachedRequest, "_send", wait_and_send):
        yield
