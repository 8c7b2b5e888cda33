"""drop_cache_control: the marks where a client wants Anthropic's own cache to end.

They stand at known places only: the same key inside a tool's schema or arguments is someone's data.
"""

from typing import Any

from proxy.stabilize.messages import message_path, messages_of, tools_of
from proxy.stabilize.model import Edit, Facts, Form, FromBody, Json, Rewrite
from proxy.stabilize.names import Name

_KEY = "cache_control"


def _drop(form: Form, body: Json, facts: Facts) -> Rewrite | None:
    edits: list[Edit] = []
    changed = _without(body, "", edits)
    if "system" in body:
        changed["system"] = _from_parts(body["system"], "system", edits)
    messages = messages_of(form, body)
    if messages:
        changed["messages"] = [
            _from_message(message, message_path(form, i), edits)
            for i, message in enumerate(messages)
        ]
    tools = tools_of(body)
    if tools:
        changed["tools"] = [_without(tool, f"tools[{i}].", edits) for i, tool in enumerate(tools)]
    return Rewrite(changed, tuple(edits)) if edits else None


def _from_message(message: Json, path: str, edits: list[Edit]) -> Json:
    bare = _without(message, f"{path}.", edits)
    if isinstance(bare.get("content"), list):
        bare["content"] = _from_parts(bare["content"], f"{path}.content", edits)
    return bare


def _from_parts(content: Any, path: str, edits: list[Edit]) -> Any:
    if not isinstance(content, list):
        return content
    return [
        _from_message(part, f"{path}[{i}]", edits) if isinstance(part, dict) else part
        for i, part in enumerate(content)
    ]


def _without(holder: Json, path: str, edits: list[Edit]) -> Json:
    if _KEY in holder:
        edits.append(Edit(path + _KEY, holder[_KEY], None))
    return {key: value for key, value in holder.items() if key != _KEY}


STABILIZER = FromBody(Name.DROP_CACHE_CONTROL, frozenset({Form.ANTHROPIC, Form.CHAT}), _drop)
