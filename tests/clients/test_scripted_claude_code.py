"""Claude Code at work: tool loops, later sessions, agents, compaction, another day."""

import json
from typing import Any

import pytest

from tests.clients.claude_code import Outcome
from tests.clients.conftest import Lab, StartLab
from tests.clients.ledger import (
    assert_append_only,
    assert_only_new_is_evaluated,
    assert_only_new_is_evaluated_in_all,
    assert_shared_at_once,
    told,
)
from tests.clients.script import Answer, Script
from tests.clients.tool_loops import EARLIER, LATER, call, claude_code_delegation, claude_code_loop

TASK = "Mend the parser"
REPOSITORY_STATUS_TOKENS = 1000
"""What a session in a changed repository may evaluate: its status, and what stands behind it."""

settings = pytest.mark.parametrize(
    ("template", "stabilizers"),
    [("strict", "safe"), ("thinking", "safe"), ("strict", "safe, inline_reasoning")],
    ids=["strict", "thinking", "reasoning"],
)


async def ask(
    lab: Lab, prompt: str, *flags: str, environment: dict[str, str] | None = None
) -> Outcome:
    client = lab.claude_code()
    return await client.ask(prompt, lab.repository, *flags, environment=environment)


@settings
async def test_tool_loop_and_later_sessions_evaluate_only_what_is_new(
    start_scripted: StartLab, template: str, stabilizers: str
) -> None:
    async with start_scripted(template, stabilizers=stabilizers) as lab:
        loop = claude_code_loop(lab.repository)
        lab.scripted.script = Script({TASK: loop})
        outcome = await ask(lab, f"{TASK} in src/one.py")
        n_in_loop = len(lab.scripted.recorded)
        continued = await ask(lab, "Is it all well now?", "-c")
        fresh = await ask(lab, "What is in src/two.py?")
        cost = await ask(lab, "/cost", "-c")
        turns = lab.turns()
        print(f"\nClaude Code, {template}, {stabilizers}\n{told(turns)}")
        assert outcome.text == "The parser is mended." and n_in_loop == 13
        assert calls_in(turns[n_in_loop].recorded.body) == calls_of(loop)
        assert_append_only(turns[: n_in_loop + ("inline_reasoning" in stabilizers)])
        assert_only_new_is_evaluated(turns[:-1])
        assert turns[-1].n_evaluated <= REPOSITORY_STATUS_TOKENS
        # A continued session counts on from where it was.
        assert continued.n_evaluated == sum(turn.n_evaluated for turn in turns[:-1])
        assert continued.n_cached == sum(turn.n_reused for turn in turns[:-1])
        assert (fresh.n_evaluated, fresh.n_cached) == (turns[-1].n_evaluated, turns[-1].n_reused)
        assert f" {fresh.n_cached / 1000:.1f}k cache read" in cost.text


def calls_in(body: dict[str, Any]) -> list[str]:
    """Return the arguments of all calls in a request; inlined reasoning makes chat messages of answers."""
    calls = []
    for message in (m for m in body["messages"] if m["role"] == "assistant"):
        blocks = message["content"] if isinstance(message["content"], list) else []
        calls += [json.dumps(block["input"]) for block in blocks if block["type"] == "tool_use"]
        for made in message.get("tool_calls", ()):
            calls.append(json.dumps(json.loads(made["function"]["arguments"])))
    return calls


def calls_of(answers: tuple[Answer, ...]) -> list[str]:
    """Return the arguments of all calls as the model made them."""
    return [json.dumps(json.loads(c.arguments)) for answer in answers for c in answer.calls]


async def test_tool_loaded_in_mid_conversation_costs_only_what_is_behind_the_tools(
    start_scripted: StartLab,
) -> None:
    async with start_scripted("strict") as lab:
        search = call("ToolSearch", query="select:NotebookEdit", max_results=1)
        lab.scripted.script = Script({TASK: (Answer("I need more.", (search,)), Answer("Good."))})
        await ask(lab, f"{TASK} with a notebook")
        turns = lab.turns()
        print(f"\nClaude Code, a tool loaded\n{told(turns)}")
        before, after = (turn.recorded.body["tools"] for turn in turns)
        assert [t["name"] for t in after[: len(before)]] == [t["name"] for t in before]
        assert len(after) == len(before) + 1
        assert turns[1].n_known > 0.6 * len(turns[0].tokens)


async def test_agents_share_their_header_at_once_and_later(start_scripted: StartLab) -> None:
    async with start_scripted("strict") as lab:
        look = (Answer("", (call("Bash", description="Look", command="ls"),)), Answer("Seen."))
        parts = {f"Examine part {part}": look for part in ("one", "two", "three")}
        lab.scripted.script = Script({TASK: claude_code_delegation(), **parts})
        await ask(lab, f"{TASK} with agents")
        turns = lab.turns()
        print(f"\nClaude Code's agents\n{told(turns)}")
        begun = [t for t in turns if "Examine part" in str(t.recorded.body["messages"][-1])]
        first, second, third = (t for t in begun if len(t.recorded.body["messages"]) == 1)
        assert_shared_at_once(turns, first, second)
        assert third.n_known > 0.99 * len(third.tokens)
        assert_only_new_is_evaluated_in_all(turns[turns.index(third) :])


async def test_continued_session_on_another_day_evaluates_only_what_is_new(
    start_scripted: StartLab,
) -> None:
    async with start_scripted("strict") as lab:
        await ask(lab, f"{TASK} today", environment=EARLIER)
        await ask(lab, "Is it late?", "-c", environment=LATER)
        turns = lab.turns()
        print(f"\nClaude Code, another day\n{told(turns)}")
        assert_only_new_is_evaluated(turns)
        assert turns[-1].n_known > 0.99 * len(turns[0].tokens)


async def test_compacted_session_keeps_its_header(start_scripted: StartLab) -> None:
    async with start_scripted("strict") as lab:
        lab.scripted.script = Script({TASK: claude_code_loop(lab.repository)[:4]})
        await ask(lab, f"{TASK} in src/one.py")
        n_before = len(lab.scripted.recorded)
        await ask(lab, "/compact", "-c")
        await ask(lab, "Go on, please.", "-c")
        turns = lab.turns()
        print(f"\nClaude Code, compacted after {n_before}\n{told(turns)}")
        assert len(turns) > n_before
        assert_only_new_is_evaluated(turns[: n_before + 1])
        assert turns[-1].n_evaluated <= 0.3 * len(turns[0].tokens)
