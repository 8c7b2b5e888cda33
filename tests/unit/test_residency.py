"""Which model of a host is loaded next, and which has to go for it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.residency import Residents, Step, next_step

MODELS = "abc"


def residents(
    loaded: str,
    in_use: str = "",
    n_at_most: int | None = 1,
    used: str = "",
    together: tuple[str, ...] = (),
) -> Residents:
    """Return residents by their names; *used* names them in the order in which they were last asked for."""
    used_at = {model: float(n) for n, model in enumerate(used, 1)}
    pairs = frozenset(frozenset(pair) for pair in together)
    return Residents(frozenset(loaded), Counter(in_use), used_at, n_at_most, pairs)


def test_who_waits_for_a_loaded_model_goes_on() -> None:
    assert next_step("aa", residents("a", in_use="a")) == Step((0, 1))


def test_model_is_loaded_once_those_that_leave_are_idle() -> None:
    assert next_step("b", residents("a")) == Step(load="b", leaving=frozenset("a"))
    assert next_step("b", residents("a", in_use="a")) == Step()
    assert next_step("b", residents("")) == Step(load="b")
    assert next_step("b", residents("a", in_use="a", n_at_most=2)) == Step(load="b")


def test_nobody_overtakes_one_who_waits_for_a_model_to_leave() -> None:
    assert next_step("aba", residents("a")) == Step((0,))
    assert next_step("ba", residents("a", in_use="a")) == Step()
    assert next_step("bc", residents("a", n_at_most=2)) == Step(load="b")


def test_idle_model_that_was_unused_for_longest_leaves() -> None:
    many = residents("abd", n_at_most=3, used="dba")
    assert next_step("c", many).leaving == {"d"}
    busy = residents("abd", in_use="d", n_at_most=3, used="dba")
    assert next_step("c", busy).leaving == {"b"}


def test_where_the_limit_is_not_known_all_leave_but_those_seen_together() -> None:
    assert next_step("c", residents("ab", n_at_most=None)).leaving == {"a", "b"}
    known = residents("ab", n_at_most=None, together=("ac",))
    assert next_step("c", known).leaving == {"b"}


def test_nothing_happens_to_models_that_are_changing() -> None:
    assert next_step("ab", residents("a"), kept_out=frozenset("ab")) == Step()
    assert next_step("dc", residents("ad", n_at_most=3), kept_out=frozenset("ab")) == Step((0,))


@given(st.lists(st.sampled_from(MODELS), max_size=12), st.integers(1, 3), st.data())
def test_everybody_is_admitted_in_the_end_and_no_model_leaves_under_a_request(
    waiting: list[str], n_at_most: int, data: st.DataObject
) -> None:
    """A host played through: requests end one by one, models are loaded as the steps say."""
    loaded: set[str] = set()
    users: list[str] = []
    n_steps = 0
    while waiting or users:
        n_steps += 1
        assert n_steps < 100
        now = Residents(frozenset(loaded), Counter(users), {}, n_at_most)
        step = next_step(waiting, now)
        users += [waiting[place] for place in step.admitted]
        waiting = [m for place, m in enumerate(waiting) if place not in step.admitted]
        if step.load is not None:
            assert not step.leaving & set(users)
            loaded = (loaded - step.leaving) | {step.load}
            assert len(loaded) <= n_at_most
        elif users:
            users.remove(data.draw(st.sampled_from(users)))
