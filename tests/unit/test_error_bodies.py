"""The proxy's own errors, in the shape that the clients of each API expect."""

import json

import pytest

from proxy import errors
from proxy.errors import ProxyError
from proxy.front.error_bodies import error_event, error_response

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def kinds_of_error(kind: type[ProxyError]) -> list[type[ProxyError]]:
    return [kind, *(deeper for sub in kind.__subclasses__() for deeper in kinds_of_error(sub))]


KINDS = kinds_of_error(ProxyError)


@pytest.mark.parametrize("kind", KINDS)
def test_error_for_openai_clients_has_message_type_and_code(kind: type[ProxyError]) -> None:
    response = error_response(CHAT, kind("it is so"))
    assert isinstance(response.body, bytes)
    body = json.loads(response.body)
    assert (response.status, response.content_type) == (kind.status, "application/json")
    assert body == {
        "error": {
            "code": kind.status,
            "message": "llama-prefix-cache: it is so",
            "type": kind.type,
            "src": "llama-prefix-cache",
        }
    }


@pytest.mark.parametrize(
    ("kind", "anthropic_type"),
    [
        (errors.BadTarget, "invalid_request_error"),
        (errors.RefusedByProxy, "permission_error"),
        (errors.BodyTooLarge, "request_too_large"),
        (errors.TooManyRequests, "overloaded_error"),
        (errors.UpstreamAbsent, "overloaded_error"),
        (errors.UpstreamGone, "api_error"),
        (errors.UpstreamNotReached, "api_error"),
        (ProxyError, "api_error"),
    ],
)
def test_error_for_anthropic_clients_has_their_types(
    kind: type[ProxyError], anthropic_type: str
) -> None:
    response = error_response(MESSAGES, kind("it is so"))
    assert isinstance(response.body, bytes)
    error = {"type": anthropic_type, "message": "llama-prefix-cache: it is so"}
    assert json.loads(response.body) == {"type": "error", "error": error}


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_passes_by_itself_says_when_to_come_back(
    kind: type[ProxyError], path: str
) -> None:
    response = error_response(path, kind("it is so"))
    assert ("Retry-After" in response.headers) == (kind.status in (502, 503))


def test_stream_that_breaks_off_ends_in_an_event_of_the_api() -> None:
    gone = errors.UpstreamGone("it is so")
    assert error_event(CHAT, gone).startswith(b'data: {"error":')
    assert error_event(MESSAGES, gone).startswith(b'event: error\ndata: {"type":"error",')
