"""The closed set of degradations: words, cures, and the state that follows."""

import time
from types import SimpleNamespace

import pytest
import structlog

from proxy import health as module
from proxy.core.conditions import OF_PROCESS, DegradationKind, State, state_under
from proxy.core.model import Quarantine
from proxy.health import Degradations
from proxy.metrics import Metrics
from proxy.serving.services import note_quarantined
from tests.unit.builders import checkpoint

K = DegradationKind


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(time=clock))
    return clock


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def noted(metrics: Metrics, clock: Clock) -> Degradations:
    return Degradations(metrics)


def sample(metrics: Metrics, name: str, kind: DegradationKind) -> float | None:
    return metrics.registry.get_sample_value(f"llama_prefix_cache_{name}", {"kind": kind})


@pytest.mark.parametrize("kind", DegradationKind)
def test_every_kind_has_a_reason_and_a_cure_in_words(kind: DegradationKind) -> None:
    assert kind.reason.endswith(".") and kind.cure.endswith(".")


@pytest.mark.parametrize(
    ("active", "state"),
    [
        ([], State.CACHING),
        ([K.DIRECTORY_IS_OPEN], State.CACHING),
        ([K.DIRECTORY_IS_OPEN, K.SAVES_FAIL], State.DEGRADED),
        ([K.SAVES_FAIL, K.RULE_IS_NOTHING], State.FORWARDING),
    ],
)
def test_state_is_that_of_the_worst(active: list[DegradationKind], state: State) -> None:
    assert state_under(active) is state


def test_only_what_belongs_to_the_store_outlives_a_llama_server() -> None:
    of_store = {K.STORE_NOT_OPEN, K.DIRECTORY_IS_OPEN, K.STATE_ENDED_SERVER, K.SHARED_STORE_AWAY}
    assert set(DegradationKind) - OF_PROCESS == of_store


def test_reason_says_how_long_requests_wait(metrics: Metrics) -> None:
    noted = Degradations(metrics, wait_seconds=7.5)
    noted.at("a").begin(K.UNREACHABLE)
    (shown,) = noted.active
    assert "Requests wait up to 7.5 s (upstream_wait_seconds)." in shown.reason


def test_begun_and_ended_degradation_is_counted_and_shown(
    noted: Degradations, metrics: Metrics, clock: Clock
) -> None:
    noted.begin(K.SAVES_FAIL, "disk full")
    clock.now += 5
    noted.begin(K.SAVES_FAIL, "disk still full")
    (shown,) = noted.active
    assert (shown.since, shown.detail) == (1000.0, "disk still full")
    assert shown.reason.endswith("(disk still full)")
    assert (noted.state, noted.since) == (State.DEGRADED, 1000.0)
    assert sample(metrics, "degraded", K.SAVES_FAIL) == 1
    assert sample(metrics, "degradations_total", K.SAVES_FAIL) == 1
    noted.end(K.SAVES_FAIL, K.LOADING)
    assert (noted.active, noted.state, noted.since) == ([], State.CACHING, 1005.0)
    assert sample(metrics, "degraded", K.SAVES_FAIL) == 0


def test_empty_detail_keeps_what_was_known(noted: Degradations) -> None:
    noted.begin(K.STORE_NOT_OPEN, "damaged")
    noted.begin(K.STORE_NOT_OPEN)
    assert noted.active[0].detail == "damaged"


def test_worst_reason_comes_first_then_the_oldest(noted: Degradations, clock: Clock) -> None:
    for kind in (K.DIRECTORY_IS_OPEN, K.SAVES_FAIL, K.ERASES_REFUSED, K.LOADING):
        noted.begin(kind)
        clock.now += 1
    kinds = [shown.kind for shown in noted.active]
    assert kinds == [K.LOADING, K.SAVES_FAIL, K.ERASES_REFUSED, K.DIRECTORY_IS_OPEN]


def test_condition_of_the_proxy_itself_counts_for_no_llama_server(noted: Degradations) -> None:
    noted.begin(K.DIRECTORY_IS_OPEN)
    for where in ("one", "two"):
        noted.at(where).begin(K.UNREACHABLE)
    assert noted.state is K.UNREACHABLE.leads_to


def test_degradation_that_comes_and_goes_is_logged_once_in_a_while(
    noted: Degradations, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines() -> list[str]:
        return [line for line in capsys.readouterr().out.splitlines() if "degradation" in line]

    structlog.reset_defaults()  # a command that ran in this process may have set its log up
    noted.begin(K.SAVES_FAIL)
    noted.end(K.SAVES_FAIL)
    assert len(lines()) == 2
    for _ in range(5):
        clock.now += 1
        noted.begin(K.SAVES_FAIL)
        noted.end(K.SAVES_FAIL)
    assert lines() == []
    clock.now += module.QUIET_SECONDS
    noted.begin(K.SAVES_FAIL)
    assert len(lines()) == 1


def test_the_end_of_a_degradation_is_told_with_its_llama_server(noted: Degradations) -> None:
    structlog.reset_defaults()
    with structlog.testing.capture_logs() as logs:
        for where in ("", "127.0.0.1:8080"):
            noted.at(where).begin(K.UNREACHABLE)
            noted.at(where).end(K.UNREACHABLE)
    said = [line["says"] for line in logs if line["event"] == "degradation ended"]
    assert said == [
        "over: llama-server unreachable",
        "over: 127.0.0.1:8080: llama-server unreachable",
    ]


def test_quarantine_is_told_in_local_time(
    monkeypatch: pytest.MonkeyPatch, noted: Degradations
) -> None:
    quarantined = checkpoint(9, quarantine=Quarantine("llama-server ended", since=0.0))
    with monkeypatch.context() as there:
        there.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        note_quarantined(noted, [quarantined])
    time.tzset()
    (told,) = noted.active
    assert told.detail.endswith("of 9 tokens, since 1970-01-01 09:00")
    note_quarantined(noted, [])
    assert not noted.active
