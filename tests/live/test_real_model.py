"""A real small model: a conversation of real words goes on after a restart."""

from contextlib import ExitStack

from tests.bench.processes import Setup, Stack
from tests.bench.words import MODEL, RESTARTS_BEFORE, Turn, converse, failures, header


async def test_conversation_goes_on_after_a_restart_without_being_evaluated_again() -> None:
    played: list[list[Turn]] = []
    for has_proxy in (True, False):
        with ExitStack() as leftovers:
            setup = Setup(n_threads=1, n_ctx=8192)
            stack = Stack(*MODEL, leftovers, has_proxy=has_proxy, setup=setup)
            await stack.start()
            script = [turn.reply.message for turn in played[0]] if played else None
            played.append(await converse(stack, header(100), script))
            await stack.stop()
    ours, alone = played
    assert failures(ours) == []
    assert ours[RESTARTS_BEFORE].n_evaluated < alone[RESTARTS_BEFORE].n_evaluated / 4
    assert all(turn.reply.text.strip() for turn in ours)
