"""The slots of the scripted llama-server: what each holds, and what of it a prompt continues."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from tests.fakes.slot_files import SlotState

N_UBATCH = 512
WINDOW = 1024
MAX_POINTS = 32


class Memory(StrEnum):
    """What a restored state is good for; a live one always has its context checkpoints.

    Those that are neither full attention nor a window are hybrid.
    """

    ANY_PREFIX = "full attention"
    RESTORE_POINTS = "context checkpoints are saved"
    END_ONLY = "context checkpoints are not saved"
    NOTHING = "a restored state is never continued"
    CUT_WINDOW = "a saved window reaches one position less far back than a restored one must"


_HYBRID = {Memory.RESTORE_POINTS, Memory.END_ONLY, Memory.NOTHING}


@dataclass(eq=False)
class Slot:
    """One slot. `lock` is held by whatever runs in it; whoever comes meanwhile waits its turn."""

    id: int
    memory: Memory
    tokens: list[int] = field(default_factory=list)
    points: list[int] = field(default_factory=list)
    is_inert: bool = False
    is_processing: bool = False
    id_task: int = -1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def clear(self) -> None:
        self.tokens, self.points, self.is_inert = [], [], False

    def n_common(self, prompt: list[int]) -> int:
        pairs = zip(self.tokens, prompt, strict=False)
        limit = min(len(self.tokens), len(prompt))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), limit)

    def n_reusable(self, prompt: list[int]) -> int:
        """Return where *prompt* continues; its last token is always evaluated."""
        if self.is_inert:
            return 0
        n_common, last = self.n_common(prompt), len(prompt) - 1
        if self.memory is Memory.ANY_PREFIX:
            return min(n_common, last)
        if n_common == len(self.tokens) <= last:
            return n_common
        return max((p for p in self.points if p <= min(n_common, last)), default=0)

    def evaluate(self, prompt: list[int], *, reuses: bool) -> int:
        """Make the slot hold *prompt*; return how many of its tokens were there already."""
        n_reused = self.n_reusable(prompt) if reuses else 0
        points = [p for p in self.points if p <= n_reused]
        # A context checkpoint lies four tokens before the end, and one a batch before that.
        for point in (len(prompt) - 4 - N_UBATCH, len(prompt) - 4):
            if point > max(points, default=0) and point >= n_reused:
                points.append(point)
        self.tokens, self.points, self.is_inert = list(prompt), points[-MAX_POINTS:], False
        return n_reused

    def state(self) -> SlotState:
        """Return what a save of the slot writes."""
        saves_points = self.memory is Memory.RESTORE_POINTS
        points = list(self.points) if saves_points else []
        if self.memory is Memory.CUT_WINDOW:
            return SlotState(list(self.tokens), points, max(0, len(self.tokens) - WINDOW))
        return SlotState(list(self.tokens), points, is_recurrent=self.memory in _HYBRID)

    def load(self, state: SlotState) -> None:
        self.tokens, self.points = list(state.tokens), list(state.points)
        # server-context.cpp, `pos_min >= pos_min_thold`, of a request that goes on at the end.
        is_cut = state.window_from is not None and state.window_from >= max(
            0, len(state.tokens) - WINDOW
        )
        self.is_inert = is_cut or self.memory is Memory.NOTHING
