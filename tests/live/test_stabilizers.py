"""What survives of a prompt, without and with the stabilizers, by llama-server's own template engine.

Every mutation that real clients were seen to make is a row of the catalogue; rows for which nothing
can be done say so. `python -m tests.lab.clients` prints the shares.
"""

from collections.abc import Iterator

import pytest

from proxy.core.messages import Route
from proxy.stabilize.model import SAFE, RequestFacts
from tests.lab.clients import claude_code_mutations as claude_code
from tests.lab.clients.catalogue import ROWS, Row
from tests.lab.clients.rendering import (
    DROPPING_REASONING,
    REFUSING,
    SYSTEM_FIRST,
    kept_share,
    render,
    server_with,
    stabilized,
    template_facts,
    tokenize,
)
from tests.lab.server import LlamaServer
from tests.live.conftest import in_long


@pytest.fixture(scope="module", params=["thinking", "tools_first", *in_long("plain", "strict")])
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(template: str) -> Iterator[LlamaServer]:
    with server_with(template) as server:
        yield server


@pytest.fixture(scope="module")
def facts(server: LlamaServer) -> RequestFacts:
    return template_facts(server)


def test_facts_of_a_template_are_read_from_its_renderings(
    facts: RequestFacts, template: str
) -> None:
    assert facts.accepts_late_system is (template not in REFUSING)
    assert (facts.reasoning_marks is not None) is (template in DROPPING_REASONING)
    if facts.reasoning_marks is not None:
        assert facts.reasoning_marks.writes_empty


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.mutation.name)
def test_stabilizers_keep_of_a_prompt_what_can_be_kept(
    server: LlamaServer, facts: RequestFacts, template: str, row: Row
) -> None:
    column = 0 if template in SYSTEM_FIRST else 1
    without = kept_share(server, row.mutation, frozenset(), facts)
    kept = kept_share(server, row.mutation, row.mutation.switches, facts)
    assert kept is not None and kept >= row.least_with[column]
    if row.mutation.form is Route.MESSAGES and template in REFUSING and has_late_system(row):
        assert without is None
        return
    assert without is not None
    if not row.only_reasoning or template in DROPPING_REASONING:
        assert without <= row.most_without[column]
    if row.nothing_to_do:
        assert kept == pytest.approx(without, abs=0.005)


def has_late_system(row: Row) -> bool:
    return any(m["role"] == "system" for b in row.mutation.requests for m in b["messages"])


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.mutation.form is Route.MESSAGES], ids=lambda r: r.mutation.name
)
def test_stabilized_messages_body_is_counted_as_it_is_rendered_here(
    server: LlamaServer, facts: RequestFacts, row: Row
) -> None:
    for body in stabilized(row.mutation, row.mutation.switches, facts):
        prompt = render(server, Route.MESSAGES, body)
        status, counted = server.request("POST", "/v1/messages/count_tokens", body)
        assert prompt is not None and status == 200
        assert counted["input_tokens"] == len(tokenize(server, prompt))


def test_late_system_text_stands_in_the_tool_result_it_followed(
    server: LlamaServer, facts: RequestFacts, template: str
) -> None:
    mutation = claude_code.m3_system_message_in_a_tool_loop()
    prompt = render(server, Route.MESSAGES, stabilized(mutation, SAFE, facts)[-1])
    assert prompt is not None
    before, after = prompt.split("The date has changed. It is now 2026-11-22.")
    if template in REFUSING:
        assert before.endswith("\n\n<system-reminder>\n")
        assert after.startswith("\n</system-reminder>\n</tool_response>")
    else:
        assert before.endswith("<|im_start|>system\n")


def test_users_text_beside_a_tool_result_is_rendered_behind_it_as_a_users(
    server: LlamaServer, facts: RequestFacts
) -> None:
    mutation = claude_code.m13_text_beside_a_tool_result()
    raw, ordered = (
        render(server, Route.MESSAGES, stabilized(mutation, switches, RequestFacts(False))[-1])
        for switches in (SAFE - {"tool_results_first"}, SAFE)
    )
    assert raw is not None and ordered is not None
    text = "Look at the docs first."
    assert raw.index(text) < raw.rindex("</tool_response>")
    assert ordered.index(text) > ordered.rindex("</tool_response>")
    assert ordered.rindex("<|im_start|>user\n", 0, ordered.index(text)) > ordered.rindex(
        "</tool_response>"
    )


def test_loaded_tool_is_named_in_the_result_of_the_search(
    server: LlamaServer, facts: RequestFacts
) -> None:
    mutation = claude_code.m9_tool_loaded_in_mid_conversation()
    prompt = render(server, Route.MESSAGES, stabilized(mutation, SAFE, facts)[-1])
    assert prompt is not None
    assert "<tool_response>\nThe tool NotebookEdit is now available.\n" in prompt
