"""One generation request: what came in, what is sent, and what came of it."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from proxy.core.messages import Conversation, Kind, Route
from proxy.core.model import Prompt, salted_tenant
from proxy.core.slots import Content, Known, Unknown
from proxy.core.tokens import Namespace
from proxy.explain.judgement import Account, Judgement
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


@dataclass(eq=False, kw_only=True)
class Request:
    """A client's request on a generation route, from its arrival until its answer is whole."""

    path: str
    route: Route
    keys: Mapping[str, str]  # the headers that carry the client's API key
    relay: Relay
    withdraw: Callable[[], None] = do_nothing
    """Ends a `relay` that has not passed on a token yet; that `relay` then raises ServerAway."""
    tenant: bytes = b""  # names the API key and the salt; empty without both
    salt: str = ""
    # The client's names for its session, itself and the model; each is empty if the client does not say.
    session: str = ""
    client: str = ""
    model: str = ""
    asked_cache: str = ""  # the client's header X-Prefix-Cache
    is_json: bool = True  # whether llama-server parses the body as it comes: it is no form
    wishes: frozenset[str] = frozenset()  # those of NO_STORE and NO_READ that the client has
    warms: bool = False  # whether the client only wants the prompt evaluated and saved
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a token of the answer, or all of it, has come."""
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    arrived_at: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.time)  # the same moment, in seconds since 1970
    queued_at: float = 0.0  # when it joined its first queue (monotonic); 0: none yet
    raw: bytes = b""  # the body to send
    body: GenerationBody | None = None  # the same decoded, None if it is no JSON object

    # From here on, each llama-server that tries to serve the request has its own values.
    server: str = ""  # its name, empty if there is only one
    namespace: Namespace = _NOBODYS  # that of the tenant there
    rewrites: tuple[str, ...] = ()  # the stabilizers that changed the body
    encoded: Sequence[bytes] = ()  # the messages of `chat` as JSON, if they were encoded already
    chat: GenerationBody | None = None  # the body in the chat form
    shape: str = ""  # its path, last role and fields: what is excluded from the cache together
    kind: Kind = Kind.NONE  # how it relates to earlier requests
    conversation: Conversation | None = None  # its messages as digests
    extends: Known | None = None
    """The content of a slot that the request plainly goes on with; `prompt` has the tokens of this content
    until the real prompt has been read."""
    is_brief: bool = False  # too short to be looked up
    prompt: Prompt | None = None
    why: str | None = None  # without a prompt: why the request is not cached
    account: Account | None = None
    is_sent: bool = False  # whether llama-server may have seen it
    answer: Answer | None = None
    answered_at: float = 0.0  # when its answer was whole, or its client left (monotonic)
    foresee: Callable[[], Judgement] = Judgement
    """Returns the judgement that will be reported if all goes as planned."""
    shared: str = ""  # what the shared store gave; empty if nothing was asked of it
    fetch_seconds: float = 0.0  # how long that took
    _received: tuple[bytes, GenerationBody | None] = (b"", None)
    _first_words: tuple[GenerationBody | None, str] = (None, "")
    """A body, and its user's first words."""

    def receive(self, raw: bytes, secret: bytes) -> "Request":
        """Take the client's body, which is decoded here and nowhere else; return this request.

        A salt splits the tenant further. Raises as `without_salt`.
        """
        parsed = requests.parse_body(raw) if self.is_json else None
        raw, body, self.salt = requests.without_salt(raw, parsed)
        self.tenant = salted_tenant(secret, self.tenant, self.salt) if self.salt else self.tenant
        if body and (warming := requests.only_to_warm(self.route, body)):
            self.warms, raw, body = True, warming, requests.parse_body(warming)
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
        self.encoded, self.is_sent = (), False
        self.foresee, self.shared = Judgement, ""
        self.conversation, self.extends, self.is_brief, self.fetch_seconds = None, None, False, 0.0

    def rewrite(self, fields: dict[str, Any], *names: str) -> None:
        """Send *fields* as the body from now on; *names* are the rewrites that changed it."""
        self.raw = msgspec.json.encode(fields)
        self.body = GenerationBody(self.raw, fields)
        self.chat, self.conversation, self.encoded = None, None, ()
        self.rewrites += names

    @property
    def wants_stream(self) -> bool:
        may_stream = self.route is not Route.UNPINNED  # llama-server's answers to these are whole
        return may_stream and self.body is not None and self.body.fields.get("stream") is True

    @property
    def n_completions(self) -> int:
        return requests.n_completions(self.route, self.body) if self.body else 1

    @property
    def words(self) -> str:
        """Its user's first words."""
        body = self.chat or self.body
        if self._first_words[0] is not body:
            self._first_words = body, words_of(body.fields) if body else ""
        return self._first_words[1]

    def as_left(self, content: Content) -> Content:
        """Return a slot's content, marked as not to be saved after a side call or under no_store."""
        if isinstance(content, Known) and self.kind is Kind.SIDE:
            content = replace(content, is_aside=True)
        if isinstance(content, Known | Unknown) and NO_STORE in self.wishes:
            content = replace(content, can_be_adopted=False)
        return content

    async def send(
        self, upstream: LlamaServer, raw: bytes, on_start: OnStart = do_nothing
    ) -> Answer:
        """Send a body and relay the answer, as Relay says; raises what `relay` raises."""
        self.answer, self.is_sent = None, True
        try:
            self.answer = await self.relay(upstream, raw, on_start)
        finally:
            self.answered_at = time.monotonic()
        return self.answer
