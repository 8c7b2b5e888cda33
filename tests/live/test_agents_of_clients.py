"""Claude Code's requests, in our own words, through the proxy: sessions share what clients would not."""

import dataclasses
from typing import Any

import pytest

from proxy.core.messages import Kind
from proxy.core.plan import Why
from tests.bench.replays import MOST_TOKENS, evaluated, measure
from tests.lab.clients import claude_code
from tests.lab.clients.replays import REPLAYS, Replay
from tests.lab.conversation import prose
from tests.lab.models import TEMPLATE_FOLDER
from tests.lab.rig import Rig
from tests.live.conftest import StartRig, in_long

SLACK_TOKENS = 32
MESSAGES = "/v1/messages"
BASH = [claude_code.tool("Bash")]
FEW_TOOLS = [claude_code.tool(name) for name in ("Agent", "Bash", "Read")]


def template_flags(template: str) -> tuple[str, ...]:
    return ("--chat-template-file", str(TEMPLATE_FOLDER / f"{template}.jinja"))


async def ask(rig: Rig, body: dict[str, Any]) -> int:
    """Send a request and return how many tokens were evaluated for it."""
    before = await rig.evaluated()
    await rig.post(MESSAGES, {**body, "max_tokens": 4, "stream": False})
    return await rig.evaluated() - before


def request(prompt: str, *later: Any, **more: Any) -> dict[str, Any]:
    return claude_code.request(prompt, *later, tools=FEW_TOOLS, **more)


def brief_request(prompt: str, *later: Any) -> dict[str, Any]:
    """Return a request for a test to which its length does not matter."""
    head = [claude_code.first_user(prompt), claude_code.environment(n_words=200)]
    return claude_code.request_with([*head, *later], prompt=prompt, tools=BASH)


@pytest.mark.parametrize("template", ["strict", *in_long("thinking", "tools_first")])
async def test_second_session_in_a_repository_shares_the_first_ones_beginning(
    start_rig: StartRig, template: str
) -> None:
    async with start_rig("hybrid", n_slots=2, extra_args=template_flags(template)) as rig:
        n_first = await ask(rig, request("mend the parser"))
        assert n_first > 5000
        n_second = await ask(rig, request("write more tests for the cart"))
        assert n_second < n_first / 100 + SLACK_TOKENS
        await rig.restart()
        n_third = await ask(rig, request("tell me what the prices are"))
        assert n_third < n_first / 100 + SLACK_TOKENS


async def test_session_in_a_changed_repository_goes_on_behind_the_environment(
    start_rig: StartRig,
) -> None:
    """Prompts are long, so that no context checkpoint is near by chance."""
    async with start_rig("hybrid", n_slots=2, extra_args=template_flags("strict")) as rig:
        n_first = await ask(rig, request(prose(7, 300)))
        await rig.restart()
        n_second = await ask(rig, request(prose(8, 300), status="M src/cart.py"))
        assert n_second < n_first / 8


async def test_session_behind_a_long_one_goes_on_behind_the_environment(
    start_rig: StartRig,
) -> None:
    """The environment in a message of its own, as droid sends it."""
    system = {"role": "system", "content": prose(3, 200)}
    begin = [system, {"role": "user", "content": prose(4, 2000)}]
    async with start_rig("hybrid", n_slots=2) as rig:
        messages = [*begin, {"role": "user", "content": "Mend the parser."}]
        for turn in range(12):
            await rig.chat(messages)
            answer = {"role": "assistant", "content": f"{turn} is mended. {prose(turn, 20)}"}
            messages += [answer, {"role": "user", "content": f"And {turn}? {prose(turn, 20)}"}]
        await rig.restart()
        n_before = await rig.evaluated()
        await rig.chat([*begin, {"role": "user", "content": "Write tests for the cart."}])
        assert await rig.evaluated() - n_before < 50


async def test_reminder_that_is_gone_from_a_later_message_costs_that_message_only(
    start_rig: StartRig,
) -> None:
    """qwen-code puts the date before the newest prompt of a continued session, and takes it away later."""

    def reminded(asked: str) -> dict[str, Any]:
        date = f"<system-reminder>\nThe current date is: Sunday. {prose(5, 60)}\n</system-reminder>"
        parts = [{"type": "text", "text": text} for text in (date, asked)]
        return {"role": "user", "content": parts}

    worked = [
        {"role": "system", "content": prose(3, 200)},
        {"role": "user", "content": "Mend the parser."},
        {"role": "assistant", "content": prose(4, 1000)},
    ]
    async with start_rig("hybrid", n_slots=2) as rig:
        await rig.chat([*worked, reminded("Is it all well?")])
        await rig.restart()
        asked = {"role": "user", "content": "Is it all well?"}
        answered = {"role": "assistant", "content": "Yes."}
        n_before = await rig.evaluated()
        await rig.chat([*worked, asked, answered, reminded("What else is there?")])
        assert await rig.evaluated() - n_before < 250


async def test_tool_loop_evaluates_only_what_is_new(start_rig: StartRig) -> None:
    async with start_rig("hybrid", n_slots=2, extra_args=template_flags("strict")) as rig:
        later: list[Any] = []
        n_first = await ask(rig, request("mend the parser"))
        for call in range(4):
            later += claude_code.step(call)
            assert await ask(rig, request("mend the parser", *later)) < n_first / 10


async def test_step_behind_a_text_that_lost_its_mark_is_sent_at_once(start_rig: StartRig) -> None:
    """Claude Code sends its newest text as a list with a mark, and without the mark as a string."""
    marked = {"type": "text", "text": "And the tests?", "cache_control": {"type": "ephemeral"}}
    answered = [*claude_code.step(1), {"role": "assistant", "content": "It is mended."}]
    asked = [*answered, {"role": "user", "content": [marked]}]
    goes_on = [*answered, {"role": "user", "content": marked["text"]}, *claude_code.step(2)]
    async with start_rig("hybrid", n_slots=2) as rig:
        for later in (answered[:-1], asked, goes_on):
            await ask(rig, brief_request("mend the parser", *later))
        async with rig.client.get(rig.admin_url + "/requests?limit=1") as reply:
            record = (await reply.json())["requests"][0]
        assert (record["why"], record["kind"]) == (Why.EXTENDS.value, Kind.TOOL_TURN.value)


async def test_sessions_without_stabilizers_are_refused_by_a_strict_template(
    start_rig: StartRig,
) -> None:
    flags = template_flags("strict")
    async with start_rig("hybrid", n_slots=1, extra_args=flags, stabilizers="none") as rig:
        body = {**request("mend the parser"), "max_tokens": 4, "stream": False}
        async with rig.client.post(rig.base_url + MESSAGES, json=body) as reply:
            assert reply.status >= 400


def replay_named(name: str) -> Replay:
    return next(replay for replay in REPLAYS if replay.name == name)


def with_one_tool(replay: Replay) -> Replay:
    """Return a replay without the tools behind the first one, in which nothing changes."""
    changed, unchanged = (
        tuple({**body, "tools": body["tools"][:1]} for body in bodies)
        for bodies in (replay.changed, replay.unchanged)
    )
    return dataclasses.replace(replay, changed=changed, unchanged=unchanged)


@pytest.mark.parametrize(
    "replay",
    [replay_named("X5"), *in_long(*(r for r in REPLAYS if r.opt_in and r.name != "X5"))],
    ids=lambda replay: replay.name,
)
async def test_change_in_front_costs_little_once_its_stabilizer_is_on(
    start_rig: StartRig, replay: Replay
) -> None:
    """What names a session is learned from the second one."""
    switches = ", ".join(("safe", *replay.opt_in))
    async with start_rig(
        "hybrid", extra_args=template_flags("strict"), stabilizers=switches
    ) as rig:
        again, causes = await measure(rig, with_one_tool(replay))
        learns = not replay.is_one_conversation
        assert max(again[learns:]) <= MOST_TOKENS, (again, causes)


async def test_path_of_a_session_is_named(start_rig: StartRig) -> None:
    async with start_rig("hybrid", extra_args=template_flags("strict")) as rig:
        replay = with_one_tool(replay_named("C1"))
        _, causes = await evaluated(rig, replay, replay.changed)
        assert causes[1:] == ["session id", "session id"]


@pytest.mark.long
async def test_fork_costs_nothing(start_rig: StartRig) -> None:
    async with start_rig("hybrid", extra_args=template_flags("strict")) as rig:
        again, causes = await measure(rig, replay_named("C2"))
        assert causes == ["hit", "hit"] and max(again) <= MOST_TOKENS


async def test_system_messages_without_a_text_are_answered(start_rig: StartRig) -> None:
    """As Claude Code sends them: effort alone, nothing, a tool that comes and one that goes."""
    reference = {"type": "tool_reference", "name": "Bash"}
    late = [
        {"role": "system", "output_config": {"effort": "high"}},
        {"role": "system", "content": []},
        {"role": "system", "content": [{"type": "tool_addition", "tool": reference}]},
        {"role": "system", "content": [{"type": "tool_removal", "tool": reference}]},
    ]
    for template in ("strict", "plain"):
        async with start_rig("hybrid", extra_args=template_flags(template)) as rig:
            for message in late:
                later: list[Any] = [*claude_code.step(1), message, *claude_code.step(2)]
                await ask(rig, brief_request("mend it", *later))
            assert rig.n_faults() == 0
