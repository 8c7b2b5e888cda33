"""Stabilizers that look at earlier requests and answers."""

import json
import re
from typing import Any

import pytest

from proxy.core.messages import Route
from proxy.stabilize.model import Memory, Name, RequestFacts, list_name
from proxy.stabilize.run import NO_FACTS, NOTHING_SEEN, Stabilized, stabilize
from proxy.stabilize.sticky import _COUNTS, _find, choose_call, means_the_same

ANSWER = {"role": "assistant", "content": "Done."}


class Sender:
    """Sends the requests of a conversation, one after the other."""

    def __init__(self, name: Name, *, form: Route = Route.CHAT) -> None:
        self.name = name
        self.form = form
        self.memory = Memory()

    def send(self, body: dict[str, Any], facts: RequestFacts = NO_FACTS) -> dict[str, Any]:
        result = stabilize(self.form, body, self.memory, {self.name}, facts)
        assert result.failures == {}
        self.memory.learn(result.lessons)
        return result.body


def user(*parts: str) -> dict[str, Any]:
    if len(parts) == 1:
        return {"role": "user", "content": parts[0]}
    return {"role": "user", "content": [{"type": "text", "text": part} for part in parts]}


# keep_tool_order


def with_tools(*names: str, n_answers: int = 1, prompt: str = "Fix it.") -> dict[str, Any]:
    return {
        "system": "Be brief.",
        "messages": [user(prompt), *[ANSWER, user("Go on.")] * n_answers],
        "tools": [{"name": name, "description": name.upper()} for name in names],
    }


def order(body: dict[str, Any]) -> str:
    return "".join(tool["name"] for tool in body["tools"])


def test_tool_that_comes_later_goes_to_the_end_and_stays_there() -> None:
    sender = Sender(Name.KEEP_TOOL_ORDER, form=Route.MESSAGES)
    assert order(sender.send(with_tools(*"ace", n_answers=0))) == "ace"
    assert order(sender.send(with_tools(*"acde"))) == "aced"
    assert order(sender.send(with_tools(*"abcde"))) == "acedb"
    assert order(sender.send(with_tools(*"abcde"))) == "acedb"
    assert order(sender.send(with_tools(*"abce"))) == "aceb"


def test_fresh_conversation_begins_with_the_tools_that_the_first_had() -> None:
    sender = Sender(Name.KEEP_TOOL_ORDER, form=Route.MESSAGES)
    sender.send(with_tools(*"ace", n_answers=0))
    sender.send(with_tools(*"acde"))
    assert order(sender.send(with_tools(*"ace", n_answers=0, prompt="Another."))) == "ace"
    assert order(sender.send(with_tools(*"abcde", n_answers=0, prompt="A third."))) == "acedb"
    elsewhere = with_tools(*"abcde", n_answers=0) | {"system": "Be brief in another folder."}
    assert order(sender.send(elsewhere)) == "acedb"


def test_conversations_that_begin_alike_are_told_apart_by_their_sessions() -> None:
    sender = Sender(Name.KEEP_TOOL_ORDER, form=Route.MESSAGES)
    for session, loaded in (("s1", "ab"), ("s2", "ac")):
        sender.send(with_tools("a", n_answers=0), RequestFacts(session=session))
        sender.send(with_tools(*loaded), RequestFacts(session=session))
    bodies = [sender.send(with_tools(*"abc"), RequestFacts(session=s)) for s in ("s1", "s2")]
    assert [order(body) for body in bodies] == ["abc", "acb"]


def test_tool_whose_keys_come_in_another_order_is_sent_as_at_first() -> None:
    """Mistral Vibe 3 orders the parameters of two of its tools anew in each process."""
    described = {"content": {"type": "string"}, "id": {"type": "string"}}
    definitions = [{"TodoItem": {"properties": described}}]
    definitions.append({"TodoItem": {"properties": dict(reversed(described.items()))}})
    sender, sent = Sender(Name.KEEP_TOOL_ORDER), []
    for defined in (*definitions, {"TodoItem": {"properties": {"id": {"type": "string"}}}}):
        function = {"name": "todo", "parameters": {"$defs": defined}}
        body = {
            "messages": [user("Fix it.")],
            "tools": [{"type": "function", "function": function}],
        }
        sent.append(json.dumps(sender.send(body)["tools"]))
    assert sent[1] == sent[0] and sent[2] == json.dumps(body["tools"])


def test_order_is_not_forgotten_while_its_conversation_only_goes_on() -> None:
    memory, seen = Memory(max_bytes=4000), NOTHING_SEEN
    for n in range(20):
        body = with_tools(*"ace", n_answers=n)
        result = stabilize(Route.MESSAGES, body, memory, {Name.KEEP_TOOL_ORDER}, seen=seen)
        memory.learn(result.lessons)
        seen = result.seen
        memory.remember_call(f"call {n}", "read", "{}" * 100)
    inserted = with_tools(*"abce", n_answers=20)
    result = stabilize(Route.MESSAGES, inserted, memory, {Name.KEEP_TOOL_ORDER}, seen=seen)
    assert order(result.body) == "aceb"


def test_order_is_never_learned_from_another_tenant() -> None:
    sender = Sender(Name.KEEP_TOOL_ORDER, form=Route.MESSAGES)
    sender.send(with_tools(*"cba", n_answers=0), RequestFacts(tenant="one"))
    assert order(sender.send(with_tools(*"abc", n_answers=0), RequestFacts(tenant="two"))) == "abc"


@pytest.mark.parametrize("tools", ["none", [1], {"a": 1}])
def test_tools_that_llama_server_refuses_are_left_alone(tools: Any) -> None:
    body = {"messages": [user("Fix it.")], "tools": tools}
    result = stabilize(Route.CHAT, body, Memory(), set(Name))
    assert result.body is body and not (result.lessons or result.failures)


@pytest.mark.parametrize("form", [Route.CHAT, Route.MESSAGES, Route.RESPONSES])
@pytest.mark.parametrize("tools", [[{"name": "a"}] * 2, [{"type": "mcp"}] * 2, [{}, {}], [{}]])
def test_tools_without_names_of_their_own_keep_the_order_of_the_client(
    form: Route, tools: list[Any]
) -> None:
    body = {list_name(form): [user("Fix it.")], "tools": tools}
    result = stabilize(form, body, Memory(), set(Name))
    assert result.body is body and result.failures == {}


# sticky_tool_text


def with_task(description: str, n_answers: int = 1, **schema: Any) -> dict[str, Any]:
    function = {"name": "task", "description": description, "parameters": schema}
    return {
        "messages": [user("Fix it."), *[ANSWER, user("Go on.")] * n_answers],
        "tools": [{"type": "function", "function": function}],
    }


def test_tool_keeps_its_first_description() -> None:
    sender = Sender(Name.STICKY_TOOL_TEXT)
    first = with_task("plan", 0)
    sender.send(first)
    assert sender.send(with_task("build"))["tools"] == first["tools"]
    assert sender.send(with_task("build", 2))["tools"] == first["tools"]


def test_tool_with_other_parameters_is_another_tool() -> None:
    sender = Sender(Name.STICKY_TOOL_TEXT)
    sender.send(with_task("plan", 0))
    other = with_task("build", type="object")
    assert sender.send(other) is other


def test_fresh_conversation_has_its_own_descriptions() -> None:
    sender = Sender(Name.STICKY_TOOL_TEXT)
    sender.send(with_task("plan", 0))
    fresh = with_task("build", 0)
    assert sender.send(fresh) is fresh
    assert sender.send(with_task("plan"))["tools"] == fresh["tools"]


# sticky_date


def on(date: str, n_answers: int = 1) -> dict[str, Any]:
    content = f"<env>\n  Working directory: /work\n  Today's date: {date}\n</env>\nBe brief."
    messages = [user("Fix it."), *[ANSWER, user("Go on.")] * n_answers]
    return {"messages": [{"role": "system", "content": content}, *messages]}


def test_date_of_a_conversation_is_that_of_its_first_request() -> None:
    sender = Sender(Name.STICKY_DATE)
    first = sender.send(on("Sat Nov 21 2026", 0))
    later = sender.send(on("Sun Nov 22 2026"))
    assert later["messages"][0] == first["messages"][0]
    assert sender.send(on("Mon Nov 23 2026", 2))["messages"][0] == first["messages"][0]


def test_fresh_conversation_has_todays_date() -> None:
    sender = Sender(Name.STICKY_DATE)
    sender.send(on("Sat Nov 21 2026", 0))
    fresh = on("Sun Nov 22 2026", 0)
    assert sender.send(fresh) is fresh
    assert sender.send(on("Mon Nov 23 2026"))["messages"][0] == fresh["messages"][0]


def test_conversation_that_begins_with_an_image_keeps_its_date() -> None:
    sender = Sender(Name.STICKY_DATE)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}

    def asked(day: int, *messages: Any) -> list[Any]:
        system = {"role": "system", "content": f"Today's date: Nov {day} 2026"}
        return list(sender.send({"messages": [system, image, *messages]})["messages"])

    first = asked(21)
    assert asked(22, ANSWER, user("Go on."))[:2] == first


@pytest.mark.parametrize("tag", ["system-reminder", "system_reminder"])
def test_conversations_with_the_same_surroundings_are_told_apart_by_what_the_user_said(
    tag: str,
) -> None:
    """Agents put their surroundings into a message of their own, crush a reminder spelled otherwise."""
    sender = Sender(Name.STICKY_DATE)

    def asked(day: int, prompt: str, *later: Any) -> dict[str, Any]:
        system = {"role": "system", "content": f"Today's date: Nov {day} 2026"}
        return {"messages": [system, user(f"<{tag}>Linux</{tag}>"), user(prompt), *later]}

    first = sender.send(asked(21, "Fix it."))["messages"]
    sender.send(asked(22, "Test it."))
    later = sender.send(asked(22, "Fix it.", ANSWER, user("Go on.")))["messages"]
    assert later[:3] == first


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ("It is Friday, 21 November 2026, 23:59:58.", "It is Saturday, 22 November 2026, 0:00:03."),
        ("It is now 11:59 PM.", "It is now 12:03 AM."),
        ("Current date: 2026-11-21 14:03:17", "Current date: 2026-11-21 14:04:52"),
        (
            "Current date and time: 2026-11-21T14:03:17Z",
            "Current date and time: 2026-11-22T09:00:01Z",
        ),
        ("The current time is 14:03 UTC.", "The current time is 9:15 UTC."),
        ("Today is Sat Nov 21 2026 at 14:03", "Today is Sun Nov 22 2026 at 9:15"),
        ("Time: 14:03:17, Nov 21, 2026", "Time: 9:15:00, Nov 22, 2026"),
        (
            "Conversation started: Saturday, November 21, 2026 10:02 AM.",
            "Conversation started: Sunday, November 22, 2026 9:15 AM.",
        ),
        (
            "Today's date is Saturday, November 21, 2026 (formatted)",
            "Today's date is Sunday, November 22, 2026 (formatted)",
        ),
        (
            "The current date is: Saturday, November 21, 2026.",
            "The current date is: Sunday, November 22, 2026.",
        ),
        ("<current_date>2026-11-21</current_date>", "<current_date>2026-11-22</current_date>"),
        (
            "<current_time>2026-11-21 14:03:17.123456</current_time>",
            "<current_time>2026-11-22 09:15:00.654321</current_time>",
        ),
        ("- UTC: 2026-06-19T00:21:07.123Z", "- UTC: 2026-06-20T10:21:07.456Z"),
        (
            "## Current Time\n2026-11-21 14:03 (Saturday)",
            "## Current Time\n2026-11-22 09:15 (Sunday)",
        ),
        ("Current Date & Time: 2026-11-21 (6) 10:02", "Current Date & Time: 2026-11-22 (0) 9:02"),
        (
            "Current time: Saturday, November 21, 2026 — 10:02 (UTC)",
            "Current time: Sunday, November 22, 2026 — 9:15 (UTC)",
        ),
    ],
)
def test_time_of_day_stays_too(first: str, later: str) -> None:
    def body(line: str, n_answers: int) -> dict[str, Any]:
        messages = [user("Fix it."), *[ANSWER, user("Go on.")] * n_answers]
        system = f"Be kind. {line} Rule 2024: it is 5 files."
        return {"messages": [{"role": "system", "content": system}, *messages]}

    sender = Sender(Name.STICKY_DATE)
    sent = sender.send(body(first, 0))
    assert sender.send(body(later, 1))["messages"][0] == sent["messages"][0]


@pytest.mark.parametrize("text", ["It is version {}.", "Now {} files", "Date: see {}", "At {}:15"])
def test_number_that_is_no_time_stays_what_it_is(text: str) -> None:
    sender = Sender(Name.STICKY_DATE)
    for n_answers, number in enumerate((2024, 2025)):
        messages = [user("Fix it."), *[ANSWER, user("Go on.")] * n_answers]
        body = {"messages": [{"role": "system", "content": text.format(number)}, *messages]}
        assert sender.send(body) is body


def test_date_that_a_user_wrote_is_that_of_the_conversations_beginning() -> None:
    sender = Sender(Name.STICKY_DATE, form=Route.MESSAGES)
    for day in ("21", "22"):
        asked = user(f"Today's date: Nov {day} 2026")
        for later in ([], [ANSWER, user("It is now 14:03.")]):
            body = {"system": "S", "messages": [asked, *later]}
            assert sender.send(body) is body


def test_date_in_front_of_the_users_text_stays() -> None:
    """qwen-code tells the day in a message that it answers itself."""
    sender = Sender(Name.STICKY_DATE)
    told = "Today's date is {} (formatted according to the user's locale).\nBe brief."
    sent = []
    for n_answers, day in enumerate(("Saturday, November 21, 2026", "Sunday, November 22, 2026")):
        messages = [
            user(told.format(day)),
            ANSWER,
            user("Fix it."),
            *[ANSWER, user("On.")] * n_answers,
        ]
        sent.append(sender.send({"messages": messages})["messages"])
    assert sent[1][:4] == [*sent[0], ANSWER]
    assert sent[1][-1]["content"] == (
        "On.\n\n<system-reminder>\nAbove, a date is left out or out of date. It now reads:\n"
        "Today's date is Sunday, November 22, 2026\n</system-reminder>"
    )


def test_what_was_told_stays_where_it_was_told() -> None:
    sender = Sender(Name.STICKY_DATE)
    sender.send(on("Sat Nov 21 2026", 0))
    second = sender.send(on("Sun Nov 22 2026"))["messages"]
    third = sender.send(on("Sun Nov 22 2026", 2))["messages"]
    fourth = sender.send(on("Sat Nov 21 2026", 3))["messages"]
    assert "Today's date: Sun Nov 22 2026\n" in second[-1]["content"]
    assert third == [*second, ANSWER, user("Go on.")]
    assert fourth[: len(third)] == third
    assert "Today's date: Sat Nov 21 2026\n" in fourth[-1]["content"]


def test_nothing_is_told_in_the_middle_of_a_tool_loop() -> None:
    sender = Sender(Name.STICKY_DATE, form=Route.MESSAGES)
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
    system = "Today's date: Nov {} 2026"
    sender.send({"system": system.format(21), "messages": [user("Fix it.")]})
    loop = [user("Fix it."), ANSWER, {"role": "user", "content": [result]}]
    sent = sender.send({"system": system.format(22), "messages": loop})
    assert sent == {"system": system.format(21), "messages": loop}
    turn = [*loop, ANSWER, user("Go on.")]
    told = sender.send({"system": system.format(22), "messages": turn})["messages"]
    assert told[:-1] == turn[:-1] and "Nov 22 2026" in told[-1]["content"]


# sticky_session

PATH = "Scratchpad directory: /tmp/claude-1000/-work/{}/scratchpad — always use it"
UUIDS = (
    "6ad1e0d2-93b4-4c0f-8a55-0f3b9c7e1d20",
    "f2c7b8aa-1d6e-4f7b-9e02-7b1c5d3a9f44",
    "0b9d4e61-5a2c-4be8-b3f7-e8d21c60a975",
)


def in_session(uuid: str, *later: Any, prompt: str = "Fix it.") -> dict[str, Any]:
    system = f"Be kind.\n{PATH.format(uuid)}\nBe brief."
    return {"system": system, "messages": [user(prompt), *later]}


def test_later_sessions_are_told_behind_the_header_what_names_them() -> None:
    sender = Sender(Name.STICKY_SESSION, form=Route.MESSAGES)
    first, second, third = (
        sender.send(in_session(uuid, prompt=f"Task of {uuid}")) for uuid in UUIDS
    )
    assert first == in_session(UUIDS[0], prompt=f"Task of {UUIDS[0]}")
    assert second["system"] == third["system"] == f"Be kind.\n{PATH.format('…')}\nBe brief."
    content = third["messages"][0]["content"]
    assert content.startswith(f"Task of {UUIDS[2]}\n") and PATH.format(UUIDS[2]) in content
    assert not any(uuid in str(third) for uuid in UUIDS[:2])


def test_numbered_id_and_the_second_of_its_making_name_a_session_too() -> None:
    """As Letta Code writes them; the agent and its ids stay."""
    told = "- CONVERSATION_ID: local-conv-{}\n- System prompt last recompiled: 2026-11-28 11:4{}:17 PM UTC"
    head = f"- AGENT_ID: agent-local-{UUIDS[0]}"
    sender = Sender(Name.STICKY_SESSION)
    for number in (1, 2, 3):
        system = {"role": "system", "content": f"{head}\n{told.format(number, number)}\nBe brief."}
        sent = sender.send({"messages": [system, user(f"Task {number}.")]})["messages"]
        if number > 1:
            masked = told.format("…", "…").replace("local-conv-…", "…")
            masked = masked.replace("2026-11-28 11:4…:17 PM", "…")
            assert sent[0]["content"] == f"{head}\n{masked}\nBe brief."
            assert told.format(number, number) in sent[1]["content"]


def test_session_keeps_what_it_began_with() -> None:
    sender = Sender(Name.STICKY_SESSION, form=Route.MESSAGES)
    for uuid in UUIDS[:2]:
        one = sender.send(in_session(uuid, prompt=f"Task of {uuid}"))
        body = in_session(uuid, ANSWER, user("Go on."), prompt=f"Task of {uuid}")
        two = sender.send(body)
        assert two["system"] == one["system"]
        assert two["messages"] == [*one["messages"], ANSWER, user("Go on.")]


def test_fork_under_another_id_is_told_in_its_newest_message() -> None:
    sender = Sender(Name.STICKY_SESSION, form=Route.MESSAGES)
    one = sender.send(in_session(UUIDS[0]))
    fork = sender.send(in_session(UUIDS[1], ANSWER, user("Go on.")))
    assert fork["system"] == one["system"] and fork["messages"][:2] == [user("Fix it."), ANSWER]
    assert PATH.format(UUIDS[1]) in fork["messages"][2]["content"]


def test_id_in_a_tools_description_and_in_a_reminder_is_held_too() -> None:
    sender = Sender(Name.STICKY_SESSION, form=Route.MESSAGES)
    for number, uuid in enumerate(UUIDS):
        url = f"https://example.org/code/session_{uuid[:8]}"
        reminder = f"<system-reminder>\n{PATH.format(uuid)}\n</system-reminder>"
        sent = sender.send(
            {
                "messages": [user(reminder, f"Look at run {uuid}.")],
                "tools": [{"name": "Bash", "description": f"Runs.\nLink {url}"}],
            }
        )
        content = str(sent["messages"])
        assert f"Look at run {uuid}." in content
        if number:
            assert sent["tools"] == [
                {"name": "Bash", "description": "Runs.\nLink https://example.org/code/session_…"}
            ]
            assert url in content and PATH.format("…") in content and PATH.format(uuid) in content


def test_count_stays_within_a_conversation_only() -> None:
    sender = Sender(Name.STICKY_SESSION)

    def body(n_left: int, prompt: str, *later: Any) -> dict[str, Any]:
        head = {"role": "system", "content": f"Memory: {n_left:,} of 2,200 characters."}
        return {"messages": [head, user(prompt), *later]}

    sender.send(body(1085, "One."))
    later = sender.send(body(1120, "One.", ANSWER, user("Go on.")))["messages"]
    assert later[0]["content"] == "Memory: 1,085 of 2,200 characters."
    assert "Memory: 1,120 of 2,200 characters." in later[-1]["content"]
    fresh = body(1120, "Two.")
    assert sender.send(fresh) is fresh


def test_what_cannot_be_told_is_left_alone() -> None:
    sender = Sender(Name.STICKY_SESSION, form=Route.MESSAGES)
    sender.send(in_session(UUIDS[0]))
    begun = in_session(UUIDS[1], {"role": "assistant", "content": "It"}, prompt="Else.")
    assert sender.send(begun) is begun


# sticky_reminders

PLAN = "<system-reminder>\nPlan only.\n</system-reminder>"
BUILD = "<system-reminder>\nBuild.\n</system-reminder>"


def test_reminder_stays_with_the_message_it_came_with() -> None:
    sender = Sender(Name.STICKY_REMINDERS)
    sender.send({"messages": [user("One.", PLAN)]})
    body = {"messages": [user("One."), ANSWER, user("Two.", PLAN)]}
    assert sender.send(body)["messages"] == [user("One.", PLAN), ANSWER, user("Two.", PLAN)]
    body = {"messages": [user("One."), ANSWER, user("Two."), ANSWER, user("Three.", BUILD)]}
    assert sender.send(body)["messages"] == [
        *(user("One.", PLAN), ANSWER, user("Two.", PLAN), ANSWER, user("Three.", BUILD))
    ]


def test_newest_message_is_sent_as_it_is() -> None:
    sender = Sender(Name.STICKY_REMINDERS)
    sender.send({"messages": [user("One.", PLAN)]})
    again = {"messages": [user("One.")]}
    assert sender.send(again) is again
    later = {"messages": [user("One."), ANSWER, user("Two.")]}
    assert sender.send(later) is later


def test_message_with_the_same_words_at_another_place_is_another_message() -> None:
    sender = Sender(Name.STICKY_REMINDERS)
    sender.send({"messages": [user("Go on.", PLAN)]})
    body = {"messages": [user("Else."), ANSWER, user("Go on."), ANSWER, user("Two.")]}
    assert sender.send(body) is body


# restore_tool_arguments


@pytest.mark.parametrize(
    ("written", "returned"),
    [
        ('{"b": 1, "a": 2}', {"a": 2, "b": 1}),
        ('{"command": "cd /work/shop && make"}', {"command": "make"}),
        ('{"command": "cd \'/my work\' && make"}', {"command": "make"}),
        ('{"old": "x"}', {"replace_all": False, "old": "x"}),
        ('{"edits": [{"old": "x"}]}', {"edits": [{"old": "x", "replace_all": False}]}),
        ('{"offset": "1"}', {"offset": 1}),
        ('{"wide": "true"}', {"wide": True}),
        ('{"timeout": 20000.0}', {"timeout": 20000}),
        ('{"path": "caf\\u00e9"}', {"path": "café"}),
    ],
)
def test_arguments_that_a_client_rewrote_mean_the_same(
    written: str, returned: dict[str, Any]
) -> None:
    assert means_the_same(json.loads(written), returned)


@pytest.mark.parametrize(
    ("written", "returned"),
    [
        ('{"a": 1}', {"a": 2}),
        ('{"a": 1}', {}),
        ('{"a": 1}', {"a": 1, "b": 2}),
        ('{"a": 1}', {"a": True}),
        ('{"a": true}', {"a": 1}),
        ('{"a": 1}', {"a": "1"}),
        ('{"a": "x"}', {"a": 1}),
        ('{"a": "1e3"}', {"a": 1000}),
        ('{"a": null}', {"a": False}),
        ('{"old": "x"}', {"old": "x", "replace_all": True}),
        ('{"old": "x", "replace_all": true}', {"old": "x", "replace_all": False}),
        ('{"command": "cd /x && make"}', {"command": "make test"}),
        ('{"command": "cd /x && cd /y && make"}', {"command": "make"}),
        ('{"command": "cd /x; make"}', {"command": "make"}),
        ('{"text": "cd /x && make"}', {"text": "make"}),
        ('{"a": [1, 2]}', {"a": [2, 1]}),
    ],
)
def test_arguments_that_a_user_may_have_edited_do_not_mean_the_same(
    written: str, returned: dict[str, Any]
) -> None:
    assert not means_the_same(json.loads(written), returned)


def test_call_is_chosen_only_if_it_is_certain() -> None:
    one, two = ("run", '{"b":1,"a":2}'), ("run", '{"a":2.0,"b":1}')
    assert choose_call([one], "run", '{"a":2,"b":1}') == one
    assert choose_call([one, two], "run", '{"a":2,"b":1}') is None
    assert choose_call([one, two], "run", '{"b": 1, "a": 2}') == one
    assert choose_call([one, two], "run", two[1]) is None
    assert choose_call([one], "walk", '{"a":2,"b":1}') is None
    assert choose_call([("run", "{")], "run", "{}") is None
    assert choose_call([one], "run", "{") is None
    assert choose_call([], "run", "{}") is None


def restored(form: Route, body: dict[str, Any], *made: tuple[str, str, str]) -> Stabilized:
    memory = Memory()
    for call in made:
        memory.remember_call(*call)
    return stabilize(form, body, memory, {Name.RESTORE_TOOL_ARGUMENTS})


def test_anthropic_call_is_restored_as_the_model_wrote_it() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "make", "t": 1}}
    body = {"messages": [user("Fix it."), {"role": "assistant", "content": [call]}]}
    raw = '{"t": 1.0, "command": "cd /work && make"}'
    result = restored(Route.MESSAGES, body, ("c1", "Bash", raw))
    arguments = result.body["messages"][1]["content"][0]["input"]
    assert json.dumps(arguments) == raw
    assert result.changed_by == (Name.RESTORE_TOOL_ARGUMENTS,)


def test_message_that_comes_again_with_another_order_or_type_is_looked_at_again() -> None:
    raw, memory, seen = '{"b": 1, "a": 2}', Memory(), NOTHING_SEEN
    memory.remember_call("c1", "read", raw)
    sent = []
    for arguments in ({"b": 1, "a": 2}, {"a": 2, "b": 1}, {"a": 2, "b": True}):
        call = {"type": "tool_use", "id": "c1", "name": "read", "input": arguments}
        body = {"messages": [user("Go."), {"role": "assistant", "content": [call]}]}
        result = stabilize(Route.MESSAGES, body, memory, {Name.RESTORE_TOOL_ARGUMENTS}, seen=seen)
        seen = result.seen
        sent.append(json.dumps(result.body["messages"][1]["content"][0]["input"]))
    assert sent == [raw, raw, '{"a": 2, "b": true}']


def test_chat_call_is_restored_to_the_letter() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"a":1}'}}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    result = restored(Route.CHAT, body, ("c1", "read", '{"a": 1}'))
    function = result.body["messages"][0]["tool_calls"][0]["function"]
    assert function == {"name": "read", "arguments": '{"a": 1}'}


def test_responses_call_is_restored_to_the_letter() -> None:
    item = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"a":1}'}
    result = restored(Route.RESPONSES, {"input": [item]}, ("c1", "read", '{"a": 1}'))
    assert result.body["input"] == [{**item, "arguments": '{"a": 1}'}]


def test_call_is_not_replaced_by_the_call_of_another_conversation_that_has_its_id() -> None:
    """Kimi K2 numbers the calls of each conversation from zero."""
    id_, others = (
        "functions.bash:0",
        [f'{{"command": "cd /other{i} && make {i}"}}' for i in range(8)],
    )
    function = {"name": "bash", "arguments": '{"command": "make 7"}'}
    call = {"id": id_, "type": "function", "function": function}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    made = [(id_, "bash", raw) for raw in (function["arguments"], *others)]
    assert restored(Route.CHAT, body, *made).body is body
    spaced = '{"command":  "make 7"}'  # only the spaces differ: it means the same whoever wrote it
    result = restored(Route.CHAT, body, *made[2:], (id_, "bash", spaced))
    assert result.body["messages"][0]["tool_calls"][0]["function"]["arguments"] == spaced


@pytest.mark.parametrize(
    ("made_name", "raw", "is_restored"),
    [("reed", '{"a": 1}', True), ("read", '{"a": 1}', False), ("reed", '{"a": ', False)],
)
def test_call_that_the_client_refused_is_restored_if_it_is_json(
    made_name: str, raw: str, is_restored: bool
) -> None:
    function = {"name": "invalid", "arguments": '{"tool":"reed","error":"No such tool."}'}
    call = {"id": "c1", "type": "function", "function": function}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    result = restored(Route.CHAT, body, ("c1", made_name, raw))
    sent = result.body["messages"][0]["tool_calls"][0]["function"]
    assert sent == ({"name": made_name, "arguments": raw} if is_restored else function)


def test_call_of_another_tenant_is_not_looked_at() -> None:
    memory = Memory()
    memory.remember_call("c1", "read", '{"a": 1}', tenant="one")
    function = {"name": "read", "arguments": '{"a":1}'}
    call = {"id": "c1", "type": "function", "function": function}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    switches = {Name.RESTORE_TOOL_ARGUMENTS}
    assert stabilize(Route.CHAT, body, memory, switches, RequestFacts(tenant="two")).body is body
    assert stabilize(Route.CHAT, body, memory, switches, RequestFacts(tenant="one")).changed_by


# the memory


def test_memory_stays_within_its_bytes_and_forgets_what_was_learned_longest_ago() -> None:
    memory = Memory(max_bytes=2000)
    for i in range(20):
        memory.learn({f"key {i}": "x" * 100, "needed": "y"})
    assert memory._values.currsize <= 2000
    assert memory.get("needed") == "y" and memory.get("key 19") == "x" * 100
    assert memory.get("key 0") is None
    memory.learn({"huge": "x" * 3000})
    assert memory.get("huge") is None and memory.get("needed") == "y"


def test_memory_survives_a_restart() -> None:
    memory = Memory()
    memory.remember_call("c1", "read", '{"a": 1}')
    memory.learn({"key": ["a", 1]})
    again = Memory.from_bytes(memory.to_bytes())
    assert again.calls("c1") == [("read", '{"a": 1}')]
    assert again.get("key") == ["a", 1] and again._values.currsize == memory._values.currsize


def test_calls_under_one_id_are_kept_apart_and_only_the_last_few() -> None:
    memory = Memory()
    for i in (*range(12), 11):
        memory.remember_call("functions.read:0", "read", f'{{"a": {i}}}')
    assert memory.calls("functions.read:0") == [("read", f'{{"a": {i}}}') for i in range(4, 12)]


def test_calls_that_a_conversation_still_sends_are_not_forgotten() -> None:
    call = {"id": "c0", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    memory = Memory(max_bytes=2000)
    for i in range(30):
        memory.remember_call(f"c{i}", "read", "{}")
        memory.learn(stabilize(Route.CHAT, body, memory, {Name.RESTORE_TOOL_ARGUMENTS}).lessons)
    assert memory.calls("c0") and not memory.calls("c1")


def test_text_that_a_tenant_repeats_is_searched_once() -> None:
    n_searches = 0

    def around(found: re.Match[str]) -> str:
        nonlocal n_searches
        n_searches += 1
        return ""

    kind = _COUNTS._replace(name="test_text_that_a_tenant_repeats", around=around)
    places = [_find(kind, tenant, "system", "Of 3 files,\nnone has\n5 lines.") for tenant in "aab"]
    assert [place[:2] for place in places[0]] == [(0, 11), (21, 29)]
    assert n_searches == 4  # other tenants would be told by the time that an answer takes
    assert places[1] == places[0] and places[2] != places[0]
