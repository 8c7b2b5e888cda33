"""llama-swap's own answers to what it refuses: the shape of OpenAI's errors, with who says it."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

_TYPES_AND_CODES = {
    401: ("authentication_error", "unauthorized"),
    404: ("invalid_request_error", "not_found"),
    409: ("invalid_request_error", "conflict"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
}


class Refused(Exception):
    """A request that llama-swap answers itself."""

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None, code: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.code = code


@web.middleware
async def rendered(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        return _render(request, refused)
    except web.HTTPNotFound:
        return web.Response(status=404, text="404 page not found\n")
    except web.HTTPMethodNotAllowed:
        return web.Response(status=405, text="Method Not Allowed\n")


def _render(request: web.Request, refused: Refused) -> web.Response:
    if "text/plain" in request.headers.get("Accept", ""):
        return web.Response(
            status=refused.status, text=f"llama-swap: {refused}", headers=refused.headers
        )
    kind, code = _TYPES_AND_CODES[refused.status]
    error = {"message": str(refused), "type": kind, "param": None, "code": refused.code or code}
    body = {"src": "llama-swap", "error": error}
    return web.json_response(body, status=refused.status, headers=refused.headers)
