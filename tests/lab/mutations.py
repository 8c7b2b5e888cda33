"""What may change between two requests of a conversation, and what the hosted APIs call that change."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.lab.apis import MESSAGES, RESPONSES, Api
from tests.lab.conversation import answer, prose, system, tool_call, tool_result, tools, user

Body = dict[str, Any]
N_WORDS = 120
"""Of each message: more than what may be evaluated again without being a miss."""

_CONVERSATION = [
    *(user(1, N_WORDS), tool_call(1), tool_result(1, N_WORDS), answer(1)),
    *(user(2, N_WORDS), tool_call(2), tool_result(2, N_WORDS), answer(2), user(3, N_WORDS)),
]


def base(api: Api) -> Body:
    """Return a request in the middle of a conversation with tools."""
    return {"model": "local", **api.ask([system(N_WORDS), *_CONVERSATION], tools(3))}


@dataclass(frozen=True)
class Mutation:
    """One change of a body, and the reason that its diagnostics must give; None if they must give none."""

    name: str
    api: Api
    reason: str | None
    change: Callable[[Body], object]

    def body(self) -> Body:
        body = copy.deepcopy(base(self.api))
        self.change(body)
        return body


def _set(**fields: Any) -> Callable[[Body], object]:
    return lambda body: body.update(fields)


def _end(name: str, *items: Any) -> Callable[[Body], object]:
    return lambda body: body[name].extend(items)


def _cut(name: str, begin: int, *instead: Any) -> Callable[[Body], object]:
    return lambda body: body.update({name: [*instead, *body[name][begin:]]})


def _text(body: Body, index: int) -> Body:
    """Return the first block of a message with a text."""
    message = body["messages" if "messages" in body else "input"][index]
    block: Body = message["content"][0]
    return block


def _reword(index: int, before: str = "Changed. ") -> Callable[[Body], object]:
    def change(body: Body) -> None:
        block = _text(body, index)
        block["text"] = before + block["text"]

    return change


def _system(body: Body) -> None:
    body["system"][0]["text"] = "It is Monday. " + body["system"][0]["text"]


def _tool(**fields: Any) -> Callable[[Body], object]:
    return lambda body: body["tools"][1].update(fields)


_NEW_TOOL = {"name": "new", "description": "New.", "input_schema": {"type": "object"}}
_NEW_FUNCTION = {"type": "function", "name": "new", "parameters": {"type": "object"}}
_SUMMARY = {"role": "user", "content": [{"type": "text", "text": "So far: " + prose(9, 50)}]}
_SUMMED_UP = {
    **{"type": "message", "role": "user"},
    "content": [{"type": "input_text", "text": "So far: " + prose(9, 50)}],
}
_SAID = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
_ASKED = {"role": "user", "content": [{"type": "text", "text": prose(7, 30)}]}
_ANSWERED = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
}
_ITEM = {
    **{"type": "message", "role": "user"},
    "content": [{"type": "input_text", "text": prose(7, 30)}],
}
_THINKING = {"type": "enabled", "budget_tokens": 1024}
_FORMAT = {"format": {"type": "json_object"}}

OF_MESSAGES = [
    Mutation("the same again", MESSAGES, None, lambda body: None),
    Mutation("next turn", MESSAGES, None, _end("messages", _SAID, _ASKED)),
    Mutation("another limit", MESSAGES, None, _set(max_tokens=3)),
    Mutation("another temperature", MESSAGES, None, _set(temperature=0.5)),
    Mutation("last messages dropped", MESSAGES, None, lambda body: body["messages"].pop()),
    Mutation("model", MESSAGES, None, _set(model="other")),
    Mutation("speed", MESSAGES, None, _set(speed="fast")),
    Mutation("date in the system prompt", MESSAGES, "system_changed", _system),
    Mutation("another system prompt", MESSAGES, "system_changed", _set(system=prose(5, 90))),
    Mutation("no system prompt", MESSAGES, "messages_changed", lambda body: body.pop("system")),
    Mutation(
        "system prompt longer at its end",
        *(MESSAGES, "system_changed", _end("system", {"type": "text", "text": "More."})),
    ),
    Mutation("tools in another order", MESSAGES, "tools_changed", lambda b: b["tools"].reverse()),
    Mutation("tool added", MESSAGES, "tools_changed", _end("tools", _NEW_TOOL)),
    Mutation("tool removed", MESSAGES, "tools_changed", lambda body: body["tools"].pop(1)),
    Mutation("no tools", MESSAGES, "tools_changed", lambda body: body.pop("tools")),
    Mutation("tool reworded", MESSAGES, "tools_changed", _tool(description="Else.")),
    Mutation("tool renamed", MESSAGES, "tools_changed", _tool(name="else")),
    Mutation("first message edited", MESSAGES, "messages_changed", _reword(0)),
    Mutation("last message edited", MESSAGES, "messages_changed", _reword(-1)),
    Mutation("message left out", MESSAGES, "messages_changed", lambda b: b["messages"].pop(3)),
    Mutation("history summed up", MESSAGES, "messages_changed", _cut("messages", 7, _SUMMARY)),
    Mutation("first messages dropped", MESSAGES, "messages_changed", _cut("messages", 4)),
    Mutation("tool choice", MESSAGES, None, _set(tool_choice={"type": "any"})),
    Mutation("thinking", MESSAGES, None, _set(thinking=_THINKING)),
]
OF_RESPONSES = [
    Mutation("the same again", RESPONSES, None, lambda body: None),
    Mutation("next turn", RESPONSES, None, _end("input", _ANSWERED, _ITEM)),
    Mutation("another limit", RESPONSES, None, _set(max_output_tokens=3)),
    Mutation("model", RESPONSES, None, _set(model="other")),
    Mutation("key", RESPONSES, None, _set(prompt_cache_key="else")),
    Mutation("tool added", RESPONSES, "tools_changed", _end("tools", _NEW_FUNCTION)),
    Mutation("tool removed", RESPONSES, "tools_changed", lambda body: body["tools"].pop(0)),
    Mutation("tools in another order", RESPONSES, "tools_changed", lambda b: b["tools"].reverse()),
    Mutation("tool reworded", RESPONSES, "tools_changed", _tool(description="Else.")),
    Mutation("text format", RESPONSES, None, _set(text=_FORMAT)),
    Mutation("effort", RESPONSES, None, _set(reasoning={"effort": "low"})),
    Mutation("verbosity", RESPONSES, None, _set(text={"verbosity": "low"})),
    Mutation("history summed up", RESPONSES, "context_compacted", _cut("input", 9, _SUMMED_UP)),
    Mutation("first items dropped", RESPONSES, "context_compacted", _cut("input", 4)),
    Mutation("instructions", RESPONSES, "input_changed", _set(instructions=prose(5, 90))),
    Mutation("first item edited", RESPONSES, "input_changed", _reword(0)),
    Mutation("last item edited", RESPONSES, "input_changed", _reword(-1)),
    Mutation("tier", RESPONSES, None, _set(service_tier="flex")),
    Mutation("tool choice", RESPONSES, None, _set(tool_choice="required")),
]
MUTATIONS = [*OF_MESSAGES, *OF_RESPONSES]
