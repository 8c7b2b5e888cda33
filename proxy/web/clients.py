"""The API key of a request, and the tenant that it makes."""

from collections.abc import Coroutine, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import xxhash
from aiohttp import web

from proxy.errors import (
    BadTarget,
    BodyTooLarge,
    CacheFault,
    ProxyError,
    RefusedByProxy,
    TooManyRequests,
    UpstreamNotReached,
)
from proxy.explain.report import Report
from proxy.llama.bodies import parse_body
from proxy.llama.client import LlamaServer
from proxy.llama.routes import (
    Aliases,
    Route,
    changes_server_state,
    counts_tokens,
    generation_route,
    with_alias,
)
from proxy.log import get_logger
from proxy.servers.pool import Pool
from proxy.serving.request import Answer, OnStart, Request
from proxy.web.errors import error_response
from proxy.web.relay import Body, Exchange, end_to_end
from proxy.web.writer import Unread

# The API key of a request, and the tenant that it makes.


_HEADERS = ("Authorization", "X-Api-Key")


def keys_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that carry a key, as far as they are there."""
    return {name: headers[name] for name in _HEADERS if name in headers}


def tenant_of(keys: Mapping[str, str]) -> bytes:
    """Return a digest of the API key that llama-server would check, empty if there is none."""
    key = keys.get("Authorization") or keys.get("X-Api-Key", "")
    if not key:
        return b""
    return xxhash.xxh3_128_digest(key.removeprefix("Bearer ").encode())


# The listener that clients talk to: generation routes go through the cache, all else straight through.


_REBUILT = frozenset(("content-length", "accept-encoding"))
_SESSION_HEADERS = (
    *("X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id"),
    "X-Session-Id",
    *("Session-Id", "Thread-Id"),
)
"""What Claude Code, OpenCode and codex call a session by; an agent within it has one of its own."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A client's request: the model that its target names, and the path as a llama-server would see it.

    `may_load` says that the model may be loaded for it.
    """

    request: web.Request
    model: str
    path: str
    may_load: bool

    @property
    def route(self) -> Route | None:
        return generation_route(self.request.method, self.path)


class Front:
    """Answers clients."""

    def __init__(
        self,
        pool: Pool,
        report: Report,
        unread: Unread,
        *,
        max_requests: int,
        aliases: Aliases,
    ) -> None:
        self._pool = pool
        self._report = report
        self._unread = unread
        self._max_requests = max_requests
        self._n_requests = 0
        self._aliases = aliases
        self._log = get_logger("front")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer any request; the proxy's own errors come in the shape of the client's API."""
        asked = self._asked(request)
        exchange = Exchange(request, asked.path, self._unread)
        try:
            response = await self._handle(asked, exchange)
            await exchange.writer.delivered()
            return response
        except CacheFault as fault:
            # Such faults end where they arise; one that did not must still not become the client's.
            return await self._refuse(asked, exchange, ProxyError(str(fault)))
        except ProxyError as error:
            if asked.route is None:
                self._log.warning("request failed", path=asked.path, reason=str(error))
            return await self._refuse(asked, exchange, error)
        except ConnectionResetError:
            # The client went away while its answer was written: there is nobody to answer.
            return exchange.response or web.Response(status=499)
        finally:
            exchange.writer.close()

    def _asked(self, request: web.Request) -> "_Asked":
        may_load = request.query.get("autoload") not in ("false", "0")
        # Of a POST hosts read only the body.
        named = request.query.get("model", "") if may_load and request.method == "GET" else ""
        return _Asked(request, *self._pool.split_path(request.path, named), may_load)

    async def _refuse(
        self, asked: "_Asked", exchange: Exchange, error: ProxyError
    ) -> web.StreamResponse:
        with suppress(ConnectionResetError):
            if await exchange.end_kept(error) and exchange.response is not None:
                return exchange.response
        return error_response(asked.path, error)

    async def _handle(self, asked: "_Asked", exchange: Exchange) -> web.StreamResponse:
        request, route = asked.request, asked.route
        if not request.raw_path.startswith("/"):
            raise BadTarget("the request target must be a path")
        if changes_server_state(request.method, asked.path):
            raise RefusedByProxy(
                f"POST {asked.path} would change llama-server's state behind the cache's back"
            )
        if route is None:
            await self._pass_on(asked, exchange)
        else:
            await self._generate(route, asked, exchange)
        if exchange.response is None:
            raise ProxyError("no answer was relayed")
        return exchange.response

    async def _pass_on(self, asked: "_Asked", exchange: Exchange) -> None:
        request, model = asked.request, asked.model
        headers = end_to_end(request.headers)
        content: Body = request.content if request.body_exists else None
        counts = self._aliases and counts_tokens(request.method, asked.path)
        if counts or (request.method == "POST" and self._pool.has_models):
            content = with_alias(await _read_body(request), self._aliases)
            headers.popall("Content-Length", None)
            body = parse_body(content) if asked.may_load and not model else None
            model = body.named_model if body else model
        keys = keys_of(request.headers)
        async with self._pool.passing(request.method, asked.path, model, keys) as upstreams:
            *others, last = upstreams
            for upstream in others:
                with suppress(UpstreamNotReached):
                    await exchange.send(upstream, content, headers)
                    return
            await exchange.send(last, content, headers)

    async def _generate(self, route: Route, asked: "_Asked", exchange: Exchange) -> None:
        generation = self._request(route, asked, exchange)
        self._n_requests += 1
        try:
            if self._n_requests > self._max_requests:
                raise TooManyRequests(f"{self._max_requests} requests are being served already")
            generation.receive(with_alias(await _read_body(asked.request), self._aliases))
            async with exchange.kept() if generation.wants_stream else nullcontext():
                await self._pool.serve(generation)
        except BaseException as error:
            if not exchange.is_answered:
                self._report.unanswered(generation, error)
            raise
        finally:
            self._n_requests -= 1

    def _request(self, route: Route, asked: "_Asked", exchange: Exchange) -> Request:
        headers = asked.request.headers

        def relay(
            upstream: LlamaServer, raw: bytes, on_start: OnStart, n_found: int | None
        ) -> Coroutine[Any, Any, Answer]:
            passed_on = end_to_end(headers, without=_REBUILT)
            return exchange.send(upstream, raw, passed_on, on_start, n_found)

        keys = keys_of(headers)
        return Request(
            path=asked.path,
            route=route,
            headers=keys,
            relay=relay,
            tenant=tenant_of(keys),
            session=" ".join(filter(None, map(headers.get, _SESSION_HEADERS))),
            model=asked.model,
        )


async def _read_body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge("the request body is over max_body_bytes") from error
