"""The stabilizers at work: what a request becomes, and what is learned from answers."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.core.messages import Route
from proxy.errors import UpstreamRefused
from proxy.health import Faults
from proxy.llama.answers import Answer, CallMade
from proxy.llama.client import Target
from proxy.metrics import Metrics
from proxy.serving.process import Process
from proxy.serving.request import Request
from proxy.serving.rewriting import Stabilizing
from proxy.serving.services import Services
from proxy.stabilize.model import parse_switches
from proxy.tasks import Tasks


class Upstream:
    """Renders nothing, as a template does that refuses all of it; counts how often it is asked."""

    target = Target("http://127.0.0.1:8080")

    def __init__(self) -> None:
        self.n_asked = 0

    async def apply_template(self, body: bytes, headers: Any) -> str:
        self.n_asked += 1
        raise UpstreamRefused(400, "no")


def stabilizing(switches: str = "safe") -> tuple[Stabilizing, Services, Upstream]:
    metrics, upstream = Metrics(), Upstream()
    services = SimpleNamespace(
        opened_store=None, metrics=metrics, faults=Faults(metrics), tasks=Tasks()
    )
    known = cast(Services, services)
    return Stabilizing(known, parse_switches(switches)), known, upstream


def process_of(upstream: Upstream, process_id: str = "one") -> Process:
    return cast(Process, SimpleNamespace(id=process_id, upstream=upstream))


PROCESS = process_of(Upstream())


async def no_answer(*_: object) -> Answer:
    raise AssertionError("nothing is sent here")


def request(route: Route = Route.MESSAGES, **fields: Any) -> Request:
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **fields}
    asked = Request(path="/v1/messages", route=route, keys={}, relay=no_answer)
    return asked.receive(json.dumps(body, indent=1).encode(), b"")


async def rewritten(stabilizers: Stabilizing, asked: Request) -> Request:
    await stabilizers.rewrite(PROCESS, asked)
    return asked


async def test_request_that_nothing_applies_to_is_the_very_same() -> None:
    stabilizers, _, _ = stabilizing()
    asked = request()
    raw, body = asked.raw, asked.body
    await stabilizers.rewrite(PROCESS, asked)
    assert asked.raw is raw and asked.body is body and not asked.rewrites


async def test_request_with_all_switched_off_is_the_very_same() -> None:
    stabilizers, _, upstream = stabilizing("none")
    asked = request(system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}])
    raw, body = asked.raw, asked.body
    await stabilizers.rewrite(PROCESS, asked)
    assert asked.raw is raw and asked.body is body and not asked.rewrites
    assert upstream.n_asked == 0


async def test_billing_line_is_dropped_counted_and_named() -> None:
    stabilizers, services, _ = stabilizing()
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1;"}
    rule = {"type": "text", "text": "Be brief."}
    served = await rewritten(stabilizers, request(system=[billing, rule]))
    assert json.loads(served.raw)["system"] == [rule]
    assert served.rewrites == ("drop_billing_header",)
    name, labels = (
        "llama_prefix_cache_stabilized_requests_total",
        {"stabilizer": "drop_billing_header"},
    )
    assert services.metrics.registry.get_sample_value(name, labels) == 1


async def test_template_is_asked_once_for_each_process() -> None:
    stabilizers, _, upstream = stabilizing()
    for _ in range(3):
        await stabilizers.rewrite(process_of(upstream), request())
    n_asked = upstream.n_asked
    other = process_of(upstream, "two")
    await stabilizers.rewrite(other, request())
    assert upstream.n_asked == 2 * n_asked > 0


async def test_call_that_the_client_rewrote_is_sent_as_the_model_made_it() -> None:
    stabilizers, _, _ = stabilizing()
    made = CallMade("toolu_1", "Bash", '{"description": "look", "command": "ls"}')
    answered = request()
    answered.answer = Answer(200, None, calls=(made,))
    stabilizers.note_calls(answered)
    changed = {"command": "ls", "description": "look"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": changed}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a b"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    served = await rewritten(stabilizers, request(messages=messages))
    block = json.loads(served.raw)["messages"][1]["content"][0]
    assert list(block["input"]) == ["description", "command"]


@pytest.mark.parametrize("key", ["prompt_cache_key", "promptCacheKey"])
async def test_cache_key_names_a_session_of_a_client_without_a_header(key: str) -> None:
    stabilizers, _, _ = stabilizing("safe")
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    answered = {"role": "assistant", "content": "ho"}
    asked = [{"role": "user", "content": "hi"}]

    async def names(session: str, order: str, *later: Any) -> str:
        sent = [tools["abc".index(name)] for name in order]
        asked_now = request(Route.CHAT, messages=[*asked, *later], tools=sent, **{key: session})
        body = json.loads((await rewritten(stabilizers, asked_now)).raw)
        return "".join(tool["function"]["name"] for tool in body["tools"])

    for session, loaded in (("one", "ab"), ("two", "ac")):
        await names(session, "a")
        await names(session, loaded, answered, *asked)
    assert await names("one", "abc", answered, *asked) == "abc"
    assert await names("two", "abc", answered, *asked) == "acb"


@pytest.mark.parametrize("switches", ["none", "safe, -restore_tool_arguments"])
async def test_calls_that_nothing_restores_are_not_kept(switches: str) -> None:
    stabilizers, _, _ = stabilizing(switches)
    asked = await rewritten(stabilizers, request())
    asked.answer = Answer(200, None, calls=(CallMade("toolu_1", "Bash", '{"command": "ls"}'),))
    stabilizers.note_calls(asked)
    assert len(stabilizers._memory) == 0


async def test_nothing_is_learned_of_a_request_that_is_not_to_be_stored() -> None:
    stabilizers, _, _ = stabilizing("all")
    made = CallMade("toolu_1", "Bash", '{"command": "ls"}')
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in "ab"]
    for private in (True, False):
        asked = await rewritten(stabilizers, request(tools=tools, cache={"no_store": private}))
        asked.answer = Answer(200, None, calls=(made,))
        stabilizers.note_calls(asked)
        assert (len(stabilizers._memory) == 0) is private
