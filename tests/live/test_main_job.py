"""The main job on a real llama-server, four kinds of memory: what is evaluated is what must be."""

from typing import Any

import pytest

from tests.lab.conversation import agent_requests, system
from tests.lab.models import MEMORIES
from tests.lab.older_builds import keep_as_saved, strip_context_checkpoints
from tests.lab.run import slots_in
from tests.live.conftest import ONE_KIND, StartRig, in_long
from tests.live.ledger import SLACK_TOKENS, Ledger

HEADER = [system(150)]
LONG_HEADER = [system(520)]


@pytest.mark.parametrize("kind", [*MEMORIES, *in_long("hybrid_no_mrope")])
async def test_conversation_after_restart_evaluates_only_new_tokens(
    start_rig: StartRig, kind: str
) -> None:
    requests = agent_requests(3, 3, header=LONG_HEADER)
    async with start_rig(kind) as rig:
        ledger = Ledger(rig)
        for messages in requests[:8]:
            n_new, n_evaluated, n_prompt = await ledger.ask(messages)
            assert n_evaluated <= n_new + SLACK_TOKENS
        assert n_prompt > 4000
        await rig.restart()
        for messages in requests[8:]:
            n_new, n_evaluated, _ = await ledger.ask(messages)
            assert n_evaluated <= n_new + SLACK_TOKENS


@ONE_KIND
async def test_second_conversation_with_same_header_shares_it(
    start_rig: StartRig, kind: str
) -> None:
    async with start_rig(kind) as rig:
        ledger = Ledger(rig)
        for messages in agent_requests(2, 2, header=HEADER):
            await ledger.ask(messages)
        for seed, restarts in ((500, False), (700, True)):
            if restarts:
                await rig.restart()
            other = agent_requests(1, 0, header=HEADER, seed=seed)[0]
            n_new, n_evaluated, n_prompt = await ledger.ask(other)
            assert n_evaluated <= n_new + SLACK_TOKENS, restarts
            assert n_new < n_prompt / 10


@pytest.mark.parametrize(
    "kind", ["hybrid", *in_long("full", "swa", "recurrent", "hybrid_no_mrope")]
)
async def test_older_builds_continue_at_the_end_of_the_state(
    start_rig: StartRig, kind: str
) -> None:
    """Without context checkpoints in the file only a state's exact end can be continued."""
    # A state shorter than a sliding window ends where no build goes on: it is not saved.
    header = LONG_HEADER if kind == "swa" else HEADER
    requests = agent_requests(3, 2, header=header)
    async with start_rig(kind, rewrite=strip_context_checkpoints) as rig:
        ledger = Ledger(rig)
        expected = "any prefix" if kind == "full" else "end only"
        assert (await rig.health())["servers"][0]["rule"] == expected
        for messages in requests[:5]:
            await ledger.ask(messages)
        await rig.restart()
        n_new, n_evaluated, _ = await ledger.ask(requests[5])
        assert n_evaluated <= n_new + SLACK_TOKENS
        other = agent_requests(1, 0, header=header, seed=500)[0]
        n_new, n_evaluated, _ = await ledger.ask(other)
        assert n_evaluated <= n_new + SLACK_TOKENS


@pytest.mark.parametrize(
    ("kind", "rewrite"),
    [
        ("hybrid", keep_as_saved),
        ("hybrid", strip_context_checkpoints),
        *in_long(*((kind, keep_as_saved) for kind in ("full", "swa", "recurrent"))),
        *in_long(("swa", strip_context_checkpoints)),
    ],
)
async def test_turn_start_survives_a_long_tool_loop_and_a_restart(
    start_rig: StartRig, kind: str, rewrite: Any
) -> None:
    """A new user message drops old reasoning, so the prompt goes back to the previous turn's start."""
    requests = agent_requests(2, 14, header=HEADER)
    async with start_rig(kind, rewrite=rewrite) as rig:
        ledger = Ledger(rig)
        for messages in requests[:15]:
            await ledger.ask(messages)
        await rig.restart()
        n_new, n_evaluated, _ = await ledger.ask(requests[15])
        assert n_evaluated <= n_new + SLACK_TOKENS


@ONE_KIND
async def test_slots_are_adopted_when_only_the_proxy_restarts(
    start_rig: StartRig, kind: str
) -> None:
    requests = agent_requests(2, 1, header=HEADER)
    async with start_rig(kind) as rig:
        ledger = Ledger(rig)
        await ledger.ask(requests[0])
        n_checkpoints = (await rig.health())["store"]["n_checkpoints"]
        await rig.restart(server=False)
        assert slots_in(await rig.health()) == {"empty": 1, "known": 1}
        assert (await rig.health())["store"][
            "n_checkpoints"
        ] == n_checkpoints  # adopted, not saved twice
        for messages in requests[1:]:
            n_new, n_evaluated, _ = await ledger.ask(messages)
            assert n_evaluated <= n_new + SLACK_TOKENS
