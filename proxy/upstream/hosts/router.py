"""llama-server's router mode, as server-models.cpp has it."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import msgspec

from proxy.errors import UpstreamRefused
from proxy.upstream.hosts.model_host import LOAD_SECONDS, CommandLine, Models, takes_key
from proxy.upstream.llama_server import QUICK_SECONDS, LlamaServer
from proxy.upstream.target import RouterTarget, Target

_LOOK_SECONDS = 0.05
_BEGIN_SECONDS = 2.0
"""So long a model that is to be loaded may be told to be unloaded."""
_UNLIMITED = 1 << 20
_UNLOAD_SECONDS = 15.0
"""A router kills a model's process that has not ended within 10 s (--stop-timeout of a preset)."""


class _Status(msgspec.Struct, frozen=True):
    value: str = ""
    args: list[str] = []


class _RouterModel(msgspec.Struct):
    id: str
    aliases: list[str] = []
    status: _Status = _Status()


class _RouterModels(msgspec.Struct):
    data: list[_RouterModel] = []


class Router:
    """llama-server without a model of its own."""

    kind = "router"
    is_polled = True
    hides_names = False

    def __init__(self, root: LlamaServer, n_at_most: int | None) -> None:
        self._root = root
        self._n_at_most = _UNLIMITED if n_at_most == 0 else n_at_most

    async def models(self) -> Models:
        listed = await self._list()
        return Models(
            loaded=frozenset(m.id for m in listed if m.status.value == "loaded"),
            known=frozenset(m.id for m in listed),
            aliases={alias: m.id for m in listed for alias in m.aliases},
            n_at_most=self._n_at_most,
        )

    async def command_lines(self) -> list[CommandLine]:
        return [CommandLine(m.id, m.status.args) for m in await self._list()]

    async def _list(self) -> list[_RouterModel]:
        reply = await self._root.call("GET", "/models", _RouterModels, seconds=QUICK_SECONDS)
        return reply.data

    async def load(self, model: str) -> None:
        try:
            await self._post("load", model)
        except UpstreamRefused as refusal:
            if refusal.status != 400:  # that it is running or loading already is no fault
                raise
        status = await self._once(model, lambda value: value != "unloaded", _BEGIN_SECONDS)
        if status == "sleeping":  # its slots are gone; to look at them wakes it
            path = f"/slots?model={quote(model, safe='')}"
            await self._root.call("GET", path, msgspec.Raw, seconds=LOAD_SECONDS)
            status = await self._status(model)
        if status == "loading":
            status = await self._once(model, lambda value: value != "loading", LOAD_SECONDS)
        if status != "loaded":
            raise UpstreamRefused(500, f"model {model} could not be loaded")

    async def accepts(self, keys: Mapping[str, str]) -> bool:
        return await takes_key(self._root, "/models", keys)

    async def unload(self, model: str) -> None:
        try:
            await self._post("unload", model)
        except UpstreamRefused as refusal:
            if refusal.status != 400:  # that it is not running is no fault
                raise
        await self._once(model, lambda value: value == "unloaded", _UNLOAD_SECONDS)

    async def resolve(self, name: str) -> str | None:
        return None

    async def _once(self, model: str, is_so: Callable[[str], bool], seconds: float | None) -> str:
        """Return a model's status once it is so, or after so many seconds."""
        status = await self._status(model)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_so(status):
                    await asyncio.sleep(_LOOK_SECONDS)
                    status = await self._status(model)
        return status

    async def _post(self, verb: str, model: str) -> None:
        await self._root.call("POST", f"/models/{verb}", dict[str, Any], {"model": model})

    async def _status(self, model: str) -> str:
        values = (m.status.value for m in await self._list() if m.id == model)
        return next(values, "unloaded")

    def target(self, model: str) -> Target:
        return RouterTarget(self._root.target.base_url, model)

    @staticmethod
    def split_path(path: str, asked: str, models: Models) -> tuple[str, str]:
        return asked, path
