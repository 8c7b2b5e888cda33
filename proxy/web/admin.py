"""Which browsers the admin listener answers: those that ask for it by a name that only this place has.

A page of another site can have its own name lead to 127.0.0.1 (DNS rebinding) and then read what is
answered as if it were its own; only the name in Host gives it away. Names without a dot, and those under
the domains below, cannot be had by anybody out there.
"""

import asyncio
import ipaddress
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.core.conditions import EXPLANATIONS
from proxy.core.rates import Rates
from proxy.core.slots import SlotTable, state_of
from proxy.errors import CacheFault, ProxyError
from proxy.explain.report import Journal
from proxy.health import Degradation
from proxy.llama.bodies import header_request, parse_body, route_path
from proxy.llama.routes import Aliases, Route, generation_route, with_alias
from proxy.metrics import POSITION_LABELS
from proxy.servers.pool import Pool
from proxy.servers.server import Server
from proxy.servers.warming import EarlierRequests, NotKnown, Warmed, Warming, send_for_nobody
from proxy.serving.process import Shared
from proxy.serving.request import Request
from proxy.web.clients import keys_of, tenant_of
from proxy.web.stored import is_asked_for, json_response, refuse_foreign_pages

# Which browsers the admin listener answers: those that ask for it by a name that only this place has.
#
# A page of another site can have its own name lead to 127.0.0.1 (DNS rebinding) and then read what is
# answered as if it were its own; only the name in Host gives it away. Names without a dot, and those
# under the domains below, cannot be had by anybody out there.


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


# The admin listener's view of recent requests: what each reused, and why not more.
#
# Browsers' foreign pages are refused, as for checkpoints: explanations hold a few words of prompts.


DEFAULT_LIMIT = 50


class RequestList:
    """Lists and explains requests."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/requests", self.list), web.get("/requests/{id}", self.explain)]

    async def list(self, request: web.Request) -> web.Response:
        """Return the last requests that have ended, the newest first."""
        refuse_foreign_pages(request)
        try:
            limit = int(request.query.get("limit", DEFAULT_LIMIT))
        except ValueError:
            return json_response(400, {"error": "limit is not a number"})
        return json_response(200, {"requests": self._journal.latest(limit)})

    async def explain(self, request: web.Request) -> web.Response:
        """Return the explanation of one request by its id, or of the last one."""
        refuse_foreign_pages(request)
        request_id = request.match_info["id"]
        explanation = self._journal.explain(request_id)
        if explanation is None:
            return json_response(404, {"error": self._journal.why_unknown(request_id)})
        return json_response(200, explanation)


# The admin listener's way to have a header evaluated and kept: POST /warm.


_CACHED = (Route.CHAT, Route.COMPLETION, Route.MESSAGES, Route.RESPONSES)


class Warm:
    """Answers POST /warm with a line of JSON whenever there is progress, and one for the end."""

    def __init__(self, warming: Warming, earlier: EarlierRequests, aliases: Aliases) -> None:
        self._warming = warming
        self._earlier = earlier
        self._aliases = aliases

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/warm", self.warm)]

    async def warm(self, request: web.Request) -> web.StreamResponse:
        """Evaluate and keep the header of the request that is the body; `path` says whose form it has.

        Without a body, that of an earlier `request` by its id, or of the last one.
        """
        refuse_foreign_pages(request)
        is_whole = is_asked_for(request, "whole")
        try:
            generation = await self._wanted(request, is_whole=is_whole)
        except NotKnown as why:
            return json_response(404, {"error": str(why)})
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        task = asyncio.ensure_future(self._warm(generation, lines, is_whole=is_whole))
        try:
            while not (task.done() and lines.empty()):
                await response.write(msgspec.json.encode(await lines.get()) + b"\n")
        finally:
            task.cancel()
        await response.write_eof()
        return response

    async def _wanted(self, request: web.Request, *, is_whole: bool) -> Request:
        if (request_id := request.query.get("request")) is not None:
            return self._earlier.again(request_id, keys_of(request.headers), is_whole=is_whole)
        return self._read(request, await request.read(), is_whole=is_whole)

    def _read(self, request: web.Request, raw: bytes, *, is_whole: bool) -> Request:
        body = parse_body(raw)
        path = request.query.get("path") or (route_path(body) if body else "")
        route = generation_route("POST", path)
        if body is None or route not in _CACHED:
            raise web.HTTPBadRequest(text="the body is no request whose prompt is cached")
        try:
            wanted = header_request(route, body, is_whole=is_whole)
        except (KeyError, TypeError, AttributeError) as error:
            raise web.HTTPBadRequest(text=f"the body is no request to {path}") from error
        keys = keys_of(request.headers)
        relay = partial(send_for_nobody, path, keys)
        warmed = Request(path=path, route=route, headers=keys, relay=relay, tenant=tenant_of(keys))
        return warmed.receive(with_alias(wanted, self._aliases))

    async def _warm(
        self,
        request: Request,
        lines: "asyncio.Queue[dict[str, Any]]",
        *,
        is_whole: bool,
    ) -> None:
        def tell(n_done: int, n_tokens: int) -> None:
            lines.put_nowait({"n_done": n_done, "n_tokens": n_tokens})

        try:
            warmed = await self._warming.warm(request, tell, is_whole=is_whole)
            lines.put_nowait({"warmed": _described(warmed)})
        except (CacheFault, ProxyError) as error:
            lines.put_nowait({"error": str(error)})
        except Exception as error:
            lines.put_nowait({"error": f"{type(error).__name__}: {error}"})
            raise


def _described(warmed: Warmed) -> dict[str, Any]:
    return {
        "id": f"{warmed.checkpoint.id:016x}",
        "size_bytes": warmed.checkpoint.size_bytes,
        "n_usable": warmed.n_usable,
        "n_header_tokens": warmed.n_header,
        "n_prompt_tokens": warmed.n_prompt,
        "was_kept": warmed.was_kept,
        "seconds": round(warmed.seconds, 3),
    }


# The admin listener: the proxy's own health and metrics. Loopback by default; never for clients.


class AdminListener:
    """Answers operators."""

    def __init__(self, shared: Shared, pool: Pool) -> None:
        self._shared = shared
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/health", self.health), web.get("/metrics", self.metrics)]

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as requests are answered; `state` and `reasons` say how well they are cached."""
        degradations, store = self._shared.everywhere, self._shared.opened_store
        body: dict[str, object] = {
            "state": degradations.state,
            "since": moment(degradations.since),
            "reasons": [describe(degradation) for degradation in degradations.active],
        }
        if self._pool.is_single:
            body |= describe_server(self._pool.servers[0])
        else:
            body["llama_servers"] = {
                server.name: describe_server(server) for server in self._pool.servers
            }
        body["waiting"] = self._pool.n_waiting
        body["background_tasks"] = len(self._shared.tasks)
        if store is not None:
            body["checkpoints"] = len(store)
            body["checkpoint_bytes"] = store.size_bytes
            body["writes"] = {
                "bytes_last_day": store.writes.last_day_bytes,
                "max_bytes_per_day": store.writes.max_bytes_per_day,
                **self._bytes_per_token(),
            }
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    def _bytes_per_token(self) -> dict[str, float | None]:
        """Return what was written for each token that was reused, and for each that was restored.

        Both since the proxy started; None while there was none.
        """
        total = self._shared.metrics.total
        n_bytes = total("written_bytes")
        n_tokens = {
            "reused": total("prompt_tokens", source="reused"),
            "restored": total("restored_tokens"),
        }
        return {
            f"bytes_per_{how}_token": round(n_bytes / n, 1) if n else None
            for how, n in n_tokens.items()
        }

    async def metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._shared.metrics.exposition(), headers=headers)


def describe_server(server: Server) -> dict[str, object]:
    """Return whether a llama-server is attached, and if so what is known of it."""
    if (process := server.process) is None:
        return {"llama_server": "not attached"}
    return {
        "llama_server": "attached",
        "rule": str(process.rule),
        "slots": describe_slots(process.slots),
        "rates": describe_rates(process.rates),
    }


def describe(degradation: Degradation) -> dict[str, str]:
    """Return what is wrong, since when, and what mends it."""
    return {
        "kind": degradation.kind.value,
        "reason": degradation.reason,
        "cure": EXPLANATIONS[degradation.kind].cure,
        "since": moment(degradation.since),
    }


def describe_slots(table: SlotTable) -> dict[str, int]:
    """Return how many slots are leased, and how many of the others hold what."""
    return dict(Counter(state_of(slot).value for slot in table))


def describe_rates(rates: Rates) -> dict[str, object]:
    """Return how fast llama-server was measured to be; what was not measured yet is 0."""
    return {
        "evaluation_tokens_per_second": {
            label: round(rates.tokens_per_second(position), 1)
            for position, label in POSITION_LABELS.items()
        },
        "restore_bytes_per_second": {
            "warm": round(rates.warm_restore.bytes_per_second),
            "cold": round(rates.cold_restore.bytes_per_second),
        },
        "save_bytes_per_second": round(rates.save.bytes_per_second),
    }


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
