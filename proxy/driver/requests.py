"""What the fronts hand to the driver, and what they report back."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from proxy.stabilize.calls_made import CallMade
from proxy.upstream.replies import Timings
from proxy.upstream.routes import Route


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has just come, before its body is read.

    `arrived_at` is of the monotonic clock, `at` in seconds since 1970.
    """

    id: str
    path: str
    arrived_at: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request on a generation route; `tenant` is empty where keys make no difference.

    `model` is what the client calls the model, `session` its session; each empty if it does not say.
    Its answer is a stream if it `wants_stream`. `server` is which llama-server serves it, empty if there is
    only one. `rewrites` are the stabilizers that changed the body. It came to the first desk at
    `queued_at` of the monotonic clock, 0 if this is the first.
    """

    arrival: Arrival
    route: Route
    raw: bytes
    headers: Mapping[str, str]
    tenant: bytes = b""
    session: str = ""
    model: str = ""
    wants_stream: bool = False
    server: str = ""
    queued_at: float = 0.0
    rewrites: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.arrival.id

    @property
    def path(self) -> str:
        return self.arrival.path


@dataclass(frozen=True, slots=True)
class Answer:
    """What was seen of llama-server's answer while it was relayed; no timings if it has none.

    `first_token_at` is of the monotonic clock; None if the answer came whole, not as a stream.
    `is_broken` says that llama-server went away in the middle. `calls` are the tool calls it made.
    """

    status: int
    timings: Timings | None
    first_token_at: float | None = None
    is_broken: bool = False
    calls: tuple[CallMade, ...] = ()


class Send(Protocol):
    """Sends a body upstream and relays the answer to the client, whole.

    Calls back once llama-server is known to run it: it sends a stream's headers when the slot starts.
    *n_found* of the prompt's tokens were there before the proxy itself evaluated any for this request;
    llama-server counts those as cached too. None says that it evaluated none.
    """

    async def __call__(
        self, body: bytes, on_start: Callable[[], None], n_found: int | None = None, /
    ) -> Answer: ...
