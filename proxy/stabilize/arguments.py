"""restore_tool_arguments: tool calls as the model wrote them.

Claude Code and OpenCode send calls back changed: other key order, a default added, a leading
`cd ... &&` removed, "1" turned into 1. A call is restored only if what came back still means what the
model wrote, so that a call which the user edited stays edited. What is not JSON is never restored:
llama-server answers 500 to it.
"""

import re
from typing import Any

import msgspec

from proxy.stabilize.memory import Lesson, call_key
from proxy.stabilize.messages import message_path, messages_of, with_messages
from proxy.stabilize.model import Edit, Form, FromMemory, Json, Known, Rewrite
from proxy.stabilize.names import Name

_CHANGE_OF_FOLDER = re.compile(r"""\Acd (?:"[^"\n]*"|'[^'\n]*'|[^\s;&|"']+) && """)
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,6})?")
_ADDED_BY_CLIENTS = {"replace_all": False}
_REFUSED_BY_CLIENT = "invalid"
"""OpenCode's name for a call that it could not run; the arguments then name the tool and the error."""


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
        pairs = list(zip(written, returned, strict=False))
        return len(written) == len(returned) and all(_is_same(*pair) for pair in pairs)
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


def choose_call(
    made: list[tuple[str, str]], name: str, raw_arguments: str
) -> tuple[str, str] | None:
    """Return the one call of those *made* that came back changed, or None if that is not certain.

    Where only spaces and escapes differ the values decide before the known changes do.
    """
    returned = _decode_object(raw_arguments)
    if returned is None or (name, raw_arguments) in made:
        return None
    values = {call: value for call in made if (value := _decode_object(call[1])) is not None}
    exact = [c for c, v in values.items() if c[0] == name and _encode(v) == _encode(returned)]
    alike = [c for c, v in values.items() if _came_back_as(c[0], v, name, returned)]
    for calls in (exact, alike):
        if calls:
            return calls[0] if len(calls) == 1 else None
    return None


def _came_back_as(made_name: str, written: Json, name: str, returned: Json) -> bool:
    if name == _REFUSED_BY_CLIENT and name != made_name:
        return returned.get("tool") == made_name and "error" in returned
    return made_name == name and means_the_same(written, returned)


def _decode_object(raw: str) -> Json | None:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _restore(form: Form, body: Json, known: Known) -> Rewrite | None:
    messages = list(messages_of(form, body))
    edits: list[Edit] = []
    for i, message in enumerate(messages):
        messages[i] = _in_message(form, message, message_path(form, i), known, edits)
    return Rewrite(with_messages(form, body, messages), tuple(edits)) if edits else None


def _in_message(form: Form, message: Json, path: str, known: Known, edits: list[Edit]) -> Json:
    if form is Form.RESPONSES:
        restored = _restored_item(message, path, known, edits)
        return restored or message
    name = "content" if form is Form.ANTHROPIC else "tool_calls"
    calls = message.get(name)
    if message.get("role") != "assistant" or not isinstance(calls, list):
        return message
    read = _restored_block if form is Form.ANTHROPIC else _restored_call
    restored_calls = [
        read(call, f"{path}.{name}[{i}]", known, edits) if isinstance(call, dict) else None
        for i, call in enumerate(calls)
    ]
    if not any(restored_calls):
        return message
    changed = [new or old for new, old in zip(restored_calls, calls, strict=True)]
    return {**message, name: changed}


def _restored_block(block: Json, path: str, known: Known, edits: list[Edit]) -> Json | None:
    """Return an Anthropic call as it was made; its arguments are an object, not a text."""
    arguments = block.get("input")
    if block.get("type") != "tool_use" or not isinstance(arguments, dict):
        return None
    raw = _encode(arguments).decode()
    call = _chosen(block.get("id"), block.get("name"), raw, known)
    if call is None:
        return None
    restored = {**block, "name": call[0], "input": _decode_object(call[1])}
    if _encode(restored) == _encode(block):
        return None
    edits.append(Edit(path, [block["name"], raw], list(call)))
    return restored


def _restored_call(call: Json, path: str, known: Known, edits: list[Edit]) -> Json | None:
    function = call.get("function")
    if not isinstance(function, dict):
        return None
    restored = _restored_function(function, call.get("id"), path, known, edits)
    return None if restored is None else {**call, "function": restored}


def _restored_item(item: Json, path: str, known: Known, edits: list[Edit]) -> Json | None:
    if item.get("type") != "function_call":
        return None
    return _restored_function(item, item.get("call_id"), path, known, edits)


def _restored_function(
    function: Json, call_id: Any, path: str, known: Known, edits: list[Edit]
) -> Json | None:
    """Return name and arguments as they were made, where the arguments are a text."""
    name, raw = function.get("name"), function.get("arguments")
    call = _chosen(call_id, name, raw, known)
    if call is None:
        return None
    edits.append(Edit(path, [name, raw], list(call)))
    return {**function, "name": call[0], "arguments": call[1]}


def _chosen(call_id: Any, name: Any, raw: Any, known: Known) -> tuple[str, str] | None:
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(raw, str)):
        return None
    return choose_call(known.memory.calls(call_id, tenant=known.tenant), name, raw)


def _learn(form: Form, body: Json, known: Known) -> list[Lesson]:
    """Return the calls of this conversation as they are known: they will be needed again."""
    lessons = []
    for call_id in _call_ids(form, messages_of(form, body)):
        key = call_key(call_id, known.tenant)
        value = known.memory.get(key)
        if value is not None:
            lessons.append(Lesson(key, value))
    return lessons


def _call_ids(form: Form, messages: list[Json]) -> list[str]:
    """Return the ids of all calls, in their order."""
    if form is Form.RESPONSES:
        found = [m.get("call_id") for m in messages if m.get("type") == "function_call"]
    else:
        answers = [m for m in messages if m.get("role") == "assistant"]
        lists = [m.get(name) for m in answers for name in ("content", "tool_calls")]
        blocks = [block for blocks in lists if isinstance(blocks, list) for block in blocks]
        found = [block.get("id") for block in blocks if isinstance(block, dict)]
    return [call_id for call_id in found if isinstance(call_id, str)]


STABILIZER = FromMemory(Name.RESTORE_TOOL_ARGUMENTS, frozenset(Form), _restore, _learn)
