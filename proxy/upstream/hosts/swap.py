"""llama-swap, as its README and proxymanager.go have it."""

import re
import shlex
from collections.abc import Mapping

import msgspec

from proxy.upstream.hosts.model_host import LOAD_SECONDS, CommandLine, Models, takes_key
from proxy.upstream.llama_server import QUICK_SECONDS, LlamaServer
from proxy.upstream.routes import is_known
from proxy.upstream.target import SwapTarget, Target

_UPSTREAM = "/upstream/"
_NAME = re.compile(r"[\w:@+-][\w.:@+-]*(/[\w:@+-][\w.:@+-]*)*")


class _Run(msgspec.Struct):
    model: str
    state: str = "ready"
    cmd: str = ""
    ttl: float = 0.0


class Running(msgspec.Struct):
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
        reply = await self._root.call("GET", "/running", Running, seconds=QUICK_SECONDS)
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
        return await takes_key(self._root, "/running", keys)

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
