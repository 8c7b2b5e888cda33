"""Both clients on the real llama-server, from end to end: nothing is scripted."""

import re

import pytest

from tests.clients import claude_code, opencode
from tests.clients.conftest import Lab, StartLab

FIRST, SECOND, THIRD, CONTINUED = (
    "Mend the parser in src/one.py",
    "Write tests for src/two.py, please",
    "What is in src/three.py?",
    "And what is missing in it?",
)
AT_MOST = 1500
"""Tokens of the second session, all its requests together; without the proxy it is 17,859."""

templates = pytest.mark.parametrize("template", ["strict", "thinking", "plain"])


async def ask_claude_code(lab: Lab, prompt: str, *flags: str) -> tuple[claude_code.Outcome, int]:
    """Return what it says, and how many tokens llama-server evaluated by its own counter."""
    client = lab.claude_code(CLAUDE_CODE_MAX_OUTPUT_TOKENS="64")
    before = await lab.rig.evaluated()
    outcome = await client.ask(prompt, lab.repository, *flags)
    return outcome, await lab.rig.evaluated() - before


async def ask_opencode(lab: Lab, prompt: str, *flags: str) -> tuple[opencode.Outcome, int]:
    before = await lab.rig.evaluated()
    outcome = await lab.opencode(output=64).ask(prompt, lab.repository, *flags)
    return outcome, await lab.rig.evaluated() - before


@templates
async def test_fresh_claude_code_sessions_evaluate_almost_nothing_of_their_header(
    start_plain: StartLab, template: str
) -> None:
    async with start_plain(template) as lab:
        first, n_first = await ask_claude_code(lab, FIRST)
        second, n_second = await ask_claude_code(lab, SECOND)
        await lab.rig.restart()
        third, n_third = await ask_claude_code(lab, THIRD)
        continued, n_continued = await ask_claude_code(lab, CONTINUED, "-c")
        print(f"\nClaude Code, {template}: {n_first}, {n_second}; {n_third}, {n_continued}")
        assert n_first > 10 * AT_MOST
        for n_evaluated in (n_second, n_third, n_continued):
            assert n_evaluated <= min(AT_MOST, n_first / 100)
        for outcome, n_evaluated in ((first, n_first), (second, n_second), (third, n_third)):
            assert outcome.n_evaluated == n_evaluated
        assert second.n_cached > 0.99 * n_first and third.session_id == continued.session_id


@templates
async def test_fresh_opencode_sessions_evaluate_almost_nothing_of_their_header(
    start_plain: StartLab, template: str
) -> None:
    async with start_plain(template) as lab:
        first, n_first = await ask_opencode(lab, FIRST)
        second, n_second = await ask_opencode(lab, SECOND)
        await lab.rig.restart()
        third, n_third = await ask_opencode(lab, THIRD)
        continued, n_continued = await ask_opencode(lab, CONTINUED, "-c")
        print(f"\nOpenCode, {template}: {n_first}, {n_second}; {n_third}, {n_continued}")
        for n_evaluated in (n_second, n_third, n_continued):
            assert n_evaluated <= min(AT_MOST, n_first / 100)
        assert continued.n_evaluated == n_continued  # no title is asked for, and nothing else
        steps = [step for run in (first, second, third, continued) for step in run.steps()]
        stats = await lab.opencode().stats(lab.repository)
        assert shown(stats, "Cache Read") == in_thousands(sum(s["cache"]["read"] for s in steps))
        assert shown(stats, "Input") == in_thousands(sum(s["input"] for s in steps))


async def test_llama_server_alone_evaluates_a_second_session_from_its_beginning(
    start_plain: StartLab,
) -> None:
    """What the figures of the other tests stand against; a strict template is refused altogether."""
    async with start_plain("plain") as lab:
        figures = []
        for prompt in (FIRST, SECOND):
            for client in lab.clients_of_server():
                before = await lab.rig.evaluated()
                await client.ask(prompt, lab.repository)
                figures.append(await lab.rig.evaluated() - before)
        print(f"\nalone, plain: Claude Code {figures[::2]}, OpenCode {figures[1::2]}")
        # Now and then a slot still holds the tools: 0.82.
        assert figures[2] > 0.75 * figures[0] > AT_MOST


def shown(stats: str, name: str) -> str:
    """Return a figure of OpenCode's table of tokens."""
    found = re.search(rf"│{name}\s+(\S+)\s*│", stats)
    assert found, stats
    return found[1]


def in_thousands(n_tokens: int) -> str:
    return f"{n_tokens / 1000:.1f}K"
