"""llama-server's routes and addresses, and the names of its models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, urlsplit

import msgspec

from proxy.core.messages import Route

# Model names: the clients' and llama-server's.


Aliases = Mapping[str, str]


def parse_aliases(text: str) -> dict[str, str]:
    """Return the names of a setting in the form `client name = server name, ...`."""
    pairs = (pair.partition("=") for pair in text.split(",") if pair.strip())
    return {name.strip(): meant.strip() for name, _, meant in pairs}


def with_alias(raw: bytes, aliases: Aliases) -> bytes:
    """Return a body with llama-server's name of its model; all other fields stay as they were sent."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(fields["model"], type=str)
        fields["model"] = msgspec.Raw(msgspec.json.encode(aliases[name]))
    except (ValueError, RecursionError, KeyError):
        return raw
    return msgspec.json.encode(fields)


# llama-server's routes by their use of slots (tools/server/server.cpp). A route that is not listed here
# never touches a slot.


_ROUTES = {
    Route.CHAT: ("/v1/chat/completions", "/chat/completions"),
    Route.COMPLETION: ("/v1/completions", "/completion", "/completions"),
    Route.MESSAGES: ("/v1/messages",),
    Route.RESPONSES: ("/v1/responses", "/responses"),
    Route.PINNED: ("/infill",),
    Route.UNPINNED: (
        "/embedding",
        "/embeddings",
        "/v1/embeddings",
        "/rerank",
        "/v1/rerank",
        "/reranking",
        "/v1/reranking",
        "/audio/transcriptions",
        "/v1/audio/transcriptions",
        "/v1/systemone",
    ),
}
_BY_PATH = {path: route for route, paths in _ROUTES.items() for path in paths}


def generation_route(method: str, path: str) -> Route | None:
    """Return the kind of a generation request; None if the request uses no slot."""
    return _BY_PATH.get(path) if method == "POST" else None


def honours_id_slot(route: Route) -> bool:
    """Return whether the proxy can choose the slot of a request."""
    return route not in (Route.MESSAGES, Route.UNPINNED)


def is_task_for_each_input(path: str) -> bool:
    """Return whether llama-server runs one task for each input of a request to *path*."""
    return any(word in path for word in ("embedding", "rerank"))


def reads_forms(path: str) -> bool:
    """Return whether request bodies for *path* are forms, not JSON."""
    return path.endswith("/audio/transcriptions")


def counts_tokens(method: str, path: str) -> bool:
    """Return whether a request only counts the tokens of a generation's body."""
    return method == "POST" and path.endswith(("/count_tokens", "/input_tokens"))


def changes_server_state(method: str, path: str) -> bool:
    """Return whether a request changes slots or adapters behind the proxy's back."""
    return method == "POST" and _is_of_state(path)


def _is_of_state(path: str) -> bool:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return parts[:1] == ["slots"] or parts == ["lora-adapters"]


def is_known(path: str) -> bool:
    """Return whether the proxy treats a path specially."""
    return path in _BY_PATH or _is_of_state(path) or counts_tokens("POST", path)


def unloads_models(method: str, path: str) -> bool:
    """Return whether a request makes a host of models load or unload a model.

    Read from server-models.cpp (router) and llama-swap's proxymanager.go.
    """
    if method == "GET":
        return path == "/unload"
    is_of_router = path in ("/models", "/models/load", "/models/unload")
    return is_of_router or path.startswith("/api/models/unload")


def is_anthropic(path: str) -> bool:
    """Return whether clients of *path* expect Anthropic's errors and usage, not OpenAI's."""
    return path.startswith("/v1/messages")


# The address of one llama-server: a URL of its own, or its model's name at a host of several models.
# A router takes the name from the body of a POST and from the query of a GET, and loads a model that is
# not loaded unless `autoload=false` is in the query (server-models.cpp); llama-swap takes the name from
# the path and always loads the model (proxymanager.go).


_GONE = b"proxy error: Failed to read connection"
"""A router appends this to the answer of a child process that has died."""
_UNREACHED = b"proxy error: Could not establish connection"
"""A router answers this, with 500, until it has noticed that a child has died."""
_BAD_GATEWAY = 502
"""llama-swap answers this, without content, until it has noticed (process_command.go)."""


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

    def lost(self, status: int, content: bytes) -> Literal["", "before", "perhaps", "after"]:
        """Return whether the host lost llama-server before or after the request was sent; empty if not.

        llama-swap answers the same in both cases: "perhaps".
        """
        if self.host == "router":
            if content.endswith(_GONE):
                return "after"
            return "before" if content.startswith(_UNREACHED) else ""
        is_swaps = self.host == "llama-swap" and status == _BAD_GATEWAY and not content
        return "perhaps" if is_swaps else ""
