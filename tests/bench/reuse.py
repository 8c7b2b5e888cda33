"""How many tokens are evaluated: for the next turn after a restart, and for a second conversation."""

from contextlib import ExitStack
from dataclasses import dataclass

from tests.bench.ledger import Ledger
from tests.bench.progress import tell
from tests.bench.rigs import open_rig
from tests.bench.section import Section
from tests.bench.workload import Request, conversation, second_conversation
from tests.lab.models import MEMORIES
from tests.lab.older_builds import RewriteStateFile, keep_as_saved, strip_context_checkpoints
from tests.lab.rig import Rig

SLACK_TOKENS = 32
N_BEFORE_RESTART = 5
SECOND_SEED, THIRD_SEED = 500, 700
NEXT_TURN, NEXT_TURN_STRIPPED = "next turn", "next turn, no context checkpoints in the files"
SECOND = "second conversation"


@dataclass(frozen=True, slots=True)
class Use:
    """What one request cost."""

    label: str
    n_prompt: int
    n_new: int
    n_evaluated: int
    n_last_message: int


class Asker:
    """Sends requests through a rig and counts."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._ledger = Ledger(rig.server)

    async def ask(self, request: Request) -> Use:
        """Send one request and return what it cost."""
        prompt = await self._ledger.tokens(request)
        last_message = await self._ledger.text_tokens(request.messages[-1]["content"])
        n_before = await self._rig.evaluated()
        await self._rig.post("/v1/chat/completions", request.body(max_tokens=8))
        n_evaluated = await self._rig.evaluated() - n_before
        n_new = self._ledger.enter(prompt)
        return Use(request.label, len(prompt), n_new, n_evaluated, len(last_message))

    async def ask_after_restart(self, request: Request) -> Use:
        await self._rig.restart()
        return await self.ask(request)


class ReuseBenchmark:
    """Fills the tables of the next turn and of the second conversation."""

    def __init__(self, leftovers: ExitStack) -> None:
        self._leftovers = leftovers
        self.next_turn = Section(
            "Next turn of a 10,000-token conversation after both were restarted",
            "evaluated <= new + 32; without context checkpoints in the files (as builds before 0.7.0 "
            "write them) <= new + last message + 32 on full, recurrent and hybrid",
            (
                "memory",
                "context checkpoints",
                "next message",
                "prompt",
                "new",
                "evaluated",
                "at most",
            ),
            is_documented=False,
        )
        self.second = Section(
            "Second conversation with the same header",
            "evaluated <= new (what follows the shared header) + 32",
            ("memory", "when", "prompt", "new", "evaluated", "at most"),
            is_documented=False,
        )
        self._beyond_new: dict[str, dict[str, int]] = {kind: {} for kind in MEMORIES}

    async def run(self) -> list[Section]:
        for kind in MEMORIES:
            await self._run(kind, keep_as_saved)
            await self._run(kind, strip_context_checkpoints)
        return [self.next_turn, self.second, self._summary()]

    def _summary(self) -> Section:
        """Return the most tokens that each kind of memory evaluated beyond those that were new."""
        section = Section(
            "Next turn of a 10,000-token conversation after a restart, and a second conversation",
            f"evaluated beyond what is new <= {SLACK_TOKENS}; without context checkpoints in the "
            "files, and the last message besides",
            ("memory", NEXT_TURN, NEXT_TURN_STRIPPED, SECOND),
        )
        for kind, beyond in self._beyond_new.items():
            cells = (beyond[name] for name in (NEXT_TURN, NEXT_TURN_STRIPPED, SECOND))
            is_met = max(beyond[NEXT_TURN], beyond[SECOND]) <= SLACK_TOKENS
            section.add(kind, *cells, is_met=is_met)
        return section

    def _count(self, kind: str, name: str, use: Use) -> None:
        n_beyond = use.n_evaluated - use.n_new
        self._beyond_new[kind][name] = max(n_beyond, self._beyond_new[kind].get(name, 0))

    async def _run(self, kind: str, rewrite: RewriteStateFile) -> None:
        is_stripped = rewrite is strip_context_checkpoints
        tell(f"reuse: {kind}" + (" without context checkpoints" if is_stripped else ""))
        requests = conversation()
        async with open_rig(kind, self._leftovers, rewrite=rewrite) as rig:
            asker = Asker(rig)
            for request in requests[:N_BEFORE_RESTART]:
                await asker.ask(request)
            if not is_stripped:
                use = await asker.ask(second_conversation(SECOND_SEED))
                self._add_second(kind, "before the restart", use)
            for request in requests[N_BEFORE_RESTART:]:
                self._add_next_turn(kind, is_stripped, await asker.ask_after_restart(request))
            if not is_stripped:
                use = await asker.ask_after_restart(second_conversation(THIRD_SEED))
                self._add_second(kind, "after the restart", use)

    def _add_next_turn(self, kind: str, is_stripped: bool, use: Use) -> None:
        self._count(kind, NEXT_TURN_STRIPPED if is_stripped else NEXT_TURN, use)
        n_at_most = use.n_new + SLACK_TOKENS + (use.n_last_message if is_stripped else 0)
        has_bar = not is_stripped or kind != "swa"
        self.next_turn.add(
            kind,
            "none" if is_stripped else "in the file",
            use.label,
            use.n_prompt,
            use.n_new,
            use.n_evaluated,
            n_at_most if has_bar else "-",
            is_met=use.n_evaluated <= n_at_most if has_bar else None,
        )

    def _add_second(self, kind: str, when: str, use: Use) -> None:
        self._count(kind, SECOND, use)
        n_at_most = use.n_new + SLACK_TOKENS
        cells = (kind, when, use.n_prompt, use.n_new, use.n_evaluated, n_at_most)
        self.second.add(*cells, is_met=use.n_evaluated <= n_at_most)
