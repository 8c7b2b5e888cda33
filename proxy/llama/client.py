"""llama-server's JSON replies, as far as the proxy reads them; unknown fields are ignored."""

import asyncio
import io
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec
from yarl import URL

from proxy.core.model import SlotId
from proxy.core.tokens import TokenIds, token_ids
from proxy.errors import (
    UpstreamFault,
    UpstreamLost,
    UpstreamRefused,
    UpstreamSlow,
    UpstreamUnreachable,
)
from proxy.llama.routes import Target

# llama-server's JSON replies, as far as the proxy reads them; unknown fields are ignored.


class GenerationDefaults(msgspec.Struct):
    n_ctx: int = 0


class Props(msgspec.Struct):
    """GET /props. `media_marker` is new in every process, so it names the process."""

    total_slots: int = 0
    media_marker: str = ""
    model_path: str = ""
    build_info: str = ""
    is_sleeping: bool = False
    default_generation_settings: GenerationDefaults = msgspec.field(
        default_factory=GenerationDefaults
    )
    modalities: dict[str, Any] = {}


class SlotStatus(msgspec.Struct):
    """One entry of GET /slots; `id_task` and `n_prompt_tokens` are absent until the slot has run a task.

    `n_prompt_tokens` is how many tokens the slot holds; a restore alone does not set it. Builds before May
    2026 (b9294) never tell it.
    """

    id: int
    is_processing: bool = False
    id_task: int = -1
    n_prompt_tokens: int | None = None

    @property
    def n_held(self) -> int | None:
        """How many tokens the slot holds, as far as tasks have put them there; None if it is not told."""
        return 0 if self.id_task < 0 else self.n_prompt_tokens


class Timings(msgspec.Struct, frozen=True):
    """What a generation reused and evaluated; cache_n + prompt_n is the prompt's length."""

    cache_n: int
    prompt_n: int
    prompt_ms: float = 0.0
    predicted_n: int = 0


class Saved(msgspec.Struct):
    n_saved: int
    n_written: int


class Restored(msgspec.Struct):
    n_restored: int


class Evaluated(msgspec.Struct):
    """A /completion reply of which only the accounting and the slot matter."""

    timings: Timings
    id_slot: int = -1


class Probability(msgspec.Struct):
    id: int
    logprob: float


class TokenProbabilities(msgspec.Struct):
    top_logprobs: list[Probability]


class Canary(msgspec.Struct):
    """A /completion reply with n_probs."""

    completion_probabilities: list[TokenProbabilities]


class AppliedTemplate(msgspec.Struct):
    prompt: str


class Tokenized(msgspec.Struct):
    tokens: list[int]


class TokenPiece(msgspec.Struct):
    id: int
    piece: str | list[int]


class TokenizedPieces(msgspec.Struct):
    tokens: list[TokenPiece]


class ModelMeta(msgspec.Struct):
    n_vocab: int = 0
    n_params: int = 0
    size: int = 0


class ModelEntry(msgspec.Struct):
    id: str = ""
    meta: ModelMeta | None = None


class ModelList(msgspec.Struct):
    data: list[ModelEntry] = []


class LoraAdapter(msgspec.Struct):
    id: int
    path: str = ""
    scale: float = 0.0


class ErrorDetail(msgspec.Struct):
    message: str = ""


class ErrorReply(msgspec.Struct):
    error: ErrorDetail


# What waits for an answer of llama-server at the moment, so that it can be cut off when that is gone.
#
# Told to end, llama-server stops decoding and takes no more connections, but then waits for the clients
# of the requests that it will not answer: until they hang up, or somebody kills it (server-http.cpp,
# SIGTERM).


class Cuttable(Protocol):
    """One exchange; `heard_at` is when llama-server last said something in it, of the monotonic clock."""

    @property
    def heard_at(self) -> float: ...

    def cut(self) -> None: ...


class Call:
    """A call that ends in TimeoutError when it is cut."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self.heard_at = time.monotonic()

    def cut(self) -> None:
        with suppress(RuntimeError):  # it is just ending by itself, or has been cut already
            self._limit.reschedule(asyncio.get_running_loop().time())


class Pending:
    """All that waits."""

    def __init__(self) -> None:
        self._waiting: set[Cuttable] = set()

    @contextmanager
    def noted(self, exchange: Cuttable) -> Iterator[None]:
        """Let an exchange be cut while the block runs."""
        self._waiting.add(exchange)
        try:
            yield
        finally:
            self._waiting.discard(exchange)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Let whatever is awaited in the block be cut: it ends in TimeoutError."""
        async with asyncio.timeout(None) as limit:
            with self.noted(Call(limit)):
                yield

    def cut_silent(self, seconds: float) -> int:
        """Cut what llama-server has said nothing to for so long; return how many."""
        silent = [e for e in self._waiting if e.heard_at <= time.monotonic() - seconds]
        for exchange in silent:
            exchange.cut()
        return len(silent)


# The calls that the proxy itself makes to llama-server, and the quirks of their replies.
#
# The only file that knows llama-server's URLs and request fields (the bodies of clients' own requests are
# `upstream.bodies`'s). Every method raises UpstreamUnreachable if there was no answer and UpstreamRefused
# if it was an error.


T = TypeVar("T")
Headers = Mapping[str, str]

_NO_KEY = {"Accept": "*/*"}
QUICK_SECONDS = 10.0
"""For calls that llama-server answers beside decoding; more means that it is not well."""
_RANDOM_MARKER = re.compile(r"<__media_\w{32}__>")
SLOT_ACTION_SECONDS = 300.0
"""Saves and restores wait for the running batch and then for the disk, many GiB at worst."""


def new_session() -> aiohttp.ClientSession:
    """Return the client session for all traffic to llama-server.

    Connections are not kept alive: llama-server closes idle ones when it likes, and a POST that meets
    a closed one cannot be repeated safely. On loopback a new one costs a tenth of a millisecond.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=65536,
        max_field_size=65536,
    )


class LlamaServer:
    """One llama-server, by its target."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        api_key: str | None,
    ) -> None:
        self.session = session
        self.pending = Pending()
        self.target = target
        self.require_loaded: Callable[[], None] = lambda: None
        """Raises UpstreamUnreachable while it must not be asked."""
        self.api_key = api_key
        self.keeps_points_of_others = False
        """Whether a slot keeps its context checkpoints over an erase and a restore, so that a restored
        state would be continued at those of another prompt: builds before July 2026 (b10068)."""
        self.own_headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def at(self, target: Target) -> "LlamaServer":
        """Return another llama-server that takes the same key."""
        return LlamaServer(self.session, target, self.api_key)

    def url(self, raw_path: str) -> URL:
        """Return the URL of a client's path with its query, left exactly as the client encoded it."""
        return URL(self.target.base_url + raw_path, encoded=True)

    def _own_url(self, method: str, path: str) -> URL:
        return self.url(self.target.path(method, path))

    async def is_ready(self) -> bool:
        """Return whether the model is loaded: until then GET /health is 503 (server-http.cpp)."""
        try:
            await self._read("GET", "/health", seconds=QUICK_SECONDS)
        except UpstreamFault:
            return False
        return True

    async def takes_key(self, keys: Headers, path: str = "/props") -> bool:
        """Return whether a client that sends *keys* is answered; raises UpstreamFault if nobody is.

        /props needs a key on every build, /models does not on some (server-http.cpp).
        """
        try:
            await self._read("GET", path, headers=keys or _NO_KEY, seconds=QUICK_SECONDS)
        except UpstreamRefused as refusal:
            if refusal.status not in (401, 403):
                raise
            return False
        return True

    async def props(self) -> Props:
        return await self.call("GET", "/props", Props, seconds=QUICK_SECONDS)

    async def process_id(self, props: Props) -> str:
        """Return a mark of the process that answered with *props*.

        The media marker is random in every process, unless LLAMA_MEDIA_MARKER fixes it; then the start
        time is asked for, which resets the two "since last scrape" gauges of /metrics. Empty if there is
        neither: then a restart cannot be told.
        """
        if _RANDOM_MARKER.fullmatch(props.media_marker):
            return props.media_marker
        url, limit = self._own_url("GET", "/metrics"), aiohttp.ClientTimeout(total=QUICK_SECONDS)
        try:
            async with self.session.get(url, headers=self.own_headers, timeout=limit) as reply:
                return reply.headers.get("Process-Start-Time-Unix", "")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamUnreachable(f"GET /metrics: {reason_of(error)}") from error

    async def slots(self) -> list[SlotStatus]:
        """Return the slots' states; 501 (UpstreamRefused) under --no-slots."""
        return await self.call("GET", "/slots", list[SlotStatus], seconds=SLOT_ACTION_SECONDS)

    async def model_meta(self) -> ModelMeta:
        models = await self.call("GET", "/v1/models", ModelList, seconds=QUICK_SECONDS)
        metas = (m.meta for m in models.data if m.meta and self.target.is_listed_as(m.id))
        return next(metas, ModelMeta())

    async def lora_adapters(self) -> list[LoraAdapter]:
        return await self.call("GET", "/lora-adapters", list[LoraAdapter], seconds=QUICK_SECONDS)

    async def apply_template(self, body: bytes, headers: Headers) -> str:
        """Render a chat body; the same parser as /v1/chat/completions reads it."""
        reply = await self.call("POST", "/apply-template", AppliedTemplate, body, headers)
        return reply.prompt

    async def tokenize(self, content: Any, headers: Headers, *, add_special: bool) -> TokenIds:
        """Tokenize a string or a mixed list as llama-server does for a prompt.

        A prompt is tokenized with add_special and parse_special; /tokenize leaves out BOS by default
        (server-context.cpp, handle_completions_impl against post_tokenize).
        """
        body = {"content": content, "add_special": add_special, "parse_special": True}
        reply = await self.call("POST", "/tokenize", Tokenized, body, headers)
        return token_ids(reply.tokens)

    async def tokenize_plain(self, text: str, headers: Headers) -> list[int]:
        """Tokenize *text* with special tokens read as ordinary text."""
        body = {"content": text, "add_special": False, "parse_special": False}
        return (await self.call("POST", "/tokenize", Tokenized, body, headers)).tokens

    async def pieces(self, text: str, headers: Headers) -> TokenizedPieces:
        body = {"content": text, "add_special": True, "parse_special": True, "with_pieces": True}
        return await self.call("POST", "/tokenize", TokenizedPieces, body, headers)

    async def evaluate(
        self, slot_id: SlotId, tokens: TokenIds, headers: Headers | None = None
    ) -> Timings:
        """Evaluate *tokens* in a slot, so that it holds exactly them.

        n_predict 0 still samples one token, but that one is never decoded
        (server-context.cpp, process_token).
        """
        prompt = {"prompt": tokens.tolist(), "n_predict": 0}
        body = {**prompt, "id_slot": slot_id, "cache_prompt": True, "n_cache_reuse": 0}
        reply = await self.call("POST", "/completion", Evaluated, body, headers, seconds=None)
        return reply.timings

    async def evaluate_anywhere(self, tokens: TokenIds) -> Evaluated:
        """Evaluate *tokens* in the slot that llama-server chooses, idle or as soon as one is."""
        body = {"prompt": tokens.tolist(), "n_predict": 0, "cache_prompt": True, "n_cache_reuse": 0}
        return await self.call("POST", "/completion", Evaluated, body, seconds=None)

    async def overwrite(self, slot_id: SlotId) -> None:
        """Make a slot hold one token, and nothing of what it held."""
        body = {"prompt": [0], "n_predict": 0, "id_slot": slot_id, "cache_prompt": False}
        await self.call("POST", "/completion", Evaluated, body, seconds=None)

    async def canary(self, slot_id: SlotId, tokens: TokenIds) -> list[tuple[int, float]]:
        """Evaluate *tokens* from nothing; return the ten likeliest next tokens with log-probabilities."""
        body = {
            "prompt": tokens.tolist(),
            "n_predict": 1,
            "n_probs": 10,
            "temperature": 0.0,
            "id_slot": slot_id,
            "cache_prompt": False,
        }
        reply = await self.call("POST", "/completion", Canary, body, seconds=None)
        if not reply.completion_probabilities:
            raise UpstreamRefused(200, "no probabilities in the reply to n_probs")
        return [(p.id, p.logprob) for p in reply.completion_probabilities[0].top_logprobs]

    async def has_slot_save_path(self) -> bool:
        """Return whether slots can be saved, without touching one; raises UpstreamFault.

        The path is looked for before the file name, and "/" never is one (server-context.cpp,
        post_slots and handle_slots_save).
        """
        try:
            await self.save(SlotId(0), "/")
        except UpstreamRefused as refusal:
            if refusal.status == 400:
                return True
            if refusal.status == 501:
                return False
            raise
        return True

    async def save(self, slot_id: SlotId, file_name: str) -> Saved:
        return await self._slot_action(slot_id, "save", Saved, {"filename": file_name})

    async def restore(self, slot_id: SlotId, file_name: str) -> Restored:
        """Load a state; any failure leaves the slot empty (server-context.cpp, SLOT_RESTORE)."""
        if self.keeps_points_of_others:
            await self.overwrite(slot_id)  # a prompt that reuses nothing drops them
        return await self._slot_action(slot_id, "restore", Restored, {"filename": file_name})

    async def erase(self, slot_id: SlotId) -> None:
        await self._slot_action(slot_id, "erase", dict[str, Any], {})

    async def _slot_action(
        self, slot_id: SlotId, action: str, reply_type: type[T], body: dict[str, str]
    ) -> T:
        path = f"/slots/{slot_id}?action={action}"
        return await self.call("POST", path, reply_type, body, seconds=SLOT_ACTION_SECONDS)

    async def call(
        self,
        method: str,
        path: str,
        reply_type: type[T],
        body: Any = None,
        headers: Headers | None = None,
        *,
        seconds: float | None = 60.0,
    ) -> T:
        """Make one call of the proxy's own; returns its reply, read as *reply_type*."""
        content = await self._read(method, path, body, headers, seconds=seconds)
        try:
            return msgspec.json.decode(content, type=reply_type)
        except msgspec.DecodeError as error:
            raise UpstreamRefused(200, f"{path}: reply not understood: {error}") from error

    async def _read(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Headers | None = None,
        *,
        seconds: float | None,
    ) -> bytes:
        self.require_loaded()
        data = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        data = self.target.body(data)
        sent = {"Content-Type": "application/json", **(headers or self.own_headers)}
        try:
            async with (
                self.pending.call(),
                self.session.request(
                    method,
                    self._own_url(method, path),
                    data=None if data is None else io.BytesIO(data),
                    headers=sent,
                    timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=5.0),
                ) as response,
            ):
                status, content = response.status, await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise UpstreamUnreachable(f"{method} {path}: {reason_of(error)}") from error
        except TimeoutError as error:
            raise UpstreamSlow(f"{method} {path}: no answer in time") from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamUnreachable(f"{method} {path}: {reason_of(error)}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamLost(f"{method} {path}: {reason_of(error)}") from error
        is_unreached = self.target.says_unreached(status, content)
        if self.target.says_gone(content) or (is_unreached and not self.target.tells_unreached):
            raise UpstreamLost(f"{method} {path}: {self.target.name} has ended")
        if status == 200:
            return content
        if is_unreached:
            raise UpstreamUnreachable(f"{method} {path}: {self.target.name} has ended")
        raise UpstreamRefused(status, _error_message(content))


def reason_of(error: Exception) -> str:
    """Return why a connection failed, in words for a person."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}"
    return str(error) or type(error).__name__


def _error_message(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=ErrorReply).error.message
    except msgspec.DecodeError:
        return content[:200].decode(errors="replace")
