"""Errors in the shape that the API's clients expect: the proxy's own, and llama-server's where it differs.

llama-server answers in OpenAI's shape everywhere, Anthropic's routes included (server-common.cpp,
format_error_response).
"""

from typing import Any

import msgspec
from aiohttp import web

from proxy.errors import ProxyError
from proxy.llama.routes import Route, generation_route, is_anthropic

HOP = "llama-prefix-cache"
RETRY_AFTER_SECONDS = 2
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
}

Error = dict[str, Any]


def error_response(path: str, error: ProxyError) -> web.Response:
    """Return the answer to a request that cannot be served."""
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if error.status in (502, 503) else None
    body = _own_error(error)
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(_anthropic(body) if is_anthropic(path) else {"error": body}),
        content_type="application/json",
        headers=headers,
    )


def error_event(path: str, error: ProxyError) -> bytes:
    """Return a stream event that ends a broken answer, in the shape of the stream's API."""
    return _event(path, _own_error(error))


def error_event_of(path: str, status: int, body: bytes) -> bytes:
    """Return llama-server's refusal as an event, for a client whose stream has begun already."""
    return _event(path, _read_error(body) or _unreadable(status))


def anthropic_error(status: int, body: bytes) -> bytes:
    """Return llama-server's refusal in Anthropic's shape; what is no error of its passes as it is."""
    error = _read_error(body)
    return body if error is None else msgspec.json.encode(_anthropic({"code": status, **error}))


def anthropic_event(data: bytes) -> bytes:
    """Return the data of llama-server's error event in Anthropic's shape."""
    error = _read_error(data)
    return data if error is None else msgspec.json.encode(_anthropic(error))


def _own_error(error: ProxyError) -> Error:
    return {"code": error.status, "message": f"{HOP}: {error}", "type": error.type, "src": HOP}


def _unreadable(status: int) -> Error:
    message = f"{HOP}: llama-server answered {status} without a stream"
    return {"code": status, "message": message, "type": ProxyError.type, "src": HOP}


def _read_error(body: bytes) -> Error | None:
    """Return llama-server's error, which streams of Messages have without its envelope."""
    try:
        content = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if content.get("type") == "error":
        return None  # in Anthropic's shape already
    error = content.get("error", content)
    return error if isinstance(error, dict) and "message" in error else None


def _event(path: str, error: Error) -> bytes:
    if is_anthropic(path):
        return b"event: error\ndata: " + msgspec.json.encode(_anthropic(error)) + b"\n\n"
    if generation_route("POST", path) is Route.RESPONSES:
        told = {"type": "error", "code": error.get("type"), "message": error["message"]}
        return b"event: error\ndata: " + msgspec.json.encode({**told, "param": None}) + b"\n\n"
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


def _anthropic(error: Error) -> Error:
    code = error.get("code")
    kind = _ANTHROPIC_TYPES.get(code if isinstance(code, int) else 500, "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: Error) -> str:
    """Return what went wrong; that a prompt is too long is told in Anthropic's words too.

    Clients know by these words, or by llama-server's, that they must make the conversation shorter.
    """
    message = str(error["message"])
    if error.get("type") != "exceed_context_size_error":
        return message
    n_prompt, n_ctx = error.get("n_prompt_tokens", 0), error.get("n_ctx", 0)
    return f"prompt is too long: {n_prompt} tokens > {n_ctx} maximum ({error['type']}: {message})"
