"""llama-swap's API keys: asked for everywhere but at /health, and kept from the models' processes."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from tests.fakes.llama_swap.errors import Refused

CREDENTIALS = ("authorization", "x-api-key")


def require_key(keys: tuple[str, ...]) -> Middleware:
    """Return what refuses requests without one of these keys; without keys nothing is refused."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if keys and request.path != "/health" and _key_of(request) not in keys:
            headers = {"WWW-Authenticate": 'Basic realm="llama-swap"'}
            raise Refused(401, "unauthorized: invalid or missing API key", headers)
        return await handler(request)

    return check


def _key_of(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if scheme == "Bearer" else request.headers.get("X-Api-Key", "")
