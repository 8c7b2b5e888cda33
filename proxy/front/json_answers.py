"""Answers of the admin listener in JSON, and who may not have them."""

from typing import Any

import msgspec
from aiohttp import web


def json_response(status: int, content: Any) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(content), content_type="application/json"
    )


def refuse_foreign_pages(request: web.Request) -> None:
    """Raise HTTPForbidden if another site's page asks: browsers then send its Origin.

    They send the listener's own, too, when its page changes something; names that others can have are
    refused before (`visitors`).
    """
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2].lower() != request.host.lower():
        raise web.HTTPForbidden(text="not for pages of other sites")
