"""What a client, or a template, has changed is named when it is there, and not when it is not."""

from typing import Any

import msgspec
import pytest

from proxy.explain.causes import Cause, PromptPart
from proxy.explain.compare import Rendering, find_change, is_alike_without_reminders, is_date

LONG = "Check the return value before it is used. " * 12
OTHER = "Sing of the sea, the sun and of old ships. " * 12
BILLING = "x-anthropic-billing-header: cc_version=2.1.3; cch={};\n"
REMINDER = "<system-reminder>\nPlan only.\n</system-reminder>\n"

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, reasoning: str = "") -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def tool(name: str, text: str = "") -> Message:
    return {"type": "function", "function": {"name": name, "description": f"{name} {text}"}}


def seen(
    system: str, *messages: Message, tools: tuple[Message, ...] = (), has_reasoning: bool = True
) -> Rendering:
    """Return a prompt as a template renders it that has the system prompt first, then the tools."""
    fields = {"messages": [{"role": "system", "content": system}, *messages], "tools": [*tools]}
    listed = "".join(f"\n{msgspec.json.encode(each).decode()}" for each in tools)
    text = f"<|system|>{system}{listed}<|end|>"
    for message in messages:
        reasoning = message.get("reasoning_content") if has_reasoning else ""
        thought = f"<think>{reasoning}</think>" if reasoning else ""
        text += f"<|{message['role']}|>{thought}{message['content']}<|end|>"
    return Rendering(fields, text + "<|assistant|>")


def change(
    new: Rendering, old: Rendering, *, is_same: bool = True
) -> tuple[Cause, PromptPart, int | None]:
    found, where = find_change(new, old, is_same=is_same)
    return found, where.part, where.message


TALK = (user("One."), said(LONG), user("Two."), said(OTHER), user("Three."))
A, B, C = tool("alpha"), tool("beta"), tool("gamma")
HEADERS = [
    ("It is 21 November 2026. " + LONG, "It is 22 November 2026. " + LONG, Cause.DATE),
    (LONG + "Now: 14:03:10." + LONG, LONG + "Now: 9:15:59." + LONG, Cause.DATE),
    ("On 2026-11-29 (Sunday). " + LONG, "On 2026-11-30 (Monday). " + LONG, Cause.DATE),
    ("Now: 2026-11-21 (0) 9:02." + LONG, "Now: 2026-11-22 (1) 9:05." + LONG, Cause.DATE),
    ("On 2026-11-21 — 10:02" + LONG, "On 2026-11-22 — 11:45" + LONG, Cause.DATE),
    (LONG + "Port 8080." + LONG, LONG + "Port 9090." + LONG, Cause.SYSTEM_TEXT),
    (f"{LONG}CHAT_ID: conv-1\n{LONG}", f"{LONG}CHAT_ID: conv-2\n{LONG}", Cause.SESSION),
    (LONG + "/tmp.kXwvQzPl/a" + LONG, LONG + "/tmp.bRmtHyWc/a" + LONG, Cause.SESSION),
    (BILLING.format("a1b") + LONG, BILLING.format("c2d") + LONG, Cause.SYSTEM_TEXT),
    (BILLING.format("a1b") + LONG, LONG, Cause.SYSTEM_TEXT),
    (f"<env>\ncwd: /a\n</env>{LONG}", f"<env>\ncwd: /b\n</env>{LONG}", Cause.SYSTEM_TEXT),
    (f"<env>\ncwd: /a\n</env>{LONG}", f"<env>\ncwd: /a\n</env>x{LONG}", Cause.SYSTEM_TEXT),
    (LONG + "I am Bob." + LONG, LONG + "I am Alice." + LONG, Cause.SYSTEM_TEXT),
    (LONG, OTHER, Cause.SYSTEM_TEXT),
]


@pytest.mark.parametrize(("old", "new", "cause"), HEADERS)
def test_change_of_the_system_prompt_is_named(old: str, new: str, cause: Cause) -> None:
    assert change(seen(new, *TALK), seen(old, *TALK)) == (cause, PromptPart.SYSTEM, 0)


TOOLS = [
    ((A, B, C), (B, A, C), Cause.TOOL_ORDER),
    ((A, B, C), (A, tool("beta", "otherwise"), C), Cause.TOOL_TEXT),
    ((A, B), (A, B, C), Cause.TOOL_LIST),
    ((A, B, C), (A, C), Cause.TOOL_LIST),
]


@pytest.mark.parametrize(("old", "new", "cause"), TOOLS)
def test_change_of_the_tools_is_named(
    old: tuple[Message, ...], new: tuple[Message, ...], cause: Cause
) -> None:
    named = change(seen(LONG, *TALK, tools=new), seen(LONG, *TALK, tools=old))
    assert named == (cause, PromptPart.TOOLS, None)


def test_second_at_which_another_session_began_names_that_session() -> None:
    """OpenHands: no date to keep helps a new conversation, `sticky_session` does."""
    new, old = (seen(f"{LONG}It is 2026-11-29T20:5{m}:26.085602\n{LONG}", *TALK) for m in "12")
    assert change(new, old, is_same=False)[0] is Cause.SESSION
    assert change(new, old)[0] is Cause.DATE


def test_other_tools_and_system_prompt_are_another_mode_or_another_agent() -> None:
    new, old = seen(OTHER, *TALK, tools=(A,)), seen(LONG, *TALK, tools=(B, C))
    assert change(new, old)[0] is Cause.SYSTEM_TEXT
    assert change(new, old, is_same=False)[0] is Cause.FIRST_SIGHT


REASONED = (user("One."), said("Yes.", "Let me think of it."), user("Two."))
HISTORIES = [
    (TALK, (*TALK[:2], user("Too."), *TALK[3:]), Cause.EDITED_MESSAGE, PromptPart.USER, 3),
    (TALK, (*TALK[2:], said(LONG), user("Four.")), Cause.TRUNCATED_HISTORY, PromptPart.USER, 1),
    (
        TALK,
        (user("Sum of it all."), *TALK[3:], said(LONG), user("Four.")),
        *(Cause.TRUNCATED_HISTORY, PromptPart.USER, 1),
    ),
    (
        (user(REMINDER + "One."), *TALK[1:]),
        (*TALK, said(LONG), user(REMINDER + "Four.")),
        *(Cause.REMINDER, PromptPart.USER, 1),
    ),
    (
        REASONED,
        (REASONED[0], said("Yes."), *REASONED[2:]),
        Cause.REASONING,
        PromptPart.ASSISTANT,
        2,
    ),
    (
        (user("It is 2026-11-21 now. One."), *TALK[1:]),
        (user("It is 2026-11-22 now. One."), *TALK[1:]),
        *(Cause.DATE, PromptPart.USER, 1),
    ),
]


@pytest.mark.parametrize(("old", "new", "cause", "part", "message"), HISTORIES)
def test_change_of_the_history_is_named(
    old: tuple[Message, ...], new: tuple[Message, ...], cause: Cause, part: PromptPart, message: int
) -> None:
    assert change(seen(LONG, *new), seen(LONG, *old)) == (cause, part, message)


def test_reasoning_that_the_template_drops_is_named_where_it_was() -> None:
    new = seen(LONG, *REASONED, said("No."), user("Three."), has_reasoning=False)
    assert change(new, seen(LONG, *REASONED)) == (Cause.REASONING, PromptPart.ASSISTANT, 2)


def test_same_messages_that_are_rendered_otherwise_are_named() -> None:
    new, old = seen(LONG, *TALK), seen(LONG, *TALK)
    told = Rendering(new.fields, new.text.replace("<|user|>Two.", "<|user|>[2] Two."))
    assert change(told, old) == (Cause.RENDERED_OTHERWISE, PromptPart.USER, 3)


def test_first_message_of_another_conversation_is_first_sight() -> None:
    new, old = seen(LONG, user("Sing.")), seen(LONG, *TALK)
    assert change(new, old, is_same=False) == (Cause.FIRST_SIGHT, PromptPart.USER, 1)
    reminded = seen(LONG, user(REMINDER + "One."))
    assert change(seen(LONG, user("Sing.")), reminded, is_same=False)[0] is Cause.FIRST_SIGHT
    assert change(seen(LONG, user("One.")), reminded, is_same=False)[0] is Cause.REMINDER
    on, other = (REMINDER.replace("only.", f"only, on 2026-11-2{day}.") for day in "78")
    dated = seen(LONG, user(other + "One."))
    assert change(seen(LONG, user(on + "One.")), dated, is_same=False)[0] is Cause.DATE


def test_without_texts_the_message_is_told_but_not_what_is_in_it() -> None:
    def bare(one: Rendering) -> Rendering:
        return Rendering(one.fields)

    for old, new, _ in HEADERS:
        assert change(bare(seen(new, *TALK)), bare(seen(old, *TALK)))[0] is Cause.SYSTEM_TEXT
    before, after, *_ = HISTORIES[0]
    named = change(bare(seen(LONG, *after)), bare(seen(LONG, *before)))
    assert named == (Cause.EDITED_MESSAGE, PromptPart.USER, 3)


def test_bare_texts_are_compared_as_they_are() -> None:
    def text(content: str) -> Rendering:
        return Rendering({}, content)

    assert change(text(LONG + "x" + OTHER), text(LONG + "y"))[0] is Cause.EDITED_MESSAGE
    assert change(text(OTHER), text(LONG)) == (Cause.FIRST_SIGHT, PromptPart.TEXT, None)
    dated = text("On 2026-11-21. " + LONG), text("On 2026-11-22. " + LONG)
    assert change(*dated)[0] is Cause.DATE


DATES = [
    "2026-11-21",
    "2026/1/2",
    "21.11.2026",
    "Sat Nov 21 2026",
    "Saturday, 21 November 2026, 14:03",
    "November 21st, 2026 at 2:03 PM",
    "2026-11-21T14:03:17.123Z",
    "14:03:17 UTC",
    "1763733797",
]


@pytest.mark.parametrize("date", DATES)
def test_any_form_of_date_is_recognized_wherever_it_changes(date: str) -> None:
    for at, character in enumerate(date):
        if character.isdigit() and (at or len(date) > 10):  # nothing else tells seconds since 1970
            other = date[:at] + ("3" if character != "3" else "4") + date[at + 1 :]
            new, old = (f"Today is {each}. Be brief and clear." for each in (other, date))
            assert is_date(new, old, len("Today is ") + at), other


def test_what_is_no_date_is_not_taken_for_one() -> None:
    pairs = [("Be 10 times", "Be 20 times"), ("v1.2 or", "v1.3 or"), ("2026-11-21", "never mind")]
    for left, right in pairs:
        at = next(i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y)
        assert not is_date(left + LONG, right + LONG, at)
    assert not is_date("2026-11-21 is Bob's", "2026-11-22 is Alice's", 9)


def test_reminders_are_left_out_in_one_go_even_if_they_have_no_end() -> None:
    old = f"{REMINDER} {REMINDER}Go on" + "<system-reminder>" * 500_000
    assert is_alike_without_reminders("Go on", old, 0, 5)
    assert not is_alike_without_reminders("Go back", old, 0, 7)
