"""The ways in which one request can start in one slot, and what each costs.

Owns: the nouns of a plan. Pure values.
"""

from dataclasses import dataclass

from proxy.core.displacement import NOTHING_DISPLACED, Displacement
from proxy.core.model import Checkpoint, SlotId
from proxy.core.slots import Reuse


@dataclass(frozen=True, slots=True)
class UseLive:
    """Continue from what the slot already holds (perhaps nothing)."""

    reuse: Reuse

    @property
    def n_reused(self) -> int:
        return self.reuse.at_least


@dataclass(frozen=True, slots=True)
class Restore:
    """Load *checkpoint* into the slot; llama-server must then reuse n_reused tokens."""

    checkpoint: Checkpoint
    n_reused: int
    n_common: int
    is_warm: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One way through one slot, and its seconds: those of the request, and those it costs others."""

    slot_id: SlotId
    start: UseLive | Restore
    seconds: float
    displacement: Displacement = NOTHING_DISPLACED
    erases: bool = False

    @property
    def total_seconds(self) -> float:
        return self.seconds + self.displacement.seconds

    @property
    def kind(self) -> str:
        if isinstance(self.start, Restore):
            return "restore"
        return "live" if self.start.n_reused else "nothing"
