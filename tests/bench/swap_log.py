"""Reads from the proxy's log, in JSON, what a change of models took."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class SwapSeconds:
    """How long it took until a request's model was there: what its last llama-server held is written
    back, that one is unloaded and the next one loaded, and the proxy gets to know it.
    """

    save: float
    load: float
    attach: float

    @property
    def total(self) -> float:
        return self.save + self.load + self.attach

    @classmethod
    def median_of(cls, swaps: Sequence[Self]) -> Self:
        """Return the medians of each part."""
        return cls(
            *(median(getattr(s, name) for s in swaps) for name in ("save", "load", "attach"))
        )


def read_swaps(log_path: Path, model: str) -> list[SwapSeconds]:
    """Return every swap in a log by which *model* took another one's place, in order."""
    swaps: list[SwapSeconds] = []
    saved = loaded = began = 0.0
    for line in _lines(log_path):
        at = datetime.fromisoformat(line["timestamp"]).timestamp()
        match line["event"]:
            case "slots saved":
                saved = at
            case "model loaded" if line["unloaded"] and line["model"] == model:
                loaded, began = at, at - line["seconds"]
            case "attached to llama-server" if loaded:
                # Where nothing was dirty, nothing says that it was saved.
                saved = saved if saved > began else began
                swaps.append(SwapSeconds(saved - began, loaded - saved, at - loaded))
                loaded = 0.0
            case _:
                pass
    return swaps


def _lines(log_path: Path) -> Iterator[dict[str, Any]]:
    for line in log_path.read_text().splitlines():
        if line.startswith("{"):
            yield json.loads(line)
