"""Hosts of models: llama-server's router mode and llama-swap, which start a llama-server for each model."""

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from proxy.core.messages import list_of, member, text_of
from proxy.errors import UpstreamFault, UpstreamRefused
from proxy.llama.client import QUICK_SECONDS, HostKind, LlamaServer, Target
from proxy.llama.requests import is_special

LOAD_SECONDS = 1800.0
"""After this time the load of a model counts as failed; until then no other model is loaded."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a host by name; `aliases` are their other names.

    `n_at_most` models may be loaded at once; None if the host does not tell.
    """

    loaded: frozenset[str]
    known: frozenset[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    n_at_most: int | None = None
    by_hand: frozenset[str] = frozenset()
    """Models that are not loaded, and that no request has loaded (--no-models-autoload)."""

    def named(self, name: str) -> str | None:
        """Return the model with this name or alias; None if there is none."""
        return name if name in self.known else self.aliases.get(name)


class ModelHost:
    """A host of several models.

    Every method raises UpstreamUnreachable if there was no answer, UpstreamRefused if the answer was an
    error.
    """

    kind: ClassVar[HostKind]
    is_polled: ClassVar[bool]
    """Whether calls to a llama-server, again and again, do not keep its model from being unloaded."""
    hides_names: ClassVar[bool]
    """Whether the host's configuration alone tells all names, and the paths for which it loads no model."""
    _guarded_path: ClassVar[str]
    """A path that needs the same API key as loading a model."""

    def __init__(self, root: LlamaServer) -> None:
        self._root = root

    async def models(self) -> Models:
        raise NotImplementedError

    async def load(self, model: str) -> None:
        """Load a model and wait until it is loaded; raises UpstreamRefused if it cannot be loaded."""
        raise NotImplementedError

    async def unload(self, model: str) -> None:
        """Unload a model and wait until it is unloaded; does nothing if the host decides on that."""

    async def resolve(self, name: str) -> str | None:
        """Return the model with a name that is not listed; None if there is none. May load the model."""
        return None

    async def accepts(self, keys: Mapping[str, str]) -> bool:
        """Return whether a client with these headers may have a model loaded."""
        with suppress(UpstreamFault):  # the request itself will show it
            return await self._root.takes_key(keys, self._guarded_path)
        return True

    def target(self, model: str) -> Target:
        return Target(self._root.target.base_url, model, self.kind)

    @staticmethod
    def split_path(path: str, asked: str, models: Models) -> tuple[str, str]:
        """Return the model that a client's request names, and the path as a llama-server would see it.

        *asked* is the model in the query. The name is empty if there is none.
        """
        return asked, path


_LOOK_SECONDS = 0.05
_BEGIN_SECONDS = 2.0
"""For so long after the call to load it, a model may still be listed as unloaded."""
_UNLOAD_SECONDS = 15.0
"""A router kills a model's process that has not ended within 10 s (--stop-timeout of a preset)."""


class Router(ModelHost):
    """llama-server in router mode, without a model of its own (server-models.cpp)."""

    kind: ClassVar[HostKind] = "router"
    is_polled = True
    hides_names = False
    _guarded_path = "/models"

    async def models(self) -> Models:
        # A router that was started anew may have other flags.
        if (props := await self._root.props()).role != "router":
            raise UpstreamRefused(404, "it is no router any more")
        listed = {text_of(entry, "id"): entry for entry in await self._root.models("/models")}
        states = {name: _state(entry) for name, entry in listed.items()}
        unloaded = frozenset(name for name, state in states.items() if state == "unloaded")
        return Models(
            loaded=frozenset(name for name, state in states.items() if state == "loaded"),
            known=frozenset(listed),
            aliases={a: name for name, m in listed.items() for a in list_of(m.get("aliases"))},
            n_at_most=len(listed) if props.max_instances == 0 else props.max_instances,
            by_hand=frozenset() if props.models_autoload else unloaded,
        )

    async def load(self, model: str) -> None:
        await self._post("load", model)
        status = await self._once(model, lambda value: value != "unloaded", _BEGIN_SECONDS)
        if status == "sleeping":  # its slots are gone; reading them wakes it
            path = f"/slots?model={quote(model, safe='')}"
            await self._root.call("GET", path, msgspec.Raw, seconds=LOAD_SECONDS)
        if await self._once(model, lambda value: value != "loading", LOAD_SECONDS) != "loaded":
            raise UpstreamRefused(500, f"model {model} could not be loaded")

    async def unload(self, model: str) -> None:
        await self._post("unload", model)
        await self._once(model, lambda value: value == "unloaded", _UNLOAD_SECONDS)

    async def _post(self, verb: str, model: str) -> None:
        try:
            await self._root.call("POST", f"/models/{verb}", msgspec.Raw, {"model": model})
        except UpstreamRefused as refusal:
            if refusal.status != 400:  # 400: it is loaded, loading or unloaded already
                raise

    async def _once(self, model: str, is_so: Callable[[str], bool], seconds: float) -> str:
        """Return a model's status as soon as it *is_so*, or the last one after so many seconds."""
        status = await self._status(model)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_so(status):
                    await asyncio.sleep(_LOOK_SECONDS)
                    status = await self._status(model)
        return status

    async def _status(self, model: str) -> str:
        entries = await self._root.models("/models")
        return next((_state(m) for m in entries if text_of(m, "id") == model), "unloaded")


def _state(entry: Mapping[str, Any]) -> str:
    return text_of(entry.get("status"), "value")


_UPSTREAM = "/upstream/"
_MOST_PARTS = 64
"""A model's name has at most so many; a path may have thousands."""
_NAME = re.compile(r"[\w:@+-][\w.:@+-]*(/[\w:@+-][\w.:@+-]*)*")


class Swap(ModelHost):
    """llama-swap (its README and proxymanager.go).

    Only its configuration tells which models may be loaded together, so llama-swap itself unloads them.
    """

    kind: ClassVar[HostKind] = "llama-swap"
    is_polled = False
    hides_names = True
    _guarded_path = "/running"

    def __init__(self, root: LlamaServer) -> None:
        super().__init__(root)
        self._resolved: dict[str, str] = {}
        self._unsettled: set[str] = set()

    async def running(self) -> list[dict[str, Any]]:
        """Return the entries of GET /running."""
        kind = list[dict[str, Any]]
        return await self._root.call("GET", "/running", kind, key="running", seconds=QUICK_SECONDS)

    async def models(self) -> Models:
        ready = (run for run in await self.running() if member(run, "state", "ready") == "ready")
        loaded = frozenset(text_of(run, "model") for run in ready)
        names: dict[str, str] = {}
        for entry in await self._root.models():
            # An entry is a model, another name of a model, or a model of another llama-swap.
            about = member(member(entry, "meta"), "llamaswap")
            if text_of(about, "type") in ("selector", "profile"):  # the model differs by request
                self._unsettled.add(text_of(entry, "id"))
            elif not text_of(about, "peerID"):
                own = text_of(entry, "id")
                model = text_of(about, "modelID") or own
                names |= dict.fromkeys((own, *list_of(member(about, "aliases"))), model)
        return Models(loaded, frozenset(names.values()) | loaded, {**names, **self._resolved})

    async def load(self, model: str) -> None:
        await self._of(model).call("GET", "/health", msgspec.Raw, seconds=LOAD_SECONDS)

    async def resolve(self, name: str) -> str | None:
        if name in self._unsettled or not _NAME.fullmatch(name):
            return None  # the name would become part of a path
        await self.load(name)
        marker = (await self._of(name).props()).media_marker
        loaded = (await self.models()).loaded
        found = [m for m in loaded if (await self._of(m).props()).media_marker == marker]
        if len(found) != 1:  # LLAMA_MEDIA_MARKER gives several processes the same marker
            return None
        self._resolved[name] = found[0]
        return found[0]

    def _of(self, model: str) -> LlamaServer:
        return self._root.at(self.target(model))

    @staticmethod
    def split_path(path: str, asked: str, models: Models) -> tuple[str, str]:
        if not path.startswith(_UPSTREAM):
            return asked, path[2:] if path.startswith("/v/") else path
        # A model's name may have slashes: the longest beginning that is a model's name is taken. Spaces at
        # the end are dropped (FindModelInPath).
        path = path.strip()
        parts = path.removeprefix(_UPSTREAM).split("/")
        names = ["/".join(parts[:n]) for n in range(min(len(parts), _MOST_PARTS), 0, -1)]
        # Else the shortest name that is followed by a path that the proxy treats specially: no such path
        # may stay hidden.
        unknown = (name for name in reversed(names) if is_special(_behind(path, name)))
        name = next(filter(models.named, names), None) or next(unknown, parts[0])
        return name, _behind(path, name)


def _behind(path: str, name: str) -> str:
    return path.removeprefix(_UPSTREAM + name)


async def recognise(root: LlamaServer) -> ModelHost | None:
    """Return the host of models at a URL; None if it is no host of models, or does not answer now."""
    with suppress(UpstreamFault):
        with suppress(UpstreamRefused):  # llama-swap has no /props
            if (await root.props()).role == "router":
                return Router(root)
        swap = Swap(root)
        await swap.running()
        return swap
    return None
