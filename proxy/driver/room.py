"""Room for what llama-server is about to save: how much it will need, and who has to go for it.

Owns: what was learned of the sizes of this model's states, and what is said when there is no room.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from proxy.core.eviction import Present
from proxy.core.model import CheckpointId
from proxy.core.slots import Content, Known
from proxy.core.state_size import StateSize, expected_bytes, extent_of
from proxy.driver.attachment import Attachment
from proxy.driver.services import Services
from proxy.errors import NoRoom
from proxy.store.budget import Claim
from proxy.upstream.state_file import StateFile

_GUESS_SHARE = 16
"""Where nothing is known of a model's states, this part of the budget is set aside for one."""
_MOST_SHARE = 2
"""An extrapolation reserves no more than this part of the budget; the file itself then tells."""


def present_of(attachment: Attachment | None) -> Present:
    """Return what the value of checkpoints depends on now."""
    if attachment is None:
        return Present(time.time())
    namespaces = frozenset(attachment.tenant_namespace(t) for t in {b"", *attachment.tenants})
    is_known = attachment.can_cache
    return Present(time.time(), attachment.rates, namespaces if is_known else frozenset())


class Room:
    """Reserves room in the store for the states of one llama-server process."""

    def __init__(self, services: Services, attachment: Attachment) -> None:
        self._services = services
        self._attachment = attachment

    @asynccontextmanager
    async def for_slot(self, content: Content) -> AsyncIterator[str]:
        """Yield the name under which a slot that holds *content* is to be saved.

        On leaving, the file is deleted unless it was committed. Raises NoRoom before anything is saved.
        """
        claim = Claim(
            self._expected_bytes(extent_of(content)),
            present_of(self._attachment),
            self._replaced_by(content),
        )
        async with self._reserved(claim) as name:
            yield name

    @asynccontextmanager
    async def for_probe(self, n_tokens: int) -> AsyncIterator[str]:
        """Yield the name for a state that is looked at and deleted; raises NoRoom."""
        n_bytes = self._expected_bytes((n_tokens, 0))
        claim = Claim(n_bytes, present_of(self._attachment), is_passing=True)
        async with self._reserved(claim) as name:
            yield name

    async def settle(self, name: str, state: StateFile, n_written: int = 0) -> None:
        """Learn from a file that was written, and make more room if it is larger than expected.

        Of *n_written* bytes the file may have been cut since. Raises NoRoom if there is no more room.
        """
        n_bytes = max(n_written, state.size_bytes)
        size = StateSize(len(state.tokens), len(state.restore_points), n_bytes)
        self._attachment.sizes.append(size)
        with self._refusals_counted():
            await self._services.store.settle(name, state.size_bytes)

    @asynccontextmanager
    async def _reserved(self, claim: Claim) -> AsyncIterator[str]:
        with self._refusals_counted():
            name = await self._services.store.reserve(claim)
        try:
            yield name
        finally:
            await self._services.store.discard(name)

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except NoRoom as refusal:
            self._services.metrics.saves_skipped.labels(refusal.reason).inc()
            self._services.faults.say_once("no room for a state", refusal.reason, refusal)
            raise

    def _expected_bytes(self, extent: tuple[int, int] | None) -> int:
        max_bytes = self._services.store.limits.max_bytes
        sizes = self._sizes()
        largest_seen = max((s.size_bytes for s in sizes), default=max_bytes // _GUESS_SHARE)
        expected = expected_bytes(sizes, *extent) if extent else None
        if expected is None:
            return min(largest_seen, max_bytes)
        return min(expected, max(largest_seen, max_bytes // _MOST_SHARE))

    def _sizes(self) -> list[StateSize]:
        """Return the sizes of this model's states; before it is identified, those of all models'."""
        ours = present_of(self._attachment).namespaces
        stored = (c for c in self._services.store if not ours or c.namespace in ours)
        return [
            *self._attachment.sizes,
            *(StateSize(c.n_tokens, len(c.restore_points), c.size_bytes) for c in stored),
        ]

    def _replaced_by(self, content: Content) -> frozenset[CheckpointId]:
        """Return the checkpoint that shares most with *content*: most often its own older state.

        It goes last. Should the save fail or the machine stop, it is what is left of the conversation.
        """
        if not isinstance(content, Known):
            return frozenset()
        nearest = next(self._services.store.find(content.namespace, content.tokens), None)
        return frozenset((nearest.checkpoint.id,) if nearest else ())
