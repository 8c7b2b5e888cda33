"""Room for what llama-server is about to save: how much it will need, and who has to go for it.

Owns: what was learned of the sizes of this model's states, and what is said when there is no room.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from proxy.core.degradation import DegradationKind
from proxy.core.keeping.eviction import Present
from proxy.core.keeping.state_size import StateSize, expected_bytes, extent_of
from proxy.core.model import CheckpointId, SlotId
from proxy.core.planning.candidates import promising
from proxy.core.restore import usable_tokens
from proxy.core.slots import Content, Known
from proxy.driver.contact.attachment import Attachment
from proxy.driver.saving.saver import SavedSlot, Saver
from proxy.driver.services import Services
from proxy.errors import WRITE_BUDGET, NoRoom
from proxy.store.budget import Claim

_GUESS_SHARE = 16
_GUESS_BYTES = 256 << 20
"""Where nothing is known of a model's states, this part of the budget is set aside for one, but no more
than so many bytes and half of what is free or may be written: the file itself then tells."""
_MOST_SHARE = 2
"""An extrapolation reserves no more than this part of the budget; the file itself then tells."""


class Room:
    """Reserves room in the store for the states of one llama-server process."""

    def __init__(self, services: Services, attachment: Attachment, saver: Saver) -> None:
        self._services = services
        self._attachment = attachment
        self._saver = saver

    def _present(self) -> Present:
        return self._services.served.present(self._attachment)

    @asynccontextmanager
    async def for_slot(self, content: Content) -> AsyncIterator[str]:
        """Yield the name under which a slot that holds *content* is to be saved.

        On leaving, the file is deleted unless it was committed. Raises NoRoom before anything is saved.
        """
        claim = Claim(
            self._expected_bytes(extent_of(content)),
            self._present(),
            self._replaced_by(content),
            spared_seconds=self._spared_seconds(content),
        )
        async with self._reserved(claim) as name:
            yield name

    @asynccontextmanager
    async def probe(self, slot_id: SlotId, n_tokens: int) -> AsyncIterator[SavedSlot]:
        """Save a slot of *n_tokens* to look at the file, which is then deleted; raises CacheFault."""
        n_bytes = self._expected_bytes((n_tokens, 0))
        claim = Claim(n_bytes, self._present(), is_passing=True)
        async with self._reserved(claim) as name:
            yield await self.save(slot_id, name)

    async def save(self, slot_id: SlotId, name: str) -> SavedSlot:
        """Save a slot under a name that room was made for; raises what `Saver.save` does, and NoRoom.

        What the file really takes is learned, and more room is made if that is more than expected.
        """
        saved = await self._saver.save(slot_id, name)
        state = saved.state
        n_bytes = max(saved.n_written, state.size_bytes)  # a repair makes a file longer
        size = StateSize(len(state.tokens), len(state.restore_points), n_bytes)
        self._attachment.sizes.append(size)
        self._attachment.rates = self._attachment.rates.after_save(saved.n_written, saved.seconds)
        with self._refusals_told():
            await self._services.store.settle(name, state.size_bytes)
        return saved

    @asynccontextmanager
    async def _reserved(self, claim: Claim) -> AsyncIterator[str]:
        with self._refusals_told():
            name = await self._services.store.reserve(claim)
        try:
            yield name
        finally:
            await self._services.store.discard(name)

    @contextmanager
    def _refusals_told(self) -> Iterator[None]:
        try:
            yield
        except NoRoom as refusal:
            is_over = refusal.reason == WRITE_BUDGET
            kind = DegradationKind.WRITE_BUDGET_SPENT if is_over else DegradationKind.NO_ROOM
            self._attachment.degrade(kind, str(refusal))
            self._services.metrics.saves_skipped.labels(refusal.reason).inc()
            raise
        self._attachment.recover(DegradationKind.NO_ROOM)
        if self._services.store.writes.has_plenty:
            self._attachment.recover(DegradationKind.WRITE_BUDGET_SPENT)

    def _expected_bytes(self, extent: tuple[int, int] | None) -> int:
        max_bytes = self._services.store.limits.max_bytes
        sizes = self._sizes()
        largest_seen = max((s.size_bytes for s in sizes), default=self._guess_bytes(max_bytes))
        expected = expected_bytes(sizes, *extent) if extent else None
        if expected is None:
            return min(largest_seen, max_bytes)
        return min(expected, max(largest_seen, max_bytes // _MOST_SHARE))

    def _guess_bytes(self, max_bytes: int) -> int:
        store = self._services.store
        try:
            free_bytes = store.files.free_bytes()
        except OSError:
            free_bytes = 0
        left_bytes = store.writes.left_bytes
        may_write_bytes = free_bytes if left_bytes is None else min(free_bytes, max(0, left_bytes))
        return min(max_bytes // _GUESS_SHARE, _GUESS_BYTES, may_write_bytes // 2)

    def _sizes(self) -> list[StateSize]:
        """Return the sizes of this model's states; before it is identified, those of all models'."""
        ours = self._present().namespaces
        stored = (c for c in self._services.store if not ours or c.namespace in ours)
        return [
            *self._attachment.sizes,
            *(StateSize(c.n_tokens, len(c.restore_points), c.size_bytes) for c in stored),
        ]

    def _spared_seconds(self, content: Content) -> float | None:
        """Return how long it takes to evaluate what no checkpoint has of a slot; None if unknown.

        It is not asked for where what may be written is not limited.
        """
        if not isinstance(content, Known) or not self._services.store.writes.max_bytes_per_day:
            return None
        rule, n_tokens = self._attachment.rule, content.n_tokens
        found = promising(
            rule, self._services.store.find(content.namespace, content.tokens), n_tokens + 1
        )
        covered = (usable_tokens(rule, c.checkpoint, c.n_common, n_tokens + 1) for c in found)
        return self._attachment.rates.evaluation_seconds(max(covered, default=0), n_tokens)

    def _replaced_by(self, content: Content) -> frozenset[CheckpointId]:
        """Return the checkpoint that shares most with *content*: most often its own older state.

        It goes last. Should the save fail or the machine stop, it is what is left of the conversation.
        """
        if not isinstance(content, Known):
            return frozenset()
        nearest = next(self._services.store.find(content.namespace, content.tokens), None)
        return frozenset((nearest.checkpoint.id,) if nearest else ())
