"""llama-server's routes, and the names of its models."""

from collections.abc import Mapping

import msgspec

from proxy.core.messages import Route

# Model names: the clients' and llama-server's.


Aliases = Mapping[str, str]


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
    Route.CHAT: "/v1/chat/completions /chat/completions",
    Route.COMPLETION: "/v1/completions /completion /completions",
    Route.MESSAGES: "/v1/messages",
    Route.RESPONSES: "/v1/responses /responses",
    Route.PINNED: "/infill",
    Route.UNPINNED: "/embedding /embeddings /v1/embeddings /rerank /v1/rerank /reranking /v1/reranking "
    "/audio/transcriptions /v1/audio/transcriptions /v1/systemone",
}
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
