"""Which conversation is gone on with while all is idle."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.core.messages import Kind, Route
from proxy.llama.answers import Answer
from proxy.servers.background import Ahead
from proxy.serving.request import Request
from proxy.tasks import Tasks


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
    ahead, process = Ahead(20.0), cast(Any, SimpleNamespace(tasks=Tasks()))
    new = partial(Request, path="", route=Route.CHAT, keys={}, relay=cast(Any, None))
    for session in "ab":
        request = new(session=session, kind=Kind.FIRST, keeps_text=True)
        request.answer = Answer(200, None)
        ahead.note(process, request)
        await asyncio.sleep(0)
    assert waiting == ["b"]
    with pytest.raises(StopIteration):  # a request does not wait for what has not begun
        ahead.give_way("b").send(None)
    await asyncio.sleep(0)
    assert waiting == []
