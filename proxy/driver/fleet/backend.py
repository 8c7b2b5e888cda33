"""One llama-server, or one model of a host of several: what follows it, serves it and saves its slots."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from proxy.driver.contact.lifecycle import Lifecycle
from proxy.driver.contact.remembering import Remembering
from proxy.driver.saving.write_back import WriteBack
from proxy.driver.services import Services
from proxy.driver.serving.cache import Cache
from proxy.upstream.target import Presence, Target


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """Everything that belongs to one llama-server, whichever process of it is running."""

    services: Services
    lifecycle: Lifecycle
    cache: Cache
    write_back: WriteBack
    remembering: Remembering

    @property
    def name(self) -> str:
        return self.services.upstream.target.name

    async def run(self) -> None:
        """Follow llama-server and save what is dirty, until cancelled."""
        work = (self.remembering.run(), self.write_back.run(), self.lifecycle.watch())
        tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


NewBackend = Callable[[Target, Presence], Backend]
