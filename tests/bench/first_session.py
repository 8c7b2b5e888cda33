"""Everything is started for the first time, Claude Code at once, and then a second fresh session.

The first session begins before the model's rule is known. What it leaves must serve the second one, in
its own slot, and again after everything was restarted.

python -m tests.bench.first_session [KIND ...]
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tests.bench.section import Section
from tests.lab.clients import claude_code
from tests.lab.conversation import prose
from tests.lab.models import MEMORIES, TEMPLATE_FOLDER, model_path
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

MOST_TOKENS = 1500
TEMPLATE = ("--chat-template-file", str(TEMPLATE_FOLDER / "thinking.jinja"))


async def begin_session(rig: Rig, seed: int) -> None:
    """Send the first request of a fresh session."""
    body = claude_code.request(prose(seed, 40))
    await rig.post("/v1/messages", {**body, "max_tokens": 4, "stream": False})


async def measure(kind: str, n_slots: int, *, restarts: bool, waits: bool) -> int:
    """Return how many tokens are evaluated for the second session, the canary of a restart left out."""
    async with AsyncExitStack() as leftovers:
        folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
        model = model_path(kind, "tiny", DEFAULT_MODEL_FOLDER)
        server = LlamaServer(
            model, folder, n_slots=n_slots, n_ctx=32768 * n_slots, extra_args=TEMPLATE
        )
        rig = await leftovers.enter_async_context(Rig(server, folder, settles=waits))
        await begin_session(rig, 7)
        await rig.settled()
        if restarts:
            await rig.restart()
        before = await rig.evaluated()
        await begin_session(rig, 8)
        return await rig.evaluated() - before


async def measure_all(kinds: Sequence[str]) -> Section:
    """Return the table."""
    section = Section(
        "A session that begins before the rule is known (1.5 MB models)",
        f"the second fresh session evaluates at most {MOST_TOKENS:,} tokens",
        ("memory", "slots", "between them", "evaluated", "evaluated if the first waits"),
    )
    for kind in kinds:
        for n_slots in (1, 2):
            for restarts in (False, True):
                n_second = await measure(kind, n_slots, restarts=restarts, waits=False)
                n_waited = await measure(kind, n_slots, restarts=restarts, waits=True)
                between = "restart of both" if restarts else "nothing"
                row = (kind, n_slots, between, n_second, n_waited)
                section.add(*row, is_met=n_second <= MOST_TOKENS)
                print(row, file=sys.stderr, flush=True)
    return section


if __name__ == "__main__":
    print(asyncio.run(measure_all(sys.argv[1:] or MEMORIES)).markdown())
