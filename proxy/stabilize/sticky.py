"""Stabilizers that keep what was sent before."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from proxy.stabilize.messages import (
    has_reminder,
    is_text,
    message_path,
    messages_of,
    rewrite_system_texts,
    system_text,
    tools_of,
    with_messages,
    without_reminders,
)
from proxy.stabilize.model import (
    Edit,
    Form,
    FromMemory,
    Json,
    Lesson,
    Name,
    Remembered,
    Rewrite,
    UnknownShape,
    call_key,
    key_of,
)

# sticky_date: date and time in the system prompt as they were when the conversation began.


_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:Mon|Tue|Tues|Wed|Wednes|Thu|Thur|Thurs|Fri|Sat|Satur|Sun)(?:day)?,? )"
_CALENDAR = (
    rf"{_WEEKDAY}?(?:\d{{4}}[-/]\d\d?[-/]\d\d?|\d\d?[./]\d\d?[./]\d{{4}}"
    rf"|{_DAY} {_MONTH},? \d{{4}}|{_MONTH} {_DAY},? \d{{4}})"
)
_CLOCK = (
    r"\d\d?:\d\d(?::\d\d)?(?:[.,]\d+)?(?: ?[AP]\.?M\b\.?)?"
    r"(?: ?(?:Z\b|UTC\b|GMT\b|[+-]\d\d:?\d\d\b))?"
)
_BEHIND = rf"(?:(?:T|,? (?:at )?){_CLOCK})?"
_MOMENT = rf"(?:{_CALENDAR}{_BEHIND}|{_CLOCK}(?:,? (?:on )?{_CALENDAR})?)"
_DATE = re.compile(
    r"(?P<words>(?:Today(?:'s|’s) date|Current date(?: and time)?|Today)(?: is)?:? "
    # These may begin any sentence: only a whole date or time may follow them.
    r"|\b(?:It is(?: now| currently)?|Now|Date|Time|(?:The )?current time|The time)(?: is)?:? "
    rf"(?={_MOMENT}))"
    rf"(?P<date>{_MOMENT}|[^\n]{{0,30}}?\b\d{{4}}\b(?:[-/]\d\d?[-/]\d\d?)?{_BEHIND})",
    re.IGNORECASE,
)


def without_dates(text: str) -> str:
    """Return a text that stays the same whatever the time is."""
    return _DATE.sub(r"\g<words>", text)


def _dates(form: Form, body: Json) -> list[str]:
    return [match["date"] for match in _DATE.finditer(system_text(form, body))]


def _key(known: Remembered) -> str:
    return key_of("date", known.identity.conversation)


def _pin(form: Form, body: Json, known: Remembered) -> Rewrite | None:
    first = None if known.identity.begins else known.memory.get(_key(known))
    if not isinstance(first, list) or len(first) != len(_dates(form, body)):
        return None
    dates = iter(first)
    changed, edits = rewrite_system_texts(
        form, body, lambda text: _DATE.sub(lambda match: match["words"] + next(dates), text)
    )
    return Rewrite(changed, edits) if edits else None


def _learn_dates(form: Form, body: Json, known: Remembered) -> list[Lesson]:
    dates = _dates(form, body)
    return [Lesson(_key(known), dates)] if dates else []


DATES = FromMemory(Name.STICKY_DATE, frozenset(Form), _pin, _learn_dates)


# sticky_reminders: reminders stay at the user message where they were first sent.
#
# OpenCode attaches the reminder of its plan mode to the newest user message only, so that each new prompt
# changes the message before. A message is known by what the user wrote in it and by its number.


def _keep(form: Form, body: Json, known: Remembered) -> Rewrite | None:
    messages = list(messages_of(form, body))
    edits = []
    for index, key in list(_prompts(messages, known))[:-1]:
        first, now = known.memory.get(key), messages[index]["content"]
        if first is not None and first != now:
            edits.append(Edit(f"{message_path(form, index)}.content", now, first))
            messages[index] = {**messages[index], "content": first}
    return Rewrite(with_messages(form, body, messages), tuple(edits)) if edits else None


def _prompts(messages: list[Json], known: Remembered) -> Iterator[tuple[int, str]]:
    """Yield index and key of each message that a user wrote."""
    n_prompts = 0
    for index, message in enumerate(messages):
        text = _reminder_text(message) if message.get("role") == "user" else None
        if text is None:
            continue
        n_prompts += 1
        written = without_reminders(text)
        yield index, key_of("reminder", known.identity.conversation, str(n_prompts), written)


def _reminder_text(message: Json) -> str | None:
    """Return the text of a message, or None if there is more than text in it."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(is_text(part) for part in content):
        return "\n".join(part["text"] for part in content)
    return None


def _learn_reminders(form: Form, body: Json, known: Remembered) -> list[Lesson]:
    messages = messages_of(form, body)
    prompts = list(_prompts(messages, known))
    # The newest may have lost its reminder by being asked again in another mode.
    return [
        Lesson(key, messages[index]["content"])
        for index, key in prompts
        if has_reminder(_reminder_text(messages[index]) or "")
        or (index == prompts[-1][0] and known.memory.get(key) is not None)
    ]


REMINDERS = FromMemory(Name.STICKY_REMINDERS, frozenset(Form), _keep, _learn_reminders)


# keep_tool_order and sticky_tool_text: the tools of a conversation as they were first sent.
#
# A tool that comes later goes behind those already seen. The order is that of the conversation; where
# that is new, of the first conversation with the same system prompt.


def _names(tools: list[Json]) -> list[str]:
    names = [_name(tool) for tool in tools]
    if len(set(names)) != len(names):
        raise UnknownShape("tools has two of one name")
    return names


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


def _order(form: Form, body: Json, known: Remembered) -> Rewrite | None:
    tools = tools_of(body)
    names = _names(tools)
    wanted = sorted(names, key=_place(known).__getitem__)
    if wanted == names:
        return None
    by_name = dict(zip(names, tools, strict=True))
    changed = {**body, "tools": [by_name[name] for name in wanted]}
    return Rewrite(changed, (Edit("tools", names, wanted),))


class _Places(dict[str, int]):
    """Where a tool goes; sorting is stable, so unknown ones keep the client's order at the end."""

    def __missing__(self, name: str) -> int:
        return len(self)


def _place(known: Remembered) -> _Places:
    own = [] if known.identity.begins else _known_order(known, _conversation_key(known))
    order = dict.fromkeys([*own, *_known_order(known, _header_key(known))])
    return _Places({name: i for i, name in enumerate(order)})


def _known_order(known: Remembered, key: str) -> list[str]:
    names: list[str] = known.memory.get(key) or []
    return names


def _conversation_key(known: Remembered) -> str:
    return key_of("tool order", known.identity.conversation)


def _header_key(known: Remembered) -> str:
    return key_of("tool order of header", known.identity.header)


def _learn_order(form: Form, body: Json, known: Remembered) -> list[Lesson]:
    names = _names(tools_of(body))
    if not names:
        return []
    keys = _conversation_key(known), _header_key(known)
    own = [] if known.identity.begins else _known_order(known, keys[0])
    lists = own, _known_order(known, keys[1])
    return [
        Lesson(key, list(dict.fromkeys([*order, *names])))
        for key, order in zip(keys, lists, strict=True)
    ]


def _tool_text(form: Form, body: Json, known: Remembered) -> Rewrite | None:
    if known.identity.begins:
        return None
    tools = tools_of(body)
    edits = []
    changed = list(tools)
    for i, tool in enumerate(tools):
        first = known.memory.get(_text_key(tool, known))
        described = _described(tool)
        if isinstance(first, str) and first != described.get("description"):
            edits.append(Edit(f"tools[{i}].description", described.get("description"), first))
            changed[i] = _redescribed(tool, first)
    return Rewrite({**body, "tools": changed}, tuple(edits)) if edits else None


def _redescribed(tool: Json, description: str) -> Json:
    described = {**_described(tool), "description": description}
    return described if _described(tool) is tool else {**tool, "function": described}


def _text_key(tool: Json, known: Remembered) -> str:
    """Return a key that changes with anything of the tool but its description."""
    rest = {**tool, **_described(tool), "description": "", "function": None}
    return key_of("tool text", known.identity.conversation, msgspec.json.encode(rest).decode())


def _learn_text(form: Form, body: Json, known: Remembered) -> list[Lesson]:
    return [
        Lesson(_text_key(tool, known), description)
        for tool in tools_of(body)
        if isinstance(description := _described(tool).get("description"), str)
    ]


ORDER = FromMemory(Name.KEEP_TOOL_ORDER, frozenset(Form), _order, _learn_order)
TEXT = FromMemory(Name.STICKY_TOOL_TEXT, frozenset(Form), _tool_text, _learn_text)


# restore_tool_arguments: tool calls as the model wrote them.
#
# Claude Code and OpenCode send calls back changed: other key order, a default added, a leading `cd ...
# &&` removed, "1" turned into 1. A call is restored only if what came back still means what the model
# wrote, so that a call which the user edited stays edited. What is not JSON is never restored: llama-
# server answers 500 to it.


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


def _restore(form: Form, body: Json, known: Remembered) -> Rewrite | None:
    messages = list(messages_of(form, body))
    edits: list[Edit] = []
    for i, message in enumerate(messages):
        messages[i] = _in_message(form, message, message_path(form, i), known, edits)
    return Rewrite(with_messages(form, body, messages), tuple(edits)) if edits else None


def _in_message(form: Form, message: Json, path: str, known: Remembered, edits: list[Edit]) -> Json:
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


def _restored_block(block: Json, path: str, known: Remembered, edits: list[Edit]) -> Json | None:
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


def _restored_call(call: Json, path: str, known: Remembered, edits: list[Edit]) -> Json | None:
    function = call.get("function")
    if not isinstance(function, dict):
        return None
    restored = _restored_function(function, call.get("id"), path, known, edits)
    return None if restored is None else {**call, "function": restored}


def _restored_item(item: Json, path: str, known: Remembered, edits: list[Edit]) -> Json | None:
    if item.get("type") != "function_call":
        return None
    return _restored_function(item, item.get("call_id"), path, known, edits)


def _restored_function(
    function: Json, call_id: Any, path: str, known: Remembered, edits: list[Edit]
) -> Json | None:
    """Return name and arguments as they were made, where the arguments are a text."""
    name, raw = function.get("name"), function.get("arguments")
    call = _chosen(call_id, name, raw, known)
    if call is None:
        return None
    edits.append(Edit(path, [name, raw], list(call)))
    return {**function, "name": call[0], "arguments": call[1]}


def _chosen(call_id: Any, name: Any, raw: Any, known: Remembered) -> tuple[str, str] | None:
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(raw, str)):
        return None
    return choose_call(known.memory.calls(call_id, tenant=known.tenant), name, raw)


def _learn_arguments(form: Form, body: Json, known: Remembered) -> list[Lesson]:
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


ARGUMENTS = FromMemory(Name.RESTORE_TOOL_ARGUMENTS, frozenset(Form), _restore, _learn_arguments)
