"""What is added up of a day, of the last two hours by minutes, and of the last 30 days by hours."""

from datetime import datetime

import msgspec

from proxy.explain.causes import Cause
from proxy.explain.report import sums_at
from proxy.explain.views import N_HOURS, N_MINUTES, History, RequestRecord, Span, Today

NOON = datetime(2026, 11, 21, 12).timestamp()
MIDNIGHT = datetime(2026, 11, 22).timestamp()


def record(**fields: object) -> RequestRecord:
    facts = {
        "id": "a",
        "at": NOON,
        "path": "/",
        "outcome": "hit",
        "cause": Cause.HIT,
        "seconds": 1.0,
    }
    return RequestRecord(**(facts | fields))  # type: ignore[arg-type]


def test_reuse_restores_misses_and_seconds_are_added_up() -> None:
    day = Today(since=NOON)
    day.add(record(n_prompt=1000, confirmed=900, chosen="live", saved_seconds=2.0))
    day.add(record(n_prompt=500, confirmed=400, chosen="restore", saved_seconds=-0.5))
    day.add(record(n_prompt=300, confirmed=0, cause=Cause.DATE, n_missed=299, outcome="miss"))
    assert day == Today(
        since=NOON,
        n_requests=3,
        n_reusing=2,
        n_missing=1,
        n_prompt=1800,
        n_reused=1300,
        n_restored=400,
        n_missed=299,
        n_new=201,
        saved_seconds=1.5,
    )


def test_restores_that_failed_and_first_words_of_a_template_are_counted_as_metrics_count_them() -> (
    None
):
    day = Today(since=NOON)
    day.add(record(n_prompt=500, confirmed=400, chosen="restore", outcome="degraded"))
    day.add(record(n_prompt=500, confirmed=15, chosen="live", outcome="miss"))
    assert (day.n_reused, day.n_restored, day.n_reusing) == (415, 0, 0)


def test_prompts_whose_reuse_is_not_known_count_as_requests_only() -> None:
    day = Today(since=NOON)
    day.add(record(outcome="bypass"))
    day.add(record(n_prompt=1000, confirmed=None, outcome="refused"))
    assert day == Today(since=NOON, n_requests=2)


def test_new_day_begins_at_its_midnight_with_nothing() -> None:
    day = Today(since=NOON, n_requests=1, n_prompt=1000, n_reused=900)
    assert sums_at(day, MIDNIGHT - 1) is day
    new = sums_at(day, MIDNIGHT + 60)
    assert new == Today(since=MIDNIGHT)
    new.add(record(n_prompt=10, confirmed=5))
    assert sums_at(new, MIDNIGHT + 62).n_reused == 5


def test_minutes_and_hours_tell_what_was_reused_missed_and_new() -> None:
    history = History(today=Today(since=NOON))
    facts = {"n_prompt": 1000, "confirmed": 600, "n_missed": 100, "cause": Cause.DATE}
    history.add(record(at=NOON + 10, **facts, saved_seconds=3.0))
    history.add(record(at=NOON + 70, n_prompt=10, confirmed=10, saved_seconds=-1.0))
    history.add(record(at=NOON + 80))
    first = Span(int(NOON), 1, 1, 600, 100, 300, 3.0)
    second = Span(int(NOON) + 60, 2, n_reused=10, saved_seconds=-1.0)
    assert history.minutes == [first, second]
    assert history.hours == [Span(int(NOON), 3, 1, 610, 100, 300, 2.0)]
    assert history.today.n_requests == 3


def test_history_keeps_two_hours_and_thirty_days_and_a_clock_set_back_hurts_nothing() -> None:
    history = History(today=Today(since=NOON))
    for hour in range(2000):
        history.add(record(at=NOON + 3600 * hour, n_prompt=10, confirmed=5))
    assert len(history.hours) == N_HOURS and len(history.minutes) == 2
    for minute in range(500):
        history.add(record(at=NOON + 2000 * 3600 + 60 * minute))
    assert len(history.minutes) == N_MINUTES
    history.add(record(at=NOON))
    assert history.minutes[-1].n_requests == 2
    kept = msgspec.msgpack.encode(history)
    assert len(kept) < 40_000 and msgspec.msgpack.decode(kept, type=History) == history
