"""Conversations that begin, go on and go back at random, on the flags that `run` adds: what they cost.

Agents work in many sessions of one header for days. The proxy is restarted in between.
"""

import random

import pytest

from proxy.core.launch import N_CONTEXT_CHECKPOINTS, Launch
from tests.lab.conversation import Message, answer, system, tool_call, tool_result, user
from tests.lab.rig import Rig
from tests.live.conftest import StartRig, in_long
from tests.live.ledger import Ledger

HEADERS = [[system(450)], [system(300, seed=5)]]
N_STEPS = 50
N_CONVERSATIONS = 12
N_LIVE = 4
"""Only the newest conversations go on."""
MOST = 1.05
"""Tokens evaluated / those that an exact cache would evaluate."""
FLAGS = ("--ctx-checkpoints", str(N_CONTEXT_CHECKPOINTS))


def go_on(conversation: list[Message], rng: random.Random) -> None:
    """Let an agent take a step or its user ask again, now and then something else than before."""
    seed = rng.randrange(10**6)
    if rng.random() < 0.5:
        conversation += [tool_call(seed), tool_result(seed)]
    else:
        conversation += [answer(seed), user(seed)]
    asked = [i for i, message in enumerate(conversation) if message["role"] == "user"]
    if len(conversation) > 8 and rng.random() < 0.08:
        conversation[rng.choice(asked[-2:]) :] = [user(seed + 1)]


def quarantined(rig: Rig) -> int:
    """Return how many states were quarantined since the proxy started."""
    return len(list(rig.running.store.quarantined)) if rig.running.store else 0


@pytest.mark.parametrize(
    ("kind", "n_slots", "seed", "is_told"),
    [
        ("hybrid", 1, 1, True),
        *in_long(
            ("hybrid", 1, 2, False),
            ("hybrid", 2, 3, True),
            ("recurrent", 1, 4, True),
            ("recurrent", 1, 7, False),
            ("swa", 2, 5, True),
            ("full", 1, 6, True),
        ),
    ],
)
async def test_conversations_at_random_evaluate_what_an_exact_cache_would(
    start_rig: StartRig, kind: str, n_slots: int, seed: int, is_told: bool
) -> None:
    rng, conversations = random.Random(seed), list[list[Message]]()
    n_new = n_evaluated = n_quarantined = 0
    narrow = ("-b", "512") if kind == "swa" else ()
    launch = Launch(n_context_checkpoints=N_CONTEXT_CHECKPOINTS)
    options = {"launch": launch} if is_told else {}
    async with start_rig(kind, n_slots=n_slots, extra_args=(*FLAGS, *narrow), **options) as rig:
        ledger = Ledger(rig)
        for _ in range(N_STEPS):
            if rng.random() < 0.05:
                await rig.settled()
                n_quarantined += quarantined(rig)
                await rig.restart()
            if not conversations or (rng.random() < 0.08 and len(conversations) < N_CONVERSATIONS):
                conversations.append([*rng.choice(HEADERS), user(rng.randrange(10**6))])
                conversation = conversations[-1]
            else:
                conversation = rng.choice(conversations[-N_LIVE:])
                go_on(conversation, rng)
            step = await ledger.ask(conversation)
            n_new, n_evaluated = n_new + step[0], n_evaluated + step[1]
        n_quarantined += quarantined(rig)
    print(f"{kind}, {n_slots} slots: {n_evaluated} evaluated, {n_new} new")
    assert n_evaluated <= MOST * n_new and not n_quarantined
