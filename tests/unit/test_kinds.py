"""What a request is to its conversation, told by the messages of those before it."""

from typing import Any

import pytest

from proxy.core import messages
from proxy.core.messages import (
    REMINDER_TAG,
    Chat,
    Conversation,
    Kind,
    chat_asked,
    has_reminder,
    kind_of,
    without_reminders,
)
from proxy.core.tokens import common_prefix_length

ASKER = (b"key", "session")
NOBODY = (b"key", "")
MAIN = "S u1 a1 t1 a2 u2"


def digest(name: str) -> bytes:
    return name.encode().ljust(8, b"\0")


def turn(named: str, asker: tuple[bytes, str] = ASKER, tools: str = "tools") -> Chat:
    """Return a request by its messages: S and s are system prompts, u, a and t those of the others."""
    roles = {"s": "system", "S": "system", "u": "user", "a": "assistant", "t": "tool"}
    names = named.split()
    digests = b"".join([digest(tools), *map(digest, names)])
    told = tuple(roles[name[0]] for name in names)
    conversation = Conversation(digests, told, tuple(1 for _ in names))
    return chat_asked(asker, conversation, has_tools=bool(tools))


@pytest.mark.parametrize(
    ("messages", "more", "expected"),
    [
        ("S u8", {"asker": NOBODY}, Kind.FIRST),
        ("S u8", {"asker": (b"key", "other")}, Kind.FIRST),
        (MAIN, {"asker": (b"another key", "session")}, Kind.FIRST),
        (f"{MAIN} a3 u3", {}, Kind.USER_TURN),
        (f"{MAIN} a3 t3", {}, Kind.TOOL_TURN),
        (f"{MAIN} a3 t3 t4", {"asker": NOBODY}, Kind.TOOL_TURN),
        (f"{MAIN} a3 t3 s3", {}, Kind.TOOL_TURN),
        (MAIN, {}, Kind.RETRY),
        (f"{MAIN} a9", {}, Kind.RETRY),
        (f"s2 {MAIN[2:]} a3 u3", {"tools": "others"}, Kind.USER_TURN),
        ("S u1 a1 t1 a2 u9", {}, Kind.REWRITE),
        ("S u1 a9 u2", {}, Kind.REWRITE),
        ("S u1 u9", {}, Kind.FIRST),  # the environment comes first, as codex and droid send it
        ("S u9", {}, Kind.COMPACTION),
        ("S u9 a2 u2", {"asker": NOBODY}, Kind.COMPACTION),
        ("S u9 a1 t1 a2 u2 a3 u3", {}, Kind.REWRITE),  # the date in the first message, at midnight
        ("S u0 u1 a1 t1", {}, Kind.REWRITE),
        ("S a2 u2 a3 u3", {"asker": NOBODY}, Kind.COMPACTION),
        ("s2 u9", {"tools": ""}, Kind.SIDE),
        ("s2 u1", {"tools": ""}, Kind.SIDE),
        ("s2 u1 u9", {"tools": ""}, Kind.SIDE),
        (f"s2 {MAIN[2:]} a3 u9", {"tools": ""}, Kind.SIDE),  # crush asks for a summary
        (f"{MAIN} a3 u9", {"tools": ""}, Kind.USER_TURN),  # smolagents, after its last step
        ("s2 u9", {"tools": "others"}, Kind.FIRST),
    ],
)
def test_kind_is_told_by_the_messages(messages: str, more: Any, expected: Kind) -> None:
    assert kind_of(turn(messages, **more), [turn(MAIN), turn("S u1")]) is expected


def test_step_of_a_long_conversation_is_compared_with_the_step_before_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, n_compared = [turn("S u1" + " a1 t1" * n) for n in range(20)], 0

    def count(left: bytes, right: bytes) -> int:
        nonlocal n_compared
        n_compared += 1
        return common_prefix_length(left, right)

    monkeypatch.setattr(messages, "common_prefix_length", count)
    assert kind_of(steps[-1], reversed(steps[:-1])) is Kind.TOOL_TURN
    assert n_compared == 1


@pytest.mark.parametrize("asker", [NOBODY, (b"key", "title-session")])
def test_title_is_told_by_the_words_that_it_quotes_where_it_does_not_name_the_session(
    asker: tuple[bytes, str],
) -> None:
    main = turn(MAIN, (b"key", asker[1] and "session"))._replace(words="Mend the parser")
    title, text = turn("s2 u9", asker, tools=""), "Name this: Mend the parser, please"
    assert kind_of(title, [main], lambda: text) is Kind.SIDE
    before = turn("s2 u8", NOBODY, tools="")._replace(words="Name this: Mend")
    assert kind_of(title, [main, before], lambda: text) is Kind.SIDE
    assert kind_of(title, [main], lambda: "Name this: another one") is Kind.FIRST
    assert kind_of(title, [main._replace(words="parser")], lambda: text) is Kind.FIRST
    with_tools = turn("s2 u9", asker, tools="others")
    assert kind_of(with_tools, [main]) is Kind.FIRST


def test_words_of_another_session_tell_of_no_compaction() -> None:
    """As in a chat without tools, where a user asks again in other words."""
    before = turn(MAIN, tools="")._replace(words="Mend the parser")
    new = turn("S u9", (b"key", "other"), tools="")
    assert kind_of(new, [before], lambda: "Mend the parser of dates") is Kind.FIRST


def test_another_side_call_of_a_session_is_one_too() -> None:
    earlier = [turn("s2 u8", tools="")._replace(kind=Kind.SIDE), turn(MAIN)]
    assert kind_of(turn("s2 u9", tools=""), earlier) is Kind.SIDE
    assert kind_of(turn("S u1"), [turn("s2 u8", tools="")]) is Kind.FIRST


def test_same_words_under_another_system_prompt_begin_a_conversation() -> None:
    assert kind_of(turn("s2 u1", NOBODY), [turn("s1 u1", NOBODY)]) is Kind.FIRST
    assert kind_of(turn("s1 u1", NOBODY), [turn("s1 u1", NOBODY)]) is Kind.RETRY


def test_without_tools_one_session_may_have_many_conversations() -> None:
    assert kind_of(turn("s2 u9", tools=""), [turn("s1 u1", tools="")]) is Kind.FIRST


def test_nothing_is_known_of_a_request_before_the_first() -> None:
    assert kind_of(turn(MAIN), []) is Kind.FIRST
    assert kind_of(turn("S"), [turn("S")]) is Kind.FIRST


@pytest.mark.parametrize(
    ("text", "own"),
    [
        (" Go on ", "Go on"),
        ("<system-reminder>a\nb</system-reminder>\nGo on", "Go on"),
        ("Go<system-reminder></system-reminder><system-reminder>c</system-reminder> on", "Go on"),
        ("Go<system-reminder>a<system-reminder>b</system-reminder> on", "Go on"),
        ("</system-reminder>Go <system-reminder>", "</system-reminder>Go <system-reminder>"),
        ("<system-reminder>a</system-reminder>Go</system-reminder>", "Go</system-reminder>"),
        ("<system-reminder>a</system-reminder>Go <system-reminder>", "Go <system-reminder>"),
    ],
)
def test_own_text_is_that_without_whole_reminders(text: str, own: str) -> None:
    assert (without_reminders(text), has_reminder(text)) == (own, text.strip() != own)


def test_reminders_that_do_not_end_are_looked_through_at_once() -> None:
    """As in code or logs of agents: a megabyte took minutes, in which nothing else was served."""
    text = REMINDER_TAG * 500_000
    assert without_reminders(text) == text and not has_reminder(text)
