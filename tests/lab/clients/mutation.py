"""What a mutation is: requests of one client of which a later one changes what an earlier one said."""

from dataclasses import dataclass
from typing import Any

from proxy.core.messages import Route
from proxy.llama.answers import CallMade
from proxy.stabilize.model import SAFE, Name

Body = dict[str, Any]


@dataclass(frozen=True)
class Mutation:
    """Requests in their order; what counts is how much of the last but one the last one keeps."""

    name: str
    form: Route
    requests: tuple[Body, ...]
    opt_in: frozenset[Name] = frozenset()
    calls_made: tuple[CallMade, ...] = ()
    """What the model had called, as it wrote it."""
    is_compaction: bool = False
    """Whether the last request is a new, shorter conversation: what counts is its own share."""

    @property
    def switches(self) -> frozenset[Name]:
        return SAFE | self.opt_in
