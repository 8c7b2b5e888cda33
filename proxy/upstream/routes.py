"""llama-server's routes, by what they do to its slots.

Read from tools/server/server.cpp. A route that is not listed here never touches a slot.
"""

from enum import StrEnum


class Route(StrEnum):
    """How a generation route names its prompt and whether it lets the proxy choose the slot."""

    CHAT = "chat"
    COMPLETION = "completion"
    MESSAGES = "messages"
    """Anthropic's Messages; llama-server drops id_slot and chooses the slot itself."""
    RESPONSES = "responses"
    """OpenAI's Responses; honours id_slot."""
    PINNED = "pinned"
    """Honours id_slot; its prompt is not read (yet)."""
    UNPINNED = "unpinned"
    """llama-server never reads id_slot and chooses the slot itself."""


class ErrorShape(StrEnum):
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


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
    """Return what kind of generation a request is, or None if it touches no slot."""
    return _BY_PATH.get(path) if method == "POST" else None


def honours_id_slot(route: Route) -> bool:
    """Return whether the proxy can choose the slot of a request."""
    return route not in (Route.MESSAGES, Route.UNPINNED)


def is_task_for_each_input(path: str) -> bool:
    """Return whether a request of this route becomes as many tasks as it has inputs."""
    return any(word in path for word in ("embedding", "rerank"))


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
    """Return whether a path means something to the proxy."""
    return path in _BY_PATH or _is_of_state(path) or counts_tokens("POST", path)


def unloads_models(method: str, path: str) -> bool:
    """Return whether a request has a host of models load or unload one.

    Read from server-models.cpp (router) and llama-swap's proxymanager.go.
    """
    if method == "GET":
        return path == "/unload"
    return path in ("/models", "/models/load", "/models/unload") or path.startswith(
        "/api/models/unload"
    )


def error_shape(path: str) -> ErrorShape:
    """Return the shape in which clients of *path* expect errors."""
    return ErrorShape.ANTHROPIC if path.startswith("/v1/messages") else ErrorShape.OPENAI
