"""Requests that are made only for what they evaluate: one token is generated, and nobody reads it."""

from typing import Any

import msgspec

from proxy.core.prefix import TokenIds
from proxy.upstream.bodies import SYSTEM_ROLES, GenerationBody, leading_system
from proxy.upstream.routes import Route

_USER = {"role": "user", "content": "."}
_LIMITS = {
    Route.CHAT: "max_tokens",
    Route.MESSAGES: "max_tokens",
    Route.RESPONSES: "max_output_tokens",
    Route.COMPLETION: "n_predict",
}
_DROPPED = (
    "stream",
    "stream_options",
    "n",
    "n_cmpl",
    "max_completion_tokens",
    "max_tokens",
    "n_predict",
)


def header_request(route: Route, body: GenerationBody, *, is_whole: bool) -> bytes:
    """Return the request that has a body's header evaluated, or all of it.

    A header is everything before the first message that is not the system's. A bare prompt has none, and
    is evaluated whole. Raises KeyError or TypeError if the body is none of *route*.
    """
    fields = {name: value for name, value in body.fields.items() if name not in _DROPPED}
    fields[_LIMITS[route]] = 1
    if route is Route.COMPLETION:
        fields["max_tokens"] = 1
    elif not is_whole:
        fields |= _header(route, body)
    return msgspec.json.encode(fields)


def tokens_request(tokens: TokenIds, model: str) -> bytes:
    """Return the request to /completion that has some tokens evaluated, by a *model* if it says which."""
    fields = {"prompt": tokens.tolist(), "n_predict": 1, "max_tokens": 1}
    return msgspec.json.encode({"model": model, **fields} if model else fields)


def _header(route: Route, body: GenerationBody) -> dict[str, Any]:
    match route:
        case Route.RESPONSES:
            given = body.fields["input"]
            items = given if isinstance(given, list) else []
            n = next((i for i, m in enumerate(items) if not _is_system(m)), len(items))
            return {"input": [*items[:n], _USER]}
        case Route.MESSAGES:
            return {"messages": [_USER]}
        case _:
            return {"messages": [*leading_system(body), _USER]}


def _is_system(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") in SYSTEM_ROLES


def route_path(body: GenerationBody) -> str:
    """Return the path that a body is most likely meant for, by what it has; "" if it has no prompt."""
    fields = body.fields
    if "input" in fields:
        return "/v1/responses"
    if "messages" in fields:
        tools = fields.get("tools") or []
        is_anthropic = "system" in fields or any("input_schema" in tool for tool in tools)
        return "/v1/messages" if is_anthropic else "/v1/chat/completions"
    return "/completion" if "prompt" in fields else ""
