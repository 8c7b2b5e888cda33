"""Many conversations on few slots, on a real llama-server: nothing that was evaluated is lost."""

import asyncio
from typing import Any

import pytest

from proxy.core.launch import Launch
from proxy.core.model import FULL_WINDOW_TOKENS
from proxy.core.slots import Known
from proxy.serving import prompts
from tests.lab.conversation import (
    Message,
    agent_requests,
    answer,
    prose,
    system,
    tool_call,
    tool_result,
    user,
)
from tests.lab.models import TEMPLATE_FOLDER
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import ONE_KIND, StartRig, in_long
from tests.live.ledger import SLACK_TOKENS, TOOLS, Ledger

HEADER = [system(150)]
NEVER_IDLE: dict[str, Any] = {"idle_save_seconds": 3600.0}
"""Nothing is saved but for a reason that the test gives."""


def stored(rig: Rig) -> list[Any]:
    return list(rig.running.store or ())


async def chat(rig: Rig, messages: list[Message], **fields: Any) -> None:
    await rig.chat(messages, **{"tools": TOOLS, "max_tokens": 4, **fields})


async def evaluated(rig: Rig) -> int:
    """Return llama-server's count once no slot is leased; some stay dirty."""
    await until(lambda: not any(slot.is_leased for slot in rig.running.server.process.slots))  # type: ignore[union-attr]
    return await asyncio.to_thread(rig.server.evaluated_tokens)


class Counted:
    """Asks without waiting for write-backs, and holds each cost against what is new."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._ledger = Ledger(rig)

    async def ask(self, messages: list[Message]) -> tuple[int, int]:
        """Send a request; return its new tokens and those evaluated for it."""
        n_new = await self._ledger.enter(messages)
        before = await evaluated(self._rig)
        await chat(self._rig, messages)
        return n_new, await evaluated(self._rig) - before

    async def ask_in_turn(self, conversations: list[list[list[Message]]]) -> None:
        for requests in zip(*conversations, strict=True):
            for messages in requests:
                n_new, n_evaluated = await self.ask(messages)
                assert n_evaluated <= n_new + SLACK_TOKENS


@ONE_KIND
async def test_conversations_by_turns_on_one_slot_evaluate_only_what_is_new(
    start_rig: StartRig, kind: str
) -> None:
    conversations = [agent_requests(2, 2, header=HEADER, seed=100 * i) for i in range(3)]
    async with start_rig(kind, n_slots=1, **NEVER_IDLE) as rig:
        await Counted(rig).ask_in_turn(conversations)


@pytest.mark.parametrize(
    ("kind", "context_checkpoints"),
    [("hybrid", 8), *in_long(("swa", 8), ("recurrent", 8), ("hybrid", 32))],
)
async def test_start_of_a_turn_outlives_a_tool_loop_that_llama_server_forgets_it_in(
    start_rig: StartRig, kind: str, context_checkpoints: int
) -> None:
    # A short header would not be worth a file.
    first, *loop, second = agent_requests(2, 20, header=[system(900)])[:22]
    flags = ("--ctx-checkpoints", str(context_checkpoints))
    launch = Launch(n_context_checkpoints=context_checkpoints)
    options = {**NEVER_IDLE, "launch": launch, "extra_args": flags}
    async with start_rig(kind, n_slots=1, **options) as rig:
        counted = Counted(rig)
        for messages in (first, *loop, second):
            n_new, n_evaluated = await counted.ask(messages)
            assert n_evaluated <= n_new + SLACK_TOKENS


@pytest.mark.parametrize("is_told", [True, False], ids=["flag known", "flag not known"])
async def test_file_has_no_more_points_than_llama_server_loads_of_it(
    start_rig: StartRig, is_told: bool
) -> None:
    """Else llama-server would leave out the oldest: the header, with which the next session begins."""
    n_kept = 4
    options: dict[str, Any] = {"launch": Launch(n_context_checkpoints=n_kept)} if is_told else {}
    options |= {**NEVER_IDLE, "extra_args": ("--ctx-checkpoints", str(n_kept))}
    *turns, last = agent_requests(9, 0, header=HEADER)
    async with start_rig("hybrid", n_slots=1, **options) as rig:
        counted = Counted(rig)
        await counted.ask_in_turn([turns])
        await counted.ask([system(300, seed=5), user(500)])
        n_new, n_evaluated = await counted.ask([*HEADER, user(900)])
        if is_told:
            assert n_evaluated <= n_new + SLACK_TOKENS
            assert all(len(checkpoint.restore_points) <= n_kept for checkpoint in stored(rig))
        # Where only a restore tells, that restore costs tokens, but no state.
        n_new, n_evaluated = await counted.ask(last)
        assert n_evaluated <= n_new + SLACK_TOKENS


@ONE_KIND
async def test_conversation_keeps_one_file_with_the_few_points_that_are_worth_it(
    start_rig: StartRig, kind: str
) -> None:
    async with start_rig(kind, n_slots=1) as rig:
        for messages in agent_requests(4, 3, header=HEADER):
            await chat(rig, messages)
            await rig.settled()
        (only,) = stored(rig)
        if kind != "full":
            places = {only.header, only.turn_start, only.n_prompt, *only.marks}
            assert 3 <= len(only.restore_points) <= len(places)
            for place in (only.header, only.turn_start, only.n_prompt):
                assert any(place - SLACK_TOKENS <= p <= place for p in only.restore_points)


@ONE_KIND
async def test_header_that_changes_half_way_shares_its_stable_part(
    start_rig: StartRig, kind: str
) -> None:
    """The second prompt that comes this way finds where it leaves the first; the third gains by it."""
    async with start_rig(kind, n_slots=1) as rig:
        ledger = Ledger(rig)
        costs = []
        for day in range(4):
            text = f"{prose(7, 300)}\nToday is day {day}.\n{prose(8, 60)}"
            costs.append(await ledger.ask([{"role": "system", "content": text}, user(day)]))
        for n_new, n_evaluated, n_prompt in costs[2:]:
            assert n_new < n_prompt - 512
            assert n_evaluated <= n_new + SLACK_TOKENS


@pytest.mark.parametrize(
    ("kind", "n_slots"),
    [
        ("hybrid", 1),
        ("full", 2),
        *in_long(("full", 1), ("swa", 1), ("recurrent", 1), ("hybrid", 2)),
    ],
)
async def test_titles_after_every_turn_cost_the_conversation_nothing(
    start_rig: StartRig, kind: str, n_slots: int
) -> None:
    async with start_rig(kind, n_slots=n_slots, **NEVER_IDLE) as rig:
        counted = Counted(rig)
        for number, messages in enumerate(agent_requests(3, 1, header=HEADER)):
            n_new, n_evaluated = await counted.ask(messages)
            assert n_evaluated <= n_new + SLACK_TOKENS
            title = [{"role": "system", "content": "Name the task."}, user(50 + number)]
            await chat(rig, title, tools=[])


@ONE_KIND
async def test_conversation_goes_on_after_a_fork_of_it_has_had_the_slot(
    start_rig: StartRig, kind: str
) -> None:
    """A summary is asked for at the end of all that was said, and does not become part of it."""
    requests = agent_requests(3, 2, header=HEADER)
    async with start_rig(kind, n_slots=1, **NEVER_IDLE) as rig:
        counted = Counted(rig)
        for messages in requests[:6]:
            await counted.ask(messages)
        fork = [*requests[5], answer(10), user(900)]
        for call in range(4):
            await counted.ask(fork)
            fork += [tool_call(900 + call), tool_result(900 + call)]
        n_new, n_evaluated = await counted.ask(requests[6])
        assert n_evaluated <= n_new + SLACK_TOKENS


@ONE_KIND
async def test_session_that_begins_with_few_other_words_takes_no_slot_unsaved(
    start_rig: StartRig, kind: str
) -> None:
    first, other = ([*HEADER, {"role": "user", "content": text}] for text in ("Go on.", "Stop."))
    loop = [message for n in range(3) for message in (tool_call(n), tool_result(n, 200))]
    async with start_rig(kind, n_slots=1, **NEVER_IDLE) as rig:
        counted = Counted(rig)
        for messages in (first, [*first, *loop[:2]], [*first, *loop[:4]], other):
            await counted.ask(messages)
        n_new, n_evaluated = await counted.ask([*first, *loop])
        assert n_evaluated <= n_new + SLACK_TOKENS


@ONE_KIND
async def test_requests_with_the_same_new_header_at_once_evaluate_it_once(
    start_rig: StartRig, kind: str
) -> None:
    async with start_rig(kind, n_slots=2, **NEVER_IDLE) as rig:
        await chat(rig, [system(200, seed=3), user(1)], tools=[])  # what evaluating costs is known
        ledger = Ledger(rig)
        requests = [[system(900, seed=5), user(seed)] for seed in (1, 2)]
        n_new = sum([await ledger.enter(messages) for messages in requests])
        before = await evaluated(rig)
        await asyncio.gather(*(chat(rig, messages) for messages in requests))
        assert await evaluated(rig) - before <= n_new + 2 * SLACK_TOKENS


async def test_short_header_at_once_is_evaluated_once_behind_a_sliding_window(
    start_rig: StartRig,
) -> None:
    async with start_rig("swa", n_slots=2, **NEVER_IDLE) as rig:
        await chat(rig, [system(500, seed=3), user(1)], tools=[])  # its file shows the window
        before = await evaluated(rig)
        asked = (rig.chat([system(400, seed=5), user(seed)], max_tokens=4) for seed in (1, 2))
        lengths = [reply["usage"]["prompt_tokens"] for reply in await asyncio.gather(*asked)]
        assert max(lengths) < FULL_WINDOW_TOKENS
        assert await evaluated(rig) - before < 1.3 * max(lengths)


async def test_turn_starts_at_the_same_token_however_long_it_goes_on(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header is found again every ten minutes, and many turns of agents are longer."""
    monkeypatch.setattr(prompts, "_REMEMBERED_SECONDS", 0.01)
    thinking = ("--chat-template-file", str(TEMPLATE_FOLDER / "thinking.jinja"))
    async with start_rig("hybrid", n_slots=1, extra_args=thinking) as rig:
        messages, begins = [user(1, 300)], set[int]()
        for step in range(2):
            await rig.chat(messages, max_tokens=4)
            await rig.settled()
            [slot] = rig.running.pool.processes[0].slots
            assert isinstance(slot.content, Known)
            begins.add(slot.content.turn_start)
            messages += [tool_call(step), tool_result(step, 200)]
        assert len(begins) == 1
