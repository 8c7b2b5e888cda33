"""The cost functions: what they predict, and how they learn from what was measured."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.rates import MAX_STEP, MIN_BYTES, MIN_TOKENS, POSITIONS, Rates

MIB = 1 << 20
TOKENS = st.integers(0, 200_000)
SECONDS = st.floats(0, 1e4)
SIZES = st.integers(0, 1 << 40)


def true_seconds(n_from: int, n_to: int) -> float:
    """Return what a server takes whose attention grows linearly: 1,000 tokens/s at first, 200 at 100k."""
    return sum(n / 1000 + 4e-8 * n * (begin + n / 2) for begin, n in [(n_from, n_to - n_from)])


def taught(*samples: tuple[int, int], times: int = 1, rates: Rates = Rates()) -> Rates:  # noqa: B008
    for n_from, n_to in samples * times:
        rates = rates.after_evaluation(n_from, n_to, true_seconds(n_from, n_to))
    return rates


@pytest.mark.parametrize("tokens_per_second", [60, 700, 3000, 6000])
def test_first_contact_tells_what_a_long_prompt_takes(tokens_per_second: float) -> None:
    """Else a fresh proxy would wait for a transfer that is slower than evaluating."""
    rates = Rates().after_evaluation(0, 128, 0.01 + 128 / tokens_per_second)
    assert rates.evaluation_seconds(0, 7000) == pytest.approx(7000 / tokens_per_second, rel=0.5)


@st.composite
def learned(draw: st.DrawFn) -> Rates:
    """Return rates after any measurements, senseless ones included."""
    rates = Rates()
    for _ in range(draw(st.integers(0, 12))):
        n_from, n_to = sorted((draw(TOKENS), draw(TOKENS)))
        rates = rates.after_evaluation(n_from, n_to, draw(SECONDS))
        rates = rates.after_restore(draw(SIZES), draw(SECONDS), is_warm=draw(st.booleans()))
        rates = rates.after_save(draw(SIZES), draw(SECONDS))
    return rates


@given(learned(), TOKENS, TOKENS, TOKENS)
def test_evaluation_costs_more_the_more_tokens_and_splitting_it_costs_one_call(
    rates: Rates, a: int, b: int, c: int
) -> None:
    a, b, c = sorted((a, b, c))
    whole, first, second = (rates.evaluation_seconds(*s) for s in ((a, c), (a, b), (b, c)))
    assert math.isfinite(whole) and whole >= max(first, second) >= 0
    if a < b < c:
        assert whole < first + second
        assert first + second - rates.evaluation_call.seconds == pytest.approx(whole)
    assert rates.evaluation_seconds(c, a) == 0


@given(learned(), SIZES, SIZES, st.booleans())
def test_transfer_costs_more_the_larger_the_file(
    rates: Rates, a: int, b: int, is_warm: bool
) -> None:
    small, large = sorted((a, b))
    assert 0 < rates.save_seconds(small) <= rates.save_seconds(large) < math.inf
    restores = [rates.restore_seconds(n, is_warm=is_warm) for n in (small, large)]
    assert 0 < restores[0] <= restores[1] < math.inf


@given(learned(), st.integers(0, 100_000), st.integers(1, 100_000), st.floats(1e-5, 1e4))
def test_evaluation_measured_brings_the_prediction_closer_and_never_beyond(
    rates: Rates, n_from: int, n_tokens: int, seconds: float
) -> None:
    before = rates.evaluation_seconds(n_from, n_from + n_tokens)
    after = rates.after_evaluation(n_from, n_from + n_tokens, seconds)
    now = after.evaluation_seconds(n_from, n_from + n_tokens)
    assert 0 < now <= before * MAX_STEP * 1.001
    if rates.is_measured and all(part.n_seen for part in rates.tokens):
        assert before / MAX_STEP <= now * 1.001
    if n_tokens < MIN_TOKENS:
        assert after == rates
    elif seconds > before:
        assert before * 0.999 <= now
    else:
        assert now <= before * 1.001


@given(learned())
def test_rates_survive_being_written_down(rates: Rates) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rates), type=Rates) == rates


def test_rates_written_down_for_other_positions_are_not_read() -> None:
    written = msgspec.to_builtins(Rates())
    one_less, last = written["tokens"][:-1], written["tokens"][-1]
    for tokens in (one_less, [*one_less, last, last]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**written, "tokens": tokens}, Rates)


def test_evaluation_rates_are_learned_for_each_stretch_of_positions() -> None:
    rates = taught(
        (0, 1000), (1000, 4000), (0, 16_000), (20_000, 24_000), (60_000, 100_000), times=20
    )
    for n_from, n_to in ((0, 800), (4096, 16_000), (30_000, 34_000), (80_000, 90_000)):
        predicted = rates.evaluation_seconds(n_from, n_to)
        assert predicted == pytest.approx(true_seconds(n_from, n_to), rel=0.35)
    speeds = [rates.tokens_per_second(position) for position in POSITIONS]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] < speeds[0] / 2


def test_evaluation_never_measured_that_far_in_is_as_slow_as_the_nearest_that_was() -> None:
    rates = taught((2048, 4096), times=5)
    near = rates.evaluation_seconds(2048, 4096)
    assert rates.evaluation_seconds(100_000, 102_048) == pytest.approx(near)
    assert rates.evaluation_seconds(0, 900) == pytest.approx(near * 900 / 2048, rel=0.05)
    assert rates.tokens_per_second(POSITIONS[-1]) == 0


def test_evaluation_never_measured_that_far_in_is_never_faster_than_before_it() -> None:
    rates = Rates()
    for _ in range(5):
        rates = rates.after_evaluation(0, 1024, 10.0).after_evaluation(1024, 4096, 3.0)
    assert rates.evaluation_seconds(100_000, 103_072) == pytest.approx(3.0, rel=0.05)


def test_evaluation_never_measured_between_two_that_were_is_as_fast_as_before_it() -> None:
    rates = taught((0, 1024), (16_384, 65_536), times=5)
    assert rates.evaluation_seconds(2048, 3072) < rates.evaluation_seconds(20_000, 21_024)
    assert rates.evaluation_seconds(2048, 3072) == pytest.approx(
        rates.evaluation_seconds(8000, 9024)
    )


def test_rates_converge_within_a_few_measurements_whatever_the_server_is() -> None:
    for tokens_per_second in (15, 500, 30_000):
        rates = Rates()
        for _ in range(8):
            rates = rates.after_evaluation(0, 4000, 4000 / tokens_per_second)
        predicted = rates.evaluation_seconds(0, 4000)
        assert predicted == pytest.approx(4000 / tokens_per_second, rel=0.1)


def test_transfer_learns_what_a_call_costs_and_what_a_byte() -> None:
    rates = Rates()
    for _ in range(200):
        for size_bytes in (MIB // 2, 300 * MIB):
            rates = rates.after_save(size_bytes, 0.030 + size_bytes / 4e8)
    assert rates.save_seconds(MIB // 2) == pytest.approx(0.030 + MIB / 8e8, rel=0.1)
    assert rates.save_seconds(200 * MIB) == pytest.approx(0.030 + 200 * MIB / 4e8, rel=0.1)
    assert rates.save.bytes_per_second == pytest.approx(4e8, rel=0.1)


def test_slow_first_measurement_is_forgotten_by_the_second() -> None:
    rates = Rates().after_restore(100 * MIB, 60.0, is_warm=True)
    assert rates.restore_seconds(100 * MIB, is_warm=True) < 60 / 10
    for _ in range(3):
        rates = rates.after_restore(100 * MIB, 0.05, is_warm=True)
    assert rates.restore_seconds(100 * MIB, is_warm=True) == pytest.approx(0.05, rel=0.15)


def test_outlier_moves_what_was_well_learned_by_less_than_a_half() -> None:
    rates = taught((0, 4000), times=20)
    before = rates.evaluation_seconds(0, 4000)
    after = rates.after_evaluation(0, 4000, 1000 * before)
    assert before < after.evaluation_seconds(0, 4000) < 1.5 * before


def test_first_prompt_tells_how_fast_a_server_is_however_fast() -> None:
    rates = Rates().after_evaluation(0, 4000, 4000 / 30_000)
    assert rates.evaluation_seconds(0, 4000) == pytest.approx(4000 / 30_000, rel=0.2)


def test_busy_moment_is_forgotten_by_the_second_prompt_after_it() -> None:
    rates = Rates()
    for n_tokens, miss in ((128, 1), (2000, 1), (4000, 4.4), (2000, 1), (4000, 1)):
        seconds = miss * true_seconds(0, n_tokens)
        rates = rates.after_evaluation(0, n_tokens, seconds)
    assert rates.evaluation_seconds(0, 4000) == pytest.approx(true_seconds(0, 4000), rel=0.3)


def test_small_measurements_and_those_without_a_time_teach_nothing() -> None:
    rates = Rates()
    assert rates.after_evaluation(500, 500 + MIN_TOKENS - 1, 9.0) is rates
    assert rates.after_evaluation(500, 5000, 0.0) is rates
    assert rates.after_save(MIN_BYTES - 1, 9.0) == rates
    assert rates.after_restore(10 * MIB, 0.0, is_warm=False) == rates


def test_restore_measured_only_warm_bounds_a_cold_one_and_the_other_way_round() -> None:
    size_bytes = 100 * MIB
    slow_memory, fast_disk = Rates(), Rates()
    for _ in range(6):
        slow_memory = slow_memory.after_restore(size_bytes, 2.0, is_warm=True)
        fast_disk = fast_disk.after_restore(size_bytes, 0.01, is_warm=False)
    warm = slow_memory.restore_seconds(size_bytes, is_warm=True)
    assert slow_memory.restore_seconds(size_bytes, is_warm=False) == warm
    cold = fast_disk.restore_seconds(size_bytes, is_warm=False)
    assert fast_disk.restore_seconds(size_bytes, is_warm=True) == cold
    assert slow_memory.cold_restore.bytes_per_second == 0
