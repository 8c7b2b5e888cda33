"""Anthropic Messages bodies in the chat form, exactly as llama-server converts them.

Owns: a copy of server_chat_convert_anthropic_to_oai (tools/server/server-chat.cpp), whose oddities
are kept: text goes before the tool results it stood behind, and blocks of unknown types vanish. Only
what reaches the template is converted: the body is for /apply-template and never answers a client.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from proxy.errors import NotConvertible
from proxy.upstream.json_values import list_of, member, text_of

Message = dict[str, Any]

_BILLING_HEADER = "x-anthropic-billing-header:"
_NONCE_BYTES = 5


def chat_of_messages(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat body that llama-server makes of a /v1/messages body; raises NotConvertible."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise NotConvertible("messages are not a list of objects")
    chat: dict[str, Any] = {
        "messages": [*_system(fields), *(c for m in messages for c in _converted(m))]
    }
    if isinstance(fields.get("tools"), list):
        chat["tools"] = [_tool(tool) for tool in fields["tools"]]
    choice = text_of(fields.get("tool_choice"), "type")
    if choice in ("auto", "any", "tool"):
        chat["tool_choice"] = "auto" if choice == "auto" else "required"
    if "chat_template_kwargs" in fields:
        chat["chat_template_kwargs"] = fields["chat_template_kwargs"]
    return chat


def _system(fields: Mapping[str, Any]) -> Iterator[Message]:
    system = fields.get("system")
    if system is None:
        return
    texts = [system] if isinstance(system, str) else _texts(list_of(system))
    yield {"role": "system", "content": "".join(map(_without_billing_nonce, texts))}


def _texts(blocks: list[Any]) -> list[str]:
    return [text_of(block, "text") for block in blocks if text_of(block, "type") == "text"]


def _without_billing_nonce(text: str) -> str:
    """Return the text with the nonce of Claude Code's billing header masked, if it begins with one.

    llama-server looks at the first `cch=` only, and counts bytes.
    """
    if not text.startswith(_BILLING_HEADER):
        return text
    head, mark, rest = text.encode().partition(b"cch=")
    if not mark or rest[_NONCE_BYTES : _NONCE_BYTES + 1] != b";":
        return text
    return (head + mark + b"f" * _NONCE_BYTES + rest[_NONCE_BYTES:]).decode()


def _converted(message: Message) -> Iterator[Message]:
    """Return what becomes of one message: itself without its results, then a message for each result."""
    if "content" not in message and message.get("role") == "assistant":
        return
    if not isinstance(message.get("content"), list):
        yield message
        return
    blocks = message["content"]
    content = [part for block in blocks for part in _content_parts(block)]
    calls = [_tool_call(block) for block in blocks if text_of(block, "type") == "tool_use"]
    thinking = (text_of(b, "thinking") for b in blocks if text_of(b, "type") == "thinking")
    reasoning = "".join(thinking)
    if content or calls or reasoning:
        optional = {"tool_calls": calls, "reasoning_content": reasoning}
        given = {key: value for key, value in optional.items() if value}
        yield {"role": text_of(message, "role"), "content": content or "", **given}
    yield from (_tool_message(block) for block in blocks if text_of(block, "type") == "tool_result")


def _content_parts(block: Any) -> list[Any]:
    return [block] if text_of(block, "type") == "text" else _image_parts(block)


def _image_parts(block: Any) -> list[Any]:
    if text_of(block, "type") != "image":
        return []
    source = member(block, "source")
    match text_of(source, "type"):
        case "base64":
            media_type = text_of(source, "media_type", "image/jpeg")
            url = f"data:{media_type};base64,{text_of(source, 'data')}"
        case "url":
            url = text_of(source, "url")
        case _:
            return []
    return [{"type": "image_url", "image_url": {"url": url}}]


def _tool_call(block: Any) -> dict[str, Any]:
    """Return a call whose arguments llama-server itself dumps, unless they are a string.

    It does so with nlohmann::json's own number formats, which are not always the shortest ones.
    """
    arguments = member(block, "input", {})
    if isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    function = {"name": text_of(block, "name"), "arguments": arguments}
    return {"id": text_of(block, "id"), "type": "function", "function": function}


def _tool_message(block: Any) -> Message:
    content = member(block, "content", "")
    if not isinstance(content, str):
        content = _result_content(list_of(content))
    return {"role": "tool", "tool_call_id": text_of(block, "tool_use_id"), "content": content}


def _result_content(blocks: list[Any]) -> Any:
    if not any(text_of(block, "type") == "image" for block in blocks):
        return "".join(_texts(blocks))
    return [part for block in blocks for part in _result_parts(block)]


def _result_parts(block: Any) -> list[Any]:
    if text_of(block, "type") != "text":
        return _image_parts(block)
    return [{"type": "text", "text": text_of(block, "text")}]


def _tool(tool: Any) -> dict[str, Any]:
    function = {
        "name": text_of(tool, "name"),
        "description": text_of(tool, "description"),
        "parameters": tool.get("input_schema", {}) if isinstance(tool, dict) else {},
    }
    return {"type": "function", "function": function}
