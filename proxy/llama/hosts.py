"""Hosts of models: routers and llama-swap, which start a llama-server for each model."""

import asyncio
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from proxy.errors import UpstreamFault, UpstreamRefused, UpstreamUnreachable
from proxy.llama.client import QUICK_SECONDS, LlamaServer
from proxy.llama.routes import RouterTarget, SwapTarget, Target, is_known

# What the proxy asks of a host of several models, whichever it is.
#
# Every method raises UpstreamUnreachable if there was no answer, UpstreamRefused if an error.


LOAD_SECONDS = 1800.0
"""A model that is not loaded after so long never will be; until then nothing else is loaded."""


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


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a host starts a model's llama-server with; it ends it after it was idle for `unload_seconds`."""

    model: str
    words: Sequence[str]
    unload_seconds: float = 0.0


class ModelHost(Protocol):
    """A host of several models."""

    kind: str
    is_polled: bool
    """Whether its llama-servers may be asked again and again without being kept from unloading."""
    hides_names: bool
    """Whether models may have names that it does not list."""

    async def models(self) -> Models: ...

    async def command_lines(self) -> list[CommandLine]:
        """Return those that the host tells: a router all of them, llama-swap those of what runs."""

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


async def accepts(root: LlamaServer, path: str, keys: Mapping[str, str]) -> bool:
    """Return whether a host answers who has these headers; one that does not answer will say why."""
    try:
        return await root.takes_key(keys, path)
    except UpstreamFault:
        return True


# What a host of models tells of the command lines it starts them with; nothing is loaded for it.
#
# llama-server's router tells all of them (GET /models, status.args), without what it hands on by
# environment variables; llama-swap those of the models that run (GET /running).


_SLEEP = "--sleep-idle-seconds"


@dataclass(frozen=True, slots=True)
class HostedFlags:
    """What decides over a model's slots; 0 if its command line does not say.

    `unload_seconds` and `sleep_seconds` are the idle times after which its slots are gone.
    """

    model: str
    unload_seconds: float = 0.0
    sleep_seconds: float = 0.0


async def hosted_flags(host: ModelHost) -> list[HostedFlags]:
    """Return what is told of each model; raises UpstreamFault."""
    lines = await host.command_lines()
    return [read_flags(line.model, line.words, line.unload_seconds) for line in lines]


def read_flags(model: str, words: Sequence[str], unload_seconds: float = 0.0) -> HostedFlags:
    """Return what a command line says; llama-server may be anywhere in it, behind docker or a shell."""
    # The last one counts; --sleep_idle_seconds is the same to llama-server.
    found = [value for name, value in pairwise(words) if name.replace("_", "-") == _SLEEP]
    return HostedFlags(model, max(0.0, unload_seconds), _seconds(found[-1] if found else None))


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0


# llama-server's router mode, as server-models.cpp has it.


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
        return await accepts(self._root, "/models", keys)

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


# llama-swap, as its README and proxymanager.go have it.


_UPSTREAM = "/upstream/"
_NAME = re.compile(r"[\w:@+-][\w.:@+-]*(/[\w:@+-][\w.:@+-]*)*")


class _Run(msgspec.Struct):
    model: str
    state: str = "ready"
    cmd: str = ""
    ttl: float = 0.0


class RunningModels(msgspec.Struct):
    running: list[_Run]


class _SwapAbout(msgspec.Struct, frozen=True, rename={"model_id": "modelID", "peer_id": "peerID"}):
    """What llama-swap says of an entry: another name of a model, or a model of another llama-swap."""

    model_id: str = ""
    peer_id: str = ""
    aliases: tuple[str, ...] = ()


class _SwapMeta(msgspec.Struct, frozen=True):
    llamaswap: _SwapAbout = _SwapAbout()


class _SwapModel(msgspec.Struct):
    id: str
    meta: _SwapMeta = _SwapMeta()

    @property
    def names(self) -> dict[str, str]:
        """Its own name and its others, and the model that each means; none if it is elsewhere."""
        about = self.meta.llamaswap
        model = about.model_id or self.id
        return {} if about.peer_id else dict.fromkeys((self.id, *about.aliases), model)


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

    async def _running(self) -> list[_Run]:
        reply = await self._root.call("GET", "/running", RunningModels, seconds=QUICK_SECONDS)
        return reply.running

    async def command_lines(self) -> list[CommandLine]:
        return [CommandLine(r.model, _words(r.cmd), r.ttl) for r in await self._running()]

    async def models(self) -> Models:
        running = await self._running()
        listed = await self._root.call("GET", "/v1/models", _SwapModels, seconds=QUICK_SECONDS)
        loaded = frozenset(run.model for run in running if run.state == "ready")
        names = {name: model for m in listed.data for name, model in m.names.items()}
        return Models(loaded, frozenset(names.values()) | loaded, {**names, **self._resolved})

    async def load(self, model: str) -> None:
        await self._of(model).call("GET", "/health", msgspec.Raw, seconds=LOAD_SECONDS)

    async def accepts(self, keys: Mapping[str, str]) -> bool:
        return await accepts(self._root, "/running", keys)

    async def unload(self, model: str) -> None:
        """Leave that to llama-swap, which knows who may stay."""

    async def resolve(self, name: str) -> str | None:
        if not _NAME.fullmatch(name):
            return None  # it would become part of a path
        await self.load(name)
        marker = (await self._of(name).props()).media_marker
        loaded = (await self.models()).loaded
        found = [m for m in loaded if (await self._of(m).props()).media_marker == marker]
        if len(found) != 1:  # where LLAMA_MEDIA_MARKER fixes them, markers tell nothing
            return None
        self._resolved[name] = found[0]
        return found[0]

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


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command, comments=True)
    except ValueError:
        return command.split()


def _behind(path: str, name: str) -> str:
    return path.removeprefix(_UPSTREAM + name)


# Finds out what answers at a URL that is no llama-server with slots.


class _RouterProps(msgspec.Struct):
    role: str = ""
    max_instances: int | None = None


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
        await root.call("GET", "/running", RunningModels, seconds=QUICK_SECONDS)
    except UpstreamFault:
        return None
    return Swap(root)
