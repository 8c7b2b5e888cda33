"""Requests to llama-server: their routes, and the bodies of generation requests.

A client's body is forwarded byte for byte, except for the fields that the proxy owns. New fields are
spliced in, so that key order and number formats stay the client's: llama-server renders tool schemas in the
order received. As in llama-server's parser, nlohmann::json, the last of repeated keys wins, a byte order
mark is skipped, and a zero byte ends the text.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import msgspec
import xxhash
from multidict import MultiMapping

from proxy.core.messages import (
    CONVERSATIONS,
    Conversation,
    Route,
    json_of,
    list_of,
    member,
    n_leading_system,
    object_in,
    text_of,
)
from proxy.core.model import SlotId
from proxy.core.tokens import TokenIds
from proxy.errors import ProxyError, UnknownShape
from proxy.llama.conversions import chat_of_messages, chat_of_responses

# llama-server's routes by their use of slots (tools/server/server.cpp). A route that is not listed here
# never touches a slot.


_ROUTES = {
    Route.CHAT: "/v1/chat/completions /chat/completions /api/chat",  # the last not in every build
    Route.COMPLETION: "/v1/completions /completion /completions",
    Route.MESSAGES: "/v1/messages",
    Route.RESPONSES: "/v1/responses /responses",
    Route.PINNED: "/infill",
    Route.UNPINNED: "/embedding /embeddings /v1/embeddings /rerank /v1/rerank /reranking /v1/reranking "
    "/audio/transcriptions /v1/audio/transcriptions /v1/systemone",
}
_SALT = "cache_salt"
UNLOAD_ONE = "/api/models/unload/"
"""llama-swap unloads the model whose name follows; all models if none does."""
_BY_PATH = {path: route for route, paths in _ROUTES.items() for path in paths.split()}


def generation_route(method: str, path: str) -> Route | None:
    """Return the kind of a generation request; None if the request uses no slot."""
    return _BY_PATH.get(path) if method == "POST" else None


def honours_id_slot(route: Route) -> bool:
    """Return whether the proxy can choose the slot of a request."""
    return route not in (Route.MESSAGES, Route.UNPINNED)


def is_task_for_each_input(path: str) -> bool:
    """Return whether llama-server runs one task for each input of a request to *path*."""
    return any(word in path for word in ("embedding", "rerank"))


def counts_tokens(method: str, path: str) -> bool:
    """Return whether a request only counts the tokens of a generation's body."""
    return method == "POST" and path.endswith(("/count_tokens", "/input_tokens"))


def may_be_read_as_another(raw_path: str, path: str) -> bool:
    """Return whether a server may find another route in *raw_path* than *path*, which is decoded.

    llama-server decodes %uXXXX, too (decode_path_component in cpp-httplib), and drops what stands behind #,
    where aiohttp looks for the query. Servers before it resolve dots.
    """
    is_odd = "%u" in raw_path.partition("?")[0] or ".." in path.split("/")
    return is_odd or "#" in raw_path or not raw_path.startswith("/")


def changes_server_state(method: str, path: str) -> bool:
    """Return whether a request changes slots or adapters behind the proxy's back."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return method == "POST" and (parts[:1] == ["slots"] or parts == ["lora-adapters"])


def is_special(path: str) -> bool:
    """Return whether the proxy treats a path specially."""
    return path in _BY_PATH or changes_server_state("POST", path) or counts_tokens("POST", path)


def unloads_models(method: str, path: str) -> bool:
    """Return whether a request makes a host of models load or unload a model.

    Read from server-models.cpp (router) and llama-swap's proxymanager.go.
    """
    if method in ("GET", "HEAD", "OPTIONS"):
        return path == "/unload"
    is_of_router = path in ("/models", "/models/load", "/models/unload")
    return is_of_router or f"{path}/".startswith(UNLOAD_ONE)


def is_anthropic(path: str) -> bool:
    """Return whether clients of *path* expect Anthropic's errors and usage, not OpenAI's."""
    return path.startswith("/v1/messages")


# Bodies: those of clients, and those that are made only to evaluate a prompt.


def is_json(headers: MultiMapping[str]) -> bool:
    """Return whether llama-server parses a body as it comes, by its headers.

    llama-server makes JSON of a form on every route (server-http.cpp). A build may decompress bodies.
    """
    is_form = any("multipart/" in kind.lower() for kind in headers.getall("Content-Type", ()))
    encodings = {kind.lower() for kind in headers.getall("Content-Encoding", ())}
    return not is_form and encodings <= {"", "identity"}


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_STACK_BELOW = 100
"""How many calls deeper than where a body is parsed its parts are written again, at most."""
_TAINTING = ("lora", "n_cache_reuse")
_MEDIA = ("image_url", "input_audio")

# The fields that /apply-template reads besides the messages (oaicompat_chat_params_parse in
# server-common.cpp).
RENDERING_FIELDS = (
    "tools tool_choice parallel_tool_calls chat_template_kwargs reasoning_effort reasoning_format "
    "response_format json_schema".split()
)
_CACHE_KEYS = ("prompt_cache_key", "promptCacheKey")
"""The field for a session's name: OpenAI's, and OpenCode's for other providers."""
_CONVERSIONS = {Route.MESSAGES: chat_of_messages, Route.RESPONSES: chat_of_responses}
_CONVERTED = ("messages", *RENDERING_FIELDS, "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class GenerationBody:
    """A client's body, as bytes and parsed; `has_media` is only told of one in the chat form."""

    raw: bytes
    fields: dict[str, Any]
    has_media: bool = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.fields["messages"]  # type: ignore[no-any-return]

    @property
    def session(self) -> str:
        """The name of the session, for clients without a header for it; empty if there is none."""
        return next(filter(None, (text_of(self.fields, name) for name in _CACHE_KEYS)), "")

    def shape(self, path: str) -> str:
        """Return the kind of the request, by which requests are counted and excluded from the cache."""
        last = next(reversed(list_of(self.fields.get("messages"))), None)
        return f"{path} {text_of(last, 'role')} {','.join(sorted(self.fields))}"


def parse_body(raw: bytes) -> GenerationBody | None:
    """Return the parsed body, or None if it is not a JSON object, or too deep to be written again."""
    text, limit = _text_read(raw), sys.getrecursionlimit()
    sys.setrecursionlimit(limit - _STACK_BELOW)
    try:
        fields = object_in(text)
    finally:
        sys.setrecursionlimit(limit)
    return None if fields is None else GenerationBody(text, fields)


def model_named(raw: bytes, body: GenerationBody | None) -> str:
    """Return the model that a body names, parsed or a form; empty if it names none."""
    if body is not None:
        return text_of(body.fields, "model")
    rest = raw.partition(b'name="model"')[2] if raw.startswith(b"--") else b""
    return rest.partition(b"\r\n\r\n")[2].partition(b"\r\n")[0].decode(errors="replace")


def without_salt(
    raw: bytes, body: GenerationBody | None
) -> tuple[bytes, GenerationBody | None, str]:
    """Return a body, decoded too, without its `cache_salt`, and that salt, empty if there is none.

    The name is vLLM's. Raises ProxyError, in vLLM's words, if the salt is no text.
    """
    if body is None and b'"cache_salt"' in raw and is_too_deep(raw):
        raise ProxyError("a body with a cache_salt is nested too deeply", 400)
    if body is None or _SALT not in body.fields:
        return raw, body, ""
    salt = body.fields.pop(_SALT)
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ProxyError("cache_salt must be a non-empty string", 400)
    raw = msgspec.json.encode(body.fields)
    return raw, GenerationBody(raw, body.fields), salt or ""


def is_too_deep(raw: bytes) -> bool:
    """Return whether a body that was not parsed is too deep for that; llama-server has no limit."""
    try:
        return isinstance(msgspec.json.decode(_text_read(raw)), dict)
    except (RecursionError, ValueError) as error:
        return isinstance(error, RecursionError)


def _text_read(raw: bytes) -> bytes:
    """Return the part of a body that llama-server reads."""
    return raw.removeprefix(_BYTE_ORDER_MARK).partition(b"\0")[0]


def as_chat_body(route: Route, body: GenerationBody) -> GenerationBody:
    """Return a body in the chat form that renders the same prompt; raises UnknownShape.

    A converted body is only for /apply-template, and has only the fields needed there.
    """
    if route not in _CONVERSIONS:
        return body
    chat = _CONVERSIONS[route](body.fields)
    fields = {key: chat[key] for key in _CONVERTED if key in chat}
    return GenerationBody(msgspec.json.encode(fields), fields)


def chat_form(
    route: Route, body: GenerationBody | None
) -> tuple[GenerationBody | None, str | None]:
    """Return the body whose prompt can be read, or why there is none."""
    if (reason := _bypass_reason(route, body)) or body is None:
        return None, reason
    if route is Route.COMPLETION:
        return GenerationBody(body.raw, {**body.fields, "prompt": _prompts_of(body)[0]}), None
    try:
        chat = as_chat_body(route, body)
    except UnknownShape as why:
        return None, str(why)
    messages = list_of(chat.fields.get("messages"))
    if set(map(type, messages)) != {dict}:
        return None, "malformed messages" if messages else "no messages"
    lists = [parts for m in messages if isinstance(parts := m.get("content"), list)]
    kinds = {text_of(part, "type") for parts in lists for part in parts}
    if not kinds <= {"text", *_MEDIA}:
        return None, "media in the request"
    return GenerationBody(chat.raw, chat.fields, not kinds.isdisjoint(_MEDIA)), None


def n_completions(route: Route, body: GenerationBody) -> int:
    """Return how many completions the request asks for: for each of its prompts, one or several."""
    n = member(body.fields, "n_cmpl", body.fields.get("n"))
    n_prompts = len(_prompts_of(body)) if route is Route.COMPLETION else 1
    return max(1, n_prompts) * (int(n) if isinstance(n, int | float) and n > 1 else 1)


def _bypass_reason(route: Route, body: GenerationBody | None) -> str | None:
    """Return why a prompt is not to be looked up, or None if it may be; messages are not judged here.

    llama-server drops all flags of /v1/messages.
    """
    if route in (Route.PINNED, Route.UNPINNED):
        return f"{route} route"
    if body is None:
        return "body is not a JSON object"
    if route is Route.MESSAGES:
        return None
    if n_completions(route, body) > 1:
        return "several completions"
    for name in _TAINTING:
        if body.fields.get(name):
            return f"{name} in the request"
    if body.fields.get("cache_prompt") is False:
        return "cache_prompt is false"
    if route is not Route.COMPLETION:
        return None
    prompt = next(iter(_prompts_of(body)), None)
    is_text = isinstance(prompt, str) and prompt
    return None if is_text or _has_tokens(prompt) else "no prompt"


def _prompts_of(body: GenerationBody) -> list[Any]:
    prompt = body.fields.get("prompt")
    return prompt if isinstance(prompt, list) and not _has_tokens(prompt) else [prompt]


def _has_tokens(prompt: Any) -> bool:
    """Return whether a list is one prompt: it has a number in it. A list of strings only is several."""
    kinds = set(map(type, list_of(prompt)))
    return kinds <= {int, str} and int in kinds


def beside_tokens(route: Route, body: GenerationBody) -> bytes:
    """Return on what, besides its tokens, the slot's state will depend; empty if on nothing else."""
    told = [route is Route.PINNED, *map(body.fields.get, _TAINTING)]
    return msgspec.json.encode(told) if any(told) else b""


def pin(
    body: GenerationBody,
    slot_id: SlotId | None = None,
    *,
    reuses: bool = True,
    may_shift: bool = False,
) -> bytes:
    """Return the body with `cache_prompt`, which a client can only turn off, and with `id_slot` if given.

    Fields of a wrong type stay, for llama-server to refuse. Unless it *may_shift*, `n_cache_reuse` 0 keeps
    a server's --cache-reuse from shifting states: a shifted state is only approximately right.
    """
    asked = body.fields.get("cache_prompt")
    owned: dict[str, Any] = {} if slot_id is None else {"id_slot": slot_id}
    if isinstance(asked, bool | None):
        owned["cache_prompt"] = reuses and asked is not False
    if not may_shift and body.fields.get("n_cache_reuse") in (None, 0):
        owned["n_cache_reuse"] = 0
    if owned.keys() & body.fields.keys():
        return msgspec.json.encode({**body.fields, **owned})
    start = body.raw.index(b"{") + 1
    spliced = msgspec.json.encode(owned)[1:-1] + (b"," if body.fields else b"")
    return body.raw[:start] + spliced + body.raw[start:]


def asked_comparison(route: Route, body: GenerationBody) -> str | None:
    """Return the id of an answer if a request asks for cache diagnostics, which is empty the first time."""
    asked = body.fields.get("diagnostics")
    if route is Route.MESSAGES and isinstance(asked, dict):
        return text_of(asked, "previous_message_id")
    named = text_of(body.fields.get("prompt_cache_options"), "comparison_response_id")
    return named or None if route is Route.RESPONSES else None


def cache_wishes(body: GenerationBody | None, header: str) -> frozenset[str]:
    """Return which of no_store and no_read a client asks for, in `cache` of the body or in *header*.

    LiteLLM's words are understood too. *header* is X-Prefix-Cache, for clients that cannot set the body.
    """
    given = member(body.fields, "cache") if body else None
    asked = [name for name, on in given.items() if on is True] if isinstance(given, dict) else []
    words = {word.strip().lower().replace("-", "_") for word in [*asked, *header.split(",")]}
    wishes = {"no_store": "no_store", "no_read": "no_read", "no_cache": "no_read"}
    return frozenset(wishes[word] for word in words & wishes.keys())


def only_to_warm(route: Route, body: GenerationBody) -> bytes | None:
    """Return the body for a request that only warms the cache; None if the client wants an answer."""
    options = body.fields.get("prompt_cache_options")
    is_free_of_answer = route is Route.MESSAGES and body.fields.get("max_tokens") == 0
    if not (is_free_of_answer or (route is Route.RESPONSES and member(options, "prewarm") is True)):
        return None
    return msgspec.json.encode(body.fields | _ONE_TOKEN)


Aliases = Mapping[str, str]


def with_alias(raw: bytes, aliases: Aliases) -> bytes:
    """Return a body with llama-server's name of its model; all other fields stay as they were sent.

    A host is sent the name once: of a repeated one llama-swap takes the first, and llama-server the last.
    """
    with suppress(ValueError, RecursionError, KeyError):
        fields = msgspec.json.decode(_text_read(raw), type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(fields["model"], type=str)
        fields["model"] = msgspec.Raw(msgspec.json.encode(aliases.get(name, name)))
        return msgspec.json.encode(fields)
    return raw


def conversation_of(body: GenerationBody, encoded: Sequence[bytes] = ()) -> Conversation:
    """Return the conversation of a body in the chat form; its messages may be *encoded* already."""
    fields = {k: body.fields[k] for k in RENDERING_FIELDS if k in body.fields}
    encoded = list(map(json_of, body.messages, encoded or repeat(b"")))
    return Conversation(
        b"".join(map(xxhash.xxh3_64_digest, [msgspec.json.encode(fields), *encoded])),
        tuple(role if isinstance(role := m.get("role"), str) else "" for m in body.messages),
        tuple(map(len, encoded)),
    )


def message_digests(route: Route, body: GenerationBody | None) -> bytes:
    """Return digests of what a body has before its messages, and of each message; empty if it has none."""
    fields = body.fields if body and route in CONVERSATIONS else {}
    messages = list_of(fields.get("messages") or fields.get("input"))
    before = [fields.get(name) for name in ("tools", "system", "instructions")]
    parts = map(msgspec.json.encode, (before, *messages)) if messages else ()
    return b"".join(map(xxhash.xxh3_64_digest, parts))


# Requests that are made only to evaluate a prompt: one token is generated and not read.


_USER = {"role": "user", "content": "(warmed)"}
_ONE_TOKEN = {"max_tokens": 1, "max_output_tokens": 1, "n_predict": 1}
"""The limit under the name of each route; llama-server ignores the other names."""
_DROPPED = ("stream", "stream_options", "n", "n_cmpl", "max_completion_tokens")


def header_request(route: Route, body: GenerationBody, *, is_whole: bool) -> bytes:
    """Return the body for a request that evaluates only the header of a body, or, if *is_whole*, all of it.

    The header is everything before the first message that is not a system message. A bare prompt has none,
    and is evaluated whole.
    """
    fields = {name: value for name, value in body.fields.items() if name not in _DROPPED}
    fields |= _ONE_TOKEN
    if not (is_whole or route is Route.COMPLETION):
        name = "input" if route is Route.RESPONSES else "messages"
        messages = list_of(fields.get(name))
        # In Messages the system prompt is not one of the messages.
        n_leading = 0 if route is Route.MESSAGES else n_leading_system(messages)
        fields[name] = [*messages[:n_leading], _USER]
    return msgspec.json.encode(fields)


def tokens_request(tokens: TokenIds, model: str) -> bytes:
    """Return the body for a request to /completion that evaluates *tokens*; *model* may be empty."""
    named = {"model": model} if model else {}
    return msgspec.json.encode({**named, "prompt": tokens.tolist(), **_ONE_TOKEN})


def route_path(body: GenerationBody) -> str:
    """Return the path that a body is probably meant for, by its fields; "" if it has no prompt."""
    fields = body.fields
    if "input" in fields:
        return "/v1/responses"
    if "messages" in fields:
        schemas = [member(tool, "input_schema") for tool in list_of(fields.get("tools"))]
        is_anthropic = "system" in fields or any(each is not None for each in schemas)
        return "/v1/messages" if is_anthropic else "/v1/chat/completions"
    return "/completion" if "prompt" in fields else ""
