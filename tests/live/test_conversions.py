"""Prompts of /v1/messages and /v1/responses: what the proxy predicts is what llama-server evaluates."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from proxy.core.model import NO_RULE, Prompt, Rule, RuleKind
from proxy.errors import UnknownShape, UpstreamRefused
from proxy.llama import client as llama_server
from proxy.llama.client import Target
from proxy.llama.connection import new_session
from proxy.llama.files import read_state_file
from proxy.llama.requests import as_chat_body, generation_route, parse_body
from proxy.servers.warming import own_request
from proxy.serving.prompts import PromptReader
from tests.lab import generated_bodies, messages_bodies, responses_bodies
from tests.lab.models import TEMPLATE_FOLDER, least_model
from tests.lab.server import LlamaServer

COUNT_PATHS = {
    "/v1/messages": "/v1/messages/count_tokens",
    "/v1/responses": "/v1/responses/input_tokens",
}
ACCEPTED = {"/v1/messages": messages_bodies.ACCEPTED, "/v1/responses": responses_bodies.ACCEPTED}
REFUSED = {"/v1/messages": messages_bodies.REFUSED, "/v1/responses": responses_bodies.REFUSED}
TEMPLATES = {
    path.stem: path
    for folder in (TEMPLATE_FOLDER, Path(__file__).with_name("templates"))
    for path in sorted(folder.glob("*.jinja"))
}


class Server:
    """A llama-server with one slot, and what the proxy predicts of its prompts."""

    def __init__(self, process: LlamaServer, directory: Path, template: str) -> None:
        self.process = process
        self.directory = directory
        self.template = template

    def predict(self, path: str, raw: bytes, rule: Rule = NO_RULE) -> Prompt | None:
        """Return the prompt as the proxy reads it, or None if it cannot."""
        try:
            return asyncio.run(self._read(path, raw, rule))
        except (UnknownShape, UpstreamRefused):
            return None

    async def _read(self, path: str, raw: bytes, rule: Rule) -> Prompt:
        route, body = generation_route("POST", path), parse_body(raw)
        assert route is not None and body is not None
        async with new_session() as session:
            upstream = llama_server.LlamaServer(session, Target(self.process.base_url), None)
            chat = as_chat_body(route, body)
            reader = PromptReader(upstream, n_ctx=1 << 20)
            return await reader.read(own_request(path, route, {}, b""), chat, rule)

    def count(self, path: str, raw: bytes) -> int | None:
        """Return llama-server's own count, or None if it refuses the body."""
        status, reply = self.process.request("POST", COUNT_PATHS[path], raw)
        return int(reply["input_tokens"]) if status == 200 else None

    def evaluate(self, path: str, raw: bytes) -> list[int] | None:
        """Serve the request itself; return the tokens that its slot holds then, or None."""
        if self.process.request("POST", path, raw)[0] != 200:
            return None
        saved = {"filename": "state"}
        assert self.process.request("POST", "/slots/0?action=save", saved)[0] == 200
        return list(read_state_file(self.directory / "state").tokens)

    def disagreement(self, path: str, raw: bytes) -> str | None:
        """Return what is wrong with the prediction for a body, if anything."""
        predicted, count = self.predict(path, raw), self.count(path, raw)
        n_predicted = None if predicted is None else predicted.n_tokens
        if n_predicted != count:
            return f"{n_predicted} tokens instead of {count}"
        if predicted is None:
            return None
        evaluated = self.evaluate(path, raw)
        # Such a body is refused for its sampling, after it was rendered.
        same = evaluated is None or evaluated == list(predicted.tokens)
        return None if same else "other tokens"


@pytest.fixture(scope="module", params=TEMPLATES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    template = str(request.param)
    directory = tmp_path_factory.mktemp(template)
    process = LlamaServer(
        least_model("full"),
        directory,
        n_slots=1,
        extra_args=("--jinja", "--chat-template-file", str(TEMPLATES[template])),
        log_path=directory / "llama-server.log",
    )
    with process:
        yield Server(process, directory, template)


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


@pytest.mark.parametrize("path", COUNT_PATHS)
def test_prediction_for_bodies_of_clients_is_what_the_slot_holds(server: Server, path: str) -> None:
    found = {
        name: server.disagreement(path, encoded(body)) for name, body in ACCEPTED[path].items()
    }
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    if server.template == "mirror":
        evaluated = (server.evaluate(path, encoded(body)) for body in ACCEPTED[path].values())
        assert all(evaluated)


@pytest.mark.parametrize("path", COUNT_PATHS)
def test_body_that_the_server_refuses_is_not_predicted(server: Server, path: str) -> None:
    for name, body in REFUSED[path].items():
        assert server.count(path, encoded(body)) is None, name
        assert server.predict(path, encoded(body)) is None, name


@given(body=generated_bodies.messages_bodies)
def test_prediction_for_any_messages_body_is_what_the_slot_holds(
    server: Server, body: dict[str, Any]
) -> None:
    assert server.disagreement("/v1/messages", encoded(body)) is None


@given(body=generated_bodies.responses_bodies)
def test_prediction_for_any_responses_body_is_what_the_slot_holds(
    server: Server, body: dict[str, Any]
) -> None:
    assert server.disagreement("/v1/responses", encoded(body)) is None


NUMBERS = (
    b"[1.0, 1e5, 1E+5, 1e15, 1e16, 9007199254740993.0, 0.1, 1e-4, 1e-5, 5e-324, 1.7976931348623157e308, -0,"
    b" -0.0, 9223372036854775807, -9223372036854775808, 18446744073709551615, 18446744073709551616,"
    b' -9223372036854775809, 123456789012345678901, "\\u00e9\\/\\u0000\\u007f\\u2028\\ud83d\\ude00\\b\\f"]'
)


def test_numbers_and_escapes_in_calls_are_written_as_the_server_writes_them(server: Server) -> None:
    arguments = b'{"z": %s, "a": {"z": 1, "a": %s}, "z": {"again": 1.50}}' % (NUMBERS, NUMBERS)
    raw = encoded(messages_bodies.after_call("ARGUMENTS", messages_bodies.result("t1", "ok")))
    raw = raw.replace(b'"ARGUMENTS"', arguments)
    raw = (
        raw[:-1]
        + b', "tools": [{"name": "f", "input_schema": {"enum": %s, "b": 1, "a": 2}}]}' % NUMBERS
    )
    assert server.count("/v1/messages", raw)
    assert server.disagreement("/v1/messages", raw) is None


def messages_session(task: str) -> list[dict[str, Any]]:
    """Return the first request of a session of Claude Code, and the one after a tool call."""
    m = messages_bodies
    asked = m.user(m.text(task))
    called = m.assistant(m.thinking("Look first."), m.call("t1", {"command": "ls"}))
    steps = [[asked], [asked, called, m.user(m.result("t1", "a\nb"))]]
    return [m.talk(*step, system=m.SYSTEM, tools=[m.BASH]) for step in steps]


def responses_session(task: str) -> list[dict[str, Any]]:
    """Return the first request of a session of codex, and the one after a tool call."""
    r = responses_bodies
    asked = r.user(r.part(task))
    called = [r.reasoning([r.thought("Look first.")]), r.call("c1", '{"cmd":"ls"}')]
    steps = [[asked], [asked, *called, r.output("c1", "a\nb")]]
    return [r.asks(step, instructions="You are a coding agent.", tools=[r.SHELL]) for step in steps]


@pytest.mark.parametrize("server", ["plain", "thinking", "tools_first"], indirect=True)
@pytest.mark.parametrize(
    ("path", "session"), [("/v1/messages", messages_session), ("/v1/responses", responses_session)]
)
def test_cuts_lie_where_the_next_request_and_the_next_session_agree(
    server: Server, path: str, session: Callable[[str], list[dict[str, Any]]]
) -> None:
    first, after_call, other = (
        server.predict(path, encoded(body), Rule(RuleKind.END_ONLY))
        for body in [*session("Fix it."), session("Explain it.")[0]]
    )
    assert first and after_call and other
    assert first.cuts.turn_start == first.cuts.message_end > 0
    assert first.cuts.header == after_call.cuts.header == other.cuts.header > 50
    assert first.tokens[: first.cuts.header] == other.tokens[: first.cuts.header]
    assert after_call.cuts.turn_start == first.cuts.message_end > first.n_tokens - 8
    assert after_call.tokens[: first.cuts.message_end] == first.tokens[: first.cuts.message_end]
    assert after_call.cuts.message_end > after_call.n_tokens - 8
