"""What GET /v1/models and GET /running tell."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from tests.fakes.llama_swap.process import ModelProcess

Record = dict[str, Any]


def list_models(processes: Iterable[ModelProcess], lists_aliases: bool) -> list[Record]:
    """Describe all models but unlisted ones."""
    listed = [process for process in processes if not process.model.settings.unlisted]
    records = [record for process in listed for record in _records(process, lists_aliases)]
    return sorted(records, key=lambda record: str(record["id"]))


def _records(process: ModelProcess, lists_aliases: bool) -> Iterator[Record]:
    settings = process.model.settings
    described = {"name": settings.name.strip(), "description": settings.description.strip()}
    common = {
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llama-swap",
        **{field: text for field, text in described.items() if text},
        "status": {"value": "unloaded" if process.state == "stopped" else "loaded"},
    }
    about: Record = {"type": "model"}
    if settings.aliases:
        about["aliases"] = list(settings.aliases)
    yield {"id": process.model.id, **common, "meta": {"llamaswap": about}}
    for alias in settings.aliases if lists_aliases else ():
        about = {"type": "alias", "modelID": process.model.id}
        yield {"id": alias, **common, "meta": {"llamaswap": about}}


def list_running(processes: Iterable[ModelProcess]) -> list[Record]:
    """Describe the processes that there are."""
    running = [process for process in processes if process.state != "stopped"]
    running.sort(key=lambda process: process.model.id)
    return [
        {
            "model": process.model.id,
            "state": process.state,
            "cmd": process.model.command,
            "proxy": process.model.proxy,
            "ttl": process.model.settings.ttl,
            "name": process.model.settings.name,
            "description": process.model.settings.description,
        }
        for process in running
    ]
