"""What goes to the shared store and what comes from there: decided by seconds."""

from dataclasses import dataclass, replace
from random import Random

import pytest

from proxy.core.model import Candidate, Prompt
from proxy.core.plan import Situation
from proxy.core.rates import Transfer, UnitCost
from proxy.core.sharing import (
    ENTERING,
    HALF_LIFE_SECONDS,
    UNMEASURED,
    after_transfer,
    best_fetch,
    bytes_at_once,
    choose_deletions,
    seconds_for,
    spared_per_byte,
)
from proxy.core.slots import Empty, Known, SlotPhase
from tests.unit.builders import ANY_PREFIX, NAMESPACE, checkpoint, run_of, steady
from tests.unit.situations import situation, slots

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
    assert fetch.seconds == pytest.approx(100 * MB / bytes_per_second, abs=0.05)
    slow_disk = replace(now(), rates=replace(now().rates, cold_restore=link(1e6)))
    fetch = best_fetch(PROMPT, slow_disk, [there(9000, 100 * MB)], link(bytes_per_second))
    assert fetch is not None and fetch.is_worth_it is is_worth_it, "what has just come is in memory"


def test_small_state_is_fetched_where_it_spares_more_than_entering_takes() -> None:
    found, quick = there(9000, 340_000), now(tokens_per_second=350_000.0)  # 26 ms
    way = link(125e6, call_seconds=0.002)
    fetch = best_fetch(PROMPT, quick, [found], way, ENTERING)
    assert fetch is not None and fetch.is_worth_it and fetch.limit_seconds < 0.03
    slow_disk = Transfer(UnitCost(0.03, 1.0), UnitCost(1e-9))
    fetch = best_fetch(PROMPT, quick, [found], way, slow_disk)
    assert fetch is not None and not fetch.is_worth_it


def test_of_two_states_the_one_is_fetched_with_which_the_request_is_done_first() -> None:
    longer, smaller = there(9000, 400 * MB), there(8000, 40 * MB)
    fetch = best_fetch(PROMPT, now(), [longer, smaller], link(100e6))
    assert fetch is not None and fetch.candidate.checkpoint == smaller.checkpoint


def test_nothing_is_fetched_that_is_here_or_gives_no_more() -> None:
    here = there(9000, 100 * MB)
    assert best_fetch(PROMPT, now(here), [there(9000, MB)], link(1e9)) is None
    assert best_fetch(PROMPT, now(), [], link(1e9)) is None
    too_long = replace(now(), n_ctx=PROMPT.n_tokens)
    assert best_fetch(PROMPT, too_long, [here], link(1e9)) is None, "it will be refused"


def test_slots_in_use_count_only_where_the_request_waits_for_one_of_them() -> None:
    remote, of_both = [there(9000, MB)], slots(Known(run_of(9500), NAMESPACE), Empty())
    of_both[0].phase = SlotPhase.RUNNING
    assert best_fetch(PROMPT, replace(now(), slots=of_both), remote, link(1e9)) is not None
    assert best_fetch(PROMPT, replace(now(), slots=of_both[:1]), remote, link(1e9)) is None


def test_transfer_is_given_up_once_it_would_come_too_late() -> None:
    quick = link(1e9, call_seconds=0.1)
    assert seconds_for(20, 100, 2.0, quick) == pytest.approx(0.1 + 0.5)
    assert seconds_for(50, 100, 2.0, quick) == pytest.approx(0.1 + 2.0), "half is left"
    assert seconds_for(60, 100, 2.0, quick) == seconds_for(100, 100, 2.0, quick)
    assert seconds_for(100, 100, 2.0, quick) == pytest.approx(0.1 + 2.4), (
        "a little late is soon enough"
    )


def test_transfer_is_given_time_to_show_its_rate() -> None:
    assert seconds_for(1, 100, 2.0, link(1e9)) == seconds_for(5, 100, 2.0, link(1e9)) == 0.05 + 0.2


def test_state_is_received_in_few_pieces_on_a_quick_link_and_in_small_ones_on_an_unknown_one() -> (
    None
):
    assert bytes_at_once(1000 * MB, link(100e6)) == 2 * MB
    assert bytes_at_once(1000 * MB, UNMEASURED) == bytes_at_once(1000 * MB, link(1e6)) == 64 << 10
    assert bytes_at_once(16 * MB, link(100e6)) == MB, "a piece shows how fast the link is"


def test_first_transfer_tells_the_rate_of_a_link_and_later_ones_correct_it() -> None:
    first = after_transfer(UNMEASURED, 0.2, 10 * MB, 1.0)
    assert (first.call.seconds, first.byte.seconds) == pytest.approx((0.2, 1e-7))
    later = after_transfer(first, 0.2, 10 * MB, 2.0)
    assert first.byte.seconds < later.byte.seconds < 2e-7
    short = after_transfer(first, 0.2, 64 << 10, 1e-6)
    assert short.byte.seconds == pytest.approx(1e-7, rel=0.01), "it was under way already"


@dataclass(frozen=True)
class Ran:
    """What a request took as the planner chose, and in the quicker way."""

    chosen: float
    quicker: float


def run_at(bytes_per_second: float, tokens_per_second: float, token_bytes: float) -> list[Ran]:
    """Send prompts of many lengths whose states lie behind a link that was not measured before."""
    call_seconds, assumed, ran = 0.02, UNMEASURED, []
    rates, rng = steady(tokens_per_second, 1e9), Random(18)
    lengths = [round(4000 * 10 ** (i / 49)) for i in range(50)]
    rng.shuffle(lengths)
    for n_tokens in lengths:
        size = int(n_tokens * token_bytes)
        stored = checkpoint(n_tokens, has_every_position=True, size_bytes=size)
        here = situation(ANY_PREFIX, Empty(), candidates=(), rates=rates, n_ctx=50_000)
        prompt = Prompt(run_of(n_tokens + 100), NAMESPACE)
        fetch = best_fetch(prompt, here, [Candidate(stored, n_tokens)], assumed)
        assert fetch is not None
        anew = rates.evaluation_seconds(0, n_tokens + 100)
        behind = anew - fetch.limit_seconds  # the restore, and the rest of the prompt
        whole = behind + call_seconds + size / bytes_per_second
        chosen = anew
        if fetch.is_worth_it:
            piece, n_there = bytes_at_once(size, assumed), 0
            while n_there < size:
                n_there = min(size, n_there + piece)
                seconds = call_seconds + n_there / bytes_per_second
                at_most = seconds_for(n_there, size, fetch.limit_seconds, assumed)
                if seconds > at_most:
                    break
            is_late = seconds > at_most
            chosen = anew + at_most if is_late else whole
            n_there -= piece * is_late
            taken = min(seconds, at_most) - call_seconds
            assumed = after_transfer(assumed, call_seconds, n_there or piece, taken)
        ran.append(Ran(chosen, min(anew, whole)))
    return ran


@pytest.mark.parametrize("bits_per_second", [1e7, 1e8, 1e9, 1e10])
@pytest.mark.parametrize(
    "tokens_per_second, token_bytes", [(8000, 1543), (700, 1500), (1500, 131_000), (300, 47_000)]
)
def test_planner_chooses_what_is_quicker_over_many_states_and_links(
    bits_per_second: float, tokens_per_second: float, token_bytes: float
) -> None:
    ran = run_at(bits_per_second / 8, tokens_per_second, token_bytes)
    factors = [each.chosen / each.quicker for each in ran]
    assert sum(factor <= 1.05 for factor in factors) >= 0.9 * len(factors)
    assert max(factors) <= 1.2


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
    dense, from_ahead = checkpoint(2000, size_bytes=MB), checkpoint(3000, size_bytes=2 * MB)
    own = [(dense, 1e6), (from_ahead, 1e6 + HALF_LIFE_SECONDS)]  # by another machine's clock
    assert choose_deletions(own, 1, 1e6) == [from_ahead]
