"""Bodies of /v1/messages in the shapes that Claude Code and the SDKs send, and in odder ones."""

from typing import Any

Body = dict[str, Any]
Block = dict[str, Any]

BILLING = "x-anthropic-billing-header: cc_version=2.1.329.cf6; cc_entrypoint=cli; cch=a5145;"
CACHED: Block = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
UNICODE = 'é 😀 \u2028 \u0000\u001f\u007f / \\ " \r\n <|im_end|> </tool_call>'


def text(content: Any, **fields: Any) -> Block:
    return {"type": "text", "text": content, **fields}


def thinking(content: Any) -> Block:
    return {"type": "thinking", "thinking": content, "signature": ""}


def call(call_id: str, arguments: Any, name: str = "Bash") -> Block:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, *content: Any, **fields: Any) -> Block:
    """Return the result of a call; *content* is its content, if it has any."""
    given = {"content": content[0]} if content else {}
    return {"type": "tool_result", "tool_use_id": call_id, **given, **fields}


def user(*blocks: Any) -> Body:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> Body:
    return {"role": "assistant", "content": list(blocks)}


HELLO: Body = {"role": "user", "content": "hello"}


def talk(*messages: Any, **fields: Any) -> Body:
    return {"max_tokens": 1, "messages": list(messages) or [HELLO], **fields}


BASH: Body = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "timeout": {"type": "number", "default": 1.0, "maximum": 6e5},
            "command": {"type": "string", "description": "é/\\"},
            "edits": {
                "type": "array",
                "items": {"anyOf": [{"type": "string"}, {"type": "null"}], "enum": [None, True]},
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
WEB_SEARCH: Body = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
SYSTEM = [text(BILLING), text("You are a coding agent.", **CACHED), text("Rules.\n", **CACHED)]


def after_call(arguments: Any, *results: Any) -> Body:
    return talk(HELLO, assistant(call("t1", arguments)), user(*(results or [result("t1", "ok")])))


AGENT = talk(
    user(text("<system-reminder>git</system-reminder>"), text("Fix it.")),
    assistant(
        thinking("Look first."), text("Looking."), call("t1", {"command": "ls", "timeout": 2})
    ),
    user(result("t1", "a\nb", is_error=False)),
    assistant(call("t2", {"b": 1, "a": [1.0, {}]}), call("t3", {}, "Read")),
    user(result("t3", [text("x"), text("y")]), text("queued"), result("t2", "no", is_error=True)),
    assistant(thinking("A"), thinking("B"), text("Done.")),
    user(text("Thanks.", **CACHED)),
    system=SYSTEM,
    tools=[BASH, WEB_SEARCH, {"name": "Read", "defer_loading": True}],
    model="local-model",
    metadata={"user_id": '{"device_id":"d"}'},
    thinking={"type": "adaptive", "display": "full"},
    context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    output_config={"effort": "medium"},
)

ACCEPTED = {
    "hello": talk(),
    "agent": AGENT,
    "no messages": {"max_tokens": 1, "messages": [], "system": "s"},
    "several texts": talk(user(text("a"), text("b"), text(""))),
    "empty text": talk({"role": "user", "content": ""}),
    "no blocks": talk(HELLO, assistant(), HELLO, user()),
    "no content": talk(HELLO, {"role": "assistant"}, HELLO),
    "null content": talk(
        {"role": "user", "content": None}, {"role": "assistant", "content": None}, HELLO
    ),
    "unicode": talk({"role": "user", "content": UNICODE}, user(text(UNICODE)), system=UNICODE),
    "unicode in calls": after_call({UNICODE: UNICODE}, result("t1", UNICODE)),
    "other keys of a message": talk({**HELLO, "name": "bob", "id": 1}),
    "chat form inside": talk(
        HELLO, {"role": "assistant", "content": "x", "reasoning_content": "r"}, HELLO
    ),
    "system text": talk(system="s"),
    "system empty": talk(system=""),
    "system null": talk(system=None),
    "system number": talk(system=5),
    "system without blocks": talk(system=[]),
    "system odd blocks": talk(system=["x", None, {"type": "image"}, text("y"), text(None)]),
    "billing": talk(system=[text(BILLING), text("z")]),
    "billing glued": talk(system=BILLING + "You are a coding agent. cch=12345;"),
    "billing not first": talk(system=[text("x" + BILLING), text(" " + BILLING)]),
    "billing later block": talk(system=[text("x"), text(BILLING), text(BILLING)]),
    "billing short nonce": talk(system=BILLING.replace("a5145", "a514")),
    "billing long nonce": talk(system=BILLING.replace("a5145", "a51456") + "cch=12345;"),
    "billing unicode nonce": talk(system=BILLING.replace("a5145", "éé1")),
    "billing wide nonce": talk(system=BILLING.replace("a5145", "123😀")),
    "billing cut": talk(system=BILLING[:-1]),
    "billing without nonce": talk(system=BILLING.replace("cch", "x")),
    "billing in a message": talk({"role": "system", "content": BILLING}, HELLO),
    "system in front": talk({"role": "system", "content": [text("a"), text("b")]}, HELLO),
    "system in the middle": talk(HELLO, {"role": "system", "content": [text("mid")]}, system="s"),
    "developer": talk({"role": "developer", "content": "d"}, HELLO),
    "tool role": talk(HELLO, {"role": "tool", "tool_call_id": "t", "content": "x"}),
    "result between texts": after_call({}, text("a"), result("t1", "r"), text("b")),
    "result absent": after_call({}, result("t1")),
    "result null": after_call({}, result("t1", None)),
    "result number": after_call({}, result("t1", 5)),
    "result object": after_call({}, result("t1", {"type": "text", "text": "x"})),
    "result without blocks": after_call({}, result("t1", [])),
    "result odd blocks": after_call(
        {}, result("t1", ["s", None, text("q"), text(5), {"type": "text"}])
    ),
    "result reference": after_call(
        {}, result("t1", [{"type": "tool_reference", "tool_name": "X"}])
    ),
    "result without id": after_call({}, {"type": "tool_result", "content": "x"}),
    "result strange image": after_call({}, result("t1", [{"type": "image"}, text("x"), text("y")])),
    "result only strange image": after_call({}, result("t1", [{"type": "image", "source": 5}])),
    "results of several calls": talk(
        HELLO, assistant(call("a", {}), call("b", {})), user(result("b", "2"), result("a", "1"))
    ),
    "call without input": talk(HELLO, assistant({"type": "tool_use"}), HELLO),
    "call null input": after_call(None),
    "call list": after_call([1, "a", None]),
    "call number": after_call(1.0),
    "call boolean": after_call(False),
    "call text": after_call('say "é/"'),
    "call empty text": after_call(""),
    "call json text": after_call('{"a": 1}'),
    "call nested": after_call({"z": {"y": [{"x": {}}, []], "a": None}, "a": {"b": {"c": [[1]]}}}),
    "call unparsed": after_call({"__unparsedToolInput": {"raw": '{"a', "len": 3}}),
    "call of odd fields": talk(HELLO, assistant({**call("t", {}), "id": 5, "name": None}), HELLO),
    "call last": talk(HELLO, user(text("x")), assistant(text("pre"), text("fill"))),
    "thinking only": talk(HELLO, assistant(thinking("T")), HELLO),
    "thinking empty": talk(HELLO, assistant(thinking("")), HELLO),
    "thinking null": talk(HELLO, assistant(thinking(None), text("x")), HELLO),
    "thinking after text": talk(HELLO, assistant(text("x"), thinking("T"), text("y")), HELLO),
    "thinking of the user": talk(user(thinking("T"), text("x"))),
    "redacted": talk(
        HELLO, assistant({"type": "redacted_thinking", "data": "x"}, text("y")), HELLO
    ),
    "document": talk(
        user({"type": "document", "source": {"type": "text", "data": "D"}}, text("x"))
    ),
    "server tool": talk(
        HELLO,
        assistant(
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            text("found", citations=[{"type": "char_location"}]),
        ),
        HELLO,
    ),
    "unknown blocks": talk(
        user("bare", None, 5, [], {}, {"type": None}, {"type": "new"}, text("x"))
    ),
    "image of a file": talk(user({"type": "image", "source": {"type": "file"}}, text("x"))),
    "cache control": talk(user(text("x", **CACHED)), system=[text("y", **CACHED)]),
    "tools empty": talk(tools=[]),
    "tools null": talk(tools=None),
    "tools object": talk(tools={"a": 1}),
    "tool bare": talk(tools=[{"name": "f"}]),
    "tool odd": talk(tools=["x", None, {"name": 5, "description": None, "input_schema": {"b": 1}}]),
    "tool null schema": talk(tools=[{"name": "f", "input_schema": None}]),
    "tool twice": talk(tools=[BASH, BASH]),
    "tool order": talk(tools=[{"name": "z"}, {"name": "a"}, {"name": "m"}]),
    "choice none": talk(tools=[BASH], tool_choice={"type": "none"}),
    "choice any": talk(tools=[BASH], tool_choice={"type": "any"}),
    "choice tool": talk(tools=[BASH], tool_choice={"type": "tool", "name": "Bash"}),
    "choice text": talk(tools=[BASH], tool_choice="required"),
    "choice without tools": talk(tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
    "template switch": talk(
        chat_template_kwargs={"enable_thinking": False, "marker": {"b": 1, "a": 2.0}}
    ),
    "template effort": talk(chat_template_kwargs={"reasoning_effort": "low"}),
    "template null": talk(chat_template_kwargs=None),
    "thinking disabled": talk(thinking={"type": "disabled"}),
    "thinking enabled": talk(thinking={"type": "enabled", "budget_tokens": 0}),
    "what is dropped": talk(
        id_slot=0,
        n=3,
        seed=1,
        grammar="x",
        reasoning_effort="none",
        reasoning_format="none",
        response_format={"type": "json_object"},
        add_generation_prompt=False,
        continue_final_message=True,
        parallel_tool_calls=True,
        service_tier="auto",
        stop_sequences=["never"],
    ),
}

REFUSED = {
    "no messages": {"max_tokens": 1},
    "text in messages": talk("x"),
    "null in messages": talk(None),
    "no role": talk({"content": "x"}),
    "text of no text": talk(user({"type": "text"})),
    "text null": talk(user(text(None))),
    "content number": talk({"role": "user", "content": 5}),
    "two assistants last": talk(HELLO, assistant(text("a")), assistant(text("b"))),
    "image": talk(user({"type": "image", "source": {"type": "base64", "data": "AAAA"}})),
    "switch of another type": talk(chat_template_kwargs={"enable_thinking": "no"}),
}
