"""Damaged state files: no answer is another one, no llama-server dies, and nothing stays damaged."""

import asyncio

from tests.lab.damage import Generations
from tests.lab.server import LlamaServer
from tests.live.conftest import ONE_KIND, StartRig


@ONE_KIND
async def test_conversations_go_on_from_damaged_states_as_if_they_were_not_there(
    start_rig: StartRig, kind: str
) -> None:
    async with start_rig(kind) as rig:
        alone = LlamaServer(rig.server.model, n_slots=1)
        await asyncio.to_thread(alone.start)
        try:
            generations = Generations(rig, alone, 2, seed=1)
            await generations.run(while_running=kind in ("full", "hybrid"), n_generations=1)
        finally:
            await asyncio.to_thread(alone.stop)
        assert len(generations.damaged) >= 2 and generations.n_not_named == 0
        assert (generations.n_wrong, generations.n_deaths, generations.n_spread) == (0, 0, 0)
        assert generations.n_reused > 0
