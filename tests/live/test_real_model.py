"""A real small model: a conversation of real words goes on after a restart."""

from contextlib import ExitStack

from tests.bench.processes import Setup, Stack
from tests.bench.words import MODEL, QUESTIONS, converse, failures, header

RESTARTS_BEFORE = 1


async def test_conversation_goes_on_after_a_restart_without_being_evaluated_again() -> None:
    """Evaluated anew, then restored, then live behind what was restored."""
    with ExitStack() as leftovers:
        setup = Setup(n_threads=1, n_ctx=8192)
        stack = Stack(*MODEL, leftovers, has_proxy=True, setup=setup)
        await stack.start()
        turns = await converse(
            stack, header(100), questions=QUESTIONS[:3], restarts_before=RESTARTS_BEFORE
        )
        await stack.stop()
    assert failures(turns) == []
    after = turns[RESTARTS_BEFORE]
    assert after.n_evaluated < after.n_prompt / 4
    assert all(turn.reply.text.strip() for turn in turns)
