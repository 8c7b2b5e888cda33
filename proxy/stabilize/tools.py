"""keep_tool_order and sticky_tool_text: the tools of a conversation as they were first sent.

A tool that comes later goes behind those already seen. The order is that of the conversation; where
that is new, of the first conversation with the same system prompt.
"""

from typing import Any

import msgspec

from proxy.stabilize.memory import Lesson, key_of
from proxy.stabilize.messages import tools_of
from proxy.stabilize.model import Edit, Form, FromMemory, Json, Known, Rewrite, UnknownShape
from proxy.stabilize.names import Name


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


def _order(form: Form, body: Json, known: Known) -> Rewrite | None:
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


def _place(known: Known) -> _Places:
    own = [] if known.identity.begins else _known_order(known, _conversation_key(known))
    order = dict.fromkeys([*own, *_known_order(known, _header_key(known))])
    return _Places({name: i for i, name in enumerate(order)})


def _known_order(known: Known, key: str) -> list[str]:
    names: list[str] = known.memory.get(key) or []
    return names


def _conversation_key(known: Known) -> str:
    return key_of("tool order", known.identity.conversation)


def _header_key(known: Known) -> str:
    return key_of("tool order of header", known.identity.header)


def _learn_order(form: Form, body: Json, known: Known) -> list[Lesson]:
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


def _text(form: Form, body: Json, known: Known) -> Rewrite | None:
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


def _text_key(tool: Json, known: Known) -> str:
    """Return a key that changes with anything of the tool but its description."""
    rest = {**tool, **_described(tool), "description": "", "function": None}
    return key_of("tool text", known.identity.conversation, msgspec.json.encode(rest).decode())


def _learn_text(form: Form, body: Json, known: Known) -> list[Lesson]:
    return [
        Lesson(_text_key(tool, known), description)
        for tool in tools_of(body)
        if isinstance(description := _described(tool).get("description"), str)
    ]


ORDER = FromMemory(Name.KEEP_TOOL_ORDER, frozenset(Form), _order, _learn_order)
TEXT = FromMemory(Name.STICKY_TOOL_TEXT, frozenset(Form), _text, _learn_text)
