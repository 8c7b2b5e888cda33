"""Stabilizers that keep what was sent before.

Each of them writes what a conversation had before in place of what its new request has, and then learns
what the request has now. The first line of a stabilizer's docstring says why the stabilizer exists, for the
table in the docs.
"""

import re
from typing import Any

import msgspec

from proxy.core.messages import Route, has_reminder, member, object_in, text_of, without_reminders
from proxy.stabilize.model import (
    DATE,
    Draft,
    Json,
    UnknownShape,
    call_key,
    key_of,
    plain_text,
    with_items,
    with_list,
)


def sticky_date(draft: Draft) -> None:
    """A date or time in the system prompt changes, and the whole prompt with it."""
    key = draft.key("date")
    first = draft.recall(key)
    if isinstance(first, list) and len(first) == len(_dates(draft)):
        dates = iter(first)
        draft.rewrite_system(
            lambda text: DATE.sub(lambda match: match["words"] + next(dates), text)
        )
    if dates_now := _dates(draft):
        draft.lessons[key] = dates_now


def _dates(draft: Draft) -> list[str]:
    return [match["date"] for match in DATE.finditer(draft.system_text)]


def sticky_reminders(draft: Draft) -> None:
    """Reminders move from the old user message to the newest, which changes the old one.

    OpenCode attaches the reminder of its plan mode to the newest user message only. A message is known by
    what the user wrote in the message and by its number.
    """
    messages = list(draft.messages)
    texts = {
        i: plain_text(m.get("content")) for i, m in enumerate(messages) if m.get("role") == "user"
    }
    prompts = [(i, text) for i, text in texts.items() if text is not None]
    for number, (i, text) in enumerate(prompts, 1):
        key = draft.key("reminder", str(number), without_reminders(text))
        first, is_newest = draft.memory.get(key), number == len(prompts)
        if first is not None and first != messages[i]["content"] and not is_newest:
            messages[i] = {**messages[i], "content": first}
        # The newest may have lost its reminder by being asked again in another mode.
        if has_reminder(plain_text(messages[i]["content"]) or "") or (
            is_newest and first is not None
        ):
            draft.lessons[key] = messages[i]["content"]
    draft.messages = messages


# The tools of a conversation as they were first sent.


def keep_tool_order(draft: Draft) -> None:
    """A tool loaded later is inserted in the middle of the list; at the end it costs nothing.

    The order is that of the conversation; where that is new, of the first conversation with the same
    system prompt.
    """
    tools = {_name(tool): tool for tool in draft.tools}
    if len(tools) != len(draft.tools):
        raise UnknownShape("tools has two of one name")
    if not tools:
        return
    keys = draft.key("tool order"), key_of("tool order of header", draft.header)
    orders: list[list[str]] = [draft.recall(keys[0]) or [], draft.memory.get(keys[1]) or []]
    places = {name: i for i, name in enumerate(dict.fromkeys(orders[0] + orders[1]))}
    # Sorting is stable, so unknown tools keep the client's order at the end.
    names = sorted(tools, key=lambda name: places.get(name, len(places)))
    draft.body = with_list(draft.body, "tools", [tools[name] for name in names])
    for key, order in zip(keys, orders, strict=True):
        draft.lessons[key] = list(dict.fromkeys(order + names))


def _name(tool: Json) -> str:
    """Return what a tool is told apart by: its name, or its kind where it has none."""
    name = _described(tool).get("name", tool.get("type"))
    if not isinstance(name, str):
        raise UnknownShape("tools has one without a name")
    return name


def _described(tool: Json) -> dict[str, Any]:
    """Return the object that holds name and description."""
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def sticky_tool_text(draft: Draft) -> None:
    """Modes such as plan and build change a tool's description in mid-conversation.

    A tool is known by everything but its description.
    """

    def as_first_sent(tool: Json) -> Json:
        described = _described(tool)
        rest = {**tool, **described, "description": "", "function": None}
        key = draft.key("tool text", msgspec.json.encode(rest).decode())
        first, text = draft.recall(key), described.get("description")
        if isinstance(first, str) and first != text:
            text, changed = first, {**described, "description": first}
            tool = changed if described is tool else {**tool, "function": changed}
        if isinstance(text, str):
            draft.lessons[key] = text
        return tool

    draft.body = with_list(draft.body, "tools", [as_first_sent(tool) for tool in draft.tools])


# Tool calls as the model wrote them. Claude Code and OpenCode send calls back changed: other key order,
# a default added, a leading `cd ... &&` removed, "1" turned into 1. A call is restored only if what
# came back still means what the model wrote, so that a call which the user edited stays edited. What is
# not JSON is never restored: llama-server answers 500 to it.


_CHANGE_OF_FOLDER = re.compile(r"""\Acd (?:"[^"\n]*"|'[^'\n]*'|[^\s;&|"']+) && """)
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,6})?")
_ADDED_BY_CLIENTS = {"replace_all": False}
_REFUSED_BY_CLIENT = "invalid"
"""OpenCode's name for a call that it could not run; the arguments then name the tool and the error."""


def restore_tool_arguments(draft: Draft, message: Json) -> list[Json]:
    """Clients send tool calls back with other keys, order or numbers than the model wrote."""

    def in_call(call: Any) -> Any:
        function = member(call, "function")
        if not isinstance(function, dict):
            return call
        restored = _restored(draft, function, call.get("id"))
        return call if restored is function else {**call, "function": restored}

    def in_block(block: Any) -> Any:
        is_call = text_of(block, "type") == "tool_use"
        return _restored(draft, block, block.get("id")) if is_call else block

    if message.get("type") == "function_call" and draft.route is Route.RESPONSES:
        return [_restored(draft, message, message.get("call_id"))]
    if message.get("role") != "assistant" or draft.route is Route.RESPONSES:
        return [message]
    is_anthropic = draft.route is Route.MESSAGES
    key, restored = ("content", in_block) if is_anthropic else ("tool_calls", in_call)
    return [with_items(message, key, restored)]


def _restored(draft: Draft, holder: Json, call_id: Any) -> Json:
    """Return the object that holds a call's name and arguments, with both as the model made them.

    Anthropic's arguments are an object, all others' are a text.
    """
    key = "input" if draft.route is Route.MESSAGES else "arguments"
    name, arguments = holder.get("name"), holder.get(key)
    if not isinstance(call_id, str) or not isinstance(name, str):
        return holder
    if made := draft.memory.calls(call_id, tenant=draft.facts.tenant):
        draft.lessons[call_key(call_id, draft.facts.tenant)] = made  # it will be needed again
    if key == "input" and isinstance(arguments, dict):
        chosen = choose_call(made, name, _encode(arguments).decode())
    elif key == "arguments" and isinstance(arguments, str):
        chosen = choose_call(made, name, arguments)
    else:
        return holder
    if chosen is None:
        return holder
    written = object_in(chosen[1]) if key == "input" else chosen[1]
    restored = {**holder, "name": chosen[0], key: written}
    return holder if _encode(restored) == _encode(holder) else restored


def choose_call(
    made: list[tuple[str, str]], name: str, raw_arguments: str
) -> tuple[str, str] | None:
    """Return the one call of those *made* that came back changed, or None if that is not certain.

    Where only spaces and escapes differ the values decide before the known changes do.
    """
    returned = object_in(raw_arguments)
    if returned is None or (name, raw_arguments) in made:
        return None
    values = {call: value for call in made if (value := object_in(call[1])) is not None}
    exact = [c for c, v in values.items() if c[0] == name and _encode(v) == _encode(returned)]
    alike = [c for c, v in values.items() if _came_back_as(c[0], v, name, returned)]
    candidates = exact or alike
    return candidates[0] if len(candidates) == 1 else None


def _came_back_as(made_name: str, written: Json, name: str, returned: Json) -> bool:
    if name == _REFUSED_BY_CLIENT and name != made_name:
        return returned.get("tool") == made_name and "error" in returned
    return made_name == name and means_the_same(written, returned)


def means_the_same(written: Json, returned: Json) -> bool:
    """Return whether *returned* is *written* but for what clients are known to change."""
    added = {key: value for key, value in returned.items() if key not in written}
    if any(key not in _ADDED_BY_CLIENTS or value is not False for key, value in added.items()):
        return False
    return all(
        key in returned and _is_same(value, returned[key], is_command=key == "command")
        for key, value in written.items()
    )


def _is_same(written: Any, returned: Any, *, is_command: bool = False) -> bool:
    if isinstance(written, dict) and isinstance(returned, dict):
        return means_the_same(written, returned)
    if isinstance(written, list) and isinstance(returned, list):
        return len(written) == len(returned) and all(map(_is_same, written, returned))
    if isinstance(written, str) and is_command and written != returned:
        return isinstance(returned, str) and _CHANGE_OF_FOLDER.sub("", written) == returned
    if isinstance(written, str) and not isinstance(returned, str):
        return _is_written_out(written, returned)
    if isinstance(written, bool) or isinstance(returned, bool):
        return written is returned
    return bool(written == returned)


def _is_written_out(text: str, value: Any) -> bool:
    """Return whether a text is a number or truth value that a client has read as such."""
    if isinstance(value, bool):
        return text == str(value).lower()
    is_number = isinstance(value, int | float) and _NUMBER.fullmatch(text) is not None
    return is_number and float(text) == float(value)


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value)
