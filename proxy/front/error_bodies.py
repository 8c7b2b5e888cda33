"""Errors of the proxy in the shape that the API's clients expect, naming the hop that failed."""

import msgspec
from aiohttp import web

from proxy.errors import ProxyError
from proxy.upstream.routes import ErrorShape, error_shape

HOP = "llama-prefix-cache"
RETRY_AFTER_SECONDS = 2
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    403: "permission_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def error_response(path: str, error: ProxyError) -> web.Response:
    """Return the answer to a request that cannot be served."""
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if error.status in (502, 503) else None
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(_body(path, error)),
        content_type="application/json",
        headers=headers,
    )


def error_event(path: str, error: ProxyError) -> bytes:
    """Return a stream event that ends a broken answer, as llama-server writes its own."""
    data = msgspec.json.encode(_body(path, error))
    if error_shape(path) is ErrorShape.ANTHROPIC:
        return b"event: error\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"


def _body(path: str, error: ProxyError) -> dict[str, object]:
    message = f"{HOP}: {error}"
    if error_shape(path) is ErrorShape.ANTHROPIC:
        return {"type": "error", "error": {"type": _anthropic_type(error), "message": message}}
    return {"error": {"code": error.status, "message": message, "type": error.type, "src": HOP}}


def _anthropic_type(error: ProxyError) -> str:
    return _ANTHROPIC_TYPES.get(error.status, "api_error")
