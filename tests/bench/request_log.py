"""Reads what the in-process proxy says of each request: its way through the slots."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog


@dataclass(frozen=True, slots=True)
class Way:
    """One request's way: its slot, whether a file was restored into it, and where it stopped."""

    slot: int
    has_restored: bool
    stops: tuple[int, ...]
    n_reused: int


class RequestLog:
    """Takes the place of the proxy's log; only the newest request's line is kept."""

    def __init__(self) -> None:
        self._line: Mapping[str, Any] | None = None
        structlog.configure(processors=[self._keep])

    def _keep(
        self, logger: object, method: str, line: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if line.get("event") == "request":
            self._line = dict(line)
        raise structlog.DropEvent

    def take(self) -> Way:
        """Return the way of the newest request, once."""
        line, self._line = self._line, None
        if line is None or "slot" not in line:
            raise RuntimeError(f"a request was not cached: {line}")
        has_restored = line["chosen"] == "restore"
        return Way(line["slot"], has_restored, tuple(line["stops"]), line["confirmed"] or 0)
