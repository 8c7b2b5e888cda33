"""A real llama-server with the proxy in front of it, in this process, for tests that matter."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Generic

import aiohttp
from typing_extensions import TypeVar

from proxy.core.launch import Launch
from proxy.servers.background import is_due
from proxy.settings import Settings
from tests.lab.older_builds import RewriteStateFile, keep_as_saved, rewriting
from tests.lab.running import Running, run_proxy
from tests.lab.samples import n_faults, sample
from tests.lab.server import LlamaServer, ServerProcess
from tests.lab.waiting import until

_LISTENERS = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
_DEFAULTS = _LISTENERS | {"idle_save_seconds": 0.05, "drain_seconds": 60.0, "ahead_seconds": 0}


S = TypeVar("S", bound=ServerProcess, default=LlamaServer, covariant=True)


class Rig(Generic[S]):
    """One llama-server, or what starts several, and one proxy; either can be restarted."""

    def __init__(
        self,
        server: S,
        directory: Path,
        *,
        rewrite: RewriteStateFile = keep_as_saved,
        settles: bool = True,
        launch: Launch | None = None,
        **settings: Any,
    ) -> None:
        """Without *settles* the first start does not wait until everything is known."""
        self.server = server
        self.rewrite = rewrite
        self._settles = settles
        self._launch = launch
        self.settings = Settings(
            slot_save_path=str(directory), **{**_DEFAULTS, "upstream": server.base_url, **settings}
        )
        self.running: Running
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Rig[S]":
        await asyncio.to_thread(self.server.start)
        await self.start_proxy()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop_proxy()
        await asyncio.to_thread(self.server.stop)

    async def start_proxy(self) -> None:
        self._stack = AsyncExitStack()
        self._stack.enter_context(rewriting(self.rewrite))
        proxy = run_proxy(self.settings, launch=self._launch)
        self.running = await self._stack.enter_async_context(proxy)
        self.client = await self._stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        )
        if self._settles:
            await self.settled()
        self._settles = True

    async def stop_proxy(self) -> None:
        await self._stack.aclose()

    async def restart(self, *, server: bool = True) -> None:
        """Stop the proxy, then llama-server; start both again."""
        await self.stop_proxy()
        if server:
            await asyncio.to_thread(self.server.stop)
            await asyncio.to_thread(self.server.start)
        await self.start_proxy()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.running.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.running.admin_port}"

    async def settled(self) -> None:
        """Wait until llama-server is attached, no slot is leased, and what is worth saving is saved."""
        await until(self._is_settled)

    def _is_settled(self) -> bool:
        pool = self.running.pool
        is_known = pool.has_models or len(pool.processes) == len(pool.servers)
        is_saving = any(process.saves.under_way for process in pool.processes)
        return (
            is_known
            and not is_saving
            and not any(
                slot.is_leased or is_due(process, slot, 0.0)
                for process in pool.processes
                for slot in process.slots
            )
        )

    async def evaluated(self) -> int:
        """Return llama-server's count of evaluated tokens once write-backs have drained."""
        await self.settled()
        assert isinstance(self.server, LlamaServer)
        return await asyncio.to_thread(self.server.evaluated_tokens)

    async def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Post to the proxy; the reply must be 200 and JSON."""
        async with self.client.post(self.base_url + path, json=body, **kwargs) as reply:
            content: dict[str, Any] = await reply.json()
            assert reply.status == 200, content
        await self.accounted()
        return content

    async def accounted(self) -> None:
        """Wait until the prompts are read of which clients have the answers, so that all is recorded."""
        await self.running.pool.accounted()

    async def chat(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}
        return await self.post("/v1/chat/completions", body)

    def sample(self, name: str, **labels: str) -> float:
        """Return a metric's value, 0 while it has none."""
        self.running.metrics.set_gauges()
        return sample(self.running.metrics, name, **labels)

    def n_faults(self) -> float:
        return n_faults(self.running.metrics)

    async def reasons_are(self, *kinds: str) -> None:
        """Wait until /health names exactly these; without any, until all is well."""

        async def are_named() -> bool:
            return [reason["kind"] for reason in (await self.health())["reasons"]] == [*kinds]

        await until(are_named)

    async def health(self) -> dict[str, Any]:
        async with self.client.get(self.admin_url + "/health") as reply:
            content: dict[str, Any] = await reply.json()
            return content
