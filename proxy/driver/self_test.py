"""The self-test: what a restored state is good for on this server, measured.

One state grows through a short, a long and a longer length, since a probe that is shorter than a
sliding window learns the wrong rule. Each is saved, and restored for a request that goes on (+8 tokens)
and, for the shorter two, for one that diverges 20 tokens before the end.
"""

from dataclasses import dataclass
from itertools import takewhile

from proxy.core.model import NO_RULE, Rule, RuleKind, SlotId
from proxy.core.prefix import TokenIds, token_ids
from proxy.core.restore import highest_point
from proxy.driver.room import Room
from proxy.driver.slot_work import RewriteStateFile
from proxy.store.state_files import StateFiles
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.state_file import read_state_file

PROBE_LENGTHS = (64, 2200, 4400)
_N_MORE = 8
N_BACK = 20
_DIVERGING_UP_TO = 2200


@dataclass(frozen=True, slots=True)
class Probe:
    """What one restored length was good for.

    `points_...` say what the file's context checkpoints promise for the same request.
    """

    n_tokens: int
    has_every_position: bool
    reused_extended: int
    points_extended: int
    reused_diverging: int | None = None
    points_diverging: int = 0

    @property
    def holds_at_end(self) -> bool:
        return self.reused_extended == self.n_tokens

    @property
    def holds_anywhere(self) -> bool:
        return self.reused_diverging in (None, self.n_tokens - N_BACK) and self.has_every_position

    @property
    def holds_at_points(self) -> bool:
        extends = self.holds_at_end or 0 < self.points_extended <= self.reused_extended
        return extends and (self.reused_diverging is None or self._diverges_at_point)

    @property
    def _diverges_at_point(self) -> bool:
        # A probe too short to have a context checkpoint before the divergence proves nothing.
        return (self.reused_diverging or 0) >= self.points_diverging


def judge(probes: list[Probe]) -> Rule:
    """Return the rule that *probes*, ascending by length, bear out."""
    if not probes:
        return NO_RULE
    n_at_end = len(list(takewhile(lambda probe: probe.holds_at_end, reversed(probes))))
    end_holds_from = probes[-n_at_end].n_tokens if 0 < n_at_end < len(probes) else 0
    if n_at_end == len(probes) and all(probe.holds_anywhere for probe in probes):
        return Rule(RuleKind.ANY_PREFIX)
    rewinds = any(p.points_diverging and p.holds_at_points for p in probes)
    if rewinds and n_at_end and all(probe.holds_at_points for probe in probes):
        return Rule(RuleKind.RESTORE_POINTS, end_holds_from)
    return Rule(RuleKind.END_ONLY, end_holds_from) if n_at_end else NO_RULE


class SelfTest:
    """Probes one leased, empty slot; whoever holds the lease erases it afterwards."""

    def __init__(
        self,
        upstream: LlamaServer,
        files: StateFiles,
        room: Room,
        slot_id: SlotId,
        rewrite: RewriteStateFile,
    ) -> None:
        self._upstream = upstream
        self._files = files
        self._room = room
        self._slot_id = slot_id
        self._rewrite = rewrite

    async def run(self, n_ctx: int, n_vocab: int) -> Rule:
        """Return the learned rule; raises CacheFault, or OSError if a file cannot be read."""
        text = token_ids((i * 7919 + 1237) % max(2, min(n_vocab, 30011)) for i in range(5000))
        lengths = [n for n in PROBE_LENGTHS if n + _N_MORE < n_ctx]
        return judge([await self._probe(text, n_tokens) for n_tokens in lengths])

    async def _probe(self, text: TokenIds, n_tokens: int) -> Probe:
        await self._upstream.evaluate(self._slot_id, text[:n_tokens])
        async with self._room.for_probe(n_tokens) as name:
            saved = await self._upstream.save(self._slot_id, name)
            self._rewrite(self._files.path(name))
            state = read_state_file(self._files.path(name))
            await self._room.settle(name, state, saved.n_written)
            diverging = None
            if n_tokens <= _DIVERGING_UP_TO:
                other = text[: n_tokens - N_BACK] + text[-N_BACK:]
                diverging = await self._reused(name, other)
            # Extended last: the next length then continues from a state that is still whole.
            extended = await self._reused(name, text[: n_tokens + _N_MORE])
        return Probe(
            n_tokens,
            state.has_every_position,
            extended,
            highest_point(state.restore_points, n_tokens),
            diverging,
            highest_point(state.restore_points, n_tokens - N_BACK),
        )

    async def _reused(self, name: str, tokens: TokenIds) -> int:
        await self._upstream.erase(self._slot_id)
        await self._upstream.restore(self._slot_id, name)
        return (await self._upstream.evaluate(self._slot_id, tokens)).cache_n
