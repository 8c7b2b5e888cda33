"""What the proxy asks of a host of several models, whichever it is.

Every method raises UpstreamUnreachable if there was no answer, UpstreamRefused if an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from proxy.errors import UpstreamFault, UpstreamRefused
from proxy.upstream.llama_server import QUICK_SECONDS, LlamaServer
from proxy.upstream.target import Target

LOAD_SECONDS = 1800.0
"""A model that is not loaded after so long never will be; until then nothing else is loaded."""
_NO_KEY = {"Accept": "*/*"}


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


async def takes_key(root: LlamaServer, path: str, keys: Mapping[str, str]) -> bool:
    """Return whether a host answers who has these headers, and no others that tell who it is."""
    try:
        await root.call("GET", path, msgspec.Raw, headers=keys or _NO_KEY, seconds=QUICK_SECONDS)
    except UpstreamRefused as refusal:
        return refusal.status not in (401, 403)
    except UpstreamFault:
        pass  # then loading will fail, and say why
    return True
