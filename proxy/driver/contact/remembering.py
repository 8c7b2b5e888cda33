"""Writes the learned rates to the index now and then, so that the next start begins with them."""

import asyncio

from proxy.core.rates import Rates
from proxy.driver.contact.attachment import Attachment
from proxy.driver.contact.lifecycle import Lifecycle
from proxy.driver.contact.memory import remember_rates
from proxy.driver.services import Services
from proxy.errors import StoreFault

_WRITE_SECONDS = 60.0


class Remembering:
    """Keeps the index up to date with what was measured, never in a request's way."""

    def __init__(self, services: Services, lifecycle: Lifecycle) -> None:
        self._services = services
        self._lifecycle = lifecycle
        self._written: tuple[Attachment, Rates] | None = None

    async def run(self) -> None:
        """Write what is new every minute, and once more when cancelled."""
        try:
            while True:
                await asyncio.sleep(_WRITE_SECONDS)
                await self._write()
        finally:
            await self._write()

    async def _write(self) -> None:
        session, store = self._lifecycle.current, self._services.opened_store
        if session is None or store is None or not session.attachment.can_cache:
            return
        attachment, rates = session.attachment, session.attachment.rates
        if self._written == (attachment, rates) or rates == Rates():
            return
        try:
            await remember_rates(store, attachment)
            self._written = attachment, rates
        except StoreFault as fault:
            self._services.faults.record("remember", fault)
