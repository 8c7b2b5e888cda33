"""Each stabilizer by itself: what it rewrites, and what it leaves alone."""

from dataclasses import replace
from typing import Any

import pytest

from proxy.core.messages import Route
from proxy.stabilize.model import Marks, Memory, Name, RequestFacts
from proxy.stabilize.run import NO_FACTS, Stabilized, stabilize

REFUSES = RequestFacts(accepts_late_system=False)
ACCEPTS = RequestFacts(accepts_late_system=True)


def run(
    name: Name,
    body: dict[str, Any],
    *,
    form: Route = Route.MESSAGES,
    facts: RequestFacts = NO_FACTS,
    memory: Memory | None = None,
) -> Stabilized:
    result = stabilize(form, body, memory or Memory(), {name}, facts)
    assert result.failures == {}
    assert set(result.changed_by) <= {name}
    return result


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*content: Any) -> dict[str, Any]:
    is_string = len(content) == 1 and isinstance(content[0], str)
    return {"role": "user", "content": content[0] if is_string else list(content)}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def result_of(call_id: str, content: Any = "done") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def note(content: str) -> str:
    return f"<system-reminder>\n{content}\n</system-reminder>"


ANSWER = {"role": "assistant", "content": "Done."}
HEADER = "x-anthropic-billing-header: cc_version=2.1.329.cf6; cc_entrypoint=cli; cch=a1b2c;"


# drop_billing_header


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([text(HEADER), text("Be brief.")], [text("Be brief.")]),
        ([text(f"{HEADER}\nBe brief.")], [text("Be brief.")]),
        (f"{HEADER}\n\nBe brief.", "Be brief."),
        ([text(HEADER)], []),
    ],
)
def test_billing_header_is_dropped(before: Any, after: Any) -> None:
    result = run(Name.DROP_BILLING_HEADER, {"model": "m", "system": before, "messages": []})
    assert result.body == {"model": "m", "system": after, "messages": []}
    assert result.changed_by == (Name.DROP_BILLING_HEADER,)


def test_billing_header_is_dropped_from_a_chat_bodys_system_message() -> None:
    body = {"messages": [system(f"{HEADER}\nBe brief."), user("hi")]}
    result = run(Name.DROP_BILLING_HEADER, body, form=Route.CHAT)
    assert result.body["messages"] == [system("Be brief."), user("hi")]


def test_billing_header_that_a_user_quotes_is_left_alone() -> None:
    body = {"system": f"Never print this: {HEADER}", "messages": [user(HEADER)]}
    assert run(Name.DROP_BILLING_HEADER, body).body is body


# drop_cache_control


@pytest.mark.parametrize("name", ["cache_control", "copilot_cache_control"])
def test_cache_control_is_dropped_where_the_api_puts_it_and_nowhere_else(name: str) -> None:
    mark = {name: {"type": "ephemeral", "ttl": "1h"}}
    schema = {"properties": {name: {"type": "string"}}}
    call = {"type": "tool_use", "id": "c", "name": "put", "input": dict(mark)}
    body = {
        "system": [{**text("Be brief."), **mark}],
        "messages": [
            {"role": "assistant", "content": [{**call, **mark}], **mark},
            user({**result_of("c", [{**text("done"), **mark}]), **mark}),
        ],
        "tools": [{"name": "put", "input_schema": schema, **mark}],
        **mark,
    }
    result = run(Name.DROP_CACHE_CONTROL, body)
    assert result.body == {
        "system": [text("Be brief.")],
        "messages": [
            {"role": "assistant", "content": [call]},
            user(result_of("c", [text("done")])),
        ],
        "tools": [{"name": "put", "input_schema": schema}],
    }


# tool_reference_text


def test_tool_references_become_words() -> None:
    found = [{"type": "tool_reference", "tool_name": name} for name in ("NotebookEdit", "WebFetch")]
    body = {"messages": [user(result_of("c", found))]}
    result = run(Name.TOOL_REFERENCE_TEXT, body)
    parts = result.body["messages"][0]["content"][0]["content"]
    joined = "".join(part["text"] for part in parts)
    assert joined == (
        "The tool NotebookEdit is now available.\nThe tool WebFetch is now available."
    )


def test_tool_reference_without_a_name_is_left_alone() -> None:
    body = {"messages": [user(result_of("c", [{"type": "tool_reference"}]))]}
    assert run(Name.TOOL_REFERENCE_TEXT, body).body is body


def test_blocks_of_system_messages_that_add_and_remove_tools_become_words() -> None:
    definition = {"name": "Draw", "input_schema": {}}
    blocks = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Edit"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}},
        {"type": "tool_removal", "tool": {"type": "mcp_toolset_reference", "server_name": "web"}},
        text("Be quick."),
    ]
    body = {"messages": [user("Fix it."), system(blocks)]}
    result = run(Name.TOOL_REFERENCE_TEXT, body)
    assert result.body["messages"][1]["content"] == [
        text("The tool Edit is now available."),
        text('The tool {"name":"Draw","input_schema":{}} is now available.'),
        text("The tool web is no longer available."),
        text("Be quick."),
    ]
    both = {Name.TOOL_REFERENCE_TEXT, Name.HOIST_SYSTEM_MESSAGE}
    hoisted = stabilize(Route.MESSAGES, body, Memory(), both)
    assert hoisted.failures == {} and len(hoisted.body["messages"]) == 1


# tool_results_first and glue_text_to_results


def test_users_text_beside_results_follows_them_as_a_message() -> None:
    body = {"messages": [user(result_of("a"), text("Stop."), result_of("b"), text("Go."))]}
    result = run(Name.TOOL_RESULTS_FIRST, body)
    assert result.body["messages"] == [
        user(result_of("a"), result_of("b")),
        user(text("Stop."), text("Go.")),
    ]


@pytest.mark.parametrize(
    ("content", "glued"),
    [
        ("done", f"done\n\n{note('hurry')}"),
        ([text("done")], [text(f"done\n\n{note('hurry')}")]),
        ("", note("hurry")),
        ([{"type": "image"}], [{"type": "image"}, text(note("hurry"))]),
    ],
)
def test_reminder_beside_a_result_becomes_part_of_it(content: Any, glued: Any) -> None:
    body = {"messages": [user(result_of("a", content), text(note("hurry")))]}
    result = run(Name.TOOL_RESULTS_FIRST, body)
    assert result.body["messages"] == [user(result_of("a", glued))]


def test_reminder_behind_a_users_text_stays_behind_it() -> None:
    body = {"messages": [user(result_of("a"), text("Stop."), text(note("hurry")))]}
    result = run(Name.TOOL_RESULTS_FIRST, body)
    assert result.body["messages"][1] == user(text("Stop."), text(note("hurry")))


@pytest.mark.parametrize(
    "message",
    [
        user(result_of("a"), result_of("b")),
        user(text("before"), result_of("a")),
        user(text("one"), text("two")),
        user("plain"),
        {"role": "user"},
    ],
)
@pytest.mark.parametrize("name", [Name.TOOL_RESULTS_FIRST, Name.GLUE_TEXT_TO_RESULTS])
def test_message_in_the_right_order_is_left_alone(name: Name, message: dict[str, Any]) -> None:
    body = {"messages": [message]}
    assert run(name, body).body is body


def test_all_text_is_glued_to_the_last_result_if_wanted() -> None:
    body = {"messages": [user(result_of("a"), result_of("b"), text("Stop."), text("Go."))]}
    result = run(Name.GLUE_TEXT_TO_RESULTS, body)
    assert result.body["messages"] == [user(result_of("a"), result_of("b", "done\n\nStop.\n\nGo."))]


# hoist_system_message


@pytest.mark.parametrize("facts", [NO_FACTS, REFUSES, ACCEPTS])
def test_system_message_behind_the_first_prompt_goes_in_front_of_it(facts: RequestFacts) -> None:
    first = user(text(note("git")), text("Fix it."))
    body = {"messages": [first, system("# Environment"), ANSWER]}
    result = run(Name.HOIST_SYSTEM_MESSAGE, body, facts=facts)
    hoisted = text(note("# Environment") + "\n")
    assert result.body["messages"] == [user(hoisted, text(note("git")), text("Fix it.")), ANSWER]


def test_prompt_as_a_string_and_as_a_list_are_hoisted_before_alike() -> None:
    results = [
        run(Name.HOIST_SYSTEM_MESSAGE, {"messages": [first, system("E"), ANSWER]})
        for first in (user("Fix it."), user(text("Fix it.")))
    ]
    assert results[0].body == results[1].body


def test_chat_body_is_hoisted_only_where_the_template_refuses_late_system_messages() -> None:
    body = {"messages": [system("S"), user("Fix it."), system("E"), ANSWER]}
    for facts in (NO_FACTS, ACCEPTS):
        assert run(Name.HOIST_SYSTEM_MESSAGE, body, form=Route.CHAT, facts=facts).body is body
    result = run(Name.HOIST_SYSTEM_MESSAGE, body, form=Route.CHAT, facts=REFUSES)
    assert result.body["messages"] == [
        system("S"),
        user(text(note("E") + "\n"), text("Fix it.")),
        ANSWER,
    ]


def test_system_message_with_more_than_text_is_left_alone_and_reported() -> None:
    body = {"messages": [user("Fix it."), system([{"type": "image"}])]}
    for name in (Name.HOIST_SYSTEM_MESSAGE, Name.FOLD_SYSTEM_MESSAGES):
        result = stabilize(Route.MESSAGES, body, Memory(), {name})
        assert result.body is body
        assert result.failures == {name: "messages[1].content is not text"}


# fold_system_messages


def test_late_system_messages_become_part_of_what_stands_before_them() -> None:
    body = {
        "system": [text("Be brief.")],
        "messages": [
            system("Really."),
            user("Fix it."),
            system("One."),
            ANSWER,
            system("Two."),
            user(result_of("a"), result_of("b")),
            system([text("Three."), text("Four.")]),
        ],
    }
    result = run(Name.FOLD_SYSTEM_MESSAGES, body)
    assert result.body == {
        "system": [text("Be brief.\n\nReally.")],
        "messages": [
            user(f"Fix it.\n\n{note('One.')}"),
            ANSWER,
            user(note("Two.")),
            user(
                result_of("a"), result_of("b", f"done\n\n{note(chr(10).join(('Three.', 'Four.')))}")
            ),
        ],
    }


def test_late_system_messages_stay_where_the_template_accepts_them() -> None:
    body = {"messages": [user("Fix it."), ANSWER, system("One.")]}
    assert run(Name.FOLD_SYSTEM_MESSAGES, body, facts=ACCEPTS).body is body
    for form in (Route.CHAT, Route.RESPONSES):
        assert run(Name.FOLD_SYSTEM_MESSAGES, body, form=form).body is body


def test_chat_body_is_folded_where_the_template_refuses() -> None:
    tool = {"role": "tool", "tool_call_id": "a", "content": "done"}
    body = {"messages": [system("S"), system("T"), user("Fix it."), tool, system("One.")]}
    result = run(Name.FOLD_SYSTEM_MESSAGES, body, form=Route.CHAT, facts=REFUSES)
    assert result.body["messages"] == [
        system("S\n\nT"),
        user("Fix it."),
        {**tool, "content": f"done\n\n{note('One.')}"},
    ]


@pytest.mark.parametrize("before", [user("Fix it."), user(result_of("a")), ANSWER, system("S")])
def test_system_messages_in_a_row_become_one_text(before: dict[str, Any]) -> None:
    body = {"messages": [user("Go."), ANSWER, before, system("One."), system(""), system("Two.")]}
    folded = run(Name.FOLD_SYSTEM_MESSAGES, body).body["messages"]
    one_by_one = run(Name.FOLD_SYSTEM_MESSAGES, {"messages": body["messages"][:4]}).body["messages"]
    one_by_one.append(system("Two."))
    assert folded == run(Name.FOLD_SYSTEM_MESSAGES, {"messages": one_by_one}).body["messages"]


def test_many_texts_are_appended_at_once() -> None:
    """One by one, each would be a copy of all before it: minutes, in which nobody is answered."""
    many = 200_000
    body = {"messages": [user("Fix it."), ANSWER, user("Go on."), *[system("x")] * many]}
    *_, last = run(Name.FOLD_SYSTEM_MESSAGES, body).body["messages"]
    assert len(last["content"]) == len("Go on.") + many * len(f"\n\n{note('x')}")
    body = {"messages": [user(result_of("a"), *[text(note("x"))] * many)]}
    (last,) = run(Name.TOOL_RESULTS_FIRST, body).body["messages"]
    (result,) = last["content"]
    assert len(result["content"]) == len("done") + many * len(f"\n\n{note('x')}")


def test_field_of_a_chat_body_without_a_name_takes_no_system_prompt() -> None:
    body = {"": "x", "messages": [system("S"), user("Fix it.")]}
    result = stabilize(Route.CHAT, body, Memory(), frozenset(Name), REFUSES)
    assert result.body is body


def test_responses_body_is_folded_where_the_template_refuses() -> None:
    output = {"type": "function_call_output", "call_id": "a", "output": "done"}
    late = {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "D"}],
    }
    body = {"instructions": "S", "input": [user("Fix it."), output, late]}
    result = run(Name.FOLD_SYSTEM_MESSAGES, body, form=Route.RESPONSES, facts=REFUSES)
    assert result.body["input"] == [user("Fix it."), {**output, "output": f"done\n\n{note('D')}"}]


# inline_reasoning

MARKS = Marks("<think>\n", "\n</think>\n\n", "\n</think>\n")


def test_reasoning_of_earlier_turns_becomes_text() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    calling = {
        "role": "assistant",
        "content": "",
        "reasoning_content": " why ",
        "tool_calls": [call],
    }
    answered = {"role": "assistant", "content": "Done.", "reasoning_content": "because"}
    newest = {"role": "assistant", "content": "", "reasoning_content": "now", "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": "a", "content": "x"}
    messages = [user("One."), calling, tool, answered, user("Two."), newest, tool]
    result = run(
        Name.INLINE_REASONING,
        {"messages": messages},
        form=Route.CHAT,
        facts=RequestFacts(reasoning_marks=MARKS),
    )
    changed = result.body["messages"]
    assert changed[1]["content"] == "<think>\nwhy\n</think>\n"
    assert changed[3]["content"] == "<think>\nbecause\n</think>\n\nDone."
    assert changed[1]["reasoning_content"] == changed[3]["reasoning_content"] == " "
    assert [changed[i] for i in (0, 2, 4, 5, 6)] == [messages[i] for i in (0, 2, 4, 5, 6)]


def test_answers_without_reasoning_get_empty_marks_where_their_turn_was_written_with_them() -> None:
    call = {"type": "tool_use", "id": "a", "name": "read", "input": {}}
    bare = {"role": "assistant", "content": [text("So."), call]}
    quoting = {"role": "assistant", "content": "<think>\nis a word"}
    messages = [user("One."), bare, user(result_of("a")), quoting, user("Two.")]
    body = {"messages": messages}
    facts = RequestFacts(reasoning_marks=replace(MARKS, writes_empty=True))
    changed = run(Name.INLINE_REASONING, body, facts=facts).body["messages"]
    assert changed[1]["content"] == "<think>\n\n</think>\n\nSo."
    assert changed[1]["reasoning_content"] == " "
    assert changed[3] == quoting
    again = {"messages": changed}
    assert run(Name.INLINE_REASONING, again, facts=facts).body is again
    assert run(Name.INLINE_REASONING, body, facts=RequestFacts(reasoning_marks=MARKS)).body is body


def test_anthropic_answer_with_reasoning_becomes_a_chat_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "why", "signature": ""},
        text("So."),
        {"type": "tool_use", "id": "a", "name": "read", "input": {"b": 1.0, "a": "é"}},
    ]
    messages = [user("One."), {"role": "assistant", "content": blocks}, user(result_of("a"))]
    body = {"messages": [*messages, user("Two.")]}
    result = run(Name.INLINE_REASONING, body, facts=RequestFacts(reasoning_marks=MARKS))
    function = {"name": "read", "arguments": {"b": 1.0, "a": "é"}}  # llama-server writes the text
    assert result.body["messages"][1] == {
        "role": "assistant",
        "content": "<think>\nwhy\n</think>\n\nSo.",
        "reasoning_content": " ",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }


def test_reasoning_is_left_alone_in_a_tool_loop_and_where_nothing_is_known_of_the_template() -> (
    None
):
    answer = {"role": "assistant", "content": [{"type": "thinking", "thinking": "why"}]}
    loop = {"messages": [user("One."), answer, user(result_of("a"))]}
    assert run(Name.INLINE_REASONING, loop, facts=RequestFacts(reasoning_marks=MARKS)).body is loop
    later = {"messages": [*loop["messages"], user("Two.")]}
    assert run(Name.INLINE_REASONING, later).body is later
