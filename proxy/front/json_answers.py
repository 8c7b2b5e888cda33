"""Answers of the admin listener in JSON, and who may not have them."""

from typing import Any

import msgspec
from aiohttp import web


def json_response(status: int, content: Any) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(content), content_type="application/json"
    )


def refuse_foreign_pages(request: web.Request) -> None:
    """Raise HTTPForbidden if another site's page asks: browsers then send its Origin."""
    if "Origin" in request.headers:
        raise web.HTTPForbidden(text="not for pages of other sites")
