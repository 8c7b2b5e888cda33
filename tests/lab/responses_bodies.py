"""Bodies of /v1/responses in the shapes that codex and the OpenAI SDK send, and in odder ones."""

from typing import Any

from tests.lab.messages_bodies import UNICODE

Body = dict[str, Any]
Item = dict[str, Any]


def asks(given: Any, **fields: Any) -> Body:
    return {"max_output_tokens": 1, "input": given, **fields}


def part(text: Any, **fields: Any) -> Item:
    return {"type": "input_text", "text": text, **fields}


def image(url: str = "data:image/png;base64,AAAA") -> Item:
    return {"type": "input_image", "image_url": url}


def said(text: Any) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def user(*parts: Any, role: str = "user", **fields: Any) -> Item:
    return {"type": "message", "role": role, "content": list(parts), **fields}


def assistant(*parts: Any, **fields: Any) -> Item:
    given = {"id": "msg_1", "status": "completed", "content": list(parts), **fields}
    return {"type": "message", "role": "assistant", **given}


def call(call_id: str, arguments: Any = "{}", **fields: Any) -> Item:
    given = {"name": "shell", "arguments": arguments, "id": "fc_1", "status": "completed", **fields}
    return {"type": "function_call", "call_id": call_id, **given}


def output(call_id: str, value: Any, **fields: Any) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": value, **fields}


def reasoning(content: Any, **fields: Any) -> Item:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **fields}


def thought(text: Any) -> Item:
    return {"type": "reasoning_text", "text": text}


HELLO: Item = {"role": "user", "content": "hello"}
SHELL: Body = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command é/.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"timeout_ms": {"type": "number", "default": 1e4}, "cmd": {"type": "string"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
OTHER_TOOLS = [
    {"type": "web_search"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    {"type": "namespace", "name": "n", "tools": [SHELL]},
]

AGENT = asks(
    [
        user(part("<permissions>"), part("<rules>"), role="developer"),
        user(part("# AGENTS.md"), part("<environment_context>")),
        user(part("Fix it.")),
        reasoning([thought("Look first.")], encrypted_content=None),
        assistant(said("Looking.")),
        call("c1", '{"cmd": "ls", "timeout_ms": 1e4}'),
        call("c2", '{"cmd":"é/"}'),
        output("c1", "a\nb"),
        output("c2", [part("x"), part("y", extra=1)]),
        reasoning([thought("A"), thought("B")], encrypted_content="gAAAA", status=None),
        assistant(said("Done."), said(" Really.")),
        user(part("Thanks.")),
    ],
    instructions="You are a coding agent.",
    tools=[SHELL, *OTHER_TOOLS],
    tool_choice="auto",
    parallel_tool_calls=True,
    reasoning={"effort": "medium", "summary": "auto"},
    store=False,
    include=["reasoning.encrypted_content"],
    prompt_cache_key="key",
    text={"verbosity": "low"},
    model="local-model",
)

ACCEPTED = {
    "hello": asks("hello"),
    "agent": AGENT,
    "unicode": asks(UNICODE, instructions=UNICODE),
    "unicode in calls": asks(
        [HELLO, call("c", f'{{"{chr(233)}": "\\u00e9\\/"}}'), output("c", UNICODE)]
    ),
    "empty input": asks(""),
    "no items": asks([]),
    "only instructions": asks([], instructions="i"),
    "instructions empty": asks("x", instructions=""),
    "instructions null": asks("x", instructions=None),
    "instructions list": asks("x", instructions=[part("i")]),
    "bare message": asks([HELLO], instructions="i"),
    "several parts": asks([user(part("a"), part("b"), part(""))]),
    "no parts": asks([user(), HELLO]),
    "other keys": asks([user(part("a"), id="x", status="completed", name="bob", foo=1)]),
    "developer": asks([user(part("d"), role="developer"), HELLO]),
    "system": asks([{"role": "system", "content": "s"}, HELLO]),
    "developer after instructions": asks(
        [user(part("d"), role="developer"), HELLO], instructions="i"
    ),
    "developer in the middle": asks([HELLO, user(part("d"), role="developer"), HELLO]),
    "answer": asks([HELLO, assistant(said("a"), said("b")), HELLO]),
    "answer as text": asks(
        [HELLO, {"type": "message", "role": "assistant", "content": "x"}, HELLO]
    ),
    "answer of input text": asks([HELLO, assistant(part("x")), HELLO]),
    "answer without content": asks([HELLO, {"type": "message", "role": "assistant"}, HELLO]),
    "answer null": asks([HELLO, assistant(content=None), HELLO]),
    "answer without parts": asks([HELLO, assistant(), HELLO]),
    "answer with reasoning": asks(
        [HELLO, assistant(said("x"), reasoning_content="r", name="n"), HELLO]
    ),
    "answers merged": asks([HELLO, assistant(said("a")), assistant(said("b"), name="b"), HELLO]),
    "answer last": asks([HELLO, assistant(said("prefilled"))]),
    "answer continued": asks(
        [HELLO, assistant(said("x"))], add_generation_prompt=False, continue_final_message=True
    ),
    "answer not continued": asks(
        [HELLO, assistant(said("x"))], add_generation_prompt=True, continue_final_message=False
    ),
    "call": asks([HELLO, call("c", '{"b": 1, "a": [1.0]}'), output("c", "x")]),
    "calls": asks([HELLO, call("c"), call("d"), output("d", "y"), output("c", "x")]),
    "calls in turn": asks([HELLO, call("c"), output("c", "x"), call("d"), output("d", "y")]),
    "answer then call": asks([HELLO, assistant(said("a")), call("c"), output("c", "x")]),
    "call then answer": asks([HELLO, call("c"), assistant(said("a")), output("c", "x")]),
    "call in a namespace": asks([HELLO, call("c", namespace="n"), output("c", "x")]),
    "call first": asks([call("c"), output("c", "x"), HELLO]),
    "call with a text": asks([HELLO, call("c", content="both"), output("c", "x")]),
    "call with a role": asks([call("c", role="user", content="both")]),
    "output empty": asks([HELLO, call("c"), output("c", "")]),
    "output without parts": asks([HELLO, call("c"), output("c", [])]),
    "output without call": asks([HELLO, output("c", "x")]),
    "reasoning": asks([HELLO, reasoning([thought("R")]), assistant(said("x")), HELLO]),
    "reasoning then call": asks([HELLO, reasoning([thought("R")]), call("c"), output("c", "x")]),
    "reasoning after answer": asks([HELLO, assistant(said("x")), reasoning([thought("R")]), HELLO]),
    "reasoning twice": asks(
        [
            HELLO,
            reasoning([thought("R"), thought("S")]),
            reasoning([thought("T")]),
            call("c"),
            HELLO,
        ]
    ),
    "reasoning of text": asks([HELLO, reasoning("R"), assistant(said("x")), HELLO]),
    "reasoning empty": asks([HELLO, reasoning([thought("")]), assistant(said("x")), HELLO]),
    "reasoning encrypted too": asks(
        [HELLO, reasoning([thought("R")], encrypted_content="x"), assistant(said("x")), HELLO]
    ),
    "tools empty": asks("x", tools=[]),
    "tool": asks("x", tools=[SHELL]),
    "tool loose": asks("x", tools=[{"type": "function", "name": "f"}]),
    "tool strict null": asks("x", tools=[{**SHELL, "strict": None}]),
    "tool order": asks("x", tools=[{**SHELL, "name": n} for n in ("z", "a", "m")]),
    "tools of other types": asks("x", tools=[*OTHER_TOOLS, SHELL, {"name": "f"}, "x", None]),
    "tools of other types only": asks("x", tools=OTHER_TOOLS),
    "choice": asks("x", tools=[SHELL], tool_choice="required", parallel_tool_calls=False),
    "choice of a function": asks(
        "x", tools=[SHELL], tool_choice={"type": "function", "name": "shell"}
    ),
    "effort": asks("x", reasoning={"effort": "high"}),
    "effort none": asks("x", reasoning={"effort": "none"}),
    "effort null": asks("x", reasoning={"effort": None}),
    "effort number": asks("x", reasoning={"effort": 5}),
    "effort twice": asks("x", reasoning={"effort": "high"}, reasoning_effort="low"),
    "effort absent": asks("x", reasoning={"summary": "auto"}, reasoning_effort="low"),
    "reasoning null": asks("x", reasoning=None),
    "reasoning text": asks("x", reasoning="high"),
    "template switch": asks("x", chat_template_kwargs={"enable_thinking": False, "marker": [1.0]}),
    "previous null": asks("x", previous_response_id=None),
    "previous empty": asks("x", previous_response_id=""),
    "generation prompt": asks("x", add_generation_prompt=False),
    "messages too": asks("x", messages=[{"role": "user", "content": "other"}]),
    "response format": asks("x", response_format={"type": "json_object"}),
    "reasoning format": asks(
        [HELLO, assistant(said("x"), reasoning_content="r")], reasoning_format="none"
    ),
    "json schema": asks("x", json_schema={"type": "object"}),
    "what is not read": asks(
        "x", text={"format": {"type": "text"}}, metadata={"a": 1}, user="u", truncation="auto"
    ),
}

REFUSED = {
    "no input": {"max_output_tokens": 1},
    "input null": asks(None),
    "input object": asks({"role": "user", "content": "x"}),
    "text in items": asks(["x"]),
    "null in items": asks([None]),
    "message without content": asks([{"role": "user"}]),
    "tool role": asks([{"role": "tool", "content": "x"}]),
    "part of no type": asks([user("x")]),
    "part of chat": asks([user({"type": "text", "text": "x"})]),
    "part without text": asks([user({"type": "input_text"})]),
    "part null": asks([user(part(None))]),
    "file": asks([user({"type": "input_file", "file_id": "x"})]),
    "image": asks([user(image())]),
    "image absent": asks([user({"type": "input_image"})]),
    "refusal": asks([HELLO, assistant({"type": "refusal", "refusal": "no"}), HELLO]),
    "refusal absent": asks([HELLO, assistant({"type": "refusal"}), HELLO]),
    "answer without type": asks([HELLO, {"role": "assistant", "content": "x"}, HELLO]),
    "answer of chat": asks([HELLO, assistant({"type": "text", "text": "x"}), HELLO]),
    "answer of no text": asks([HELLO, assistant(said(None)), HELLO]),
    "call of an object": asks([HELLO, call("c", {"a": 1})]),
    "call without a name": asks([HELLO, {**call("c"), "name": None}]),
    "output null": asks([HELLO, call("c"), output("c", None)]),
    "output of texts": asks([HELLO, call("c"), output("c", ["x"])]),
    "output of output": asks([HELLO, call("c"), output("c", [said("x")])]),
    "output image": asks([HELLO, call("c"), output("c", [image()])]),
    "output image absent": asks([HELLO, call("c"), output("c", [{"type": "input_image"}])]),
    "reasoning without content": asks([HELLO, reasoning(None), HELLO]),
    "reasoning without parts": asks([HELLO, reasoning([]), HELLO]),
    "reasoning of no text": asks([HELLO, reasoning(["x"]), HELLO]),
    "reasoning encrypted": asks(
        [HELLO, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, HELLO]
    ),
    "reasoning without summary": asks([HELLO, {"type": "reasoning", "content": [thought("R")]}]),
    "custom call": asks([HELLO, {"type": "custom_tool_call", "call_id": "c", "input": "x"}]),
    "item reference": asks([HELLO, {"type": "item_reference", "id": "msg_1"}]),
    "tools null": asks("x", tools=None),
    "tool of chat": asks("x", tools=[{"type": "function", "function": {"name": "f"}}]),
    "previous response": asks("x", previous_response_id="resp_1"),
}
