"""The admin listener's way to have a header evaluated and kept: POST /warm."""

import asyncio
import secrets
from typing import Any

import msgspec
from aiohttp import web

from proxy.driver.fleet.earlier_requests import EarlierRequests, NotKnown
from proxy.driver.fleet.warming import Warmed, Warming
from proxy.driver.requests import Arrival, GenerationRequest
from proxy.errors import CacheFault, ProxyError
from proxy.front.json_answers import json_response, refuse_foreign_pages
from proxy.front.keys import keys_of, tenant_of
from proxy.front.stored.queries import is_asked_for
from proxy.upstream.aliases import Aliases, with_alias
from proxy.upstream.bodies import head_of, parse_body
from proxy.upstream.header_bodies import header_request, route_path
from proxy.upstream.routes import Route, generation_route

_CACHED = (Route.CHAT, Route.COMPLETION, Route.MESSAGES, Route.RESPONSES)


class Warm:
    """Answers POST /warm with a line of JSON whenever there is progress, and one for the end."""

    def __init__(
        self,
        warming: Warming,
        earlier: EarlierRequests,
        aliases: Aliases,
        *,
        shares_between_api_keys: bool,
    ) -> None:
        self._warming = warming
        self._earlier = earlier
        self._aliases = aliases
        self._shares_between_api_keys = shares_between_api_keys

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

    async def _wanted(self, request: web.Request, *, is_whole: bool) -> GenerationRequest:
        if (request_id := request.query.get("request")) is not None:
            return self._earlier.again(request_id, keys_of(request.headers), is_whole=is_whole)
        return self._read(request, await request.read(), is_whole=is_whole)

    def _read(self, request: web.Request, raw: bytes, *, is_whole: bool) -> GenerationRequest:
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
        return GenerationRequest(
            arrival=Arrival(secrets.token_hex(4), path),
            route=route,
            raw=with_alias(wanted, self._aliases),
            headers=keys,
            tenant=tenant_of(keys, is_shared=self._shares_between_api_keys),
            model=head_of(with_alias(raw, self._aliases)).named_model,
        )

    async def _warm(
        self,
        request: GenerationRequest,
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
