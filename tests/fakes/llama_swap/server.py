"""The HTTP side: which requests name a model and how, what is answered here, what is passed on."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from tests.fakes.llama_swap import errors
from tests.fakes.llama_swap.config import Config, Model
from tests.fakes.llama_swap.keys import CREDENTIALS, require_key
from tests.fakes.llama_swap.listings import list_models, list_running
from tests.fakes.llama_swap.process import ModelProcess, StartFailed
from tests.fakes.llama_swap.scheduler import LimitReached, ModelUnloaded, Scheduler

BY_BODY = (
    *("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings"),
    *("/v1/messages", "/v1/messages/count_tokens", "/infill", "/completion"),
    *("/reranking", "/rerank", "/v1/rerank", "/v1/reranking"),
    *("/v/chat/completions", "/v/responses", "/v/completions", "/v/embeddings"),
    *("/v/messages", "/v/messages/count_tokens", "/v/rerank", "/v/reranking"),
)
MAX_BODY_BYTES = 1 << 30
_HOP_BY_HOP = ("connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
_PASSED_ON = aiohttp.ClientTimeout(total=None, sock_connect=30)


class LlamaSwap:
    """One llama-swap: its configuration, its processes, and who waits for which."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def app(self) -> web.Application:
        app = web.Application(
            middlewares=[errors.rendered, require_key(self._config.api_keys)],
            client_max_size=MAX_BODY_BYTES,
        )
        app.cleanup_ctx.append(self._run)
        for path in BY_BODY:
            app.router.add_post(path, self._by_body)
        app.router.add_get("/props", self._by_query, allow_head=False)
        app.router.add_route("*", "/upstream/{rest:.+}", self._upstream)
        app.router.add_get("/v1/models", self._models, allow_head=False)
        app.router.add_get("/running", self._running, allow_head=False)
        app.router.add_get("/health", _health, allow_head=False)
        app.router.add_get("/unload", self._unload, allow_head=False)
        app.router.add_post("/api/models/unload", self._unload_all)
        app.router.add_post("/api/models/unload/{model:.+}", self._unload_one)
        return app

    async def _run(self, app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(auto_decompress=False, timeout=_PASSED_ON) as client:
            self._client = client
            self._processes = {
                model.id: ModelProcess(model, client) for model in self._config.models.values()
            }
            self._scheduler = Scheduler(self._processes.values(), self._config.start_seconds)
            yield
            await self._scheduler.close()

    async def _by_body(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fields = _json_fields(request, body)
        requested = _named(request, body)
        model = self._find(requested)
        filtered = model.settings.filters.applied(fields, str(requested))
        if model.settings.use_model_name:
            filtered["model"] = model.settings.use_model_name
        if filtered != fields:
            body = json.dumps(filtered).encode()
        path = request.raw_path
        target = path.removeprefix("/v") if path[:3] == "/v/" else path
        told: web.StreamResponse | None = None
        if fields.get("stream") and path == "/v1/chat/completions":
            told = await self._tell_of_loading(request, model)
        return await self._serve(request, model, target, body, told)

    async def _tell_of_loading(
        self, request: web.Request, model: Model
    ) -> web.StreamResponse | None:
        """Begin the answer to who waits for a model, if that is wanted."""
        if not self._config.sends_loading_state or self._processes[model.id].state == "ready":
            return None
        told = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await told.prepare(request)
        delta = {"reasoning_content": f"llama-swap loading model: {model.id}\n"}
        event = json.dumps({"choices": [{"delta": delta}]})
        await told.write(f"data: {event}\n\n".encode())
        return told

    async def _by_query(self, request: web.Request) -> web.StreamResponse:
        model = self._find(request.query.get("model"))
        return await self._serve(request, model, request.raw_path, b"")

    def _find(self, name: object) -> Model:
        if not isinstance(name, str) or not name:
            raise errors.Refused(404, "no model id could be identified")
        model = self._config.find(name)
        if model is None:
            raise errors.Refused(404, "no router for requested model")
        return model

    async def _upstream(self, request: web.Request) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        name, model, rest = self._find_in_path(path.removeprefix("/upstream/"))
        if not rest:
            status = 301 if request.method in ("GET", "HEAD") else 308
            location = f"/upstream/{name}/" + (f"?{query}" if query else "")
            return web.Response(status=status, headers={"Location": location})
        is_ignored = any(re.search(each, unquote(rest)) for each in self._config.ignore_paths)
        if is_ignored and self._processes[model.id].state != "ready":
            message = f"model {model.id} is not loaded; path matches upstream.ignorePaths"
            raise errors.Refused(409, message)
        target = rest + (f"?{query}" if query else "")
        return await self._serve(request, model, target, await request.read())

    def _find_in_path(self, path: str) -> tuple[str, Model, str]:
        """Split a path after the longest name of a model that it begins with; names may have slashes."""
        segments = path.split("/")
        for n_segments in range(len(segments), 0, -1):
            name = unquote("/".join(segments[:n_segments]))
            model = self._config.find(name)
            if model is not None:
                rest = "".join("/" + segment for segment in segments[n_segments:])
                return name, model, rest
        raise errors.Refused(404, "model not found")

    async def _serve(
        self,
        request: web.Request,
        model: Model,
        target: str,
        body: bytes,
        told: web.StreamResponse | None = None,
    ) -> web.StreamResponse:
        process = self._processes[model.id]
        try:
            async with self._scheduler.serving(process):
                return await self._pass_on(request, model.proxy + target, body, told)
        except (StartFailed, ModelUnloaded) as error:
            raise errors.Refused(500, f"unspecific error: {error}") from None
        except LimitReached:
            raise errors.Refused(429, "Too many requests", {"Retry-After": "1"}) from None

    async def _pass_on(
        self,
        request: web.Request,
        url: str,
        body: bytes,
        response: web.StreamResponse | None = None,
    ) -> web.StreamResponse:
        dropped = ("content-length", *_HOP_BY_HOP, *(CREDENTIALS if self._config.api_keys else ()))
        try:
            async with self._client.request(
                request.method,
                URL(url, encoded=True),
                headers=_without(request.headers, dropped),
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
                data=body or None,
                allow_redirects=False,
            ) as answer:
                if response is None:
                    headers = _answer_headers(answer)
                    response = web.StreamResponse(status=answer.status, headers=headers)
                    await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
        except aiohttp.ClientError:
            # An answer that broke off ends as if it were whole: the real one cannot tell the client either.
            return response or web.Response(status=502)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        records = list_models(self._processes.values(), self._config.lists_aliases)
        return web.json_response({"data": records, "object": "list"})

    async def _running(self, request: web.Request) -> web.Response:
        return web.json_response({"running": list_running(self._processes.values())})

    async def _unload(self, request: web.Request) -> web.Response:
        await self._scheduler.unload(list(self._processes.values()))
        return web.Response(text="OK")

    async def _unload_all(self, request: web.Request) -> web.Response:
        await self._scheduler.unload(list(self._processes.values()))
        return web.json_response({"msg": "ok"})

    async def _unload_one(self, request: web.Request) -> web.Response:
        model = self._config.find(request.match_info["model"])
        if model is None:
            raise errors.Refused(404, "model not found")
        await self._scheduler.unload([self._processes[model.id]])
        return web.Response(text="OK")


async def _health(request: web.Request) -> web.Response:
    return web.Response(text="OK")


def _named(request: web.Request, body: bytes) -> object:
    """Return the model that a request names: of repeated keys the first counts, as in gjson.

    Without the type of JSON, llama-swap looks for a form, and for that in the query, too.
    """
    if "application/json" not in request.headers.get("Content-Type", ""):
        return request.query.get("model")
    try:
        fields = json.loads(body, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    except ValueError:
        return None
    return fields.get("model") if isinstance(fields, dict) else None


def _json_fields(request: web.Request, body: bytes) -> dict[str, Any]:
    if "application/json" not in request.headers.get("Content-Type", ""):
        return {}
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _without(headers: CIMultiDictProxy[str], dropped: tuple[str, ...]) -> CIMultiDict[str]:
    kept = (pair for pair in headers.items() if pair[0].lower() not in dropped)
    return CIMultiDict(kept)


def _answer_headers(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    headers = _without(answer.headers, _HOP_BY_HOP)
    for name in [name for name in headers if name.lower().startswith("access-control-")]:
        headers.popall(name, None)
    if "text/event-stream" in answer.headers.get("Content-Type", "").lower():
        headers["X-Accel-Buffering"] = "no"
    return headers
