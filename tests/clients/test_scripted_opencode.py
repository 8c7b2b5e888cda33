"""OpenCode at work: tool loops, later sessions, agents, plan and build, another day."""

from typing import Any

import pytest

from tests.clients.conftest import Lab, StartLab
from tests.clients.ledger import (
    SLACK_TOKENS,
    assert_append_only,
    assert_only_new_is_evaluated,
    assert_shared_at_once,
    told,
)
from tests.clients.opencode import Outcome
from tests.clients.script import Answer, Script
from tests.clients.tool_loops import EARLIER, LATER, call, opencode_delegation, opencode_loop

TASK = "Mend the parser"

templates = pytest.mark.parametrize("template", ["strict", "thinking"])


async def ask(
    lab: Lab, prompt: str, *flags: str, environment: dict[str, str] | None = None, **limits: int
) -> Outcome:
    client = lab.opencode(**limits)
    return await client.ask(prompt, lab.repository, *flags, environment=environment)


@templates
async def test_tool_loop_and_later_sessions_evaluate_only_what_is_new(
    start_scripted: StartLab, template: str
) -> None:
    async with start_scripted(template) as lab:
        loop = opencode_loop(lab.repository)
        lab.scripted.script = Script({TASK: loop})
        outcome = await ask(lab, f"{TASK} in src/one.py")
        continued = await ask(lab, "Is it all well now?", "-c")
        fresh = await ask(lab, "What is in src/two.py?")
        turns = lab.turns()
        print(f"\nOpenCode, {template}\n{told(turns)}")
        work = [turn for turn in turns if turn.recorded.has_tools]
        assert len(work) == len(outcome.steps()) + 2 == 15
        assert calls_in(work[-2].recorded.body) == [c.arguments for a in loop for c in a.calls]
        assert_append_only(work[:-2])
        assert_only_new_is_evaluated(turns)
        assert work[-1].n_reused >= 0.99 * work[-1].n_known
        steps = outcome.steps() + continued.steps() + fresh.steps()
        assert [step["cache"]["read"] for step in steps] == [turn.n_reused for turn in work]
        assert [step["input"] for step in steps] == [turn.n_evaluated for turn in work]


def calls_in(body: dict[str, Any]) -> list[str]:
    """Return the arguments of all calls in a request."""
    calls = (c for m in body["messages"] for c in m.get("tool_calls", ()))
    return [str(c["function"]["arguments"]) for c in calls]


async def test_agents_share_their_header_at_once(start_scripted: StartLab) -> None:
    async with start_scripted("strict") as lab:
        look = (Answer("", (call("bash", description="Look", command="ls"),)), Answer("Seen."))
        parts = {f"Examine part {part}": look for part in ("one", "two")}
        lab.scripted.script = Script({TASK: opencode_delegation(), **parts})
        await ask(lab, f"{TASK} with agents")
        turns = lab.turns()
        print(f"\nOpenCode's agents\n{told(turns)}")
        begun = [t for t in turns if "Examine part" in str(t.recorded.body["messages"][-1])]
        first, second = (t for t in begun if t.recorded.has_tools)
        assert_shared_at_once(turns, first, second)


@pytest.mark.parametrize("stabilizers", ["safe", "safe, sticky_date"])
async def test_continued_session_on_another_day_keeps_its_prompt_with_a_sticky_date(
    start_scripted: StartLab, stabilizers: str
) -> None:
    async with start_scripted("strict", stabilizers=stabilizers) as lab:
        await ask(lab, f"{TASK} today", environment=EARLIER)
        await ask(lab, "Is it late?", "-c", environment=LATER)
        turns = lab.turns()
        print(f"\nOpenCode, another day, {stabilizers}\n{told(turns)}")
        first, second = (turn for turn in turns if turn.recorded.has_tools)
        is_kept = "sticky_date" in stabilizers
        assert (second.n_known > 0.99 * len(first.tokens)) is is_kept
        if is_kept:
            assert_only_new_is_evaluated(turns)


@pytest.mark.parametrize(
    "stabilizers",
    ["safe", "safe, sticky_tool_text, sticky_reminders, inline_reasoning"],
    ids=["safe", "all"],
)
async def test_plan_then_build_keeps_its_prompt_with_sticky_tools_and_reminders(
    start_scripted: StartLab, stabilizers: str
) -> None:
    async with start_scripted("strict", stabilizers=stabilizers) as lab:
        lab.scripted.script = Script({TASK: opencode_loop(lab.repository)[:2]})
        await ask(lab, f"{TASK}: what is to be done?", "--agent", "plan")
        await ask(lab, "Do it.", "-c", "--agent", "build")
        await ask(lab, "And now the tests.", "-c", "--agent", "build")
        turns = lab.turns()
        print(f"\nOpenCode, plan and build, {stabilizers}\n{told(turns)}")
        work = [turn for turn in turns if turn.recorded.has_tools]
        is_kept = [b.n_known > 0.99 * len(a.tokens) for a, b in zip(work, work[1:], strict=False)]
        assert all(is_kept) is (stabilizers != "safe")


async def test_compacted_session_keeps_its_header(start_scripted: StartLab) -> None:
    """The summary is asked for with another system prompt and no tools, in the middle of the loop."""
    async with start_scripted("strict") as lab:
        lab.scripted.script = Script({TASK: opencode_loop(lab.repository)})
        await ask(lab, f"{TASK} in src/one.py", context=14000, output=1000)
        turns = lab.turns()
        print(f"\nOpenCode, compacted\n{told(turns)}")
        summary = max(i for i, turn in enumerate(turns) if not turn.recorded.has_tools)
        assert 0 < summary < len(turns) - 1
        n_header = turns[-1].n_known
        assert n_header > 10_000
        assert turns[summary + 1].n_reused >= 0.99 * n_header - SLACK_TOKENS
