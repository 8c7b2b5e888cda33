"""A real llama-server in router mode: no model of its own, one child process for each model it serves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.model_host import ModelHost
from tests.lab.models import model_path
from tests.lab.processes import child_pids
from tests.lab.server import (
    BASE_ARGUMENTS,
    DEFAULT_MODEL_FOLDER,
    POLL_INTERVAL_SECONDS,
    SLOTS_APART,
    STOP_TIMEOUT_SECONDS,
    LlamaServerError,
    find_llama_server,
    read_evaluated_tokens,
)


def link_models(
    folder: Path,
    kinds: Mapping[str, str],
    models: Path = DEFAULT_MODEL_FOLDER,
    sizes: Mapping[str, str] | None = None,
) -> Path:
    """Fill `folder` for --models-dir: each id of `kinds` becomes a model of that kind.

    It is the least unless `sizes` says otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for model_id, kind in kinds.items():
        path = model_path(kind, (sizes or {}).get(model_id, "least"), models)
        (folder / f"{model_id}.gguf").symlink_to(path.resolve())
    return folder


class Router(ModelHost):
    """One router and its children; an id is a file name in `models` without .gguf."""

    def __init__(
        self,
        models: Path,
        slot_save_path: Path | None = None,
        *,
        models_max: int = 1,
        n_slots: int = 2,
        n_ctx: int = 16384,
        extra_args: Sequence[str] = (),
        port: int | None = None,
        log_path: Path | None = None,
    ) -> None:
        """Describe the router; all flags but the first two are for its children."""
        super().__init__(port, log_path)
        self.models = models
        self.models_max = models_max
        self.slot_save_path = slot_save_path
        self.n_slots = n_slots
        self.n_ctx = n_ctx
        self.extra_args = tuple(extra_args)
        self.binary = find_llama_server()

    def command(self) -> list[str]:
        command = [str(self.binary), "--models-dir", str(self.models.resolve())]
        command += ["--models-max", str(self.models_max)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["-np", str(self.n_slots), SLOTS_APART]
        command += ["-c", str(self.n_ctx), "-t", "1", *BASE_ARGUMENTS]
        if self.slot_save_path is not None:
            command += ["--slot-save-path", str(self.slot_save_path.resolve())]
        return [*command, *self.extra_args]

    def statuses(self) -> dict[str, str]:
        """Return each model's status: unloaded, loading, loaded or sleeping."""
        return {model["id"]: model["status"]["value"] for model in self._listed()}

    def child_url(self, model: str) -> str:
        """Return the address of the process that serves a loaded model."""
        status = next(entry["status"] for entry in self._listed() if entry["id"] == model)
        port = status["args"][status["args"].index("--port") + 1]
        return f"http://127.0.0.1:{port}"

    def child_pid(self, model: str) -> int:
        """Return the process id of a loaded model's child."""
        for pid in child_pids(self.pid):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if words[words.index("--alias") + 1] == model:
                return pid
        raise LlamaServerError(f"{model} has no process")

    def unload(self, model: str) -> None:
        """Have a model's process ended, and wait for it; its running requests are cut."""
        status, answer = self.request("POST", "/models/unload", {"model": model})
        if status != 200:
            raise LlamaServerError(f"{model} is not unloaded: {answer}")
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        while self.statuses()[model] != "unloaded":
            if time.monotonic() > deadline:
                raise LlamaServerError(f"{model} does not end")
            time.sleep(POLL_INTERVAL_SECONDS)

    def evaluated_tokens(self, model: str) -> int:
        """Return how many prompt tokens a loaded model's process has evaluated (not reused)."""
        path = f"/metrics?model={model}&autoload=false"
        return read_evaluated_tokens(self.request("GET", path)[1])

    def _listed(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = self.request("GET", "/models")[1]["data"]
        return models
