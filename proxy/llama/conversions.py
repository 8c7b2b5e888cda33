"""Anthropic Messages and OpenAI Responses bodies in the chat form, as llama-server converts them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from proxy.errors import NotConvertible

# Members of parsed JSON as llama-server reads them: what is absent, null or of another type is a default.
#
# json_value in tools/server/server-common.h.


def member(value: Any, key: str, default: Any = None) -> Any:
    """Return a member of an object; null counts as absent, and anything else has no members."""
    found = value.get(key) if isinstance(value, dict) else None
    return default if found is None else found


def text_of(value: Any, key: str, default: str = "") -> str:
    """Return a member that is a string."""
    found = member(value, key)
    return found if isinstance(found, str) else default


def list_of(value: Any) -> list[Any]:
    """Return a list, empty if the value is none."""
    return value if isinstance(value, list) else []


# Anthropic Messages bodies in the chat form, exactly as llama-server converts them.
#
# Owns: a copy of server_chat_convert_anthropic_to_oai (tools/server/server-chat.cpp), whose oddities are
# kept: text goes before the tool results it stood behind, and blocks of unknown types vanish. Only what
# reaches the template is converted: the body is for /apply-template and never answers a client.


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
        chat["tools"] = [_tool_of_messages(tool) for tool in fields["tools"]]
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


def _tool_of_messages(tool: Any) -> dict[str, Any]:
    function = {
        "name": text_of(tool, "name"),
        "description": text_of(tool, "description"),
        "parameters": tool.get("input_schema", {}) if isinstance(tool, dict) else {},
    }
    return {"type": "function", "function": function}


# OpenAI Responses bodies in the chat form, exactly as llama-server converts them.
#
# Owns: a copy of server_chat_convert_responses_to_chatcmpl (tools/server/server-chat.cpp). Items that
# llama-server answers with an error are not convertible.


Messages = list[Message]

_REPLACED_FIELDS = ("input", "instructions", "tools", "reasoning", "max_output_tokens")


def chat_of_responses(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat body that llama-server makes of a /v1/responses body; raises NotConvertible."""
    if text_of(fields, "previous_response_id"):
        raise NotConvertible("previous_response_id")
    chat = {key: value for key, value in fields.items() if key not in _REPLACED_FIELDS}
    chat["messages"] = _messages(fields)
    tools = [
        _tool_of_responses(tool) for tool in _tools(fields) if text_of(tool, "type") == "function"
    ]
    if tools:
        chat["tools"] = tools
    if "max_output_tokens" in fields:
        chat["max_tokens"] = fields["max_output_tokens"]
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict) and "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _messages(fields: Mapping[str, Any]) -> Messages:
    messages: Messages = []
    if "instructions" in fields:
        messages.append({"role": "system", "content": text_of(fields, "instructions")})
    items = fields.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise NotConvertible("input is neither a string nor a list")
    for item in map(_with_content_parts, items):
        _converter(item)(item, messages)
    return messages


def _with_content_parts(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise NotConvertible("an item of the input is not an object")
    content = item.get("content")
    if not isinstance(content, str):
        return item
    return {**item, "content": [{"type": "input_text", "text": content}]}


def _converter(item: dict[str, Any]) -> Callable[[dict[str, Any], Messages], None]:
    """Return what adds an item to the messages; llama-server tries the kinds in this order."""
    role, type_ = text_of(item, "role"), text_of(item, "type")
    if role in ("user", "system", "developer") and isinstance(item.get("content"), list):
        return _add_input_message
    if role == "assistant" and type_ == "message":
        return _add_output_message
    has_call_id = isinstance(item.get("call_id"), str)
    if type_ == "function_call" and has_call_id and _has_texts(item, "arguments", "name"):
        return _add_call
    if type_ == "function_call_output" and has_call_id:
        if isinstance(item.get("output"), str | list):
            return _add_call_output
    if type_ == "reasoning" and isinstance(item.get("summary"), list):
        return _add_reasoning
    raise NotConvertible(f"an item of the input of type {type_!r} and role {role!r}")


def _has_texts(item: Mapping[str, Any], *keys: str) -> bool:
    return all(isinstance(item.get(key), str) for key in keys)


def _add_input_message(item: dict[str, Any], messages: Messages) -> None:
    content = [_input_part(part) for part in item["content"]]
    messages.append({**_without_status(item), "content": content})


def _without_status(item: dict[str, Any]) -> Message:
    return {key: value for key, value in item.items() if key not in ("type", "status")}


def _input_part(part: Any) -> dict[str, Any]:
    match text_of(part, "type"):
        case "input_text" if "text" in part:
            return {"text": part["text"], "type": "text"}
        case "input_image" if "image_url" in part:
            return {"image_url": {"url": part["image_url"]}, "type": "image_url"}
        case type_:
            raise NotConvertible(f"an input part of type {type_!r}")


def _add_output_message(item: dict[str, Any], messages: Messages) -> None:
    converted = [_output_part(part) for part in list_of(item.get("content"))]
    last = _last_assistant(messages)
    if last is None:
        messages.append({**_without_status(item), "content": converted})
    else:
        last["content"] = [*list_of(last.get("content")), *converted]


def _output_part(part: Any) -> dict[str, Any]:
    match text_of(part, "type"):
        case "output_text" | "input_text" if _has_texts(part, "text"):
            return {"text": part["text"], "type": "text"}
        case "refusal" if _has_texts(part, "refusal"):
            return {"refusal": part["refusal"], "type": "refusal"}
        case type_:
            raise NotConvertible(f"an output part of type {type_!r}")


def _last_assistant(messages: Messages) -> Message | None:
    """Return the message that an assistant's item becomes part of, if it follows one."""
    return messages[-1] if messages and messages[-1].get("role") == "assistant" else None


def _add_call(item: dict[str, Any], messages: Messages) -> None:
    function = {"arguments": item["arguments"], "name": item["name"]}
    call = {"function": function, "id": item["call_id"], "type": "function"}
    last = _last_assistant(messages)
    if last is None:
        messages.append({"role": "assistant", "tool_calls": [call]})
    else:
        last["tool_calls"] = [*list_of(last.get("tool_calls")), call]


def _add_call_output(item: dict[str, Any], messages: Messages) -> None:
    output = item["output"]
    content = output if isinstance(output, str) else [_output_of_call_part(p) for p in output]
    messages.append({"content": content, "role": "tool", "tool_call_id": item["call_id"]})


def _output_of_call_part(part: Any) -> dict[str, Any]:
    match text_of(part, "type"):
        case "input_text":
            return {**part, "type": "text"}
        case "input_image":
            return {"image_url": {"url": part.get("image_url")}, "type": "image_url"}
        case type_:
            raise NotConvertible(f"an output part of a call of type {type_!r}")


def _add_reasoning(item: dict[str, Any], messages: Messages) -> None:
    parts = list_of(item.get("content"))
    if not parts or not isinstance(parts[0], dict) or not _has_texts(parts[0], "text"):
        raise NotConvertible("a reasoning item without its text")
    text = parts[0]["text"]
    last = _last_assistant(messages)
    if last is None:
        messages.append({"role": "assistant", "content": [], "reasoning_content": text})
    else:
        last["reasoning_content"] = text


def _tools(fields: Mapping[str, Any]) -> list[Any]:
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        raise NotConvertible("tools are not a list")
    return tools


def _tool_of_responses(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": {**function, "strict": function.get("strict", True)}}
