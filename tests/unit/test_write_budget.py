"""The write budget: what was written within 24 hours, and which saves get what is left."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.eviction import Present
from proxy.core.saving import PLENTY_SHARE, WINDOW_HOURS, Claim, Written, scarcity, why_refused

HOUR = 3600.0
DAY = WINDOW_HOURS * HOUR
NOW = 1_000 * DAY
BUDGET = 1000
NOTHING = Written()


def claim(n_bytes: int, spared_seconds: float | None = None) -> Claim:
    return Claim(n_bytes, Present(NOW), spared_seconds=spared_seconds)


def worth(n_bytes: int, seconds_per_byte: float) -> Claim:
    return claim(n_bytes, n_bytes * seconds_per_byte)


def after(*saves: Claim, now: float = NOW) -> Written:
    written = NOTHING
    for wanted in saves:
        written = written.after(wanted.n_bytes, wanted, now)
    return written


def is_made(wanted: Claim, written: Written, now: float = NOW, pending_bytes: int = 0) -> bool:
    return why_refused(wanted, written, BUDGET, now, pending_bytes) is None


def test_without_a_budget_everything_is_saved() -> None:
    assert why_refused(worth(1 << 60, 0.0), after(worth(1 << 60, 9.0)), 0, NOW) is None


def test_while_half_is_left_a_save_that_spares_nothing_is_made() -> None:
    assert is_made(worth(100, 0.0), after(worth(500, 1.0)))
    assert not is_made(worth(100, 0.0), after(worth(501, 1.0)))


def test_what_a_save_must_be_worth_rises_to_the_average_as_less_is_left() -> None:
    average = 0.01
    needed = []
    for n_written in (500, 600, 700, 800, 900, 990):
        written = after(worth(n_written, average))
        shares = [i / 100 for i in range(101)]
        needed.append(min(s for s in shares if is_made(worth(10, s * average), written)))
    assert needed == sorted(needed)
    assert needed[0] == 0 and needed[-1] == pytest.approx(0.98)


def test_save_of_a_state_for_a_few_new_tokens_is_refused_before_that_of_a_new_conversation() -> (
    None
):
    written = after(worth(400, 0.02), worth(300, 0.01))
    again, new = claim(100, 0.1), claim(100, 3.0)
    refusal = why_refused(again, written, BUDGET, NOW)
    assert refusal is not None and "not worth it" in refusal
    assert is_made(new, written)


def test_save_larger_than_what_is_left_is_refused_whatever_it_is_worth() -> None:
    refusal = why_refused(worth(101, 1e9), after(worth(900, 0.1)), BUDGET, NOW)
    assert refusal is not None and "100 are left" in refusal
    assert is_made(worth(100, 1e9), after(worth(900, 0.1)))


def test_saves_under_way_count_as_written() -> None:
    assert not is_made(worth(101, 1.0), NOTHING, pending_bytes=900)
    assert is_made(worth(100, 1.0), NOTHING, pending_bytes=900)


def test_save_of_unknown_worth_is_made_while_there_is_room_and_leaves_the_average_alone() -> None:
    written = after(worth(600, 0.01), claim(300))
    assert written.last_day_bytes(NOW) == 900
    assert written.seconds_per_byte(NOW) == pytest.approx(0.01)
    assert is_made(claim(100), written) and not is_made(claim(101), written)


def test_what_was_written_a_day_ago_counts_no_more() -> None:
    written = after(worth(700, 0.01))
    assert written.last_day_bytes(NOW + DAY) == 700, "its hour is not over yet"
    assert written.last_day_bytes(NOW + DAY + HOUR) == 0
    assert written.seconds_per_byte(NOW + DAY + HOUR) == 0
    later = written.after(10, claim(10), NOW + DAY + HOUR)
    assert len(later.hours) == 1, "nor is it kept"


def test_clock_that_was_set_back_does_not_hold_up_saves_for_longer_than_two_days() -> None:
    written = after(worth(700, 0.01), now=NOW + DAY)
    assert written.last_day_bytes(NOW) == 700
    settled = written.after(10, claim(10), NOW)
    assert settled.last_day_bytes(NOW + DAY + HOUR) == 0
    assert written.last_day_bytes(NOW + 2 * DAY + HOUR) == 0, "all was refused meanwhile"
    assert after(worth(700, 0.01), now=NOW + 1000 * DAY).last_day_bytes(NOW) == 0


def test_written_survives_being_written_down() -> None:
    written = after(worth(700, 0.01)).after(5, claim(5), NOW + HOUR)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(written), type=Written) == written


SAVES = st.lists(
    st.tuples(
        st.integers(1, 600), st.none() | st.floats(0, 100), st.floats(0, 8 * HOUR), st.floats(0, 1)
    ),
    max_size=40,
)


@given(SAVES)
def test_no_24_hours_ever_see_more_written_than_the_budget(
    saves: list[tuple[int, float | None, float, float]],
) -> None:
    written, now, made = NOTHING, NOW, list[tuple[float, int]]()
    for n_at_most, seconds, passes, share in saves:
        now += passes
        wanted = claim(n_at_most, seconds)
        if is_made(wanted, written, now):
            n_bytes = int(n_at_most * share)
            written = written.after(n_bytes, wanted, now)
            made.append((now, n_bytes))
    for begin, _ in made:
        assert sum(n for at, n in made if begin <= at < begin + DAY) <= BUDGET
    assert written.last_day_bytes(now) >= sum(n for at, n in made if at > now - DAY)


@given(st.integers(1, 10**15), st.integers(-(10**15), 10**15))
def test_scarcity_lies_between_nothing_and_all(budget: int, left: int) -> None:
    assert 0 <= scarcity(left, budget) <= 1
    assert (scarcity(left, budget) == 0) == (left >= PLENTY_SHARE * budget)
