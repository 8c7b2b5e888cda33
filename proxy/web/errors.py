"""Error bodies in the shape of each client's API, and the edits of forwarded answers.

llama-server sends errors in OpenAI's shape on all routes, Anthropic's included (server-common.cpp,
format_error_response). The proxy edits the usage, and errors for clients of Anthropic's API.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from proxy.core.messages import Route, object_in
from proxy.errors import ProxyError
from proxy.explain.report import Told
from proxy.llama.answers import TrueUsage, empty_answer
from proxy.llama.connection import MAX_BUFFERED_BYTES, Reply
from proxy.llama.requests import generation_route, is_anthropic
from proxy.serving.request import Request

HOP = "llama-prefix-cache"
RETRY_AFTER_SECONDS = 2
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    422: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    501: ("not_supported_error", "invalid_request_error"),
    502: ("unavailable_error", "api_error"),
    503: ("unavailable_error", "overloaded_error"),
}
"""The type of an error by its status: llama-server's, and Anthropic's."""

_TOO_LONG = "exceed_context_size_error"
_OPENAIS_CODE = "context_length_exceeded"

Error = dict[str, Any]
Edit = Callable[[bytes], bytes]
_AS_IT_IS: Edit = bytes


def error_response(path: str, error: ProxyError, headers: dict[str, str]) -> web.Response:
    """Return the answer to a request that cannot be served, with other *headers*."""
    body, may_retry = _own_error(error.status, str(error)), error.status in (502, 503)
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(_anthropic(body) if is_anthropic(path) else {"error": body}),
        content_type="application/json",
        headers=headers | ({"Retry-After": str(RETRY_AFTER_SECONDS)} if may_retry else {}),
    )


def error_event(path: str, error: ProxyError) -> bytes:
    """Return a stream event that ends a broken answer, in the shape of the stream's API.

    OpenCode, Kilo and pi try again only if the message has a status that says so.
    """
    return _event(path, _own_error(error.status, f"{error} (status {error.status})"), error.status)


def error_event_of(path: str, status: int, body: bytes) -> bytes:
    """Return llama-server's refusal as an event, for a client whose stream has begun already."""
    if (error := _read_error(body)) is None:
        error = _own_error(status, f"llama-server answered {status} without a stream")
    return _event(path, error, status)


def anthropic_error(status: int, body: bytes) -> bytes:
    """Return llama-server's error in Anthropic's shape; a body that is no such error stays as it is."""
    error = _read_error(body)
    return body if error is None else msgspec.json.encode(_anthropic(error, status))


def overflow_error(body: bytes) -> bytes:
    """Return a refusal of too long a prompt in words that clients know; any other body as it is."""
    error = _read_error(body) or {}
    return msgspec.json.encode({"error": error}) if error.get("type") == _TOO_LONG else body


def _own_error(status: int, message: str) -> Error:
    kind, _ = _TYPES.get(status, _TYPES[500])
    return {"code": status, "message": f"{HOP}: {message}", "type": kind, "src": HOP}


def _read_error(body: bytes) -> Error | None:
    """Return llama-server's error in *body*, None if there is none; Messages streams have no envelope."""
    content = object_in(body)
    if content is None or content.get("type") == "error":
        return None  # in Anthropic's shape already
    error = content.get("error", content)
    error = {"message": error} if "src" in content and isinstance(error, str) else error
    return _in_known_words(error) if isinstance(error, dict) and "message" in error else None


def _in_known_words(error: Error) -> Error:
    """Return a refusal of too long a prompt in the words of Anthropic, OpenAI and llama-server.

    OpenCode, pi and Hermes know llama-server's words; Claude Code, Kimi Code, qwen-code and vibe
    Anthropic's; codex OpenAI's code, Continue and crewAI that code in the message, aider OpenAI's words,
    and agents made with Fantasy the two numbers in those words.
    """
    if error.get("type") != _TOO_LONG:
        return error
    n_ctx, n_prompt = error.get("n_ctx", 0), error.get("n_prompt_tokens", 0)
    words = f"prompt is too long: {n_prompt} tokens > {n_ctx} maximum ({_OPENAIS_CODE}: "
    words += f"this model's maximum context length is {n_ctx} tokens, your messages resulted in "
    words += f"{n_prompt} tokens; {_TOO_LONG}: {error['message']})"
    return error | {"code": _OPENAIS_CODE, "message": words}


def _event(path: str, error: Error, status: int) -> bytes:
    if is_anthropic(path):
        return b"event: error\ndata: " + msgspec.json.encode(_anthropic(error, status)) + b"\n\n"
    if generation_route("POST", path) is Route.RESPONSES:
        kind, code, words = error.get("type"), error.get("code"), error["message"]
        told = {"code": code if isinstance(code, str) else kind, "message": words, "param": None}
        # OpenAI's types have these fields in the event itself; its server, and codex, in `error`. Of most
        # errors codex shows only what a failed response tells, and older ones read nothing else.
        fields = {"type": "error", **told, "sequence_number": 0, "error": {"type": kind, **told}}
        failed = {"type": "response.failed", "sequence_number": 1, "response": {"error": told}}
        both = tuple(map(msgspec.json.encode, (fields, failed)))
        return b"event: error\ndata: %b\n\nevent: response.failed\ndata: %b\n\n" % both
    # In a stream crush tries again by the type, and knows only OpenAI's types; a 501 does not pass.
    if status >= 500 and status != 501:
        error = error | {"type": _TYPES[500][0]}
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


def _anthropic(error: Error, status: int = 500) -> Error:
    """Return an error in Anthropic's shape; *status* counts where it has no number for a code."""
    code = error.get("code")
    _, kind = _TYPES.get(code if isinstance(code, int) else status, _TYPES[500])
    return {"type": "error", "error": {"type": kind, "message": str(error["message"])}}


class StreamEdit:
    """Edits a stream line by line; chunks may end anywhere, and a line is passed on once it is whole."""

    def __init__(self, usage: TrueUsage) -> None:
        self._usage = usage
        self._is_error = False
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        self._rest += chunk
        if b"\n" not in chunk:  # a long line is not split again with each chunk
            return self.finish() if len(self._rest) > MAX_BUFFERED_BYTES else b""
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return b"".join(self._edited(line) + b"\n" for line in lines)

    def finish(self) -> bytes:
        """Return what is left when the stream ends in the middle of a line."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest

    def _edited(self, line: bytes) -> bytes:
        if self._usage.is_anthropic:
            if line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"
            elif self._is_error and line.startswith(b"data:"):
                return b"data: " + anthropic_error(500, line[5:].strip())
        return self._usage.of_line(line)


def edits_of(
    path: str, answer: Reply | aiohttp.ClientResponse, request: Request | None, told: Told
) -> tuple[StreamEdit | None, Edit | None]:
    """Return the edit of an answer to a request of *path*: of a stream, or of the whole answer.

    Anthropic's answers always get the count of newly cached tokens. In other answers the usage is edited if
    the prompt was evaluated up to a stop first, because llama-server counts those tokens as cached.
    """
    account = request.account if request else None
    n_found = account.n_reused if account else None
    headers, of_anthropic = answer.headers, is_anthropic(path)
    is_too_long = int(headers.get("Content-Length", 0)) > MAX_BUFFERED_BYTES
    if answer.method == "HEAD" or "Content-Encoding" in headers or is_too_long:
        return None, None
    is_needed = of_anthropic or n_found is not None or told.diagnostics
    usage = TrueUsage(path, n_found, told.diagnostics) if is_needed else None
    content_type = headers.get("Content-Type", "")
    if content_type.startswith("text/event-stream"):
        return (StreamEdit(usage) if usage else None), None
    # Read whole: some failures are not passed on.
    edit: Edit | None = _AS_IT_IS if answer.status == 500 else None
    if not content_type.startswith("application/json"):
        return None, edit
    if answer.status == 200 and usage:
        edit = usage.of_answer
    elif answer.status >= 400 and of_anthropic:
        edit = partial(anthropic_error, answer.status)
    elif answer.status == 400:
        edit = overflow_error
    if request and request.warms:
        true = edit or _AS_IT_IS
        return None, lambda body: empty_answer(path, true(body))
    return None, edit
