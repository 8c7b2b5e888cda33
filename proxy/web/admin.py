"""The admin listener: health, metrics, recent requests, the store, and warming, for operators only.

On loopback the listener asks for a token only if one is set. Without a token `only_operators` keeps out the
pages of other sites. A site can let its own name lead to 127.0.0.1 (DNS rebinding), so that its page may
read the answers; only the name in Host shows that. On the internet nobody can own a name without a dot, or
one under the domains below; in a stranger's network somebody may (docs/security.md). Browsers send an
Origin with each request by which the page of another site could read an answer or change something. Its
other requests, as for an image, do neither.
"""

import asyncio
import hmac
import ipaddress
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST

from proxy import __version__
from proxy.core.eviction import Removal
from proxy.core.model import Checkpoint, CheckpointId
from proxy.core.slots import Known, Slot, state_of
from proxy.errors import CacheFault, NotKnown, ProxyError, ServerAway, StoreFault
from proxy.explain import views
from proxy.health import Degradation
from proxy.llama import requests
from proxy.servers.pool import Pool
from proxy.servers.warming import Warming, own_request
from proxy.serving.process import Process
from proxy.serving.request import Request
from proxy.serving.services import Services
from proxy.serving.tenants import keys_of, tenant_of
from proxy.store.known_models import model_names

_OPENAPI = Path(__file__).with_name("openapi.yaml")
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".lan")
_FOR_PROGRAMS = ("/health", "/metrics")
"""Paths whose answers have no word of any prompt."""
_CHECKPOINT = "/checkpoints/{id:[0-9a-fA-F]{1,16}}"
_NOT_THERE = "there is no checkpoint with this id"
_JSON = "application/json"
_ASKS_FOR_TOKEN = 'Basic realm="llama-prefix-cache: any name, and the admin token as the password"'
_SLICE_SECONDS = 0.002


def is_own_name(host: str, own_host: str = "") -> bool:
    """Return whether nobody else can own the name in a Host header; *own_host* is ours."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.strip("[]").rstrip(".").lower()
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return "." not in name or name == own_host.lower() or name.endswith(_PRIVATE)


def only_operators(token: str | None, open_paths: Collection[str], own_host: str) -> Middleware:
    """Return the middleware of the admin listener; refusals and faults are answered as JSON.

    It refuses other sites' pages, and then 1. if there is no *token*: requests under foreign names; 2. if
    there is one: requests without it, except those to *open_paths*, under any name.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path not in _FOR_PROGRAMS:
                if token is None and not is_own_name(request.host, own_host):
                    told = f"ask by an address, not by {request.host!r}, or set admin_token_file: other"
                    told += " sites' pages could otherwise read this under a name of theirs"
                    raise ProxyError(told, 403)
                origin = request.headers.get("Origin", f"://{request.host}")
                if origin.partition("://")[2].lower() != request.host.lower():
                    raise ProxyError("not for pages of other sites", 403)
            if token is not None and request.path not in open_paths:
                _require(token, request)
            return await handler(request)
        except StoreFault as fault:
            return _refusal(503, fault)
        except ProxyError as why:
            return _refusal(why.status, why)
        except web.HTTPException as why:  # aiohttp's own
            says = "no such route (clients use `listen`)" if why.status == 404 else why.text
            why.body, why.content_type = msgspec.json.encode({"error": says}), _JSON
            raise

    return check


def _refusal(status: int, why: Exception) -> web.Response:
    body = msgspec.json.encode({"error": str(why)})
    headers = {"WWW-Authenticate": _ASKS_FOR_TOKEN} if status == 401 else None
    return web.Response(status=status, body=body, content_type=_JSON, headers=headers)


def _require(token: str, request: web.Request) -> None:
    """Refuse a request without the token: a program's Bearer token, or a person's password."""
    kind, _, authorization = request.headers.get("Authorization", "").partition(" ")
    shown = b""
    if kind.lower() == "bearer":
        shown = authorization.strip().encode(errors="surrogateescape")
    elif kind.lower() == "basic":
        with suppress(ValueError):
            shown = b64decode(authorization).partition(b":")[2]
    if not hmac.compare_digest(shown, token.encode()):
        why = "this listener asks for its token: as a Bearer token, or as the password of any user"
        raise ProxyError(why, 401)


def json_response(content: Any = None, **fields: Any) -> web.Response:
    """Return *content* as JSON, or an object of the *fields*."""
    body = msgspec.json.encode(fields if content is None else content)
    return web.Response(body=body, content_type=_JSON)


class Admin:
    """Answers operators."""

    def __init__(self, shared: Services, pool: Pool, aliases: requests.Aliases) -> None:
        self._shared = shared
        self._pool = pool
        self._warming = Warming(shared, pool)
        self._aliases = aliases

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/requests", self.requests),
            web.get("/requests/{id}", self.explain),
            web.get("/trace", self.trace),
            web.get("/checkpoints", self.checkpoints),
            web.delete(_CHECKPOINT, self.delete),
            web.put(_CHECKPOINT + "/pin", self.pin),
            web.delete(_CHECKPOINT + "/pin", self.pin),
            web.get("/tree", self.tree),
            web.post("/warm", self.warm),
            web.get("/openapi.json", self.openapi),
        ]

    # How well requests are served.

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as requests are answered; `state` and `reasons` say how well they are cached."""
        return json_response(status_of(self._shared, self._pool))

    async def openapi(self, request: web.Request) -> web.Response:
        """Return the OpenAPI document of this listener."""
        document = yaml.safe_load(_OPENAPI.read_text())
        place = "#/components/schemas/{name}"
        _, schemas = msgspec.json.schema_components(views.SENT, ref_template=place)
        document["components"]["schemas"] |= schemas
        document["info"]["version"] = __version__
        return json_response(document)

    async def metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        with suppress(StoreFault, OSError):
            await self._shared.store.space()
        return web.Response(body=self._shared.metrics.exposition(), headers=headers)

    # Recent requests: what each reused, and why not more.

    async def requests(self, request: web.Request) -> web.Response:
        """Return the last requests that have ended, newest first; the query may filter them."""
        await self._pool.accounted()
        latest = self._shared.journal.latest(
            _limit(request, 50),
            conversation=request.query.get("conversation", ""),
            client=request.query.get("client", ""),
            only_misses=_is_asked_for(request, "misses"),
        )
        return json_response(requests=latest)

    async def explain(self, request: web.Request) -> web.Response:
        """Return the explanation of one request by its id, or of the last one."""
        journal = self._shared.journal
        await self._pool.accounted()
        return json_response(journal.with_costs(journal.explain(request.match_info["id"])))

    async def trace(self, request: web.Request) -> web.Response:
        """Return the last requests without their texts, the oldest first."""
        await self._pool.accounted()
        return json_response(requests=views.numbered(self._shared.journal.traced))

    # The store: which checkpoints there are, pinning and deleting them, and their tree.

    async def checkpoints(self, request: web.Request) -> web.Response:
        """Return all checkpoints `under` a node, the most valuable first."""
        store, node_id = self._shared.store, request.query.get("under")
        names, present = model_names(store.index), self._shared.present()
        listed = list[views.ListedCheckpoint]()
        async for c in in_slices(store):
            if not node_id or node_id in views.path_to(views.parent_of(c)):
                value, is_warm = round(store.value_seconds(c, present), 3), store.is_warm(c)
                listed.append(views.list_checkpoint(c, names, value_seconds=value, is_warm=is_warm))
        return json_response(checkpoints=sorted(listed, key=lambda c: -(c.value_seconds or 0)))

    async def tree(self, request: web.Request) -> web.Response:
        """Return the nodes of the store's tree: the models, their headers, and the largest sessions.

        `n_left_out` is how many nodes are not among them; `version` changes with the store.
        """
        store, outline, version = self._shared.store, views.Outline(), self._shared.store.version
        limit, names = _limit(request, 500), model_names(store.index)
        async for checkpoint in in_slices(store):
            outline.add(views.list_checkpoint(checkpoint, names))
        nodes = outline.nodes(self._shared.present().rates_by, limit)
        return json_response(nodes=nodes, n_left_out=len(outline) - len(nodes), version=version)

    async def pin(self, request: web.Request) -> web.Response:
        """Pin a checkpoint (PUT), or unpin it (DELETE)."""
        is_pinned = request.method == "PUT"
        found = await self._shared.store.pin(_checkpoint_id(request), is_pinned=is_pinned)
        if found is None:
            raise NotKnown(_NOT_THERE)
        return json_response(id=f"{found.id:016x}", is_pinned=found.is_pinned)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete one checkpoint, a pinned one only with `pinned`."""
        store, may_be_pinned = self._shared.store, _is_asked_for(request, "pinned")
        if (checkpoint := store.get(_checkpoint_id(request))) is None:
            raise NotKnown(_NOT_THERE)
        if checkpoint.is_pinned and not may_be_pinned:
            raise ProxyError("it is pinned", 409)
        if not await store.remove(checkpoint, Removal.OPERATOR) and store.get(checkpoint.id):
            raise ProxyError("it is in use", 409)
        return json_response(id=f"{checkpoint.id:016x}", size_bytes=checkpoint.size_bytes)

    # Warming: a header is evaluated and kept before somebody needs it.

    async def warm(self, request: web.Request) -> web.StreamResponse:
        """Evaluate and keep the header of the request in the body, of any of the cached APIs.

        With `request` in the query, the header of that earlier request is kept instead, by its id or as the
        last one. The answer has a line of JSON for each progress, and one for the end.
        """
        is_whole, keys = _is_asked_for(request, "whole"), keys_of(request.headers)
        # The listener's token, no client's key: commands show a kept one also where none is asked for.
        keys.pop("Authorization", None)
        if (request_id := request.query.get("request")) is not None:
            wanted = self._warming.again(request_id, keys, is_whole=is_whole)
        else:
            wanted = await self._read(request, keys, is_whole=is_whole)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)

        async def tell(**told: Any) -> None:
            with suppress(ConnectionResetError):  # the client left: this is cancelled next
                await response.write(msgspec.json.encode(told) + b"\n")

        try:
            await tell(warmed=await self._warming.warm(wanted, tell, is_whole=is_whole))
        except (CacheFault, ProxyError) as error:
            why = ": `stats` says why, and what helps" * isinstance(error, ServerAway)
            await tell(error=f"{error}{why}")
        except Exception as error:
            self._shared.faults.record("unattended action", error)
            await tell(error="the proxy failed: its log says more")
        await response.write_eof()
        return response

    async def _read(
        self, request: web.Request, keys: Mapping[str, str], *, is_whole: bool
    ) -> Request:
        """Return a request that evaluates the header of the request in the body; raises 400."""
        if (body := requests.parse_body(await request.read())) is None:
            raise ProxyError("the body is no JSON object", 400)
        path = requests.route_path(body)
        if (route := requests.generation_route("POST", path)) is None:
            why = "the body is no request: it has no messages, prompt or input"
            raise ProxyError(why, 400)
        wanted = requests.header_request(route, body, is_whole=is_whole)
        warmed = own_request(path, route, keys, tenant_of(keys, self._shared.secret))
        return warmed.receive(requests.with_alias(wanted, self._aliases), self._shared.secret)


# What a query says.


def _limit(request: web.Request, default: int) -> int:
    """Return the `limit` in the query; raises 400 if it is no number."""
    text = request.query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ProxyError(f"limit must be a whole number, not {text!r}", 400)
    return int(text)


def _is_asked_for(request: web.Request, name: str) -> bool:
    """Return whether a switch is on in the query: `name`, `name=1` or `name=true`; raises 400."""
    text = request.query.get(name, "false").lower()
    if text not in ("", "1", "true", "0", "false"):
        raise ProxyError(f"{name} must be true or false, not {text!r}", 400)
    return text in ("", "1", "true")


def _checkpoint_id(request: web.Request) -> CheckpointId:
    return CheckpointId(int(request.match_info["id"], 16))


# What operators are shown.


async def in_slices(checkpoints: Iterable[Checkpoint]) -> AsyncIterator[Checkpoint]:
    """Yield checkpoints, and let the event loop serve requests in between.

    To find the value of one checkpoint takes up to a millisecond.
    """
    slice_ends_at = time.perf_counter() + _SLICE_SECONDS
    for checkpoint in checkpoints:
        yield checkpoint
        if time.perf_counter() > slice_ends_at:
            await asyncio.sleep(0)
            slice_ends_at = time.perf_counter() + _SLICE_SECONDS


def status_of(shared: Services, pool: Pool) -> dict[str, Any]:
    """Return how requests are served now, by which llama-servers, and how full the store is.

    /health, the live page and `stats` all show these facts. `servers` are the attached llama-servers.
    """
    degradations, store = shared.all_degradations, shared.opened_store
    return {
        "listen": pool.settings.listen,
        "state": degradations.state,
        "since": _moment(degradations.since),
        "reasons": [_describe_reason(each) for each in degradations.active],
        "servers": [_describe_process(process) for process in pool.processes],
        "n_waiting": pool.n_waiting,
        "store": None
        if store is None
        else {
            "n_checkpoints": len(store),
            "size_bytes": store.size_bytes,
            "max_bytes": store.writes.max_bytes,
            "written_last_day_bytes": store.writes.last_day_bytes,
            "max_write_bytes_per_day": store.writes.max_bytes_per_day,
            "version": store.version,
        },
    }


def _describe_process(process: Process) -> dict[str, Any]:
    return {
        "name": process.upstream.target.name,  # of its model, if the address has several
        "build": process.build,
        "rule": process.rule.kind.value,
        "n_ctx": process.n_ctx,
        "slots": [_describe_slot(slot) for slot in process.slots],
    }


def _describe_reason(each: Degradation) -> dict[str, Any]:
    told = {"kind": each.kind, "reason": each.reason, "cure": each.kind.cure}
    return {**told, "since": _moment(each.since)}


def _describe_slot(slot: Slot) -> dict[str, Any]:
    """Return a slot; its numbers are 0 if its content is not known.

    `n_coming` is the length in tokens of the prompt that is being served there. `used_at` is when the slot
    was last leased or released, in seconds since 1970; null if that was before the proxy was started.
    """
    known = slot.content if isinstance(slot.content, Known) else None
    began_at = time.time() - time.monotonic()  # another one after each sleep of the machine
    return {
        "id": slot.id,
        "state": state_of(slot),
        "is_closing": slot.is_closing,
        "n_tokens": known.n_tokens if known else 0,
        "n_unsaved": known.n_unsaved if known else 0,
        "n_coming": len(slot.destined) if slot.destined is not None else 0,
        "used_at": round(began_at + slot.used_at, 1) if slot.used_at else None,
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
