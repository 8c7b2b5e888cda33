"""The journal of requests: what it remembers and how it is asked."""

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.core.messages import Kind, Route
from proxy.core.model import Prompt, SlotId
from proxy.core.plan import Plan, Start
from proxy.core.rates import Rates
from proxy.errors import NotKnown
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.judgement import Account, Judgement
from proxy.explain.report import MAX_REQUESTS, Inquiry, Journal, Report
from proxy.explain.views import OWN_CLIENT, RequestRecord
from proxy.llama.answers import Answer
from proxy.llama.client import Timings
from proxy.llama.requests import GenerationBody
from proxy.metrics import Metrics
from proxy.serving.request import Request
from proxy.stabilize.model import SAFE, Name
from tests.unit.builders import ANY_PREFIX, NAMESPACE, run_of


def record(request_id: str, cause: Cause = Cause.HIT, **fields: Any) -> RequestRecord:
    facts: dict[str, Any] = {"at": 1.0, "path": "/v1", "outcome": "miss", "seconds": 1.0} | fields
    return RequestRecord(id=request_id, cause=cause, **facts)


def test_journal_tells_the_newest_first_and_forgets_the_oldest() -> None:
    journal = Journal()
    with pytest.raises(NotKnown):
        journal.explain("last")
    for number in range(MAX_REQUESTS + 5):
        journal.add(record(str(number)))
    assert [r.id for r in journal.latest(2)] == [str(MAX_REQUESTS + 4), str(MAX_REQUESTS + 3)]
    assert len(journal.latest(10 * MAX_REQUESTS)) == MAX_REQUESTS
    assert journal.latest(-1) == []
    assert journal.explain("last").request.id == str(MAX_REQUESTS + 4)
    assert journal.explain("5").request.id == "5"
    with pytest.raises(NotKnown, match="no request 4 is known"):
        journal.explain("4")
    assert journal.n_recorded == MAX_REQUESTS + 5


def test_name_that_a_client_gives_a_model_is_kept_shortened() -> None:
    """A body of a request may have 256 MiB, and thousands of requests are remembered."""

    async def nowhere(*_: Any) -> Answer:
        raise AssertionError

    route, path = Route.CHAT, "/v1/chat/completions"
    request = Request(path=path, route=route, keys={}, relay=nowhere, model="m" * 1_000_000)
    told = Report(Metrics(), Journal()).described(request)
    assert len(told["model"]) == 200


def test_requests_are_found_by_conversation_and_by_client() -> None:
    journal = Journal()
    journal.add(record("a", conversation="1", client="OpenCode 1.18"))
    journal.add(record("b", Cause.DATE, conversation="2", client="OpenCode 1.18"))
    journal.add(record("c", conversation="2", client="curl 8.5"))
    assert [r.id for r in journal.latest(9, conversation="2")] == ["c", "b"]
    assert [r.id for r in journal.latest(9, client="OpenCode 1.18")] == ["b", "a"]
    assert [r.id for r in journal.latest(1, client="OpenCode 1.18")] == ["b"]


@pytest.mark.parametrize(
    ("part", "is_same", "switched_on", "expected"),
    [
        (PromptPart.SYSTEM, True, SAFE, "from the next conversation on, not this one."),
        (PromptPart.SYSTEM, True, SAFE | {Name.STICKY_DATE}, "not since the proxy was started."),
        (PromptPart.SYSTEM, False, SAFE, "into the newest message."),
        (PromptPart.TOOL_RESULT, True, SAFE, "into the newest message."),
    ],
)
def test_cure_is_one_that_is_not_on_and_would_have_helped(
    part: PromptPart, is_same: bool, switched_on: frozenset[Name], expected: str
) -> None:
    journal = Journal(switched_on=switched_on)
    judgement = Judgement(Cause.DATE, is_same_conversation=is_same)
    journal.add(record("a", Cause.DATE, part=part), judgement)
    found = journal.explain("a")
    assert found.cure.endswith(expected)
    offers = 'add a stabilizer, --stabilizers "safe, sticky_date": `sticky_date` lets' in found.cure
    assert offers == expected.startswith("from the next conversation on")


def test_cure_that_every_conversation_shares_is_offered_to_a_new_one_if_it_is_off() -> None:
    for switched_on, is_offered in ((frozenset({Name.INLINE_REASONING}), False), (SAFE, True)):
        journal = Journal(switched_on=switched_on)
        journal.add(record("a", Cause.REASONING, part=PromptPart.ASSISTANT))
        assert ("Or add" in journal.explain("a").cure) == is_offered


def test_last_request_is_that_of_a_client_if_there_is_one() -> None:
    journal = Journal()
    journal.add(record("warmed", Cause.FIRST_SIGHT, client=OWN_CLIENT))
    assert journal.explain("last").request.id == "warmed"
    journal.add(record("a", Cause.HIT))
    journal.add(record("b", Cause.HIT))
    journal.add(record("warmed again", Cause.FIRST_SIGHT, client=OWN_CLIENT))
    journal.add(record("after b", Cause.NOT_LOOKED_UP, kind=Kind.AHEAD))
    assert journal.explain("last").request.id == "b"


def test_last_miss_is_found_behind_what_came_after_it() -> None:
    journal = Journal()
    journal.add(record("a", Cause.HIT))
    with pytest.raises(NotKnown, match="no miss"):
        journal.explain("miss")
    for request_id, cause in (("b", Cause.DATE), ("c", Cause.EVICTED), ("d", Cause.FIRST_SIGHT)):
        journal.add(record(request_id, cause))
    assert journal.explain("miss").request.id == "c"


def test_every_cause_has_words() -> None:
    assert all(cause.says and cause.says[-1] == cause.cure[-1] == "." for cause in Cause)
    assert {cause.stabilizer for cause in Cause if cause.stabilizer} < set(Name)


def test_all_of_a_conversation_of_few_tokens_is_known_when_it_goes_on() -> None:
    """Clients are not told that the message before was not found."""
    process: Any = SimpleNamespace(
        id="process", journal=Journal(), served={}, rule=ANY_PREFIX, opened_store=None
    )
    body = GenerationBody(b"", {"messages": [{"role": "user", "content": "So."}]})
    for n_known, n_prompt, cause in ((0, 60, Cause.FIRST_SIGHT), (60, 200, Cause.HIT)):
        plan = Plan(Start(SlotId(0), n_known, n_known), n_shared=n_known)
        account = Account(plan, n_prompt, n_reused=n_known)
        inquiry = Inquiry(process, Prompt(run_of(n_prompt), NAMESPACE), body)
        found = inquiry.judge(account, f"of {n_prompt}")
        assert (account.outcome, found.cause) == ("miss", cause)


def test_answer_that_has_begun_leaves_nothing_that_a_request_beside_it_could_miss() -> None:
    process: Any = SimpleNamespace(
        id="process", journal=Journal(), served={}, rule=ANY_PREFIX, opened_store=None
    )
    roles = ("user", "assistant", "user")
    body = GenerationBody(b"", {"messages": [{"role": role, "content": "So."} for role in roles]})
    one, other = (Account(Plan(Start(SlotId(i))), n_prompt=1000) for i in range(2))
    first = Inquiry(process, Prompt(run_of(1000), NAMESPACE), body)
    first.foresee(one, "one")
    second = Inquiry(process, Prompt(run_of(1000), NAMESPACE), body)
    for inquiry, account, name in ((first, one, "one"), (second, other, "other")):
        account.add(Timings(0, 1000), Rates())
        assert inquiry.judge(account, name).cause is Cause.FIRST_SIGHT
