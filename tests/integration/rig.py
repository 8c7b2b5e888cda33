"""The proxy in this process before a scripted llama-server, for what the real one cannot be made to do."""

import asyncio
import io
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import pytest
from yarl import URL

from proxy.core.conditions import DegradationKind
from proxy.core.saving import is_write_back_due
from proxy.servers import server as lifecycle
from proxy.serving import launches
from proxy.serving.process import Process
from proxy.settings import Settings
from tests.fakes.llama_server import FakeLlamaServer, Seen
from tests.lab.running import Running, run_proxy
from tests.lab.samples import n_faults, sample
from tests.lab.waiting import HANG_SECONDS, until

CHAT = "/v1/chat/completions"
COMPLETION = "/completion"


def text(name: str, n_words: int = 300) -> str:
    """Return words, each of which is one token and belongs to *name* alone."""
    return "".join(f" {name}{i}" for i in range(n_words))


def question(name: str, n_words: int = 300) -> list[dict[str, Any]]:
    """Return the messages of a conversation's first request."""
    return [{"role": "user", "content": text(name, n_words)}]


Messages = list[dict[str, Any]]
Form = Callable[[Messages], Messages]


def with_image(messages: Messages) -> Messages:
    """Return Anthropic messages of the same tokens, which /apply-template refuses: they are not read."""
    source = {"type": "base64", "media_type": "image/png", "data": ""}
    image = {"type": "image", "source": source, "text": ""}
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}, image]}
        for message in messages
    ]


KEYS: dict[str, Any] = {"api_keys": ("own", "alice", "bob", "carol"), "upstream_api_key": "own"}
"""Options of a rig whose llama-server asks for a key; without, all clients are one tenant."""
SALTS: dict[str, Any] = {"has_salts": True}
"""Options of a rig whose llama-server asks for no key, and whose clients tell themselves apart."""

TENANTS = pytest.mark.parametrize("tenants", [KEYS, SALTS], ids=["keys", "salts"])

MESSAGES_FORMS = pytest.mark.parametrize("form", [list, with_image], ids=["read", "not read"])
"""Only if the prompt of a /v1/messages request is read is a slot prepared for it that is the most similar
one; else llama-server may choose any."""


def next_question(messages: list[dict[str, Any]], reply: "Reply") -> list[dict[str, Any]]:
    """Return the messages of the request after *reply*."""
    said = {"role": "assistant", "content": reply.content["choices"][0]["message"]["content"]}
    return [*messages, said, {"role": "user", "content": " go on"}]


@dataclass(frozen=True, slots=True)
class Reply:
    """A client's answer."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def content(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    @property
    def n_reused(self) -> int:
        return int(self.content["timings"]["cache_n"])

    @property
    def n_prompt(self) -> int:
        timings = self.content["timings"]
        return int(timings["cache_n"] + timings["prompt_n"])


class Rig:
    """One scripted llama-server and one proxy; the proxy can be stopped and started again.

    Leaving it proves that nothing was leaked: no lease, no place in the queue, no temporary file.
    """

    def __init__(
        self, server: FakeLlamaServer, *, has_salts: bool = False, **settings: Any
    ) -> None:
        """With *has_salts* what tells clients apart is no key, but the `cache_salt` of their requests."""
        self.server = server
        self.has_salts = has_salts
        self.options = settings
        self.running: Running
        self._stack = AsyncExitStack()
        self._proxy = AsyncExitStack()

    async def __aenter__(self) -> "Rig":
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.server)
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            timeout = aiohttp.ClientTimeout(total=HANG_SECONDS)
            self.client = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=timeout, connector=connector)
            )
            stack.push_async_callback(self.stop_proxy)
            await self.start_proxy()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await until(lambda: self.n_occupied() == 0)
        finally:
            if error is not None:
                self.server.process.gone.set()  # nothing that is held may hold up the failure
            await self._stack.aclose()
        if error is None:
            assert self.temporary_files() == []

    async def start_proxy(self, *, waits: bool = True) -> None:
        settings = Settings(
            upstream=self.server.base_url,
            slot_save_path=str(self.server.directory),
            listen="127.0.0.1:0",
            **{
                "admin": "127.0.0.1:0",
                "idle_save_seconds": 0.04,
                "drain_seconds": 60.0,
                "ahead_seconds": 0,
                **self.options,
            },
        )
        self.running = await self._proxy.enter_async_context(run_proxy(settings))
        if waits:
            await self.looked()

    async def stop_proxy(self) -> None:
        await self._proxy.aclose()

    async def looked(self) -> None:
        """Wait until the proxy has made up its mind about llama-server, self-test included."""
        await until(lambda: DegradationKind.ATTACHING not in self.running.degradations)
        await until(lambda: self.n_occupied() == 0)

    @property
    def process(self) -> Process | None:
        """The attachment to the process that serves now, None if there is none yet."""
        process = self.running.server.process
        if process is None or process.id != self.server.process_id:
            return None
        return process

    async def attached(self) -> Process:
        """Wait until the proxy is attached to the process that serves now, self-test included."""
        await until(lambda: self.process is not None and self.n_occupied() == 0)
        assert self.process is not None
        return self.process

    async def unwatched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have llama-server looked at only for a request, or because something went wrong."""
        server = self.running.server
        monkeypatch.setattr(lifecycle, "WATCH_SECONDS", HANG_SECONDS)
        server.poke()
        await until(lambda: not server._poked.is_set())  # that look has begun
        await server.look()  # and has ended

    async def settled(self) -> Process:
        """Wait until the proxy is attached, no slot is leased and all that is to be saved is committed."""
        await until(self._is_settled)
        assert self.process is not None
        return self.process

    def _is_settled(self) -> bool:
        if (process := self.process) is None:
            return False
        table, rule = process.slots, process.rule
        return not process.saves.under_way and not any(
            s.is_leased or is_write_back_due(rule, s.content) for s in table
        )

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.running.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.running.admin_port}"

    async def post(self, path: str, body: Any, *, key: str | None = None, **kwargs: Any) -> Reply:
        """Post to the proxy, as it is if it is bytes, and return whatever comes."""
        if self.has_salts and key and isinstance(body, dict):
            body, key = {**body, "cache_salt": key}, None
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= {"Content-Type": "application/json", **kwargs.pop("headers", {})}
        url = URL(self.base_url + path, encoded=True)
        async with self.client.post(url, data=io.BytesIO(data), headers=headers, **kwargs) as reply:
            return Reply(reply.status, await reply.read(), dict(reply.headers))

    async def chat(self, messages: Any, *, key: str | None = None, **fields: Any) -> Reply:
        """Send a chat; it must be answered."""
        if isinstance(messages, str):
            messages = question(messages)
        reply = await self.post(CHAT, {"messages": messages, **fields}, key=key)
        assert reply.status == 200, reply.body
        return reply

    def begin_chat(self, name: str, **fields: Any) -> "asyncio.Task[Reply]":
        """Send a chat without waiting for its answer; cancel it to hang up."""
        return asyncio.ensure_future(self.chat(name, **fields))

    async def health(self) -> dict[str, Any]:
        async with self.client.get(self.admin_url + "/health") as reply:
            return dict(await reply.json())

    async def reasons(self) -> list[str]:
        """Return the kinds of degradation that /health names."""
        return [reason["kind"] for reason in (await self.health())["reasons"]]

    def n_occupied(self) -> int:
        """Return how many slots are leased and requests waiting."""
        process = self.running.server.process
        if process is None:
            return 0
        queue = process.queue
        return queue.n_waiting + sum(slot.is_leased for slot in queue.table)

    async def waiting(self, n_requests: int) -> None:
        """Wait until so many requests are in the queue."""
        await until(lambda: self.process and self.process.queue.n_waiting == n_requests)

    def sample(self, name: str, **labels: str) -> float:
        self.running.metrics.set_gauges()
        return sample(self.running.metrics, name, **labels)

    def n_faults(self) -> float:
        return n_faults(self.running.metrics)

    def requests_seen(self) -> list[Seen]:
        """Return the clients' own generations, as llama-server saw them."""
        return [r for r in self.server.seen_at("generate") if not _is_ours(r)]

    @property
    def checkpoints(self) -> list[tuple[str, int]]:
        """The store's content: why each checkpoint is kept and how many tokens it holds."""
        assert self.running.store is not None
        return sorted((c.kind.value, c.n_tokens) for c in self.running.store)

    def temporary_files(self) -> list[str]:
        return sorted(path.name for path in Path(self.server.directory).glob("*.saving"))


def _is_ours(request: Seen) -> bool:
    """Return whether the proxy asked on its own behalf, for a canary."""
    return b'"n_probs"' in request.body


def wait_for_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the start of the next request whose client leaves waited for until it is seen."""
    seconds = chain([HANG_SECONDS], repeat(0.1))

    def may_begin_until(*_: Any) -> float:
        return time.monotonic() + next(seconds)

    monkeypatch.setattr(launches, "_may_begin_until", may_begin_until)


async def hang_up(task: "asyncio.Task[Any]") -> None:
    """Close a client's connection in the middle of its request."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
