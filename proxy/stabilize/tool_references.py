"""tool_reference_text: what a tool search found, said in words.

llama-server makes nothing of a tool_reference block (convert_anthropic_to_oai in server-chat.cpp), so
that the result of a successful search is an empty text.
"""

from typing import Any

from proxy.stabilize.messages import message_path, messages_of, with_messages
from proxy.stabilize.model import Edit, Facts, Form, FromBody, Json, Rewrite
from proxy.stabilize.names import Name
from proxy.stabilize.tool_results import is_result


def _say(form: Form, body: Json, facts: Facts) -> Rewrite | None:
    edits: list[Edit] = []
    messages = [
        _in_message(message, message_path(form, i), edits)
        for i, message in enumerate(messages_of(form, body))
    ]
    return Rewrite(with_messages(form, body, messages), tuple(edits)) if edits else None


def _in_message(message: Json, path: str, edits: list[Edit]) -> Json:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    blocks = [
        _in_result(block, f"{path}.content[{i}].content", edits) if is_result(block) else block
        for i, block in enumerate(content)
    ]
    return {**message, "content": blocks}


def _in_result(result: Json, path: str, edits: list[Edit]) -> Json:
    content = result.get("content")
    if not isinstance(content, list):
        return result
    parts = []
    for i, part in enumerate(content):
        spoken = _spoken(part, is_first=i == 0)
        if spoken is not None:
            edits.append(Edit(f"{path}[{i}]", part, spoken))
        parts.append(spoken or part)
    return {**result, "content": parts}


def _spoken(part: Any, *, is_first: bool) -> Json | None:
    """Return a reference in words; llama-server joins the texts of a result with nothing between."""
    if not isinstance(part, dict) or part.get("type") != "tool_reference":
        return None
    if not isinstance(part.get("tool_name"), str):
        return None
    line_break = "" if is_first else "\n"
    return {"type": "text", "text": f"{line_break}The tool {part['tool_name']} is now available."}


STABILIZER = FromBody(Name.TOOL_REFERENCE_TEXT, frozenset({Form.ANTHROPIC}), _say)
