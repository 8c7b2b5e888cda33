"""Claude Code at work: tool loops, later sessions, agents, compaction, another day."""

import pytest

from tests.clients.claude_code import Outcome
from tests.clients.conftest import Lab, StartLab
from tests.clients.ledger import SLACK_TOKENS, Turn, told
from tests.clients.script import Answer, Script
from tests.clients.tool_loops import call, claude_code_delegation, claude_code_loop

TASK = "Mend the parser"
GENERATION_PROMPT_TOKENS = 8
YESTERDAY, TODAY = {"TZ": "Etc/GMT+12"}, {"TZ": "Pacific/Kiritimati"}
"""At every moment it is an earlier date in the one than in the other."""

templates = pytest.mark.parametrize("template", ["strict", "thinking"])


async def ask(lab: Lab, prompt: str, *flags: str, **options: dict[str, str]) -> Outcome:
    return await lab.claude_code().ask(prompt, lab.repository, *flags, **options)


def assert_only_new_is_evaluated(turns: list[Turn]) -> None:
    for turn in turns:
        assert turn.n_evaluated <= turn.n_new + SLACK_TOKENS, told(turns)


def assert_append_only(turns: list[Turn]) -> None:
    """Assert that each prompt begins with all of the one before it, but for what asks for an answer."""
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn.n_known >= len(before.tokens) - GENERATION_PROMPT_TOKENS, told(turns)


@templates
async def test_tool_loop_and_later_sessions_evaluate_only_what_is_new(
    start_scripted: StartLab, template: str
) -> None:
    async with start_scripted(template) as lab:
        lab.scripted.script = Script(**{TASK: claude_code_loop(lab.repository)})
        outcome = await ask(lab, f"{TASK} in src/one.py")
        n_in_loop = len(lab.scripted.recorded)
        continued = await ask(lab, "Is it all well now?", "-c")
        fresh = await ask(lab, "What is in src/two.py?")
        turns = lab.turns()
        print(f"\nClaude Code, {template}\n{told(turns)}")
        assert outcome.text == "The parser is mended." and n_in_loop == 13
        assert_append_only(turns[:n_in_loop])
        assert_only_new_is_evaluated(turns)
        n_header = turns[-1].n_known
        assert turns[-1].n_evaluated <= 0.01 * n_header + SLACK_TOKENS
        n_sent = sum(len(turn.tokens) for turn in turns)
        counted = [outcome, continued, fresh]
        print([o.said["modelUsage"] for o in counted], n_sent)
