"""The listener for clients: generation requests go through the cache, all other requests pass through."""

import asyncio
from dataclasses import dataclass

from aiohttp import HttpVersion10, HttpVersion11, web

from proxy.core.messages import Route
from proxy.errors import CacheFault, ProxyError, ProxyStopped, ServerAway, TooManyRequests
from proxy.explain.judgement import Judgement
from proxy.llama import requests
from proxy.llama.client import OWN_ID, SENT_BY, Body
from proxy.llama.connection import end_to_end
from proxy.log import get_logger
from proxy.servers.pool import Pool
from proxy.serving.request import Request
from proxy.serving.services import Services
from proxy.serving.tenants import client_name, keys_of, tenant_of
from proxy.tasks import Deadline
from proxy.web.relay import Exchange
from proxy.web.writer import Unread

MAX_BODY_BYTES = 256 << 20
"""The largest request body of a generation; other requests stream through without a limit."""
SMALL_BODY_BYTES = 1 << 20
MAX_COMING_BYTES = 1 << 30
"""So many bytes of bodies may be coming; beyond that only small bodies are taken, as no key was checked."""
MAX_TARGET_BYTES = 32 << 10
"""The longest path with its query; llama-server has the same limit."""
IDLE_SECONDS = 75.0
"""How long the proxy keeps a connection without a whole request head; llama-server keeps one for 5 s."""
BODY_SECONDS = 300.0
"""How long the body of a generation may take to come."""
_CUT = "the proxy stopped before the request body was whole"
_SESSION_HEADERS = (
    "X-Claude-Code-Session-Id X-Claude-Code-Agent-Id X-Session-Id Session-Id Thread-Id X-Affinity"
).split()
"""The session headers of Claude Code, OpenCode, codex and Vibe, and that of an agent within a session."""


@dataclass
class Front:
    """Answers clients."""

    pool: Pool
    shared: Services
    unread: Unread
    max_requests: int
    aliases: requests.Aliases
    deadline: Deadline
    n_coming_bytes: int = 0

    async def handle(self, incoming: web.Request) -> web.StreamResponse:
        """Answer any request; the proxy's own errors come in the shape of the client's API."""
        may_load = incoming.query.get("autoload") not in ("false", "0")
        # A host of models reads only the body of a POST, not its query. HEAD loads a model as GET does.
        is_named = may_load and incoming.method in ("GET", "HEAD")
        named = incoming.query.get("model", "") if is_named else ""
        model, path = self.pool.split_path(incoming.path, named)
        exchange = Exchange(incoming, path, self.unread, self.shared.report)
        try:
            # What follows does not hold for a request that llama-server may read otherwise.
            if requests.may_be_read_as_another(incoming.raw_path, incoming.path):
                raise ProxyError("the request target must be a path without %u, # and ..", 400)
            if not HttpVersion10 <= incoming.version <= HttpVersion11:
                raise ProxyError("only HTTP/1.0 and HTTP/1.1 are spoken here", 400)
            if incoming.headers.get(SENT_BY) == OWN_ID:
                return await exchange.refuse(ProxyError("`upstream` leads back to this proxy", 508))
            if exchange.route is None:
                await self._pass_on(exchange, model, may_load=may_load)
            else:
                await self._generate(exchange, exchange.route, model)
            if exchange.writer.response is None:
                raise ProxyError("no answer was relayed")
            await exchange.writer.delivered()
            return exchange.writer.response
        except CacheFault as fault:
            # A cache fault ends where it arises; if one gets here, the client must not be hurt by it.
            return await exchange.refuse(ProxyError(str(fault)))
        except ProxyError as error:
            if exchange.route is None:
                get_logger("front").warning("request failed", path=path, reason=str(error))
            return await exchange.refuse(error)
        except ConnectionResetError:
            return exchange.writer.response or web.Response(status=499)  # the client left
        finally:
            exchange.writer.close()

    async def _pass_on(self, exchange: Exchange, model: str, *, may_load: bool) -> None:
        """Pass on a request that is no generation to the first llama-server that can be reached."""
        incoming, path = exchange.incoming, exchange.path
        if requests.changes_server_state(incoming.method, path):
            message = f"POST {path} would change llama-server's state behind the cache's back"
            raise ProxyError(message, 403)
        keys, headers = keys_of(incoming.headers), end_to_end(incoming.headers)
        content: Body = incoming.content if incoming.body_exists else None
        counts_tokens = self.aliases and requests.counts_tokens(incoming.method, path)
        if counts_tokens or (incoming.method == "POST" and self.pool.has_models):
            content = await self._read_body(incoming)
            headers.popall("Content-Length", None)  # an alias may have changed it
            if may_load and not model:
                model = requests.model_named(content, requests.parse_body(content))
        async with self.pool.passing(incoming.method, path, model, keys) as upstreams:
            for upstream in upstreams:
                try:
                    await exchange.send(upstream, content, headers=headers)
                    return
                except ServerAway as away:
                    if incoming.content.exception() is not None:
                        raise ProxyStopped(_CUT) from away
                    if away.was_sent or upstream is upstreams[-1]:
                        raise

    async def _generate(self, exchange: Exchange, route: Route, model: str) -> None:
        """Serve a generation request through the cache; raises TooManyRequests, or as `Pool.serve`."""
        headers, in_flight = exchange.incoming.headers, self.shared.journal.in_flight
        keys, session = keys_of(headers), " ".join(filter(None, map(headers.get, _SESSION_HEADERS)))
        request = exchange.request = Request(
            path=exchange.path,
            route=route,
            keys=keys,
            relay=exchange.send,
            withdraw=exchange.withdraw,
            tenant=tenant_of(keys, self.shared.secret),
            # Bytes that are no UTF-8 came as surrogates.
            session=session.encode(errors="replace").decode(),
            asked_cache=headers.get("X-Prefix-Cache", ""),
            client=client_name(headers.get("User-Agent", "")),
            is_json=requests.is_json(headers),
            model=model,
        )
        try:
            async with self.deadline.ends_block():
                body = await self._read_body(exchange.incoming)
                if len(in_flight) >= self.max_requests:
                    message = f"{self.max_requests} requests are being served already"
                    raise TooManyRequests(message)
                in_flight[request.id] = request
                if request.receive(body, self.shared.secret).wants_stream:
                    exchange.writer.keep()
                await self.pool.serve(request)
        except BaseException as error:
            if not exchange.is_answered:
                self.shared.report.unanswered(request, error)
            raise
        finally:
            in_flight.pop(request.id, None)
            # Request and exchange refer to each other: the body would stay until Python collects garbage.
            exchange.request, request.foresee = None, Judgement

    async def _read_body(self, incoming: web.Request) -> bytes:
        """Return the body, in which an alias became the model's name; raises ProxyError over the limits."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while chunk := await incoming.content.readany():
                    body += chunk
                    self.n_coming_bytes += len(chunk)
                    if len(body) > MAX_BODY_BYTES:
                        raise ProxyError(
                            f"the request body is over {MAX_BODY_BYTES >> 20} MiB", 413
                        )
                    if len(body) > SMALL_BODY_BYTES and self.n_coming_bytes > MAX_COMING_BYTES:
                        message = f"over {MAX_COMING_BYTES >> 20} MiB of request bodies are coming"
                        raise TooManyRequests(message)
        except TimeoutError as error:
            message = f"the request body did not come within {BODY_SECONDS:.0f} s"
            raise ProxyError(message, 408) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            # aiohttp ends the bodies that are still coming before it ends their requests.
            raise ProxyStopped(_CUT) from None
        finally:
            self.n_coming_bytes -= len(body)
        if self.aliases or self.pool.has_models:
            return requests.with_alias(bytes(body), self.aliases)
        return bytes(body)
