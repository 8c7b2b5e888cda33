"""tool_results_first and glue_text_to_results: text beside tool results in one Anthropic message.

llama-server makes one user message of a message's texts and puts it before the tool results, wherever
the client had written it (convert_anthropic_to_oai in server-chat.cpp). Text that is the user's follows
the results as a message of its own; a reminder becomes part of the last result, so that it begins no
new turn. The opt-in treats all text like a reminder.
"""

from typing import Any

from proxy.stabilize.messages import (
    append_text,
    is_reminder,
    is_text,
    message_path,
    messages_of,
    with_messages,
)
from proxy.stabilize.model import Edit, Facts, Form, FromBody, Json, Rewrite
from proxy.stabilize.names import Name


def is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def has_results(message: Json) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(is_result(block) for block in content)


def append_to_last_result(blocks: list[Any], text: str, path: str) -> list[Any]:
    """Return the blocks of a message with *text* behind its last tool result; raises UnknownShape."""
    index = max(i for i, block in enumerate(blocks) if is_result(block))
    result = blocks[index]
    content = append_text(Form.ANTHROPIC, result.get("content"), text, f"{path}.content[{index}]")
    return [*blocks[:index], {**result, "content": content}, *blocks[index + 1 :]]


def _results_first(form: Form, body: Json, facts: Facts) -> Rewrite | None:
    return _rewrite(form, body, is_reminder)


def _glue(form: Form, body: Json, facts: Facts) -> Rewrite | None:
    return _rewrite(form, body, is_text)


def _rewrite(form: Form, body: Json, belongs_to_result: Any) -> Rewrite | None:
    messages: list[Json] = []
    edits: list[Edit] = []
    for i, message in enumerate(messages_of(form, body)):
        parts = _ordered(message, belongs_to_result, message_path(form, i))
        if parts != [message]:
            after = [part["content"] for part in parts]
            edits.append(Edit(f"{message_path(form, i)}.content", message["content"], after))
        messages += parts
    return Rewrite(with_messages(form, body, messages), tuple(edits)) if edits else None


def _ordered(message: Json, belongs_to_result: Any, path: str) -> list[Json]:
    """Return the one or two messages that are rendered in the order in which a client wrote one."""
    if message.get("role") != "user" or not has_results(message):
        return [message]
    content = message["content"]
    first = next(i for i, block in enumerate(content) if is_result(block))
    results = [block for block in content[first:] if is_result(block)]
    beside = [block for block in content[first:] if not is_result(block)]
    head = content[:first] + results
    while beside and belongs_to_result(beside[0]):
        head = append_to_last_result(head, beside[0]["text"], path)
        beside = beside[1:]
    ordered = {**message, "content": head}
    return [ordered, {"role": "user", "content": beside}] if beside else [ordered]


RESULTS_FIRST = FromBody(Name.TOOL_RESULTS_FIRST, frozenset({Form.ANTHROPIC}), _results_first)
GLUE = FromBody(Name.GLUE_TEXT_TO_RESULTS, frozenset({Form.ANTHROPIC}), _glue)
