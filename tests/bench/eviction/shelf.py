"""The states that a store holds while a trace is played, as values of the product's own core."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from proxy.core.eviction import Relative
from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind, Rule, RuleKind
from proxy.core.rates import Rates
from proxy.core.saving import likely_cuts, points_of_others, select_points
from proxy.core.slots import Known
from proxy.core.tokens import Namespace, count_blocks, token_ids
from tests.bench.eviction.trace import BLOCK_TOKENS, Asked

RATES = Rates()
"""The product's defaults: 500 tokens a second wherever they lie, so that a second is 500 tokens."""
_NAMESPACE = Namespace(b"trace")
_N_COMPARED = 8
"""Of those that share most; the store compares 32, to the same end on these traces."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a state of a memory type takes, and what it can be continued at."""

    rule: Rule
    token_bytes: int
    point_bytes: int = 0
    """Of each context checkpoint, and of the state's own end."""

    def state_bytes(self, n_tokens: int, n_points: int) -> int:
        return n_tokens * self.token_bytes + (n_points + 1) * self.point_bytes


MEMORIES = {
    "full": Memory(Rule(RuleKind.ANY_PREFIX), token_bytes=100_000),
    "hybrid": Memory(Rule(RuleKind.RESTORE_POINTS), token_bytes=25_000, point_bytes=63_000_000),
}


@dataclass(frozen=True, slots=True)
class File:
    """A stored state, and the blocks of the prompt that it holds."""

    checkpoint: Checkpoint
    asked: Asked


def _common(file: File, asked: Asked, n_shared: int) -> int:
    """Return how many tokens of a file a prompt begins with that shares *n_shared* blocks.

    Behind a prompt's last full block no hash tells: whoever shares all full blocks and is longer goes on
    from the whole state.
    """
    is_next = n_shared >= file.asked.n_full_blocks > 0 and asked.n_prompt >= file.asked.n_prompt
    n_common = file.checkpoint.n_tokens if is_next else n_shared * BLOCK_TOKENS
    return min(n_common, file.checkpoint.n_tokens, asked.n_prompt)


@dataclass
class Shelf:
    """All files, by id and by block."""

    memory: Memory
    files: dict[CheckpointId, File] = field(default_factory=dict)
    asked_at: dict[CheckpointId, dict[int, float]] = field(default_factory=dict)
    size_bytes: int = 0
    _by_block: dict[int, dict[CheckpointId, None]] = field(default_factory=dict)
    _n_made: int = 0

    def make(self, asked: Asked, candidates: Sequence[Candidate]) -> File:
        """Return the state after a request, which is not put anywhere yet.

        As the product's saves do, it goes on from the nearest of the *candidates*, whose cuts it knows, and
        has those context checkpoints, its own and theirs, that are worth their bytes.
        """
        self._n_made += 1
        n_tokens = asked.n_prompt + asked.n_answer
        header, turn_start = asked.n_header, asked.turn_start or asked.n_prompt
        nearest = [
            (c.n_common, (*c.checkpoint.marks, c.checkpoint.turn_start)) for c in candidates[:1]
        ]
        marks = {n_cut for n_common, cuts in nearest for n_cut in cuts if n_cut <= n_common}
        content = Known(
            token_ids(bytes(4 * asked.n_prompt)),
            _NAMESPACE,
            header=header,
            turn_start=turn_start,
            marks=tuple(sorted(marks - {0, header, turn_start})),
        )
        own = dict.fromkeys({header, turn_start, asked.n_prompt} - {0}, self.memory.point_bytes)
        likely = likely_cuts(content, CheckpointKind.CONVERSATION)
        selected = select_points(own, points_of_others(candidates), likely, RATES)
        has_points = self.memory.rule.kind is RuleKind.RESTORE_POINTS
        points = tuple(sorted(selected)) if has_points else ()
        checkpoint = Checkpoint(
            id=CheckpointId(self._n_made),
            namespace=_NAMESPACE,
            kind=CheckpointKind.CONVERSATION,
            n_tokens=n_tokens,
            restore_points=points,
            has_every_position=not has_points,
            file_name="",
            size_bytes=self.memory.state_bytes(n_tokens, len(points)),
            created_at=asked.at,
            last_used_at=asked.at,
            n_prompt=asked.n_prompt,
            header=header,
            turn_start=turn_start,
            marks=content.marks,
            n_messages=2 * asked.n_turns,
        )
        return File(checkpoint, asked)

    def put(self, file: File) -> None:
        self.files[file.checkpoint.id] = file
        self.size_bytes += file.checkpoint.size_bytes
        for block in file.asked.blocks:
            self._by_block.setdefault(block, {})[file.checkpoint.id] = None

    def replace(self, file: File) -> None:
        """Put another record of a file that is there."""
        self.files[file.checkpoint.id] = file

    def remove(self, file: File) -> None:
        checkpoint_id = file.checkpoint.id
        del self.files[checkpoint_id]
        self.asked_at.pop(checkpoint_id, None)
        self.size_bytes -= file.checkpoint.size_bytes
        for block in file.asked.blocks:
            self._by_block[block].pop(checkpoint_id, None)
            if not self._by_block[block]:
                del self._by_block[block]

    def n_with(self, block: int) -> int:
        """Return how many files hold a block."""
        return len(self._by_block.get(block, ()))

    def sharing(self, asked: Asked, n_at_most: int = _N_COMPARED) -> Iterator[tuple[File, int]]:
        """Yield the files that share blocks, and how many; most first, then the newest."""
        seen: set[CheckpointId] = set()
        for n_shared in range(len(asked.blocks), 0, -1):
            for checkpoint_id in reversed(self._by_block.get(asked.blocks[n_shared - 1], {})):
                if checkpoint_id in seen:
                    continue
                seen.add(checkpoint_id)
                yield self.files[checkpoint_id], n_shared
                if len(seen) == n_at_most:
                    return

    def n_known_blocks(self, asked: Asked) -> int:
        """Return how many blocks of a request any file begins with."""
        return next((n for _, n in self.sharing(asked, 1)), 0)

    def candidates(self, asked: Asked) -> list[Candidate]:
        """Return the checkpoints that share a prefix with a request."""
        return [Candidate(f.checkpoint, _common(f, asked, n)) for f, n in self.sharing(asked)]

    def relatives(self, checkpoint: Checkpoint) -> list[Relative]:
        """Return a checkpoint, and those that share most with it, as the store's catalogue does."""
        own = self.files[checkpoint.id]
        others = [
            (f, max(_common(f, own.asked, n), _common(own, f.asked, n)))
            for f, n in self.sharing(own.asked, _N_COMPARED + 1)
            if f is not own
        ]
        return [
            Relative(f.checkpoint, count_blocks(n), self.asked_at.get(f.checkpoint.id, {}))
            for f, n in ((own, checkpoint.n_tokens), *others)
        ]
