"""The proxy's own errors, in the shape that the clients of each API expect."""

import json

import pytest

from proxy import errors
from proxy.errors import ProxyError
from proxy.web.errors import anthropic_error, error_event, error_event_of, error_response
from tests.unit.edits import edit_of_answer, edit_of_stream

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def kinds_of_error(kind: type[ProxyError]) -> list[type[ProxyError]]:
    return [kind, *(deeper for sub in kind.__subclasses__() for deeper in kinds_of_error(sub))]


# Others are there or not, by what was imported before.
KINDS = [kind for kind in kinds_of_error(ProxyError) if kind.__module__ == errors.__name__]
OPENAI_TYPES = {
    404: "not_found_error",
    500: "server_error",
    502: "unavailable_error",
    503: "unavailable_error",
}


@pytest.mark.parametrize("kind", KINDS)
def test_error_for_openai_clients_has_message_type_and_code(kind: type[ProxyError]) -> None:
    response = error_response(CHAT, kind("it is so"), {})
    assert isinstance(response.body, bytes)
    body = json.loads(response.body)
    assert (response.status, response.content_type) == (kind.status, "application/json")
    assert body == {
        "error": {
            "code": kind.status,
            "message": "llama-prefix-cache: it is so",
            "type": OPENAI_TYPES[kind.status],
            "src": "llama-prefix-cache",
        }
    }


@pytest.mark.parametrize(
    ("status", "openai_type", "anthropic_type"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (403, "permission_error", "permission_error"),
        (413, "invalid_request_error", "request_too_large"),
        (422, "invalid_request_error", "invalid_request_error"),
        (errors.TooManyRequests.status, "unavailable_error", "overloaded_error"),
        (503, "unavailable_error", "overloaded_error"),
        (errors.ServerAway.status, "unavailable_error", "api_error"),
        (ProxyError.status, "server_error", "api_error"),
    ],
)
def test_error_of_a_status_has_the_type_of_each_api(
    status: int, openai_type: str, anthropic_type: str
) -> None:
    response = error_response(CHAT, ProxyError("it is so", status), {})
    assert isinstance(response.body, bytes)
    assert (response.status, json.loads(response.body)["error"]["type"]) == (status, openai_type)
    response = error_response(MESSAGES, ProxyError("it is so", status), {})
    assert isinstance(response.body, bytes)
    error = {"type": anthropic_type, "message": "llama-prefix-cache: it is so"}
    assert json.loads(response.body) == {"type": "error", "error": error}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_passes_by_itself_says_when_to_come_back(
    kind: type[ProxyError], path: str
) -> None:
    response = error_response(path, kind("it is so"), {})
    assert ("Retry-After" in response.headers) == (kind.status in (502, 503))


def test_stream_that_breaks_off_ends_in_an_event_of_the_api() -> None:
    gone = errors.ServerAway("it is so")
    assert error_event(CHAT, gone).startswith(b'data: {"error":')
    assert error_event(MESSAGES, gone).startswith(b'event: error\ndata: {"type":"error",')


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion"])
def test_failure_that_passes_has_a_type_that_crush_knows_where_no_status_can_tell(
    path: str,
) -> None:
    """Its library, Fantasy, tries again behind the types of OpenAI's errors only."""
    gone, full = errors.ServerAway("it is so"), errors.TooManyRequests("it is so")
    loading = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    for event in (
        error_event(path, gone),
        error_event(path, full),
        error_event_of(path, 503, json.dumps({"error": loading}).encode()),
        error_event_of(path, 502, b"<html>"),
    ):
        assert json.loads(event[6:])["error"]["type"] == "server_error"
    refused = error_event(path, ProxyError("it is so", 400))
    assert json.loads(refused[6:])["error"]["type"] == "invalid_request_error"


TOO_LONG = {
    "code": 400,
    "message": "request (160011 tokens) exceeds the available context size (65536 tokens)",
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 160011,
    "n_ctx": 65536,
}
KNOWN_WORDS = (
    "prompt is too long: 160011 tokens > 65536 maximum (context_length_exceeded: this model's maximum "
    "context length is 65536 tokens, your messages resulted in 160011 tokens; exceed_context_size_error: "
    "request (160011 tokens) exceeds the available context size (65536 tokens))"
)
IN_KNOWN_WORDS = TOO_LONG | {"code": "context_length_exceeded", "message": KNOWN_WORDS}


@pytest.mark.parametrize(
    ("status", "anthropic_type"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (500, "api_error"),
        (501, "invalid_request_error"),
        (503, "overloaded_error"),
    ],
)
def test_llama_servers_error_is_brought_into_anthropics_shape(
    status: int, anthropic_type: str
) -> None:
    raw = json.dumps({"error": {"code": status, "message": "it is so", "type": "x"}}).encode()
    error = {"type": anthropic_type, "message": "it is so"}
    assert json.loads(anthropic_error(status, raw)) == {"type": "error", "error": error}


@pytest.mark.parametrize(
    "error", ["it is so", {"message": "it is so", "type": "x", "param": None, "code": "not_found"}]
)
def test_llama_swaps_error_is_brought_into_anthropics_shape(error: object) -> None:
    """That of v250, and that of later ones, whose codes are words."""
    raw = json.dumps({"error": error, "src": "llama-swap"}).encode()
    told = {"type": "not_found_error", "message": "it is so"}
    assert json.loads(anthropic_error(404, raw)) == {"type": "error", "error": told}


def test_prompt_that_is_too_long_is_told_in_the_words_of_all() -> None:
    told = json.loads(anthropic_error(400, json.dumps({"error": TOO_LONG}).encode()))["error"]
    assert told["type"] == "invalid_request_error"
    assert told["message"] == KNOWN_WORDS


def test_prompt_that_is_too_long_for_another_api_is_told_in_all_words_too() -> None:
    """Kimi Code and qwen-code do not know llama-server's words, codex only a code."""
    edit = edit_of_answer(CHAT, 400, None)
    assert edit is not None
    told = json.loads(edit(json.dumps({"error": TOO_LONG}).encode()))["error"]
    assert told == IN_KNOWN_WORDS
    other = b'{"error": {"code": 400, "message": "it is so", "type": "invalid_request_error"}}'
    assert edit(other) == other


@pytest.mark.parametrize(
    "raw", [b"", b"<html>", b"[]", b"{}", b'{"error": "no"}', b'{"type": "error", "error": {}}']
)
def test_answer_that_is_no_error_of_llama_server_passes_as_it_is(raw: bytes) -> None:
    assert anthropic_error(400, raw) == raw


def test_error_event_of_a_messages_stream_is_brought_into_anthropics_shape() -> None:
    edit = edit_of_stream(MESSAGES, None)
    assert edit is not None
    event = b'event: error\ndata: {"code":500,"message":"it is so","type":"server_error"}\n\n'
    name, data, *_ = edit.feed(event).split(b"\n")
    assert name == b"event: error"
    error = {"type": "api_error", "message": "it is so"}
    assert json.loads(data[5:]) == {"type": "error", "error": error}


def test_refusal_in_a_stream_has_the_shape_of_its_api() -> None:
    raw = json.dumps({"error": TOO_LONG}).encode()
    refusal = {"error": IN_KNOWN_WORDS}
    assert error_event_of(CHAT, 400, raw) == b"data: " + compact(refusal) + b"\n\n"
    assert error_event_of("/completion", 400, raw) == error_event_of(CHAT, 400, raw)
    anthropic = b"event: error\ndata: " + anthropic_error(400, raw) + b"\n\n"
    assert error_event_of(MESSAGES, 400, raw) == anthropic
    told = {"code": "context_length_exceeded", "message": KNOWN_WORDS, "param": None}
    nested = {"type": TOO_LONG["type"], **told}
    event = {"type": "error", **told, "sequence_number": 0, "error": nested}
    failed = {"type": "response.failed", "sequence_number": 1, "response": {"error": told}}
    events = b"event: error\ndata: %b\n\nevent: response.failed\ndata: %b\n\n"
    expected = events % (compact(event), compact(failed))
    assert error_event_of("/v1/responses", 400, raw) == expected


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses"])
@pytest.mark.parametrize("status", [200, 418, 502, 504])
def test_refusal_in_a_stream_that_is_not_json_says_which_status_it_was(
    path: str, status: int
) -> None:
    assert b"llama-server answered %d" % status in error_event_of(path, status, b"<html>")


def compact(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def test_error_that_comes_in_chunks_as_a_router_sends_it_is_put_into_anthropics_shape() -> None:
    edit = edit_of_answer(MESSAGES, 400, None, length="")
    assert edit is not None
    told = {"type": "exceed_context_size_error", "message": "no", "n_prompt_tokens": 9, "n_ctx": 5}
    error = json.loads(edit(json.dumps({"error": told}).encode()))["error"]
    assert error["message"].startswith("prompt is too long: 9 tokens > 5 maximum")
