"""What is added up of a day."""

from datetime import datetime

from proxy.explain.causes import Cause
from proxy.explain.report import sums_at
from proxy.explain.views import RequestRecord, Today

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
    day = day.after(record(n_prompt=1000, confirmed=900, chosen="live", saved_seconds=2.0))
    day = day.after(record(n_prompt=500, confirmed=400, chosen="restore", saved_seconds=-0.5))
    day = day.after(record(n_prompt=300, confirmed=0, chosen="nothing", n_missed=299))
    assert day == Today(
        since=NOON,
        n_requests=3,
        n_reusing=2,
        n_prompt=1800,
        n_reused=1300,
        n_restored=400,
        n_missed=299,
        saved_seconds=1.5,
    )


def test_prompts_whose_reuse_is_not_known_count_as_requests_only() -> None:
    day = Today(since=NOON).after(record()).after(record(n_prompt=1000, confirmed=None))
    assert day == Today(since=NOON, n_requests=2)


def test_new_day_begins_at_its_midnight_with_nothing() -> None:
    day = Today(since=NOON).after(record(n_prompt=1000, confirmed=900))
    assert sums_at(day, MIDNIGHT - 1) == day
    new = sums_at(day, MIDNIGHT + 60)
    assert new == Today(since=MIDNIGHT)
    assert sums_at(new.after(record(n_prompt=10, confirmed=5)), MIDNIGHT + 62).n_reused == 5
