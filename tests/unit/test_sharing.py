"""What goes to the shared store and what comes from there: decided by seconds."""

from dataclasses import replace

import pytest

from proxy.core.model import Candidate, Prompt
from proxy.core.plan import Situation
from proxy.core.rates import Transfer, UnitCost
from proxy.core.sharing import (
    FORGOTTEN_SECONDS,
    HALF_LIFE_SECONDS,
    UNMEASURED,
    believed,
    best_fetch,
    bytes_at_once,
    choose_deletions,
    seconds_for,
    spared_per_byte,
)
from proxy.core.slots import Empty
from tests.unit.builders import ANY_PREFIX, NAMESPACE, checkpoint, run_of, steady
from tests.unit.situations import situation

PROMPT = Prompt(run_of(10_000), NAMESPACE)
MB = 1_000_000


def link(bytes_per_second: float, call_seconds: float = 0.0) -> Transfer:
    return Transfer(UnitCost(call_seconds, 1.0), UnitCost(1 / bytes_per_second, 1.0))


def there(n_tokens: int, size_bytes: int) -> Candidate:
    stored = checkpoint(n_tokens, has_every_position=True, size_bytes=size_bytes)
    return Candidate(stored, min(n_tokens, 10_000))


def now(*local: Candidate, tokens_per_second: float = 1000.0) -> Situation:
    rates = steady(tokens_per_second, 1e12)
    return situation(ANY_PREFIX, Empty(), candidates=local, rates=rates, n_ctx=20_000)


@pytest.mark.parametrize("bytes_per_second, is_worth_it", [(125e6, True), (8e6, False)])
def test_state_is_fetched_where_the_link_is_faster_than_evaluating(
    bytes_per_second: float, is_worth_it: bool
) -> None:
    fetch = best_fetch(PROMPT, now(), [there(9000, 100 * MB)], link(bytes_per_second))
    assert fetch is not None and fetch.is_worth_it is is_worth_it
    assert fetch.limit_seconds == pytest.approx(9.0, rel=0.01), "what evaluating 9,000 tokens takes"
    assert fetch.seconds == pytest.approx(100 * MB / bytes_per_second)


def test_of_two_states_the_one_is_fetched_with_which_the_request_is_done_first() -> None:
    longer, smaller = there(9000, 400 * MB), there(8000, 40 * MB)
    fetch = best_fetch(PROMPT, now(), [longer, smaller], link(100e6))
    assert fetch is not None and fetch.candidate.checkpoint == smaller.checkpoint


def test_nothing_is_fetched_that_is_here_or_gives_no_more() -> None:
    here = there(9000, 100 * MB)
    assert best_fetch(PROMPT, now(here), [there(9000, MB)], link(1e9)) is None
    assert best_fetch(PROMPT, now(), [], link(1e9)) is None
    assert best_fetch(PROMPT, replace(now(), n_ctx=9_000), [here], link(1e9)) is None


def test_transfer_is_given_up_once_it_would_come_too_late() -> None:
    quick = link(1e9, call_seconds=0.1)
    assert seconds_for(50, 100, 2.0, quick) == pytest.approx(1.1)
    assert seconds_for(100, 100, 2.0, quick) == 2.0, "no longer than its limit"


def test_state_is_received_in_few_pieces_on_a_quick_link_and_in_small_ones_on_an_unknown_one() -> (
    None
):
    assert bytes_at_once(1000 * MB, link(100e6)) == 2 * MB
    assert bytes_at_once(1000 * MB, UNMEASURED) == bytes_at_once(1000 * MB, link(1e6)) == 64 << 10
    assert bytes_at_once(16 * MB, link(100e6)) == MB, "a piece shows how fast the link is"


def test_transfer_is_given_time_to_show_its_rate() -> None:
    assert seconds_for(1, 100, 2.0, link(1e9)) == seconds_for(5, 100, 2.0, link(1e9)) == 0.2


def test_slow_link_is_tried_again_after_a_while() -> None:
    slow, quick = link(1e6), link(1e9)
    assert believed(slow, FORGOTTEN_SECONDS / 2) == slow
    assert believed(slow, 2 * FORGOTTEN_SECONDS) == UNMEASURED
    assert believed(quick, 2 * FORGOTTEN_SECONDS) == quick


def test_what_is_quicker_evaluated_than_fetched_is_not_put_there() -> None:
    stored = checkpoint(10_000, size_bytes=100 * MB)
    assert spared_per_byte(stored, steady(1000.0), link(1e9)) > 0
    assert spared_per_byte(stored, steady(1_000_000.0), link(1e9)) == 0
    header = checkpoint(9000, size_bytes=10 * MB)
    rates = steady(1000.0)
    assert spared_per_byte(header, rates, link(1e9)) > spared_per_byte(stored, rates, link(1e9))


def test_writer_deletes_what_was_not_read_for_long_and_no_more_than_needed() -> None:
    old, new = checkpoint(1000, size_bytes=MB), checkpoint(1001, size_bytes=MB)
    own = [(new, 1e6), (old, 1e6 - 2 * HALF_LIFE_SECONDS)]
    assert choose_deletions(own, 0, 1e6) == []
    assert choose_deletions(own, 1, 1e6) == [old]
    assert choose_deletions(own, 2 * MB, 1e6) == [old, new]
