"""Random requests get the same class of answer through the proxy as from llama-server alone.

docs/security.md names what may differ: heads that violate RFC 9112 (h11 judges) may be refused here.
"""

import json
import re
from typing import Any

import h11
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.lab.raw_bytes import HOST, chat, get, post, status_of
from tests.lab.rig import Rig
from tests.live.conftest import StartRig

MESSAGES = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
BODIES: list[tuple[bytes, dict[str, Any]]] = [
    (b"/v1/chat/completions", json.loads(chat(stream=True))),
    (b"/v1/chat/completions", json.loads(chat(cache_prompt=True, id_slot=0))),
    (b"/completion", {"prompt": "def f():", "n_predict": 2}),
    (b"/completion", {"prompt": [300, 301], "n_predict": 2, "n_cache_reuse": 0}),
    (b"/v1/completions", {"prompt": "def f():", "max_tokens": 2, "stream": False}),
    (b"/v1/messages", {**MESSAGES, "system": "be short", "model": "x"}),
    (b"/v1/messages/count_tokens", MESSAGES),
    (b"/v1/responses", {"input": "hello", "max_output_tokens": 2}),
    (b"/tokenize", {"content": "hello", "add_special": True}),
    (b"/apply-template", MESSAGES),
]
HEADS = [
    get(path) for path in (b"/health", b"/v1/models", b"/props", b"/no/such", b"/slots?a=b%20c")
]
HEADS.append(post(b"/tokenize", b'{"content": "hello"}'))
ODD_LINES = [
    *(
        b"Content-Length: 0",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
        b"X: \xff\xfe",
    ),
    *(
        b"Connection: keep-alive, X",
        b"Connection: close",
        b"Accept-Encoding: gzip",
        b"Range: bytes=0-",
    ),
    *(
        b"Authorization: Bearer \xe9",
        b"X-Api-Key: ",
        b"Content-Encoding: gzip",
        b"Origin: http://a",
    ),
    *(
        b"Session-Id: \xc3\xa9",
        b"X-Conversation-Id: a",
        b"Upgrade: h2c",
        b"Content-Type: text/plain",
    ),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
NAMES = (
    *(
        "n_predict",
        "max_tokens",
        "stream",
        "cache_prompt",
        "id_slot",
        "n_cache_reuse",
        "temperature",
    ),
    *(
        "stop",
        "tools",
        "tool_choice",
        "response_format",
        "lora",
        "n",
        "model",
        "logprobs",
        "grammar",
    ),
)
IN_ONE_LOOP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def class_of(status: int) -> str:
    """Return what a status means; a connection that is closed without an answer is a refusal."""
    return {0: "refused", 4: "refused", 5: "failed"}.get(status // 100, "served")


def is_valid(raw: bytes) -> bool:
    """Return whether a request violates nothing that h11 knows of, and has no header twice, no fragment."""
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(raw)
        event = connection.next_event()
        while isinstance(event, h11.Request | h11.Data):
            event = connection.next_event()
    except h11.RemoteProtocolError:
        return False
    names = re.findall(rb"(?m)^([^:\n]+):", raw.partition(b"\r\n\r\n")[0].lower())
    is_target = b"#" not in raw.partition(b"\r\n")[0]
    return isinstance(event, h11.EndOfMessage) and len(names) == len(set(names)) and is_target


@st.composite
def changed_bodies(draw: st.DrawFn) -> bytes:
    """Return a request whose body is another one than clients send."""
    path, fields = draw(st.sampled_from(BODIES))
    names = st.sampled_from([*fields, *NAMES])
    raw = json.dumps({**fields, **draw(st.dictionaries(names, VALUES, max_size=3))}).encode()
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=2)) + raw[at + draw(st.integers(0, 2)) :]
    return post(path, raw)


@st.composite
def changed_heads(draw: st.DrawFn) -> bytes:
    """Return a request with some bytes changed in its head, or with an odd line in it."""
    head, end, body = draw(st.sampled_from(HEADS)).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    for line in draw(st.lists(st.sampled_from(ODD_LINES), max_size=2)):
        lines.insert(draw(st.integers(1, len(lines))), line)
    head = b"\r\n".join(lines)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(head)))
        head = head[:at] + draw(st.binary(max_size=2)) + head[at + draw(st.integers(0, 2)) :]
    return head + end + body


@pytest.fixture
async def rig(start_rig: StartRig) -> Any:
    async with start_rig("hybrid", n_ctx=1024) as rig:
        yield rig


@given(raw=changed_bodies())
@IN_ONE_LOOP
async def test_any_body_has_the_direct_class_of_answer(rig: Rig, raw: bytes) -> None:
    alone = class_of(await status_of(rig.server.base_url, raw))
    assert class_of(await status_of(rig.base_url, raw)) == alone


def as_passed_on(raw: bytes) -> bytes:
    """Return a request as the proxy understands it.

    An empty line before it is ignored (RFC 9112, 2.2), and so are bytes of its headers that are no UTF-8.
    """
    target, end, rest = raw.lstrip(b"\r\n").partition(b"\r\n")
    headers, blank, body = rest.partition(b"\r\n\r\n")
    return target + end + headers.decode(errors="ignore").encode() + blank + body


@given(raw=changed_heads())
@example(raw=b"GET /health HTTP/1.1\r\nHost: localhost\r\nRange:\x80 bytes=0-\r\n\r\n")
@example(raw=b"\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
@example(raw=b"GET /health\r\nHost: localhost\r\n\r\n")
@IN_ONE_LOOP
async def test_any_head_has_the_direct_class_of_answer_or_is_refused(rig: Rig, raw: bytes) -> None:
    # Only what may be half a request needs an end; a client that sends no more is not waited for long.
    is_half = not is_valid(raw)
    ours = class_of(await status_of(rig.base_url, raw, is_all=is_half))
    assert ours != "failed"
    # The proxy passes no Host on, and so does not judge it.
    if HOST in raw and (not is_half or ours == "served"):
        passed_on = as_passed_on(raw)
        assert class_of(await status_of(rig.server.base_url, passed_on, is_all=is_half)) == ours


WRITTEN = ("%c", "%%%02x", "%%%02X", "%%u%04x", "%%u%04X", "%%U%04x", "%%25%02x", "/%c", "./%c")
"""Ways to write a letter of a path: some of them are another letter."""


@given(ways=st.lists(st.sampled_from(WRITTEN), min_size=8, max_size=8))
@example(ways=["%c", "%%u%04x", *["%c"] * 6])
@IN_ONE_LOOP
async def test_slots_are_not_reached_however_their_path_is_written(
    rig: Rig, ways: list[str]
) -> None:
    letters = zip(ways, map(ord, "/slots/0"), strict=True)
    path = "/" + "".join(way % letter for way, letter in letters).removeprefix("/")
    raw = post(f"{path}?action=erase".encode(), b"{}")
    assert class_of(await status_of(rig.base_url, raw)) == "refused", path
