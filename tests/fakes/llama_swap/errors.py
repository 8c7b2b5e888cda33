"""llama-swap's own answers to what it refuses, as release v250 gives them: why, and who says it."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web


class Refused(Exception):
    """A request that llama-swap answers itself."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


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
    body = {"src": "llama-swap", "error": str(refused)}
    return web.json_response(body, status=refused.status, headers=refused.headers)
