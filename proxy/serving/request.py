"""One generation request: what came in, what is sent, and what came of it."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from proxy.core.messages import Conversation, Kind, Route
from proxy.core.model import Prompt, salted_tenant
from proxy.core.slots import Known
from proxy.core.tokens import Namespace
from proxy.explain.causes import Cause
from proxy.explain.judgement import Account
from proxy.explain.sketch import words_of
from proxy.llama import requests
from proxy.llama.answers import Answer
from proxy.llama.client import LlamaServer
from proxy.llama.requests import GenerationBody

NO_STORE, NO_READ = "no_store", "no_read"
_NOBODYS = Namespace(b"")


OnStart = Callable[[], None]
Relay = Callable[[LlamaServer, bytes, OnStart], Awaitable[Answer]]
"""Sends a body to a llama-server and relays the whole answer to the client.

OnStart is called once llama-server runs the request: llama-server sends a stream's headers when the slot
starts.
"""


def do_nothing() -> None:
    """Do nothing when llama-server starts a request."""


def not_looked_up() -> Cause:
    return Cause.NOT_LOOKED_UP


@dataclass(eq=False, kw_only=True)
class Request:
    """A client's request on a generation route, from its arrival until its answer is whole.

    `withdraw` ends a `relay` that has not passed on a token yet; that `relay` then raises ServerAway.
    `headers` are those with the client's API key. `tenant` names that key and the `salt`, empty without
    both. `model`, `session` and `client` are the client's names for the model, for its session and for
    itself; each is empty if the client does not say. `asked_cache` is the client's header X-Prefix-Cache,
    `wishes` are those of no_store and no_read that it has. A request that `warms` wants its prompt
    evaluated and saved, and an empty answer: whole, or as a stream. `answering` is set once a token of the
    answer, or all of it, has come. `arrived_at` is of the monotonic clock, `at` in seconds since 1970.
    `raw` is the body to send, `body` the same decoded, None if it is no JSON object.

    The fields from `server` on are set anew for each llama-server that tries to serve the request. `server`
    is its name, empty if there is only one, and `namespace` that of the tenant there; `rewrites` are the
    stabilizers that changed the body; `chat` is the body in the chat form, `shape` its kind of form,
    `conversation` its messages as digests, and `kind` says how it relates to earlier requests. Without a
    `prompt`, `why` says why the request is not cached. If the request plainly goes on with what a slot
    holds, `extends` is that content, and `prompt` has its tokens until the real prompt has been read. A
    request that `is_brief` is too short to be looked up. The request joined its first queue at `queued_at`
    of the monotonic clock, 0 if it has joined none yet, and its answer was whole at `answered_at`.
    `foresee` returns the cause that will be reported if all goes as planned. If it `keeps_text`, the text
    of its answer is kept, even of a stream. `shared` says what the shared store gave, empty if nothing was
    asked of it; that took `fetch_seconds`.
    """

    path: str
    route: Route
    headers: Mapping[str, str]
    relay: Relay
    withdraw: OnStart = do_nothing
    tenant: bytes = b""
    salt: str = ""
    session: str = ""
    client: str = ""
    model: str = ""
    asked_cache: str = ""
    wishes: frozenset[str] = frozenset()
    warms: Literal["", "whole", "stream"] = ""
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    arrived_at: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.time)
    raw: bytes = b""
    body: GenerationBody | None = None
    queued_at: float = 0.0
    server: str = ""
    namespace: Namespace = _NOBODYS
    rewrites: tuple[str, ...] = ()
    chat: GenerationBody | None = None
    shape: str = ""
    kind: Kind = Kind.NONE
    conversation: Conversation | None = None
    extends: Known | None = None
    is_brief: bool = False
    prompt: Prompt | None = None
    why: str | None = None
    account: Account | None = None
    answer: Answer | None = None
    answered_at: float = 0.0
    foresee: Callable[[], Cause] = not_looked_up
    keeps_text: bool = False
    shared: str = ""
    fetch_seconds: float = 0.0
    _received: tuple[bytes, GenerationBody | None] = (b"", None)

    def receive(self, raw: bytes, secret: bytes) -> "Request":
        """Take the client's body, which is decoded here and nowhere else; return this request.

        A salt splits the tenant further. Raises as `without_salt`.
        """
        raw, body, self.salt = requests.without_salt(raw, requests.parse_body(raw))
        self.tenant = salted_tenant(secret, self.tenant, self.salt) if self.salt else self.tenant
        if body and (warming := requests.only_to_warm(self.route, body)):
            self.warms = "stream" if body.wants_stream else "whole"
            raw, body = warming, requests.parse_body(warming)
        self.wishes = requests.cache_wishes(body, self.asked_cache)
        self.model = self.model or requests.model_named(raw, body)
        self.session = self.session or (body.session if body else "")
        self._received = raw, body
        self.begin()
        return self

    def begin(self, server: str = "", namespace: Namespace = _NOBODYS) -> None:
        """Begin anew with the body that the client sent, at the llama-server of that name."""
        (self.raw, self.body), self.server, self.namespace = self._received, server, namespace
        self.rewrites, self.chat, self.prompt, self.why, self.account = (), None, None, None, None
        self.answered_at, self.foresee, self.shared = 0.0, not_looked_up, ""
        self.conversation, self.extends, self.is_brief, self.fetch_seconds = None, None, False, 0.0

    def rewrite(self, fields: dict[str, Any], *names: str) -> None:
        """Send *fields* as the body from now on; *names* are the rewrites that changed it."""
        self.raw = msgspec.json.encode(fields)
        self.body = GenerationBody(self.raw, fields)
        self.chat, self.conversation = None, None
        self.rewrites += names

    @property
    def wants_stream(self) -> bool:
        return self.body is not None and self.body.wants_stream

    @property
    def words(self) -> str:
        """Its user's first words."""
        body = self.chat or self.body
        return words_of(body.fields) if body else ""

    async def send(
        self, upstream: LlamaServer, raw: bytes, on_start: OnStart = do_nothing
    ) -> Answer:
        """Send a body and relay the answer, as Relay says; raises what `relay` raises."""
        self.answer = None
        self.answer = await self.relay(upstream, raw, on_start)
        self.answered_at = time.monotonic()
        return self.answer
