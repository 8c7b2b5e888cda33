"""The journal of requests: what it remembers and how it is asked."""

from proxy.explain.causes import MEANINGS, Cause
from proxy.explain.report import MAX_REQUESTS, Journal
from proxy.explain.views import RequestRecord


def record(request_id: str, cause: Cause = Cause.DATE) -> RequestRecord:
    return RequestRecord(
        id=request_id, at=1.0, path="/v1", outcome="miss", cause=cause, seconds=1.0
    )


def test_journal_tells_the_newest_first_and_forgets_the_oldest() -> None:
    journal = Journal()
    assert journal.explain("last") is None
    for number in range(MAX_REQUESTS + 5):
        journal.add(record(str(number)))
    assert [r.id for r in journal.latest(2)] == [str(MAX_REQUESTS + 4), str(MAX_REQUESTS + 3)]
    assert len(journal.latest(10 * MAX_REQUESTS)) == MAX_REQUESTS
    assert journal.latest(-1) == []
    last = journal.explain("last")
    assert last is not None and last.request.id == str(MAX_REQUESTS + 4)
    assert journal.explain("4") is None and journal.explain("5") is not None
    assert journal.n_recorded == MAX_REQUESTS + 5


def test_last_miss_is_found_behind_what_came_after_it() -> None:
    journal = Journal()
    journal.add(record("a", Cause.HIT))
    assert journal.explain("miss") is None and "missed" in journal.why_unknown("miss")
    for request_id, cause in (("b", Cause.DATE), ("c", Cause.EVICTED), ("d", Cause.FIRST_SIGHT)):
        journal.add(record(request_id, cause))
    found = journal.explain("miss")
    assert found is not None and found.request.id == "c"


def test_every_cause_has_words() -> None:
    assert set(MEANINGS) == set(Cause)
    assert all(says and cure and says[-1] == cure[-1] == "." for says, cure in MEANINGS.values())
