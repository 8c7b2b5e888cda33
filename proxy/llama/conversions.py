"""Anthropic Messages and OpenAI Responses bodies in the chat form, exactly as llama-server converts them.

Owns: copies of server_chat_convert_anthropic_to_oai and server_chat_convert_responses_to_chatcmpl
(tools/server/server-chat.cpp), whose oddities are kept. Only fields that reach the template are converted:
the body is for /apply-template and never for an answer to a client. Bodies that llama-server refuses are
not convertible.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import msgspec

from proxy.core.messages import list_of, member, text_of
from proxy.errors import UnknownShape

Message = dict[str, Any]

# Anthropic Messages. Text that follows a tool result is moved before it, and blocks of unknown types are
# dropped.


_BILLING_HEADER = "x-anthropic-billing-header:"
_NONCE_BYTES = 5
_SHOWN = ("text", "image")


def chat_of_messages(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat body that llama-server makes of a /v1/messages body; raises UnknownShape."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UnknownShape("messages are not a list of objects")
    converted = [c for m in messages for c in chat_messages_of(m)]
    if (system := fields.get("system")) is not None:
        texts = [system] if isinstance(system, str) else _texts(list_of(system))
        content = "".join(map(_without_billing_nonce, texts))
        converted.insert(0, {"role": "system", "content": content})
    chat: dict[str, Any] = {"messages": converted}
    if isinstance(fields.get("tools"), list):
        chat["tools"] = [_tool_of_messages(tool) for tool in fields["tools"]]
    choice = text_of(fields.get("tool_choice"), "type")
    if choice in ("auto", "any", "tool"):
        chat["tool_choice"] = "auto" if choice == "auto" else "required"
    if "chat_template_kwargs" in fields:
        chat["chat_template_kwargs"] = fields["chat_template_kwargs"]
    return chat


def _of_kind(blocks: list[Any], kind: str) -> list[Any]:
    return [block for block in blocks if text_of(block, "type") == kind]


def _texts(blocks: list[Any]) -> list[str]:
    return [text_of(block, "text") for block in _of_kind(blocks, "text")]


def _without_billing_nonce(text: str) -> str:
    """Return the text with the nonce masked if it begins with Claude Code's billing header.

    llama-server looks only at the first `cch=`, and counts bytes.
    """
    if not text.startswith(_BILLING_HEADER):
        return text
    head, mark, rest = text.encode().partition(b"cch=")
    if not mark or rest[_NONCE_BYTES : _NONCE_BYTES + 1] != b";":
        return text
    return (head + mark + b"f" * _NONCE_BYTES + rest[_NONCE_BYTES:]).decode()


def chat_messages_of(message: Message) -> Iterator[Message]:
    """Yield one message of Messages converted: without its tool results, then one for each result."""
    if "content" not in message and message.get("role") == "assistant":
        return
    blocks = message.get("content")
    if not isinstance(blocks, list):
        yield message
        return
    content = _parts(blocks)
    calls = [_tool_call(block) for block in _of_kind(blocks, "tool_use")]
    reasoning = "".join(text_of(block, "thinking") for block in _of_kind(blocks, "thinking"))
    if content or calls or reasoning:
        optional = {"tool_calls": calls, "reasoning_content": reasoning}
        given = {key: value for key, value in optional.items() if value}
        yield {"role": text_of(message, "role"), "content": content or "", **given}
    for block in _of_kind(blocks, "tool_result"):
        call_id, result = text_of(block, "tool_use_id"), _result(member(block, "content", ""))
        yield {"role": "tool", "tool_call_id": call_id, "content": result}


def _result(content: Any) -> Any:
    if isinstance(content, str):
        return content
    blocks = list_of(content)
    if not _of_kind(blocks, "image"):
        return "".join(_texts(blocks))
    return [{"type": "text", "text": p["text"]} if "text" in p else p for p in _parts(blocks)]


def _parts(blocks: list[Any]) -> list[Any]:
    """Return the texts and images of a content in the chat form."""
    kinds = [(text_of(block, "type"), block) for block in blocks]
    parts = [block if kind == "text" else _image(block) for kind, block in kinds if kind in _SHOWN]
    return [part for part in parts if part]


def _image(block: Any) -> dict[str, Any]:
    """Return an image in the chat form, empty where llama-server knows no such source."""
    source = member(block, "source")
    match text_of(source, "type"):
        case "base64":
            url = f"data:{text_of(source, 'media_type')};base64,{text_of(source, 'data')}"
        case "url":
            url = text_of(source, "url")
        case _:
            return {}
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_call(block: Any) -> dict[str, Any]:
    """Return a tool call; its arguments are left for llama-server to encode, unless they are a string.

    llama-server writes numbers in nlohmann::json's formats, which are not always the shortest ones.
    """
    arguments = member(block, "input", {})
    if isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    function = {"name": text_of(block, "name"), "arguments": arguments}
    return {"id": text_of(block, "id"), "type": "function", "function": function}


def _tool_of_messages(tool: Any) -> dict[str, Any]:
    function = {key: text_of(tool, key) for key in ("name", "description")}
    parameters = tool.get("input_schema", {}) if isinstance(tool, dict) else {}
    return {"type": "function", "function": {**function, "parameters": parameters}}


# OpenAI Responses.


def chat_of_responses(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat body that llama-server makes of a /v1/responses body; raises UnknownShape."""
    if text_of(fields, "previous_response_id"):
        raise UnknownShape("previous_response_id")
    chat = {key: value for key, value in fields.items() if key != "tools"}
    chat["messages"] = _messages(fields)
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        raise UnknownShape("tools are not a list")
    if functions := _of_kind(tools, "function"):
        described = [{k: v for k, v in tool.items() if k != "type"} for tool in functions]
        chat["tools"] = [
            {"type": "function", "function": {**f, "strict": f.get("strict", True)}}
            for f in described
        ]
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict) and "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _messages(fields: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    if "instructions" in fields:
        messages.append({"role": "system", "content": text_of(fields, "instructions")})
    items = fields.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise UnknownShape("input is neither a string nor a list")
    for item in items:
        if not isinstance(item, dict):
            raise UnknownShape("an item of the input is not an object")
        if isinstance(content := item.get("content"), str):
            item = {**item, "content": [{"type": "input_text", "text": content}]}
        _add_item(item, messages)
    return messages


def _add_item(item: Message, messages: list[Message]) -> None:
    """Add an item of the input to the messages; llama-server tests for the kinds in this order."""
    role, kind, content = text_of(item, "role"), text_of(item, "type"), item.get("content")
    message = {key: copy(value) for key, value in item.items() if key not in ("type", "status")}
    is_result = kind == "function_call_output" and _has_texts(item, "call_id")
    if role in ("user", "system", "developer") and isinstance(content, list):
        messages.append({**message, "content": list(map(_input_part, content))})
    elif role == "assistant" and kind == "message":
        converted = [_text_part(part, "output_text", "input_text") for part in list_of(content)]
        _list_in(_answer(messages, {**message, "content": []}), "content").extend(converted)
    elif kind == "function_call" and _has_texts(item, "call_id", "arguments", "name"):
        function = {"arguments": item["arguments"], "name": item["name"]}
        call = {"function": function, "id": item["call_id"], "type": "function"}
        _list_in(_answer(messages, {"role": "assistant"}), "tool_calls").append(call)
    elif is_result and isinstance(output := item.get("output"), str | list):
        if isinstance(output, list):
            output = list(map(_input_part, output))
        messages.append({"content": output, "role": "tool", "tool_call_id": item["call_id"]})
    elif kind == "reasoning" and isinstance(item.get("summary"), list):
        parts = list_of(content)
        if not parts or not _has_texts(parts[0], "text"):
            raise UnknownShape("a reasoning item without its text")
        answer = _answer(messages, {"role": "assistant", "content": []})
        answer["reasoning_content"] = parts[0]["text"]
    else:
        raise UnknownShape(f"an item of the input of type {kind!r} and role {role!r}")


def _answer(messages: list[Message], fresh: Message) -> Message:
    """Return the message for an assistant's item: the last one if it is an assistant's, or else *fresh*."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append(fresh)
    return messages[-1]


def _list_in(answer: Message, key: str) -> list[Any]:
    """Return the list that an answer has under a key, an empty one if there is none."""
    answer[key] = found = list_of(answer.get(key))
    return found


def _has_texts(item: Any, *keys: str) -> bool:
    return all(isinstance(member(item, key), str) for key in keys)


def _input_part(part: Any) -> dict[str, Any]:
    """Return a part of an input message or of a tool's result in the chat form.

    Raises UnknownShape for files. Builds up to September 2026 (b11063) refuse images in results.
    """
    if text_of(part, "type") == "input_image" and "image_url" in part:
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return _text_part(part, "input_text")


def _text_part(part: Any, *kinds: str) -> dict[str, Any]:
    """Return a text part of one of the *kinds* in the chat form; raises UnknownShape for other parts."""
    kind = text_of(part, "type")
    if kind in kinds and _has_texts(part, "text"):
        return {"text": part["text"], "type": "text"}
    raise UnknownShape(f"a part of type {kind!r}")
