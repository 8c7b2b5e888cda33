"""The traces: the same on every run, and of the shapes that they promise."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.traces.catalogue import TRACES
from tests.bench.traces.session import Session
from tests.bench.traces.trace import NO_HEADER, Request

ALL_DIGESTS = (
    "import json; from tests.bench.traces.catalogue import TRACES; "
    "print(json.dumps({name: trace().digest() for name, trace in TRACES.items()}))"
)


def requests_of(name: str) -> list[Request]:
    return list(TRACES[name]().requests())


def test_traces_are_the_same_in_every_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": "."}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", ALL_DIGESTS]
    printed = subprocess.run(command, env=environment, cwd=root, capture_output=True, check=True)
    digests = {name: trace().digest() for name, trace in TRACES.items()}
    assert json.loads(printed.stdout) == digests
    assert len(set(digests.values())) == len(TRACES)


@pytest.mark.parametrize("name", TRACES)
def test_every_tool_result_follows_its_call(name: str) -> None:
    for request in requests_of(name):
        open_calls: list[str] = []
        for message in request.messages:
            if message["role"] == "tool":
                open_calls.remove(message["tool_call_id"])
            else:
                assert not open_calls, request.label
            open_calls += [call["id"] for call in message.get("tool_calls", [])]
        assert not open_calls, request.label


@pytest.mark.parametrize("name", TRACES)
def test_every_request_waits_for_an_answer(name: str) -> None:
    # Claude Code says where it is in a system message behind the user's.
    roles = ("user", "tool", "system") if name == "claude-code" else ("user", "tool")
    assert all(request.messages[-1]["role"] in roles for request in requests_of(name))


def test_agent_is_one_session_that_only_grows() -> None:
    requests = requests_of("agent")
    assert sum(request.messages[-1]["role"] == "user" for request in requests) == 12
    for before, after in zip(requests, requests[1:], strict=False):
        assert after.messages[: len(before.messages)] == before.messages


def test_restart_is_the_agent_with_a_restart_in_the_middle() -> None:
    stages = TRACES["restart"]().stages
    assert [stage.restarts for stage in stages] == [False, True]
    assert requests_of("restart") == requests_of("agent")


def test_interleaved_sessions_take_turns() -> None:
    names = [request.label.split(".")[0] for request in requests_of("interleaved")]
    assert names == ["a", "b", "c"] * 6


def test_grown_has_results_of_8000_characters() -> None:
    requests = requests_of("grown")
    assert len(requests) == 36
    assert {len(m["content"]) for m in requests[-1].messages if m["role"] == "tool"} == {8000}


def test_reasoning_has_turns_of_at_least_20_calls() -> None:
    turns = list(calls_per_turn(requests_of("reasoning")[-1]))
    assert len(turns) == 3
    assert min(turns) >= 20


def calls_per_turn(request: Request) -> Iterator[int]:
    roles = [message["role"] for message in request.messages]
    starts = [i for i, role in enumerate(roles) if role == "user"]
    for start, end in zip(starts, [*starts[1:], len(roles)], strict=True):
        yield roles[start:end].count("tool")


def test_subagents_run_in_sequence_and_at_once() -> None:
    stages = TRACES["subagents"]().stages
    assert [len(stage.clients) for stage in stages] == [1, 3, 1]
    tools = {request.label.split(".")[0]: request.tools for request in requests_of("subagents")}
    children = {name: t for name, t in tools.items() if name.startswith("child")}
    assert len(children) == 5
    assert all(t != tools["parent"] for t in children.values())


def test_branch_regenerates_edits_and_goes_back() -> None:
    requests = requests_of("branch")
    last = requests[7]
    assert requests[8].messages == requests[9].messages == last.messages
    edited = next(r for r in requests if r.label == "edited.1")
    n_common = common_messages(edited, last)
    assert n_common == edited.messages.index(edited.messages[-1])
    assert 0 < n_common < len(last.messages)
    back = next(r for r in requests if r.label == "back.1")
    assert [m["role"] for m in last.messages[common_messages(back, last) :]].count("user") == 1


def common_messages(left: Request, right: Request) -> int:
    pairs = zip(left.messages, right.messages, strict=False)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def test_titles_come_in_and_after_turns() -> None:
    labels = [request.label for request in requests_of("titles")]
    assert labels[:6] == ["t.1", "t.2", "title1.1", "t.3", "title2.1", "t.4"]


def test_mixed_has_four_clients_and_a_restart() -> None:
    trace = TRACES["mixed"]()
    assert [len(stage.clients) for stage in trace.stages] == [4, 4]
    assert [stage.restarts for stage in trace.stages] == [False, True]
    assert trace.slots == (2,)


def test_real_answers_are_put_where_they_belong() -> None:
    session = Session("s", NO_HEADER, 1)
    session.ask().request()
    request = session.real_answer().ask().request()
    said = {"role": "assistant", "content": "Indeed so"}
    messages = request.body({"s.1": said})["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1] == said


def test_only_short_chats_need_real_answers() -> None:
    users = {
        name
        for name in TRACES
        for request in requests_of(name)
        if any("answer_to" in message for message in request.messages)
    }
    assert users == {"short", "mixed"}
