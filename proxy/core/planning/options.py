"""The ways in which one request can start in one slot, and what each costs.

Owns: the nouns of a plan. Pure values.
"""

from dataclasses import dataclass
from enum import StrEnum

from proxy.core.model import Checkpoint, SlotId
from proxy.core.planning.displacement import NOTHING_DISPLACED, Displacement
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


class Why(StrEnum):
    """Why a plan is the cheapest."""

    LIVE_LONGEST = "a free slot holds the longest usable prefix"
    LIVE_CHEAPER = "a checkpoint holds more, but costs more to restore than to evaluate the rest"
    RESTORE_LONGEST = "a checkpoint holds more than any free slot"
    RESTORE_ELSEWHERE = "going on in the live slot would displace more than a restore costs"
    RESTORE_SHORTER = "a longer checkpoint costs more to restore than to evaluate the rest"
    NOTHING_FOUND = "neither a free slot nor a checkpoint holds a usable prefix"
    NOTHING_RESTORABLE = "no free slot holds a usable prefix, and nothing can be restored"
    NOTHING_WORTH_IT = "evaluating is cheaper than any restore"
    NOTHING_DISPLACED = "going on in a live slot would displace more than it saves"
    TOO_LONG = "llama-server will refuse it: it is as long as a slot's context, or longer"
