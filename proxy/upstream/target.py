"""Where one llama-server is asked: at a URL of its own, or by its model's name at a host of several.

Owns: how a call names its model. llama-server's router takes it from the body of a POST and from the
query of a GET, and loads a model that is not loaded unless `autoload=false` is in the query
(server-models.cpp); llama-swap takes it from the path and always loads it (proxymanager.go).
"""

from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote, urlsplit

import msgspec

from proxy.errors import UpstreamUnreachable

_GONE = b"proxy error: Failed to read connection"
"""What a router writes behind the answer of a child that has died, as if it were a part of it."""
_UNREACHED = b"proxy error: Could not establish connection"
"""What it answers, with 500, until it has noticed."""
_BAD_GATEWAY = 502
"""What llama-swap answers, without a word, until it has noticed (process_command.go)."""


@dataclass(frozen=True, slots=True)
class Target:
    """A llama-server at a URL of its own; `base_url` is where clients' own requests go as they are."""

    base_url: str
    model: str = ""
    speaks_plainly: ClassVar[bool] = False
    """Whether its host says in plain text what went wrong with llama-server."""

    @property
    def name(self) -> str:
        """What people are told of it: the model, or else the address."""
        return self.model or urlsplit(self.base_url).netloc

    def path(self, method: str, path: str) -> str:
        """Return the path, with its query, of a call of the proxy's own."""
        return path

    def body(self, data: bytes | None) -> bytes | None:
        """Return the body of a call of the proxy's own."""
        return data

    def says_gone(self, chunk: bytes) -> bool:
        """Return whether its host says in an answer that llama-server went away."""
        return False

    def says_unreached(self, status: int, content: bytes) -> bool:
        """Return whether an answer is its host's, which could not reach llama-server."""
        return False

    def is_listed_as(self, model_id: str) -> bool:
        """Return whether an entry of /v1/models is of this one: a router lists all of its models."""
        return True


@dataclass(frozen=True, slots=True)
class RouterTarget(Target):
    """One model of llama-server's router mode; never loaded by a call."""

    speaks_plainly: ClassVar[bool] = True

    def path(self, method: str, path: str) -> str:
        named = f"model={quote(self.model, safe='')}&" if method == "GET" else ""
        return f"{path}{'&' if '?' in path else '?'}{named}autoload=false"

    def body(self, data: bytes | None) -> bytes | None:
        if data is None:
            return None
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**fields, "model": self.model})

    def says_gone(self, chunk: bytes) -> bool:
        return chunk.endswith(_GONE)

    def says_unreached(self, status: int, content: bytes) -> bool:
        return content.startswith(_UNREACHED)

    def is_listed_as(self, model_id: str) -> bool:
        return model_id == self.model


@dataclass(frozen=True, slots=True)
class SwapTarget(Target):
    """One model of llama-swap."""

    def path(self, method: str, path: str) -> str:
        return f"/upstream/{quote(self.model, safe='/')}{path}"

    def says_unreached(self, status: int, content: bytes) -> bool:
        return status == _BAD_GATEWAY and not content


@dataclass(slots=True)
class Presence:
    """Whether there is a process behind a target, as far as its host says.

    `is_polled` says that it may be asked again and again: llama-swap unloads a model that nobody has
    asked anything for a while. It was gone `n_lost` times.
    """

    is_there: bool = True
    is_polled: bool = True
    n_lost: int = 0

    def lose(self) -> None:
        self.is_there = False
        self.n_lost += 1

    def require(self, name: str) -> None:
        """Raise UpstreamUnreachable if there is none: llama-swap would load the model."""
        if not self.is_there:
            raise UpstreamUnreachable(f"{name} is not loaded")
