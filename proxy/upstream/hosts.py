"""What answers at a URL instead of a llama-server: something that starts one for each model.

Owns: the calls by which llama-server's router mode (server-models.cpp) and llama-swap (its README and
proxymanager.go) tell which models they have and which are loaded, and by which a model is loaded or
unloaded. Every method raises UpstreamUnreachable if there was no answer, UpstreamRefused if an error.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from proxy.errors import UpstreamFault, UpstreamRefused, UpstreamUnreachable
from proxy.upstream.llama_server import QUICK_SECONDS, LlamaServer
from proxy.upstream.routes import is_known
from proxy.upstream.target import RouterTarget, SwapTarget, Target

_LOOK_SECONDS = 0.05
_BEGIN_SECONDS = 2.0
"""So long a model that is to be loaded may be told to be unloaded."""
_UNLIMITED = 1 << 20
_UNLOAD_SECONDS = 15.0
"""A router kills a model's process that has not ended within 10 s (--stop-timeout of a preset)."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a host by name; `aliases` are their other names.

    `n_at_most` may be loaded at once; None if the host does not say.
    """

    loaded: frozenset[str]
    known: frozenset[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    n_at_most: int | None = None

    def named(self, name: str) -> str | None:
        """Return the model that clients call *name*, None if there is none."""
        return name if name in self.known else self.aliases.get(name)


class ModelHost(Protocol):
    """A host of several models."""

    kind: str
    is_polled: bool
    """Whether its llama-servers may be asked again and again without being kept from unloading."""
    hides_names: bool
    """Whether models may have names that it does not list."""

    async def models(self) -> Models: ...

    async def load(self, model: str) -> None:
        """Return when the model is loaded; raises UpstreamRefused if it cannot be."""

    async def accepts(self, keys: Mapping[str, str]) -> bool:
        """Return whether a client with these headers may have a model loaded."""

    async def unload(self, model: str) -> None:
        """Return when the model is unloaded, or at once if that is left to the host."""

    async def resolve(self, name: str) -> str | None:
        """Return the model that has a name which is not listed, None if there is none; may load it."""

    def target(self, model: str) -> Target: ...

    def split_path(self, path: str, asked: str, models: Models) -> tuple[str, str]:
        """Return the model that a client's request names, and its path as a llama-server would see it.

        *asked* is what the query says. The name is empty if there is none.
        """


class _RouterProps(msgspec.Struct):
    role: str = ""
    max_instances: int | None = None


class _Status(msgspec.Struct, frozen=True):
    value: str = ""


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
            await self._root.call("GET", path, msgspec.Raw, seconds=None)
            status = await self._status(model)
        if status == "loading":
            status = await self._once(model, lambda value: value != "loading", None)
        if status != "loaded":
            raise UpstreamRefused(500, f"model {model} could not be loaded")

    async def accepts(self, keys: Mapping[str, str]) -> bool:
        return await _takes_key(self._root, "/models", keys)

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


_UPSTREAM = "/upstream/"
_NO_KEY = {"Accept": "*/*"}
_NAME = re.compile(r"[\w:@+-][\w.:@+-]*(/[\w:@+-][\w.:@+-]*)*")


class _Run(msgspec.Struct):
    model: str
    state: str = "ready"


class _Running(msgspec.Struct):
    running: list[_Run]


class _SwapModel(msgspec.Struct):
    id: str


class _SwapModels(msgspec.Struct):
    data: list[_SwapModel] = []


class Swap:
    """llama-swap; which models may be loaded together is known only to its configuration."""

    kind = "llama-swap"
    is_polled = False
    hides_names = True

    def __init__(self, root: LlamaServer) -> None:
        self._root = root
        self._resolved: dict[str, str] = {}

    async def models(self) -> Models:
        running = await self._root.call("GET", "/running", _Running, seconds=QUICK_SECONDS)
        listed = await self._root.call("GET", "/v1/models", _SwapModels, seconds=QUICK_SECONDS)
        loaded = frozenset(run.model for run in running.running if run.state == "ready")
        return Models(
            loaded=loaded,
            known=frozenset(m.id for m in listed.data) | loaded,
            aliases=self._resolved,
        )

    async def load(self, model: str) -> None:
        await self._of(model).call("GET", "/health", msgspec.Raw, seconds=None)

    async def accepts(self, keys: Mapping[str, str]) -> bool:
        return await _takes_key(self._root, "/running", keys)

    async def unload(self, model: str) -> None:
        """Leave that to llama-swap, which knows who may stay."""

    async def resolve(self, name: str) -> str | None:
        if not _NAME.fullmatch(name):
            return None  # it would become part of a path
        await self.load(name)
        marker = (await self._of(name).props()).media_marker
        for model in (await self.models()).loaded:
            if (await self._of(model).props()).media_marker == marker:
                self._resolved[name] = model
                return model
        return None

    def _of(self, model: str) -> LlamaServer:
        return self._root.at(self.target(model))

    def target(self, model: str) -> Target:
        return SwapTarget(self._root.target.base_url, model)

    @staticmethod
    def split_path(path: str, asked: str, models: Models) -> tuple[str, str]:
        if not path.startswith(_UPSTREAM):
            return asked, path
        # A model's name may have slashes in it: the longest beginning that is one counts.
        parts = path.removeprefix(_UPSTREAM).split("/")
        names = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
        # Of one that is not known, what is behind it counts: nothing of ours may be hidden there.
        unknown = (name for name in reversed(names) if is_known(_behind(path, name)))
        name = next(filter(models.named, names), None) or next(unknown, parts[0])
        return name, _behind(path, name)


def _behind(path: str, name: str) -> str:
    return path.removeprefix(_UPSTREAM + name)


async def _takes_key(root: LlamaServer, path: str, keys: Mapping[str, str]) -> bool:
    """Return whether a host answers who has these headers, and no others that tell who it is."""
    try:
        await root.call("GET", path, msgspec.Raw, headers=keys or _NO_KEY, seconds=QUICK_SECONDS)
    except UpstreamRefused as refusal:
        return refusal.status not in (401, 403)
    except UpstreamFault:
        pass  # then loading will fail, and say why
    return True


async def recognise(root: LlamaServer) -> ModelHost | None:
    """Return the host of models that answers at a URL; None if it is none, or cannot be asked now."""
    try:
        props = await root.call("GET", "/props", _RouterProps, seconds=QUICK_SECONDS)
        if props.role == "router":
            return Router(root, props.max_instances)
    except UpstreamUnreachable:
        return None
    except UpstreamFault:
        pass
    try:
        await root.call("GET", "/running", _Running, seconds=QUICK_SECONDS)
    except UpstreamFault:
        return None
    return Swap(root)
