"""Which browsers the admin listener answers: those that ask for it by a name that only this place has.

A page of another site can have its own name lead to 127.0.0.1 (DNS rebinding) and then read what is
answered as if it were its own; only the name in Host gives it away. Names without a dot, and those under
the domains below, cannot be had by anybody out there.
"""

import ipaddress

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".lan")
_FOR_PROGRAMS = ("/health", "/metrics")
"""No word of any prompt is in these."""


def is_own_name(host: str, *own_hosts: str) -> bool:
    """Return whether nobody else can have a Host header's name; *own_hosts* are known to be ours."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.strip("[]").rstrip(".").lower()
    if "." not in name or name in map(str.lower, own_hosts) or name.endswith(_PRIVATE):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def only_by_own_names(*own_hosts: str) -> Middleware:
    """Return a middleware that refuses requests for anybody else's names."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _FOR_PROGRAMS and not is_own_name(request.host, *own_hosts):
            raise web.HTTPForbidden(
                text=f"ask by an address, or put the name of {request.host!r} into admin_hosts: other "
                "sites' pages could otherwise read this under a name of theirs"
            )
        return await handler(request)

    return check
