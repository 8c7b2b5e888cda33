"""What holds for every stabilizer on whatever JSON: nothing raised, nothing mutated, done once is done."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.core.messages import CONVERSATIONS, Route
from proxy.stabilize.model import Marks, Memory, Name, RequestFacts
from proxy.stabilize.run import Seen, Stabilized, stabilize
from tests.lab.clients.catalogue import ROWS, Row

ALL = frozenset(Name)
MARKS = Marks("<think>\n", "\n</think>\n\n", "\n</think>\n", writes_empty=True)
FACTS = [RequestFacts(accepts, marks) for accepts in (None, True, False) for marks in (None, MARKS)]

WORDS = st.sampled_from(
    [
        "",
        "hello",
        "<system-reminder>\nplan\n</system-reminder>",
        "do it\n<system-reminder>plan</system-reminder>",
        "x-anthropic-billing-header: cc_version=1;",
        "x-anthropic-billing-header: a\nx-anthropic-billing-header: b\nrest",
        "Today's date: Sat Nov 21 2026\nmore",
        "Today's date is 2026-11-22.",
        "Today Today is 2026-11-1",
        "<current_date>2026-11-22</current_date> 7 of 9",
        "Notes: /tmp/a1b2c3d4e5/notes\n12 left",
        "Notes: /tmp/f6a7b8c9d0/notes\n7 left",
        '{"b":1,"a":"2"}',
        '{"tool":"read","error":"no"}',
        "{",
    ]
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
NAMES = st.sampled_from(["read", "edit", "bash", "invalid", "Zed"])
IDS = st.sampled_from(["c1", "c2", "c3"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
MARK = {"cache_control": st.just({"type": "ephemeral"})}


def thing(required: dict[str, Any], **optional: Any) -> st.SearchStrategy[Any]:
    """Return objects of one shape, now and then with junk in place of one value."""
    optional = {**optional, **MARK}
    broken = [st.fixed_dictionaries({**required, key: JUNK}, optional=optional) for key in required]
    whole = st.fixed_dictionaries(required, optional=optional)
    return st.integers(0, 15).flatmap(lambda n: st.one_of(broken) if n == 15 else whole)


def texts(kind: str) -> st.SearchStrategy[Any]:
    return thing({"type": st.just(kind), "text": WORDS})


ARGUMENTS = st.dictionaries(
    st.sampled_from(["command", "b", "a", "replace_all"]),
    st.sampled_from([1, "1", 2.0, False, "x"]),
)
REFERENCE = thing({"type": st.just("tool_reference"), "tool_name": NAMES})
BLOCKS = st.lists(
    st.one_of(
        texts("text"),
        thing({"type": st.just("thinking"), "thinking": WORDS}),
        thing({"type": st.just("tool_use"), "id": IDS, "name": NAMES, "input": ARGUMENTS}),
        thing(
            {"type": st.just("tool_result"), "tool_use_id": IDS},
            content=WORDS | st.lists(texts("text") | REFERENCE, max_size=3) | JUNK,
        ),
        thing({"type": st.just("image"), "source": JUNK}),
    ),
    max_size=4,
)
FUNCTION = thing({"name": NAMES, "arguments": WORDS})
CALLS = st.lists(thing({"id": IDS, "type": st.just("function"), "function": FUNCTION}), max_size=2)
MESSAGE = thing(
    {"role": ROLES, "content": st.one_of(WORDS, BLOCKS)},
    tool_calls=CALLS,
    reasoning_content=WORDS,
    tool_call_id=IDS,
)
ITEM = st.one_of(
    thing({"type": st.just("message"), "role": ROLES, "content": WORDS | BLOCKS}),
    thing({"role": ROLES, "content": st.lists(texts("input_text"), max_size=2)}),
    thing({"type": st.just("function_call"), "call_id": IDS, "name": NAMES, "arguments": WORDS}),
    thing({"type": st.just("function_call_output"), "call_id": IDS, "output": WORDS}),
)
TOOL = st.one_of(
    thing({"name": NAMES, "description": WORDS, "input_schema": JUNK}),
    thing({"type": st.just("function"), "function": thing({"name": NAMES, "description": WORDS})}),
)


def rarely_junk(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 15).flatmap(lambda n: JUNK if n == 15 else usual)


BODY = st.fixed_dictionaries(
    {
        "messages": rarely_junk(st.lists(MESSAGE, max_size=6)),
        "input": rarely_junk(st.lists(ITEM, max_size=6) | WORDS),
    },
    optional={
        "model": WORDS,
        "system": rarely_junk(WORDS | st.lists(texts("text"), max_size=3)),
        "instructions": rarely_junk(WORDS),
        "tools": rarely_junk(st.lists(TOOL, max_size=4)),
        "temperature": JUNK,
        **MARK,
    },
)
FORMS = st.sampled_from(CONVERSATIONS)


def taught(form: Route, bodies: list[Any], facts: RequestFacts) -> Memory:
    """Return a memory that has seen some requests and calls."""
    memory = Memory()
    for call_id in ("c1", "c2"):
        memory.remember_call(call_id, "read", '{"a": "2", "b": 1}')
        memory.remember_call(call_id, "bash", '{"command": "cd /x && x"}')
    for body in bodies:
        memory.learn(stabilize(form, body, memory, ALL, facts).lessons)
    return memory


@given(FORMS, BODY, st.lists(BODY, max_size=2), st.sampled_from(FACTS))
def test_stabilizing_raises_nothing_mutates_nothing_and_is_done_once(
    form: Route, body: Any, earlier: list[Any], facts: RequestFacts
) -> None:
    memory = taught(form, [*earlier, body], facts)
    check(form, body, memory, ALL, facts)


def check(
    form: Route, body: Any, memory: Memory, switches: frozenset[Name], facts: RequestFacts
) -> Stabilized:
    as_given, known = copy.deepcopy(body), memory.to_bytes()
    once = stabilize(form, body, memory, switches, facts)
    assert encoded(body) == encoded(as_given)
    assert memory.to_bytes() == known
    assert encoded(stabilize(form, body, memory, switches, facts).body) == encoded(once.body)
    twice = stabilize(form, once.body, memory, switches, facts)
    assert encoded(twice.body) == encoded(once.body)
    assert twice.changed_by == () and twice.body is once.body
    assert once.changed_by or once.body is body
    kept = [key for key in body if key in once.body]
    assert [key for key in once.body if key in body] == kept
    memory.learn(once.lessons)
    assert encoded(stabilize(form, body, memory, switches, facts).body) == encoded(once.body)
    again = stabilize(form, body, memory, switches, facts, once.seen)
    assert encoded(again.body) == encoded(once.body) and again.changed_by == once.changed_by
    return once


def encoded(value: Any) -> bytes:
    """Return the JSON text, in which the order of keys shows."""
    return msgspec.json.encode(value)


TOOL_ORDERS = st.permutations(["bash", "edit", "read", "write"]).flatmap(
    lambda names: st.integers(1, 4).map(lambda n: names[:n])
)
DATES = st.sampled_from(["Sat Nov 21 2026", "Sun Nov 22 2026"])
REMINDERS = st.sampled_from(["", "plan", "build"])
IDS_OF_RUNS = st.sampled_from(["run 0a1b2c3d4e", "run 5f6a7b8c9d", "no run"])
REQUESTS = st.lists(
    st.tuples(TOOL_ORDERS, DATES, REMINDERS, REMINDERS, IDS_OF_RUNS), min_size=1, max_size=5
)


def conversation_request(form: Route, n_turns: int, request: Any) -> Any:
    """Return the request of a conversation after some turns, as a client would write it."""
    names, date, plan, mode, run = request
    system = f"Be brief.\nToday's date: {date}\nThat is all of {run}: {len(names)} tools."
    tools = [
        {"name": name, "description": f"{name} while {mode} in {run}", "input_schema": {}}
        for name in names
    ]
    messages: list[dict[str, Any]] = []
    for i in range(n_turns + 1):
        reminder = f"\n<system-reminder>{plan}</system-reminder>" if plan and i == n_turns else ""
        messages.append({"role": "user", "content": f"Task {i}{reminder}"})
        messages.append(
            {
                "role": "assistant",
                "content": f"Done {i}",
                "reasoning_content": f"Why {i}",
                "tool_calls": [{"id": "c1", "function": {"name": "read", "arguments": "{}"}}],
            }
        )
    if form is Route.MESSAGES:
        return {"system": system, "messages": messages[:-1], "tools": tools}
    name = "input" if form is Route.RESPONSES else "messages"
    return {name: [{"role": "system", "content": system}, *messages[:-1]], "tools": tools}


READ_IN_TWO_RUNS = [
    ([tool], "Sat Nov 21 2026", "", "plan", run)
    for tool, run in [
        ("read", "run 0a1b2c3d4e"),
        ("bash", "run 0a1b2c3d4e"),
        ("read", "run 5f6a7b8c9d"),
        ("read", "run 5f6a7b8c9d"),
    ]
]
"""sticky_tool_text holds the second run's description, and sticky_session leaves the id in it out."""


@example(Route.CHAT, READ_IN_TWO_RUNS, {Name.STICKY_TOOL_TEXT, Name.STICKY_SESSION}, RequestFacts())
@given(FORMS, REQUESTS, st.sets(st.sampled_from(Name)), st.sampled_from(FACTS))
def test_every_request_of_a_conversation_is_stabilized_once_and_for_all(
    form: Route, requests: list[Any], switches: set[Name], facts: RequestFacts
) -> None:
    memory, seen = Memory(), Seen()
    for n_turns, request in enumerate(requests):
        body = conversation_request(form, n_turns, request)
        seen = stabilize(form, body, memory, switches, facts, seen).seen
        result = check(form, body, memory, frozenset(switches), facts)
        assert result.failures == {} and seen == result.seen


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.mutation.name)
@pytest.mark.parametrize("facts", [FACTS[1], FACTS[2], FACTS[5]], ids=str)  # each of either kind
def test_stabilizing_a_clients_requests_is_done_once(row: Row, facts: RequestFacts) -> None:
    memory, seen = Memory(), Seen()
    for made in row.mutation.calls_made:
        memory.remember_call(made.call_id, made.name, made.raw_arguments)
    for body in row.mutation.requests:
        seen = stabilize(row.mutation.form, body, memory, ALL, facts, seen).seen
        result = check(row.mutation.form, body, memory, ALL, facts)
        assert result.failures == {} and seen == result.seen


@given(FORMS, BODY)
def test_with_all_off_the_very_body_comes_back(form: Route, body: Any) -> None:
    result = stabilize(form, body, taught(form, [body], FACTS[0]), frozenset())
    assert result.body is body
    assert not (result.changed_by or result.failures or result.lessons)


TOUCHED = {"system", "instructions", "messages", "input", "tools", "cache_control"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.mutation.name)
def test_each_stabilizer_alone_touches_nothing_it_is_not_for(row: Row) -> None:
    body = row.mutation.requests[-1]
    for name in Name:
        result = stabilize(row.mutation.form, body, Memory(), {name}, FACTS[-1])
        for key in body:
            if key not in TOUCHED or name not in result.changed_by:
                assert result.body[key] is body[key] or result.body[key] == body[key]


def test_numbers_and_letters_survive_where_nothing_is_changed() -> None:
    raw = (
        b'{"seed":18446744073709551617,"temperature":1.0,"top_p":0.1,"x":-0.0,"text":"\xc3\xa9\xe2\x82\xac",'
        b'"system":"x-anthropic-billing-header: a\\nBe brief.","messages":[{"role":"assistant","content":'
        b'[{"type":"tool_use","id":"c","name":"n","input":{"z":20000.0,"a":12345678901234567890}}]}]}'
    )
    body = msgspec.json.decode(raw)
    result = stabilize(Route.MESSAGES, body, Memory(), ALL)
    assert encoded(result.body) == raw.replace(b"x-anthropic-billing-header: a\\n", b"")
