"""How many bytes the store may take, those of files that are still being written included.

Owns: the two limits and what is reserved under them. Nothing here waits or looks at a disk, so that
what fits is reserved in the same step.
"""

from dataclasses import dataclass, field

from proxy.core.keeping.eviction import Present, Removal
from proxy.core.keeping.write_budget import Wanted
from proxy.core.model import CheckpointId
from proxy.errors import NoRoom


@dataclass(frozen=True, slots=True)
class Limits:
    """At most `max_bytes` of state files, and at least `min_free_bytes` left free on their disk.

    No more than `max_write_bytes_per_day` are written within 24 hours; 0 is no limit.
    """

    max_bytes: int
    min_free_bytes: int = 0
    max_write_bytes_per_day: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What room is made for: a file of at most *n_bytes*, seen from the *present*.

    `replaces` are the checkpoints that it will make needless, `spared_seconds` what it would take to
    evaluate what only this file will have (None: not known). A `passing` file is deleted as soon as it was
    looked at; the free space may be short for so long, and what may be written in a day does not limit it.
    """

    n_bytes: int
    present: Present
    replaces: frozenset[CheckpointId] = frozenset()
    is_passing: bool = False
    spared_seconds: float | None = None

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.n_bytes, self.spared_seconds)


@dataclass(slots=True)
class _Reserved:
    claim: Claim
    n_bytes: int
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class Shortage:
    """So many bytes have to go, and which limit says so."""

    n_bytes: int
    reason: Removal


@dataclass
class Budget:
    """The limits, and the reservations of files that are no checkpoints yet, by file name."""

    limits: Limits
    _reserved: dict[str, _Reserved] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        return sum(r.n_bytes for r in self._reserved.values())

    @property
    def unwritten_bytes(self) -> int:
        return sum(r.n_bytes for r in self._reserved.values() if not r.is_written)

    def unwritten(self, name: str) -> Claim | None:
        """Return what was claimed for a file, unless it was settled or released."""
        reserved = self._reserved.get(name)
        return None if reserved is None or reserved.is_written else reserved.claim

    def reserve(self, name: str, claim: Claim) -> None:
        """Count a file that is about to be written; raises NoRoom if it is too large in any case."""
        self._require_possible(claim.n_bytes)
        self._reserved[name] = _Reserved(claim, claim.n_bytes)

    def settle(self, name: str, n_bytes: int) -> Claim:
        """Count a file as it was written; return what was claimed for it."""
        reserved = self._reserved[name]
        reserved.n_bytes, reserved.is_written = n_bytes, True
        self._require_possible(n_bytes)
        return reserved.claim

    def release(self, name: str) -> None:
        """Count a file no more: it is a checkpoint now, or gone."""
        self._reserved.pop(name, None)

    def shortage(self, claim: Claim, stored_bytes: int, free_bytes: int) -> Shortage:
        """Return what is missing for all reservations, *claim*'s included, to fit."""
        over_budget = stored_bytes + self.reserved_bytes - self.limits.max_bytes
        wanted_bytes = self.unwritten_bytes + (
            0 if claim.is_passing else self.limits.min_free_bytes
        )
        short_of_free = wanted_bytes - free_bytes
        if short_of_free > max(0, over_budget):
            return Shortage(short_of_free, Removal.FREE_SPACE)
        return Shortage(over_budget, Removal.BUDGET)

    def _require_possible(self, n_bytes: int) -> None:
        if n_bytes > self.limits.max_bytes:
            raise NoRoom(
                "larger than the budget",
                f"a state of {n_bytes:,} bytes is more than max_store_bytes ({self.limits.max_bytes:,})",
            )
