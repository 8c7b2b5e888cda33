"""Which conversation is gone on with while all is idle."""

import asyncio
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.core.messages import Conversation, Kind, Route
from proxy.llama.answers import Answer
from proxy.servers.background import Ahead
from proxy.serving.request import Request
from proxy.tasks import Tasks
from tests.lab.waiting import until

CHAT = Conversation(bytes(16), ("user",), (9,))


async def test_the_conversation_that_was_answered_last_is_gone_on_with(monkeypatch: Any) -> None:
    """An earlier one may still wait until all is idle."""
    waiting: list[str] = []

    async def wait(_: Ahead, process: object, request: Request) -> None:
        waiting.append(request.session)
        try:
            await asyncio.Event().wait()
        finally:
            waiting.remove(request.session)

    monkeypatch.setattr(Ahead, "_begin", wait)
    ahead, process = Ahead(20.0), cast(Any, SimpleNamespace(tasks=Tasks(), is_caching=True))
    new = partial(Request, path="", route=Route.CHAT, keys={}, relay=cast(Any, None))
    for session in "ab":
        request = new(session=session, kind=Kind.FIRST, conversation=CHAT)
        request.answer = Answer(200, None)
        ahead.note(process, request)
        await asyncio.sleep(0)
    assert waiting == ["b"]
    with pytest.raises(StopIteration):  # a request does not wait for what has not begun
        ahead.give_way("b").send(None)
    await asyncio.sleep(0)
    assert waiting == []


async def test_a_task_that_ends_leaves_the_one_that_evaluates_at_another_server_alone(
    monkeypatch: Any,
) -> None:
    """The task was told to stop for a request, but its piece outlasts the answer to that request."""
    ends = {"a": asyncio.Event(), "b": asyncio.Event()}

    async def evaluate(self: Ahead, process: object, request: Request) -> None:
        self._evaluating, self._waiting = self._waiting, None
        await ends[request.session].wait()

    monkeypatch.setattr(Ahead, "_evaluate", evaluate)
    monkeypatch.setattr("proxy.servers.background._IDLE_SECONDS", 0.0)
    faults = SimpleNamespace(suppressed=lambda stage: nullcontext())
    parts = {"tasks": Tasks(), "faults": faults, "settling": [], "is_caching": True}
    ahead, process = Ahead(20.0), cast(Any, SimpleNamespace(**parts))
    for session in "ab":
        await ahead.give_way("other")
        request = Request(
            path="", route=Route.CHAT, keys={}, relay=cast(Any, None), session=session
        )
        request.conversation, request.answer = CHAT, Answer(200, None)
        ahead.note(process, request)
        await until(lambda: ahead._evaluating is not None)
    ends["a"].set()
    await until(lambda: len(process.tasks) == 1)
    assert ahead._evaluating is not None
    ends["b"].set()
    await process.tasks.drain(1.0)
    assert ahead._evaluating is None
