"""The files of the live page, as the admin listener serves them.

They are read once. The policy lets the page load nothing from anywhere else and run nothing but its own
files: what requests bring along can only ever be shown as text.
"""

from importlib.resources import files
from importlib.resources.abc import Traversable

import xxhash
from aiohttp import web

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"


class _File:
    def __init__(self, source: Traversable, content_type: str) -> None:
        self.body = source.read_bytes()
        self.content_type = content_type
        self.etag = f'"{xxhash.xxh3_64_hexdigest(self.body)}"'


class PageFiles:
    """Serves the page at `/`, and what belongs to it under `/page/`."""

    def __init__(self) -> None:
        self._files = {
            source.name: _File(source, content_type)
            for source in files("proxy.page").joinpath("assets").iterdir()
            if (content_type := _TYPES.get("." + source.name.rpartition(".")[2]))
        }

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/", self.index), web.get("/page/{name}", self.file)]

    async def index(self, request: web.Request) -> web.Response:
        return self._answer(request, self._files[_INDEX])

    async def file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(text="the page has no such file")
        return self._answer(request, found)

    def _answer(self, request: web.Request, found: _File) -> web.Response:
        headers = {
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-cache",
            "ETag": found.etag,
        }
        if request.headers.get("If-None-Match") == found.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=found.body, content_type=found.content_type, charset="utf-8", headers=headers
        )
