"""What people know a conversation and its client by."""

from typing import Any

import msgspec
import pytest

from proxy.core.model import Checkpoint, Family, Title, title_of
from proxy.explain.sketch import words_of
from proxy.serving.tenants import client_name
from tests.unit.builders import candidate, checkpoint


def said(*messages: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (said(("system", "You help"), ("user", "Mend\n the  login")), "Mend the login"),
        (said(("user", "<system-reminder>No\nsecrets</system-reminder>\nMend it")), "Mend it"),
        (said(("user", [{"type": "text", "text": "Mend"}, {"type": "image_url"}])), "Mend"),
        (said(("user", "<system-reminder>x</system-reminder>"), ("user", "Then")), "Then"),
        (said(("user", "<system_reminder>x</system_reminder>"), ("user", "Then")), "Then"),
        (
            said(("user", "<current_datetime>2026-11-21T14:03:17Z</current_datetime>\n\nMend it")),
            "Mend it",
        ),
        (
            said(
                ("user", "# AGENTS.md\n<environment_context>\n</environment_context>"),
                ("user", "Mend it"),
            ),
            "Mend it",
        ),
        (said(("user", '"Mend it"\n<environment_details>\n</environment_details>')), "Mend it"),
        (said(("user", "Mend it\n<turn-context>\n</turn-context>")), "Mend it"),
        ({"prompt": "Once upon \x1b[31ma time"}, "Once upon [31ma time"),
        (said(("user", '"Mend it"\n')), "Mend it"),
        (said(("user", '"a" is "b", not c')), '"a" is "b", not c'),
        ({"prompt": [1, 2, 3]}, ""),
        (said(("assistant", "Hello")), ""),
        ({"messages": "none"}, ""),
    ],
)
def test_title_is_the_first_thing_that_the_user_said(fields: dict[str, Any], expected: str) -> None:
    assert words_of(fields) == expected


def test_title_is_short() -> None:
    words = words_of(said(("user", "a " + "long story " * 1000)))
    assert len(words) == 60 and words.endswith("…")


@pytest.mark.parametrize(
    ("user_agent", "expected"),
    [
        ("claude-cli/2.1.329 (external, cli)", "Claude Code 2.1.329"),
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14", "OpenCode 1.18.33"),
        ("AsyncOpenAI/Python 2.7.1", "AsyncOpenAI/Python 2.7.1"),
        ("Anthropic/JS 0.70.0", "Anthropic/JS 0.70.0"),
        ("curl/8.5.0", "curl 8.5.0"),
        ("Mozilla/5.0 (X11; Linux x86_64)", "a browser"),
        ("my\x00client" + "x" * 80, "myclient" + "x" * 32),
        ("", ""),
    ],
)
def test_client_is_called_as_people_call_it(user_agent: str, expected: str) -> None:
    assert client_name(user_agent) == expected


def test_state_without_a_title_has_that_of_its_session_and_shared_ones_have_no_words() -> None:
    mine, family = Title("Mend the login", "OpenCode 1.18"), Family(7, 70)
    relatives = [candidate(100, 90, family=Family(7, 71)), candidate(90, 90, family=family)]
    assert title_of(Title(), family, relatives) == Title()
    relatives.append(candidate(80, 80, family=family, title=mine))
    assert title_of(Title(), family, relatives[2:]) == mine
    assert title_of(Title("Another"), family, relatives[2:]) == Title("Another")
    assert title_of(mine, Family(7), relatives) == Title("", "OpenCode 1.18")


def test_record_of_an_older_version_is_read_without_a_title() -> None:
    record = msgspec.to_builtins(checkpoint(100, title=Title("Mend", "curl 8.5")))
    assert msgspec.convert(record, Checkpoint).title == Title("Mend", "curl 8.5")
    del record["title"]
    assert msgspec.convert(record, Checkpoint).title == Title()
