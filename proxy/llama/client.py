"""The calls that the proxy itself makes to llama-server, and llama-server's replies.

The only file that knows llama-server's URLs and request fields; `llama/requests.py` knows
clients' own requests. Of replies, only the fields that the proxy reads are named; others are ignored.
"""

import asyncio
import io
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from proxy.core.messages import error_text, list_of, member, object_in, text_of
from proxy.core.model import Canary, SlotId
from proxy.core.tokens import TokenIds, token_ids
from proxy.errors import UpstreamLost, UpstreamRefused, UpstreamSlow, UpstreamUnreachable
from proxy.llama.connection import NOT_CONNECTED, Reply, literal_address, read_most, reason_of, send

T = TypeVar("T")
Headers = Mapping[str, str]
Body = bytes | AsyncIterable[bytes] | None

_OWN = {"Content-Type": "application/json", "Connection": "close"}
"""A new connection for each call: a kept one could still lead to a process that is going."""
SENT_BY, OWN_ID = "X-Prefix-Cache-Sent-By", token_hex(8)
"""A header of requests that are passed on: one that leads back to the proxy would go round without end."""
QUICK_SECONDS = 10.0
"""For calls that llama-server answers while it decodes; if it takes longer, something is wrong."""
SLOT_ACTION_SECONDS = 300.0
"""Saves and restores wait for the running batch and then for the disk, many GiB at worst."""
MEDIA_MARKER = re.compile(r"<__media_\w{32}__>")
"""What stands for an image or a sound in a rendering, unless LLAMA_MEDIA_MARKER sets it."""


class Props(msgspec.Struct):
    """GET /props. `media_marker` is new in every process, so it identifies the process.

    `role` is "router" if llama-server hosts several models. `max_instances` models may be loaded at once;
    0 means any number. Without `models_autoload` a request for a model that is not loaded is refused.
    """

    total_slots: int = 0
    media_marker: str = ""
    model_path: str = ""
    build_info: str = ""
    is_sleeping: bool = False
    default_generation_settings: dict[str, Any] = {}
    modalities: dict[str, Any] = {}
    role: str = ""
    max_instances: int | None = None
    models_autoload: bool = True

    @property
    def n_ctx(self) -> int:
        """The context of one slot."""
        n_ctx = self.default_generation_settings.get("n_ctx")
        return n_ctx if isinstance(n_ctx, int) else 0


class SlotStatus(msgspec.Struct):
    """One entry of GET /slots; `id_task` and `n_prompt_tokens` are absent until the slot has run a task.

    `n_prompt_tokens` is the number of tokens in the slot; a restore alone does not set it. Builds before
    May 2026 (b9294) do not report it.
    """

    id: int
    is_processing: bool = False
    id_task: int = -1
    n_prompt_tokens: int | None = None
    n_prompt_tokens_processed: int | None = None
    n_prompt_tokens_cache: int | None = None
    next_token: Any = None

    @property
    def n_generated(self) -> int:
        """How many tokens were generated."""
        return sum(int(member(each, "n_decoded", 0)) for each in list_of(self.next_token)[:1])

    @property
    def n_held(self) -> int | None:
        """How many tokens tasks have put into the slot; None if llama-server does not report it."""
        return 0 if self.id_task < 0 else self.n_prompt_tokens


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Sums of larger numbers could not be stored."""


class Timings(msgspec.Struct, frozen=True):
    """What a generation reused and evaluated; cache_n + prompt_n is the prompt's length."""

    cache_n: Count
    prompt_n: Count
    prompt_ms: float = 0.0
    predicted_n: Count = 0


class Saved(msgspec.Struct):
    n_saved: int
    n_written: int


class Probability(msgspec.Struct):
    """A token's log-probability; with a generated token come the likeliest tokens at its position."""

    id: int
    logprob: float
    top_logprobs: list["Probability"] = []


class TokenPiece(msgspec.Struct):
    """A token with its text, or with its bytes where a character has several tokens."""

    id: int
    piece: str | list[int]


class ModelMeta(msgspec.Struct):
    n_vocab: int = 0
    n_params: int = 0
    size: int = 0


class LoraAdapter(msgspec.Struct):
    id: int
    path: str = ""
    scale: float = 0.0


# The address of one llama-server: a URL of its own, or its model's name at a host of several models.
# A router takes the name from the body of a POST and from the query of a GET, and loads a model that is
# not loaded unless `autoload=false` is in the query (server-models.cpp); llama-swap takes the name from
# the path and always loads the model (proxymanager.go).


_GONE = b"proxy error: Failed to read connection"
"""A router appends this to the answer of a child process that has died."""
_UNREACHED = b"proxy error: Could not establish connection"
"""A router answers this, with 500, until it has noticed that a child has died."""
_BAD_GATEWAY = 502
"""llama-swap answers this, without content, until it has noticed (process_command.go); so do gateways."""


HostKind = Literal["router", "llama-swap"]


@dataclass(frozen=True, slots=True)
class Target:
    """A llama-server at a URL of its own, or one model of a host; no call loads a router's model.

    Clients' own requests go to `base_url` unchanged.
    """

    base_url: str
    model: str = ""
    host: HostKind | None = None

    @property
    def name(self) -> str:
        """The name shown to people: the model, or else the address."""
        return self.model or urlsplit(self.base_url).netloc

    def addressed(self, method: str, path: str, body: bytes | None) -> tuple[str, bytes | None]:
        """Return the path with its query, and the body, to send for a call of the proxy's own."""
        if self.host == "llama-swap":
            return f"/upstream/{quote(self.model, safe='/')}{path}", body
        if self.host == "router":
            named = f"model={quote(self.model, safe='')}&" if method == "GET" else ""
            path = f"{path}{'&' if '?' in path else '?'}{named}autoload=false"
            if body is not None:
                fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
                body = msgspec.json.encode({**fields, "model": self.model})
        return path, body

    def may_be_lost(self, status: int, headers: Headers) -> bool:
        """Return whether a host, or a gateway before llama-server, seems to answer for it: `lost` tells."""
        if self.host == "router":
            return headers.get("Content-Type", "").startswith("text/plain")
        return status == _BAD_GATEWAY and not (self.host and headers.get("Content-Length") != "0")

    def lost(self, status: int, content: bytes) -> Literal["", "before", "after"]:
        """Return whether the host lost llama-server before or after the request was sent; empty if not.

        llama-swap, and a gateway before llama-server, answer the same in both cases.
        """
        if self.host == "router":
            if content.endswith(_GONE):
                return "after"
            return "before" if content.startswith(_UNREACHED) else ""
        return "after" if status == _BAD_GATEWAY and not (self.host and content) else ""


@dataclass(eq=False)
class Heard:
    """An exchange that can be cut; llama-server last sent something at `heard_at` (monotonic clock).

    After SIGTERM llama-server stops decoding and takes no more connections, but then waits for the clients
    of its unanswered requests until they hang up, or until it is killed (server-http.cpp, SIGTERM).
    """

    _cut: Callable[[], None]
    heard_at: float = field(default_factory=time.monotonic)
    is_cut: bool = False

    def cut(self) -> None:
        self.is_cut = True
        self._cut()


class LlamaServer:
    """One llama-server at its target.

    Every call raises UpstreamUnreachable if there was no answer, UpstreamRefused if the answer was an
    error.
    """

    def __init__(self, session: aiohttp.ClientSession, target: Target, api_key: str | None) -> None:
        self.session = session
        self._waiting: set[Heard] = set()
        self.target = target
        self.require_loaded: Callable[[], None] = lambda: None
        """Raises UpstreamUnreachable while no call may be made."""
        self.api_key = api_key
        self.keeps_points_of_others = False
        """Whether a slot keeps its context checkpoints over an erase and a restore, as builds before July
        2026 (b10068) do: a restored state could then be continued at those of another prompt."""
        self._address = literal_address(target.base_url)
        self.own_headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def at(self, target: Target) -> "LlamaServer":
        """Return the llama-server at another target, with the same API key."""
        return LlamaServer(self.session, target, self.api_key)

    async def forward(
        self, method: str, raw_path: str, headers: CIMultiDict[str], body: Body
    ) -> Reply | aiohttp.ClientResponse:
        """Send a client's request; return the answer once its head has come; raises aiohttp.ClientError."""
        headers.setdefault(SENT_BY, OWN_ID)
        if self._address and isinstance(body, bytes | None) and method in ("GET", "POST"):
            return await send(self._address, method, raw_path, headers, body or b"")
        # aiohttp writes a large body from a file in pieces, and warns of one in bytes.
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        url = URL(self.target.base_url + raw_path, encoded=True)  # exactly as the client encoded it
        return await self.session.request(
            method, url, data=data, headers=headers, allow_redirects=False
        )

    @contextmanager
    def heard(self, cut: Callable[[], None]) -> Iterator[Heard]:
        """Allow `cut_silent` to cut an exchange while the block runs."""
        exchange = Heard(cut)
        self._waiting.add(exchange)
        try:
            yield exchange
        finally:
            self._waiting.discard(exchange)

    @asynccontextmanager
    async def waiting(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Raise TimeoutError if the block takes longer, or when `cut_silent` cuts a call awaited in it."""
        loop = asyncio.get_running_loop()

        def cut() -> None:
            with suppress(RuntimeError):  # it is ending by itself, or was cut already
                limit.reschedule(loop.time())

        async with asyncio.timeout(seconds) as limit:
            with self.heard(cut):
                yield

    def cut_silent(self, seconds: float) -> None:
        """Cut the exchanges in which llama-server has sent nothing for so long."""
        for exchange in list(self._waiting):
            if exchange.heard_at <= time.monotonic() - seconds:
                exchange.cut()

    async def takes_key(self, keys: Headers, path: str = "/props") -> bool:
        """Return whether llama-server accepts *keys*; raises UpstreamFault at other failures.

        /props needs a key on every build, /models does not on some (server-http.cpp).
        """
        try:
            # Without headers, the proxy's own key would be sent.
            await self._read("GET", path, None, keys or {"Accept": "*/*"}, QUICK_SECONDS)
        except UpstreamRefused as refusal:
            if refusal.status not in (401, 403):
                raise
            return False
        return True

    async def props(self, seconds: float = QUICK_SECONDS) -> Props:
        return await self.call("GET", "/props", Props, seconds=seconds)

    async def process_id(self, props: Props) -> str:
        """Return an id of the process that answered with *props*; empty if there is none.

        The id is the media marker, which is random in every process. If LLAMA_MEDIA_MARKER fixes it, the id
        is the start time of /metrics; reading it resets the two "since last scrape" gauges. Without an id a
        restart cannot be noticed.
        """
        if MEDIA_MARKER.fullmatch(props.media_marker):
            return props.media_marker
        with suppress(UpstreamRefused):  # without --metrics
            headers, _ = await self._read("GET", "/metrics", None, None, QUICK_SECONDS)
            return headers.get("Process-Start-Time-Unix", "")
        return ""

    async def is_replaced(self, process_id: str) -> bool:
        """Return whether another process than *process_id* answers, also where no look has seen it yet.

        A small model is loaded in less than the time between two looks.
        """
        with suppress(UpstreamRefused, UpstreamUnreachable):
            return await self.process_id(await self.props()) != process_id
        return False

    async def slots(self) -> list[SlotStatus]:
        """Return the slots' states; 501 (UpstreamRefused) under --no-slots."""
        return await self.call("GET", "/slots", list[SlotStatus], seconds=SLOT_ACTION_SECONDS)

    async def models(self, path: str = "/v1/models") -> list[dict[str, Any]]:
        """Return the entries of a list of models; a router's /models also has their states."""
        return await self.call("GET", path, list[dict[str, Any]], key="data", seconds=QUICK_SECONDS)

    async def dies_of_completions(self) -> bool:
        """Return whether a completion would end llama-server: it has --embeddings, and pools nothing.

        Then it refuses /v1/embeddings in these words, whatever the request (server-context.cpp).
        """
        try:
            await self.call("POST", "/v1/embeddings", msgspec.Raw, {})
        except UpstreamRefused as refusal:
            return "Pooling type 'none'" in str(refusal)
        return False

    async def model_meta(self) -> ModelMeta:
        entries = await self.models()
        if self.target.host == "router":  # which lists all of its models
            entries = [m for m in entries if text_of(m, "id") == self.target.model]
        meta = next(filter(None, (member(m, "meta") for m in entries)), None)
        known = {name: member(meta, name) for name in ModelMeta.__struct_fields__}
        return ModelMeta(**{name: n for name, n in known.items() if isinstance(n, int)})

    async def lora_adapters(self) -> list[LoraAdapter]:
        return await self.call("GET", "/lora-adapters", list[LoraAdapter], seconds=QUICK_SECONDS)

    async def apply_template(self, body: bytes, headers: Headers) -> str:
        """Render a chat body; llama-server parses it as for /v1/chat/completions."""
        return await self.call("POST", "/apply-template", str, body, headers, key="prompt")

    async def tokenize(self, content: Any, headers: Headers, *, add_special: bool) -> TokenIds:
        """Tokenize a string or a mixed list.

        llama-server tokenizes prompts with add_special, but /tokenize leaves out BOS by default
        (server-context.cpp, handle_completions_impl against post_tokenize).
        """
        fields = {"content": content, "add_special": add_special}
        ids = await self.call("POST", "/tokenize", list[int], fields, headers, key="tokens")
        return token_ids(ids)

    async def pieces(self, text: str, headers: Headers, *, is_whole: bool) -> list[TokenPiece]:
        """Tokenize *text*, a prompt or a part of one; return each token with its text."""
        fields = {"content": text, "add_special": is_whole, "with_pieces": True}
        return await self.call("POST", "/tokenize", list[TokenPiece], fields, headers, key="tokens")

    async def evaluate(
        self, slot_id: SlotId, tokens: TokenIds, headers: Headers | None = None
    ) -> Timings:
        """Evaluate *tokens* in a slot, so that it holds exactly them.

        n_predict 0 still samples one token, but never decodes it (server-context.cpp, process_token).
        """
        fields = {"prompt": tokens.tolist(), "id_slot": slot_id, **_REUSES}
        return await self._complete(Timings, fields, headers, key="timings")

    async def overwrite(self, slot_id: SlotId) -> None:
        """Replace the content of a slot by one token."""
        await self._complete(msgspec.Raw, {"prompt": [0], "id_slot": slot_id, **_FROM_NOTHING})

    async def canary(self, slot_id: SlotId, tokens: TokenIds) -> Canary:
        """Evaluate *tokens* from nothing; return the ten likeliest next tokens with log-probabilities."""
        wanted = {"n_predict": 1, "n_probs": 10, "temperature": 0.0, "id_slot": slot_id}
        fields = {"prompt": tokens.tolist(), **_FROM_NOTHING, **wanted}
        reply = await self._complete(list[Probability], fields, key="completion_probabilities")
        if not reply:
            raise UpstreamRefused(200, "no probabilities in the reply to n_probs")
        return [(p.id, p.logprob) for p in reply[0].top_logprobs]

    async def _complete(
        self, kind: type[T], fields: dict[str, Any], headers: Headers | None = None, key: str = ""
    ) -> T:
        return await self.call("POST", "/completion", kind, fields, headers, key=key, seconds=None)

    async def save(self, slot_id: SlotId, file_name: str) -> Saved:
        return await self._act_on_slot(slot_id, "save", Saved, file_name)

    async def restore(self, slot_id: SlotId, file_name: str) -> int:
        """Restore a state; return how many tokens the slot then holds.

        Any failure leaves the slot empty (server-context.cpp, SLOT_RESTORE).
        """
        if self.keeps_points_of_others:
            # A prompt that reuses nothing drops the slot's context checkpoints.
            await self.overwrite(slot_id)
        return await self._act_on_slot(slot_id, "restore", int, file_name, key="n_restored")

    async def erase(self, slot_id: SlotId) -> None:
        await self._act_on_slot(slot_id, "erase", msgspec.Raw)

    async def _act_on_slot(
        self, slot_id: SlotId, action: str, kind: type[T], file_name: str = "", key: str = ""
    ) -> T:
        path = f"/slots/{slot_id}?action={action}"
        fields = {"filename": file_name} if file_name else {}
        return await self.call("POST", path, kind, fields, key=key, seconds=SLOT_ACTION_SECONDS)

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: Any = None,
        headers: Headers | None = None,
        *,
        key: str = "",
        seconds: float | None = 60.0,
    ) -> T:
        """Make one call of the proxy's own; return the reply, or its member *key*, read as *kind*."""
        _, content = await self._read(method, path, body, headers, seconds)
        try:
            if key:
                content = msgspec.json.decode(content, type=dict[str, msgspec.Raw])[key]
            return msgspec.json.decode(content, type=kind)
        except (ValueError, KeyError, RecursionError) as error:
            raise UpstreamRefused(200, f"{path}: reply not understood") from error

    async def _read(
        self, method: str, path: str, body: Any, headers: Headers | None, seconds: float | None
    ) -> tuple[Headers, bytes]:
        """Make one call; return headers and content if llama-server itself, not its host, answered 200."""
        self.require_loaded()
        data = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        there, data = self.target.addressed(method, path, data)
        try:
            all_headers = CIMultiDict({**_OWN, **(headers or self.own_headers)})
            async with self.waiting(seconds):
                async with await self.forward(method, there, all_headers, data) as response:
                    status, content = response.status, await read_most(response.content)
        except NOT_CONNECTED as error:
            raise UpstreamUnreachable(f"{method} {path}: {reason_of(error)}") from error
        except TimeoutError as error:
            # llama-server without TLS waits for the rest of what it takes for a request.
            is_https = self.target.base_url.startswith("https:")
            tls = "; has it TLS? `upstream` begins with https" * is_https
            raise UpstreamSlow(f"{method} {path}: no answer in time{tls}") from error
        except (aiohttp.ClientError, OSError) as error:
            # Without an errno llama-server closed the connection before the body was written.
            was_sent = not isinstance(error, aiohttp.ClientOSError) or error.errno is not None
            kind = UpstreamLost if was_sent else UpstreamUnreachable
            raise kind(f"{method} {path}: {reason_of(error)}") from error
        if lost := self.target.lost(status, content):
            kind = UpstreamUnreachable if lost == "before" else UpstreamLost
            raise kind(f"{method} {path}: a gateway or host answers {status} for llama-server")
        if status == 504:
            told = "a gateway or host answers 504: it waits no longer, nginx by proxy_read_timeout"
            raise UpstreamSlow(f"{method} {path}: {told}")
        is_whole = response.content.at_eof()
        if status == 200 and is_whole:
            return response.headers, content
        raise UpstreamRefused(status, error_message(content) if is_whole else f"{path}: too long")


_REUSES = {"n_predict": 0, "cache_prompt": True, "n_cache_reuse": 0}
_FROM_NOTHING = {"n_predict": 0, "cache_prompt": False}


def error_message(content: bytes) -> str:
    reply = object_in(content)
    if reply is None or "error" not in reply:
        said = content[:200].decode(errors="replace").strip()
        return "" if said.startswith("<") else said  # a page, of something else
    return error_text(reply)[:1000]  # /health and the log tell it
