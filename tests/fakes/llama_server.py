"""A scripted llama-server: for faults and rules that the real one cannot be made to show.

It keeps tokens per slot, writes and reads real state files, and tells in `timings` what it reused. What
it answers is deterministic; what goes wrong is `faults`, and `hold` stops it wherever a test wants to
look. Everything that was asked of it is in `seen`, byte for byte.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from multidict import CIMultiDictProxy

from tests.fakes import tokenizer
from tests.fakes.faults import Faults, Gate
from tests.fakes.generation import PATHS, Generation, Shape, generate, n_predict
from tests.fakes.slot_files import StateFileRefused, read_slot_file, write_slot_file
from tests.fakes.slots import Memory, Slot
from tests.lab.server import find_free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PUBLIC = ("/health",)
IN_SLOT = ("save", "restore", "erase", "evaluate", "generate")
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it came in."""

    method: str
    path: str
    place: str
    headers: CIMultiDictProxy[str]
    body: bytes
    n_process: int

    @property
    def fields(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


@dataclass(eq=False)
class Process:
    """What does not outlive a restart."""

    media_marker: str
    slots: list[Slot]
    n_tasks: int = 0
    displaced: list[Slot] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class FakeLlamaServer:
    """A llama-server on a loopback port of its own, in the test's event loop."""

    def __init__(
        self,
        directory: Path,
        *,
        memory: Memory = Memory.ANY_PREFIX,
        n_slots: int = 2,
        n_ctx: int | None = None,
        file_version: int = 4,
        api_keys: tuple[str, ...] = (),
        media_marker: str | None = None,
        has_generation_prompt: bool = True,
        faults: Faults | None = None,
    ) -> None:
        self.directory = directory
        self.memory = memory
        self.n_slots = n_slots
        # What a window or context checkpoints are good for shows only in a long state.
        needs_long = memory in (Memory.RESTORE_POINTS, Memory.CUT_WINDOW)
        self.n_ctx = n_ctx or (4096 if needs_long else 2048)
        self.file_version = file_version
        self.api_keys = api_keys
        self.keys_that_may_not_look: tuple[str, ...] = ()
        """Those for which something before this server refuses /props."""
        self.fixed_media_marker = media_marker
        self.has_generation_prompt = has_generation_prompt
        self.faults = faults or Faults()
        self.seen: list[Seen] = []
        self.n_evaluated = 0
        self.n_chunks_sent = 0
        self.parsing: web.Request | None = None
        """The request that was held at "parse" last."""
        self.n_processes = 0
        self.port = 0
        self._gates: dict[str, Gate] = {}
        self.process = self._new_process()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def process_id(self) -> str:
        """What tells this process from the one before: its marker, or else when it started."""
        return str(self.n_processes) if self.fixed_media_marker else self.process.media_marker

    @property
    def slots(self) -> list[Slot]:
        return self.process.slots

    async def __aenter__(self) -> "FakeLlamaServer":
        app = web.Application(client_max_size=1 << 30, middlewares=[self._admit])
        app.router.add_route("*", "/{path:.*}", self._route)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=10.0, auto_decompress=False
        )
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.process.gone.set()
        await self._runner.cleanup()

    async def listen(self) -> None:
        # Of those that the kernel gives away, another connection may have it when this server comes back.
        self.port = self.port or find_free_port()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()

    async def crash(self) -> None:
        """Die: what runs breaks off, and nothing listens any more until `restart`."""
        self.process.gone.set()
        await self._site.stop()

    async def shut_down(self) -> None:
        """Take no more connections, answer nothing any more, and wait for the clients to leave."""
        await self._site.stop()

    async def restart(self) -> None:
        self.process = self._new_process()
        await self.listen()

    def replace_process(self, *, ends_calls: bool = True) -> None:
        """Die and be back at once, empty; without *ends_calls* the old process still answers its last."""
        if ends_calls:
            self.process.gone.set()
        self.process = self._new_process()

    def hold(self, place: str, n_calls: int | None = None) -> Gate:
        """Stop the next *n_calls* calls at *place*, or all, until the gate is opened."""
        self._gates[place] = Gate(n_calls)
        return self._gates[place]

    @property
    def is_parsing_for_nobody(self) -> bool:
        """Whether the client of the request that was held at "parse" last is gone."""
        return self.parsing is not None and _is_gone(self.parsing)

    @property
    def held(self) -> frozenset[str]:
        """The places where calls are stopped now."""
        return frozenset(self._gates)

    def release(self, place: str) -> None:
        self._gates.pop(place).open()

    def release_all(self) -> None:
        for place in list(self._gates):
            self.release(place)

    def seen_at(self, place: str) -> list[Seen]:
        return [request for request in self.seen if request.place == place]

    def _new_process(self) -> Process:
        self.n_processes += 1
        marker = self.fixed_media_marker or f"<__media_{secrets.token_hex(16)}__>"
        return Process(marker, [Slot(i, self.memory) for i in range(self.n_slots)])

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record a request and let it run until this process dies."""
        body = await request.read()
        place = _place(request, body)
        self.seen.append(
            Seen(request.method, request.raw_path, place, request.headers, body, self.n_processes)
        )
        process = self.process
        work = asyncio.ensure_future(self._answer(place, request, handler))
        gone = asyncio.ensure_future(process.gone.wait())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not process.gone.is_set():
            return await self._spoilt(place, request, work.result())
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return self._lost(request)

    async def _spoilt(
        self, place: str, request: web.Request, answer: web.StreamResponse
    ) -> web.StreamResponse:
        """Return an answer as it leaves: whole, but for scripted faults."""
        if isinstance(answer, web.Response) and isinstance(answer.body, bytes):
            if place in self.faults.break_off:
                return await self._half(request, answer.body)
            if place in self.faults.cut_short:
                half = answer.body[: len(answer.body) // 2]
                return web.Response(body=half, content_type="application/json")
        return answer

    async def _answer(
        self, place: str, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        if self.faults.is_loading:
            return _error(503, "Loading model", "unavailable_error")
        if self.api_keys and request.path not in PUBLIC and _key(request) not in self.api_keys:
            return _error(401, "Invalid API Key", "authentication_error")
        if place == "props" and _key(request) in self.keys_that_may_not_look:
            return _error(403, "Forbidden", "permission_error")
        if place not in IN_SLOT:
            if trouble := await self._trouble(place, request):
                return trouble
        return await handler(request)

    async def _trouble(self, place: str, request: web.Request) -> web.Response | None:
        """Return what goes wrong at a place, None if nothing does."""
        await asyncio.sleep(self.faults.slow_seconds.get(place, 0.0))
        if gate := self._gates.get(place):
            await gate.arrive()
        if place in self.faults.drop or self._dies(place):
            return self._lost(request)
        if status := self.faults.refuse.get(place):
            return _error(status, f"scripted fault at {place}", "server_error")
        return None

    def _lost(self, request: web.Request) -> web.Response:
        """Cut the connection, or answer as a gateway does whose connection to this process was cut."""
        has_begun = request.writer.output_size > 0
        if has_begun or not self.faults.has_gateway:
            return _cut(request)
        page = "<html><h1>502 Bad Gateway</h1>"
        return web.Response(status=502, text=page, content_type="text/html")

    def _dies(self, place: str) -> bool:
        """Return whether this process ends here; the next one is there then."""
        if not self.faults.dies_at.get(place):
            return False
        self.faults.dies_at[place] -= 1
        self.replace_process()
        return True

    async def _route(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in PATHS and request.method == "POST":
            return await self._generate(request, PATHS[path])
        if path.startswith("/slots/"):
            return await self._slot_action(request, int(path.split("/")[2]) % self.n_slots)
        routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/props"): self._props,
            ("GET", "/slots"): self._slots,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("GET", "/lora-adapters"): self._lora_adapters,
            ("POST", "/apply-template"): self._apply_template,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/echo"): self._echo,
        }
        handler = routes.get((request.method, path))
        return await handler(request) if handler else _error(404, "File Not Found", "not_found")

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _props(self, request: web.Request) -> web.Response:
        props = {
            "total_slots": self.n_slots,
            "media_marker": self.process.media_marker,
            "build_info": "b1-scripted",
            "model_path": "/nowhere/scripted.gguf",
            "default_generation_settings": {"n_ctx": self.n_ctx},
            "modalities": {"vision": True},
        }
        return _json(props | self.faults.props)

    async def _slots(self, request: web.Request) -> web.Response:
        return _json(
            [
                {
                    "id": s.id,
                    "is_processing": s.is_processing,
                    "id_task": s.id_task,
                    "n_prompt_tokens": len(s.tokens),
                }
                for s in self.slots
            ]
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"Process-Start-Time-Unix": str(self.n_processes)}
        return web.Response(body=b"", headers=headers)

    async def _models(self, request: web.Request) -> web.Response:
        meta = {"n_vocab": tokenizer.N_VOCAB, "n_params": 1, "size": 1} | self.faults.meta
        return _json({"data": [{"id": "scripted", "meta": meta}]})

    async def _lora_adapters(self, request: web.Request) -> web.Response:
        return _json([])

    async def _apply_template(self, request: web.Request) -> web.Response:
        if b"image_url" in await request.read():
            return _error(400, "image input is not supported", "invalid_request_error")
        return _json({"prompt": self._render(await request.json())})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        content, add_special = body.get("content", []), body.get("add_special", False)
        tokens = tokenizer.tokenize_parts(content, add_special=add_special)
        if body.get("with_pieces"):
            pieces = [*[""] * add_special, *tokenizer.pieces(content)]
            listed = [{"id": t, "piece": p} for t, p in zip(tokens, pieces, strict=True)]
            return _json({"tokens": listed})
        return _json({"tokens": tokens})

    async def _echo(self, request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    def _render(self, body: dict[str, Any]) -> str:
        return tokenizer.render(body, has_generation_prompt=self.has_generation_prompt)

    async def _slot_action(self, request: web.Request, slot_id: int) -> web.StreamResponse:
        slot, place = self.slots[slot_id], request.query["action"]
        if place != "erase" and "/" in (await request.json())["filename"]:
            return _error(400, "Invalid filename", "invalid_request_error")
        async with slot.lock:
            trouble = await self._trouble(place, request)
            if self.faults.forgets_dropped_actions and _is_gone(request):
                return _cut(request)
            if place == "save":
                return self._save(slot, await self._file(request), trouble)
            slot.clear()  # a restore that fails has done that too
            if trouble is not None:
                return trouble
            return (
                self._restore(slot, await self._file(request)) if place == "restore" else _json({})
            )

    async def _file(self, request: web.Request) -> Path:
        name: str = (await request.json())["filename"]
        return self.directory / name

    def _save(self, slot: Slot, path: Path, trouble: web.Response | None) -> web.Response:
        if trouble is not None:
            if trouble.status == 500:
                path.write_bytes(b"ggsq, and then the disk was full")
            return trouble
        state = slot.state()
        if self.faults.saves_other_tokens:
            state.tokens[:] = [token + 1 for token in state.tokens[:-1]]
        n_bytes = write_slot_file(path, state, self.file_version)
        if self.faults.saves_nothing:
            path.unlink()
        if self.faults.n_bytes_lost:
            os.truncate(path, n_bytes - self.faults.n_bytes_lost)
        return _json({"id_slot": slot.id, "n_saved": len(state.tokens), "n_written": n_bytes})

    def _restore(self, slot: Slot, path: Path) -> web.Response:
        try:
            has_window = self.memory is Memory.CUT_WINDOW
            state = read_slot_file(path, self.file_version, has_window=has_window)
            n_read = path.stat().st_size
        except (StateFileRefused, FileNotFoundError) as refusal:
            return _error(400, f"Unable to restore slot: {refusal}", "invalid_request_error")
        slot.load(state)
        slot.is_inert = slot.is_inert or self.faults.restores_are_inert
        return _json({"id_slot": slot.id, "n_restored": len(state.tokens), "n_read": n_read})

    async def _generate(self, request: web.Request, shape: Shape) -> web.StreamResponse:
        try:
            body = await request.json()
            prompt = self._prompt(shape, body)
        except (ValueError, LookupError, AttributeError) as error:
            return _error(500, f"parse error: {error}", "server_error")
        if not prompt:
            return _error(400, "the prompt is empty", "invalid_request_error")
        if _n_predict(await request.read()) != 0 and (gate := self._gates.get("parse")):
            self.parsing = request
            await gate.arrive()
        slot = self._choose(-1 if shape is Shape.ANTHROPIC else body.get("id_slot", -1), prompt)
        async with slot.lock:
            slot.is_processing = True
            try:
                answer = await self._run(request, shape, body, prompt, slot)
            finally:
                slot.is_processing = False
        if _n_predict(await request.read()) != 0 and (gate := self._gates.get("answered")):
            await gate.arrive()
        return answer

    async def _run(
        self,
        request: web.Request,
        shape: Shape,
        body: dict[str, Any],
        prompt: list[int],
        slot: Slot,
    ) -> web.StreamResponse:
        """Generate in a slot, until it is done or the client is gone."""
        self._begin(slot)
        place = "evaluate" if body.get("n_predict") == 0 else "generate"
        if place == "generate" and self.faults.n_out_of_cells:
            self.faults.n_out_of_cells -= 1
            slot.clear()
            return _error(500, "Context size has been exceeded.", "server_error")
        trouble = await _while_wanted(request, self._trouble(place, request))
        if trouble is not None:
            return trouble
        if place == "generate" and "n_probs" not in body and self._dies("answer"):
            return self._lost(request)
        if self.faults.has_native_cache:
            self._bring_back(slot, prompt)
        n_reused = slot.evaluate(prompt, reuses=body.get("cache_prompt", True))
        self.n_evaluated += len(prompt) - n_reused
        pieces = generate(prompt, n_predict(body))
        done = Generation(slot.id, len(prompt), n_reused, pieces, bool(body.get("n_probs")))
        if body.get("stream"):
            return await self._stream(request, slot, done, shape)
        slot.tokens += done.tokens_decoded(len(pieces))
        if self.faults.dies_after_chunks is not None:
            return await self._half(request, json.dumps(done.whole(shape)).encode())
        return _json(done.whole(shape))

    async def _half(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(body)
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        return _cut(request)

    def _begin(self, slot: Slot) -> None:
        self.process.n_tasks += 1
        slot.id_task = self.process.n_tasks
        if self.faults.clears_idle_slots:
            for other in self.slots:
                if not other.is_processing:
                    other.clear()

    def _bring_back(self, slot: Slot, prompt: list[int]) -> None:
        """Swap what the slot holds for something displaced that has more of the prompt."""
        displaced = self.process.displaced
        best = max((slot, *displaced), key=lambda held: held.n_common(prompt))
        displaced.append(replace(slot))
        slot.tokens, slot.points = best.tokens, best.points

    async def _stream(
        self, request: web.Request, slot: Slot, done: Generation, shape: Shape
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        n_sent = 0
        try:
            await response.prepare(request)
            if self._dies("stream"):
                return _cut(request)
            for event in done.events(shape):
                if n_sent == self.faults.dies_after_chunks:
                    return _cut(request)
                if n_sent and (gate := self._gates.get("chunk")):
                    await gate.arrive()
                if _is_gone(request):
                    break
                if self.faults.dies_at.get("event"):
                    await response.write(event[: len(event) // 2])
                    if gate := self._gates.get("event"):
                        await gate.arrive()
                    self._dies("event")
                    return _cut(request)
                await response.write(event)
                n_sent += 1
                self.n_chunks_sent += 1
                await asyncio.sleep(self.faults.chunk_seconds)
        except ConnectionResetError:
            pass  # the client has left
        finally:
            slot.tokens += done.tokens_decoded(n_sent)
        return response

    def _prompt(self, shape: Shape, body: dict[str, Any]) -> list[int]:
        if shape in (Shape.NATIVE, Shape.OPENAI_TEXT):
            prompt = body.get("prompt", "")
            return tokenizer.tokenize_parts(prompt, add_special=not isinstance(prompt, list))
        chat = tokenizer.from_anthropic(body) if shape is Shape.ANTHROPIC else body
        tokens = tokenizer.tokenize(self._render(chat))
        return self.faults.retokenize(body, tokens) if self.faults.retokenize else tokens

    def _choose(self, id_slot: int, prompt: list[int]) -> Slot:
        """Return the slot asked for, else the most alike of the idle ones."""
        if id_slot >= 0:
            return self.slots[id_slot % self.n_slots]
        idle = [slot for slot in self.slots if not slot.is_processing] or self.slots
        return max(idle, key=lambda slot: slot.n_common(prompt))


def _place(request: web.Request, body: bytes) -> str:
    if request.path.startswith("/slots/"):
        return request.query["action"]
    if request.path not in PATHS:
        return request.path.rsplit("/", 1)[-1]
    return "evaluate" if _n_predict(body) == 0 else "generate"


def _n_predict(body: bytes) -> Any:
    try:
        return json.loads(body).get("n_predict")
    except (ValueError, AttributeError):
        return None


def _key(request: web.Request) -> str:
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return bearer or request.headers.get("X-Api-Key", "")


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _while_wanted(
    request: web.Request, work: Coroutine[Any, Any, web.Response | None]
) -> web.Response | None:
    """Await *work*, but look now and then whether the client is still there."""
    task = asyncio.ensure_future(work)
    while not task.done() and not _is_gone(request):
        await asyncio.wait({task}, timeout=_LOOK_SECONDS)
    if task.done():
        return task.result()
    task.cancel()
    return _cut(request)


def _cut(request: web.Request) -> web.Response:
    """Close the connection; what is returned can no longer be sent."""
    if request.transport is not None:
        request.transport.close()
    return web.Response()


def _json(content: Any) -> web.Response:
    return web.json_response(content)


def _error(status: int, message: str, kind: str) -> web.Response:
    error = {"code": status, "message": message, "type": kind}
    compact = partial(json.dumps, separators=(",", ":"))  # as llama-server writes
    return web.json_response({"error": error}, status=status, dumps=compact)
