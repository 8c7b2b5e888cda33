"""What the live page is told: the state of the proxy now, and the requests since the last look."""

import secrets
import time

import msgspec

from proxy.core.slots import Known, Slot, state_of
from proxy.core.views.overview import Overview, ServerView, SlotView, StoreView
from proxy.driver.contact.attachment import Attachment
from proxy.driver.fleet.fleet import Fleet
from proxy.driver.services import Shared
from proxy.front.admin import describe, moment
from proxy.store.store import CheckpointStore

MAX_REQUESTS = 50
"""So many requests are told of in one look; those before them are at /requests."""
_MAX_DIGITS = 18


class Looks:
    """Looks at the running proxy."""

    def __init__(self, shared: Shared, fleet: Fleet) -> None:
        self._shared = shared
        self._fleet = fleet
        self._run = secrets.token_hex(4)
        self._epoch = time.time() - time.monotonic()
        self._store_view: StoreView | None = None

    def now(self) -> Overview:
        """Return the present, without requests and without a position."""
        degradations, journal = self._shared.everywhere, self._shared.journal
        return Overview(
            state=degradations.state.value,
            since=moment(degradations.since),
            reasons=tuple(describe(degradation) for degradation in degradations.active),
            servers=tuple(
                self._server(backend.name, session.attachment)
                for backend in self._fleet.backends
                if (session := backend.lifecycle.current)
            ),
            n_waiting=self._fleet.n_waiting,
            store=self._store(self._shared.opened_store),
            today=journal.today(),
            keeps=journal.keep.value,
        )

    def since(self, position: str) -> Overview:
        """Return the present and the requests since a position; the last ones if it is not known."""
        journal = self._shared.journal
        run, _, number = position.partition("-")
        is_known = run == self._run and number.isdecimal() and len(number) <= _MAX_DIGITS
        n_seen = int(number) if is_known else 0
        n_new = min(MAX_REQUESTS, max(0, journal.n_recorded - n_seen))
        return msgspec.structs.replace(
            self.now(),
            position=f"{self._run}-{journal.n_recorded}",
            requests=tuple(journal.latest(n_new)),
        )

    def _server(self, name: str, attachment: Attachment) -> ServerView:
        return ServerView(
            name=name,
            build=attachment.build,
            rule=attachment.rule.kind.value,
            n_ctx=attachment.n_ctx,
            slots=tuple(self._slot(slot) for slot in attachment.desk.table),
        )

    def _slot(self, slot: Slot) -> SlotView:
        known = slot.content if isinstance(slot.content, Known) else None
        return SlotView(
            id=slot.id,
            state=state_of(slot).value,
            is_closing=slot.is_closing,
            n_tokens=known.n_tokens if known else 0,
            n_header=known.header if known else 0,
            n_unsaved=known.n_unsaved if known else 0,
            n_coming=len(slot.destined) if slot.destined is not None else 0,
            used_at=round(self._epoch + slot.used_at, 1) if slot.used_at else None,
        )

    def _store(self, store: CheckpointStore | None) -> StoreView | None:
        if store is None:
            return None
        # Summing up 10,000 records takes a millisecond: not twice a second while nothing changes.
        if self._store_view is None or self._store_view.version != store.version:
            self._store_view = StoreView(
                n_checkpoints=len(store),
                size_bytes=store.size_bytes,
                max_bytes=store.limits.max_bytes,
                version=store.version,
            )
        return self._store_view
