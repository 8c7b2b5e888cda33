"""What all of the admin listener's views of the store share.

Other sites' pages are refused. The listener is on loopback and has no password, so any page that an
operator visits could otherwise reach it; browsers send an Origin with every request that changes
something, and with every one that comes from another site's page.
"""

from collections.abc import Mapping

from aiohttp import web

from proxy.core.keeping.eviction import Present
from proxy.core.model import Checkpoint
from proxy.core.prefix import Namespace
from proxy.core.views.listing import ListedCheckpoint, list_checkpoint
from proxy.front.json_answers import refuse_foreign_pages
from proxy.store.store import CheckpointStore

_MAX_DIGITS = 18


def require_store(request: web.Request, store: CheckpointStore | None) -> CheckpointStore:
    """Return the store; raises 403 for a page of another site, 503 if there is no store."""
    refuse_foreign_pages(request)
    if store is None:
        raise web.HTTPServiceUnavailable(text="the store is not open")
    return store


def list_stored(
    checkpoint: Checkpoint, names: Mapping[Namespace, str], store: CheckpointStore, present: Present
) -> ListedCheckpoint:
    """Return a checkpoint as operators see it, with what only a running proxy knows."""
    return list_checkpoint(
        checkpoint,
        names,
        value_seconds=store.value_seconds(checkpoint, present),
        is_warm=store.is_warm(checkpoint),
    )


def whole_number(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a number from the query, *most* at most; raises 400 if it is none."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise web.HTTPBadRequest(text=f"{name} must be a whole number, not {text!r}")
    return min(int(text), most)


def is_asked_for(request: web.Request, name: str) -> bool:
    """Return whether a switch is on in the query: `name`, `name=1` or `name=true`."""
    text = request.query.get(name, "false").lower()
    if text not in ("", "1", "true", "0", "false"):
        raise web.HTTPBadRequest(text=f"{name} must be true or false, not {text!r}")
    return text in ("", "1", "true")
