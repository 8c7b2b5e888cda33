"""OpenAI Responses bodies in the chat form, exactly as llama-server converts them.

Owns: a copy of server_chat_convert_responses_to_chatcmpl (tools/server/server-chat.cpp). Items that
llama-server answers with an error are not convertible.
"""

from collections.abc import Callable, Mapping
from typing import Any

from proxy.errors import NotConvertible
from proxy.upstream.json_values import list_of, text_of

Message = dict[str, Any]
Messages = list[Message]

_REPLACED_FIELDS = ("input", "instructions", "tools", "reasoning", "max_output_tokens")


def chat_of_responses(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat body that llama-server makes of a /v1/responses body; raises NotConvertible."""
    if text_of(fields, "previous_response_id"):
        raise NotConvertible("previous_response_id")
    chat = {key: value for key, value in fields.items() if key not in _REPLACED_FIELDS}
    chat["messages"] = _messages(fields)
    tools = [_tool(tool) for tool in _tools(fields) if text_of(tool, "type") == "function"]
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


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": {**function, "strict": function.get("strict", True)}}
