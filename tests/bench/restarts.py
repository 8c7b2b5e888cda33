"""`run` with one command: three conversations on one slot, SIGTERM, and all of them go on."""

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.bench.progress import tell
from tests.bench.section import Section
from tests.lab.interleaved import Conversations, Cost
from tests.lab.models import MEMORIES, model_path
from tests.lab.run import RunProcess
from tests.lab.server import DEFAULT_MODEL_FOLDER

N_BEFORE_RESTART = 4


async def measure_restarts(leftovers: ExitStack) -> Section:
    """Return the table of the first request of each conversation after everything was restarted."""
    section = Section(
        "`run`: three conversations on one slot, killed with SIGTERM and started again",
        "evaluated <= new + 32",
        ("memory", "conversation", "prompt", "new", "evaluated", "at most"),
    )
    for kind in MEMORIES:
        tell(f"run: {kind}")
        for i, cost in enumerate(await asyncio.to_thread(_measure, kind, leftovers)):
            cells = (cost.n_prompt, cost.n_new, cost.n_evaluated, cost.n_at_most)
            section.add(kind, "ABC"[i], *cells, is_met=cost.is_met)
    return section


def _measure(kind: str, leftovers: ExitStack) -> list[Cost]:
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    (folder / "slots").mkdir()
    model = model_path(kind, "tiny", DEFAULT_MODEL_FOLDER)
    run = RunProcess(folder / "run.log", model=model, slot_save_path=folder / "slots")
    leftovers.callback(run.kill)
    run.start_and_await_caching()
    conversations = Conversations(run)
    for n_request in range(N_BEFORE_RESTART):
        conversations.tell_all(n_request)
    run.stop()
    run.start_and_await_caching()
    costs = conversations.tell_all(N_BEFORE_RESTART)
    run.stop()
    return costs
