"""inline_reasoning: the reasoning of earlier turns, kept as text of the answers it led to.

Templates drop `reasoning_content` of all answers before the newest user message; what is in `content`
they keep. How a template writes reasoning is a fact about it, so that the text is the one that stood
in the prompt while the turn was running.
"""

from typing import Any

import msgspec

from proxy.stabilize.messages import is_text, message_path, messages_of, with_messages
from proxy.stabilize.model import Edit, Facts, Form, FromBody, Json, Marks, Rewrite, UnknownShape
from proxy.stabilize.names import Name
from proxy.stabilize.tool_results import has_results

_NO_REASONING = " "
"""Said to have none, a template does not look for it in the text; llama-server leaves out an empty one."""


def inline_reasoning(form: Form, body: Json, facts: Facts) -> Rewrite | None:
    """Return the body with the reasoning of all answers before the newest user message in their text."""
    if facts.reasoning_marks is None:
        return None
    messages = messages_of(form, body)
    changed = list(messages)
    edits = []
    for i in range(_newest_user_index(messages)):
        path = message_path(form, i)
        if messages[i].get("role") != "assistant":
            continue
        read = _as_chat if form is Form.ANTHROPIC else _as_it_is
        message = _inlined(read(messages[i], path), facts.reasoning_marks, path)
        if message is not None:
            changed[i] = message
            edits.append(Edit(path, messages[i], message))
    return Rewrite(with_messages(form, body, changed), tuple(edits)) if edits else None


def _newest_user_index(messages: list[Json]) -> int:
    indices = [
        i for i, m in enumerate(messages) if m.get("role") == "user" and not _is_all_results(m)
    ]
    return max(indices, default=0)


def _is_all_results(message: Json) -> bool:
    if not has_results(message):
        return False
    return all(block.get("type") == "tool_result" for block in message["content"])


def _inlined(message: Json, marks: Marks, path: str) -> Json | None:
    reasoning = message.get("reasoning_content") or ""
    if not isinstance(reasoning, str) or reasoning == _NO_REASONING:
        return None
    if not reasoning.strip() and not marks.writes_empty:
        return None
    content = message.get("content") or ""
    if isinstance(content, list):
        if not all(is_text(part) for part in content):
            raise UnknownShape(f"{path}.content is not text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UnknownShape(f"{path}.content is not text")
    if content.startswith(marks.begin):
        return None
    ends_in_calls = not content and message.get("tool_calls")
    end = marks.end_before_calls if ends_in_calls else marks.end
    kept = marks.begin + (reasoning.strip() if marks.strips else reasoning) + end
    return {**message, "content": kept + content, "reasoning_content": _NO_REASONING}


def _as_it_is(message: Json, path: str) -> Json:
    return message


def _as_chat(message: Json, path: str) -> Json:
    """Return an Anthropic answer as the chat message that llama-server makes of it.

    llama-server passes a message whose content is a string as it is (convert_anthropic_to_oai in
    server-chat.cpp), which is the only way to have both reasoning in the text and none beside it.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    thinking, texts, calls = "", "", []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thinking += block.get("thinking", "")
        elif kind == "text":
            texts += block["text"]
        elif kind == "tool_use":
            calls.append(_as_chat_call(block))
        else:
            raise UnknownShape(f"{path}.content has a block of another kind")
    chat: Json = {"role": "assistant", "content": texts, "reasoning_content": thinking}
    return {**chat, "tool_calls": calls} if calls else chat


def _as_chat_call(block: Json) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input", {})).decode()
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


STABILIZER = FromBody(
    Name.INLINE_REASONING, frozenset({Form.ANTHROPIC, Form.CHAT}), inline_reasoning
)
