"""States that are about to be saved, and who waits for them."""

import time
from contextlib import ExitStack

import pytest

from proxy.core.model import ExpectedState
from proxy.serving.queue import Choice, SlotQueue
from tests.unit.builders import NAMESPACE, run_of
from tests.unit.queues import ONE, TWO, Choose, join, queue_of, soon


def arrival(n_tokens: int = 1000, seconds: float = 1000.0) -> ExpectedState:
    return ExpectedState(run_of(n_tokens), NAMESPACE, time.monotonic() + seconds, 5000, (100, 200))


def test_announced_state_is_coming_while_the_block_runs() -> None:
    queue = queue_of(1)
    with queue.announced(arrival()):
        [coming] = queue.expected
        assert (coming.tokens, coming.namespace) == (run_of(1000), NAMESPACE)
        assert (coming.size_bytes, coming.restore_points) == (5000, (100, 200))
        assert 0 < coming.expected_at - time.monotonic() <= 1000
    assert queue.expected == []


def test_announced_nothing_is_not_coming() -> None:
    queue = queue_of(1)
    with queue.announced(None):
        assert queue.expected == []


def test_announced_state_is_withdrawn_when_it_cannot_be_saved() -> None:
    queue = queue_of(1)
    with pytest.raises(KeyError):
        with queue.announced(arrival()):
            raise KeyError
    assert queue.expected == []


def test_announced_states_of_several_requests_go_one_by_one() -> None:
    queue = queue_of(3)
    first, second, twin = ExitStack(), ExitStack(), ExitStack()
    first.enter_context(queue.announced(arrival(300)))
    second.enter_context(queue.announced(arrival(400)))
    twin.enter_context(queue.announced(arrival(300)))
    first.close()
    assert [len(coming.tokens) for coming in queue.expected] == [400, 300]
    twin.close()
    assert [len(coming.tokens) for coming in queue.expected] == [400]
    second.close()
    assert queue.expected == []


def patient(queue: SlotQueue, seen: list[tuple[ExpectedState, ...]]) -> Choose:
    """Return who declines a free slot as long as something is coming."""

    def choose() -> Choice | None:
        seen.append(tuple(queue.expected))
        return None if seen[-1] else Choice((TWO,))

    return choose


@pytest.mark.parametrize("fails", [False, True])
async def test_who_waits_for_a_state_is_asked_again_once_it_is_there_or_never_will_be(
    fails: bool,
) -> None:
    queue = queue_of(2)
    seen = list[tuple[ExpectedState, ...]]()
    held = await queue.lease(lambda: Choice((ONE,)))
    try:
        with queue.announced(arrival()):
            waiting = await join(queue, patient(queue, seen), may_be_overtaken=True)
            assert not waiting.done()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert (await soon(waiting)).held == (TWO,)
    assert seen[0] and not seen[-1]
    held.release()
