"""Which model of a host is loaded next, and which has to go for it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.residency import Residents, next_step

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


def step(
    *admitted: int, load: str | None = None, leaving: str = ""
) -> tuple[list[int], str | None, frozenset[str]]:
    return list(admitted), load, frozenset(leaving)


def test_who_waits_for_a_loaded_model_goes_on() -> None:
    assert next_step("aa", residents("a", in_use="a")) == step(0, 1)


def test_model_is_loaded_once_those_that_leave_are_idle() -> None:
    assert next_step("b", residents("a")) == step(load="b", leaving="a")
    assert next_step("b", residents("a", in_use="a")) == step()
    assert next_step("b", residents("")) == step(load="b")
    assert next_step("b", residents("a", in_use="a", n_at_most=2)) == step(load="b")


def test_nobody_overtakes_one_who_waits_for_a_model_to_leave() -> None:
    assert next_step("aba", residents("a")) == step(0)
    assert next_step("ba", residents("a", in_use="a")) == step()
    assert next_step("bc", residents("a", n_at_most=2)) == step(load="b")


def test_idle_model_that_was_unused_for_longest_leaves() -> None:
    many = residents("abd", n_at_most=3, used="dba")
    assert next_step("c", many)[2] == {"d"}
    busy = residents("abd", in_use="d", n_at_most=3, used="dba")
    assert next_step("c", busy)[2] == {"b"}


def test_where_the_limit_is_not_known_all_leave_but_those_seen_together() -> None:
    assert next_step("c", residents("ab", n_at_most=None))[2] == {"a", "b"}
    known = residents("ab", n_at_most=None, together=("ac",))
    assert next_step("c", known)[2] == {"b"}


def test_nothing_happens_to_models_that_are_changing() -> None:
    assert next_step("ab", residents("a"), kept_out=frozenset("ab")) == step()
    assert next_step("dc", residents("ad", n_at_most=3), kept_out=frozenset("ab")) == step(0)


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
        admitted, load, leaving = next_step(waiting, now)
        users += [waiting[place] for place in admitted]
        waiting = [m for place, m in enumerate(waiting) if place not in admitted]
        if load is not None:
            assert not leaving & set(users)
            loaded = (loaded - leaving) | {load}
            assert len(loaded) <= n_at_most
        elif users:
            users.remove(data.draw(st.sampled_from(users)))
