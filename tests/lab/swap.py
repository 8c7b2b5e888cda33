"""A llama-swap before real llama-servers: the real one, if there is one here, or the stand-in."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.lab.model_host import ModelHost
from tests.lab.models import model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer, read_evaluated_tokens

START_SECONDS = 60
"""llama-swap waits as long for a llama-server that it ends, and then kills it. With a tiny model one that
generates may not end at SIGTERM (6 and 9 of 60 on a busy machine), only at a second one."""


def find_llama_swap() -> list[str]:
    """Return the command of a llama-swap: LLAMA_SWAP_BIN, PATH, or the stand-in of the tests."""
    found = os.environ.get("LLAMA_SWAP_BIN") or shutil.which("llama-swap")
    return [found] if found else [sys.executable, "-m", "tests.fakes.llama_swap"]


class Swap(ModelHost):
    """One llama-swap and its llama-servers, of which it runs one at a time unless groups say otherwise."""

    def __init__(
        self,
        folder: Path,
        kinds: Mapping[str, str],
        slot_save_path: Path | None = None,
        *,
        n_slots: int = 2,
        n_ctx: int = 16384,
        extra_args: Sequence[str] = (),
        sizes: Mapping[str, str] | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        **config: Any,
    ) -> None:
        """Describe it; each id of `kinds` becomes a model of that kind, of size least or as in `sizes`.

        `folder` gets its configuration and log; `settings` adds to what that says of models by id (aliases,
        ttl, ...), `config` to the rest of it (groups, upstream, ...).
        """
        super().__init__(log_path=folder / "llama-swap.log")
        servers = {
            model_id: LlamaServer(
                model_path(kind, (sizes or {}).get(model_id, "least"), DEFAULT_MODEL_FOLDER),
                slot_save_path,
                n_slots=n_slots,
                n_ctx=n_ctx,
                extra_args=extra_args,
                log_path=self.log_path,
            )
            for model_id, kind in kinds.items()
        }
        self._config_path = folder / "llama-swap.yaml"
        models = {
            model_id: {
                "cmd": shlex.join(server.command()),
                "proxy": server.base_url,
                **(settings or {}).get(model_id, {}),
            }
            for model_id, server in servers.items()
        }
        written = {"healthCheckTimeout": START_SECONDS, "models": models, **config}
        self._config_path.write_text(yaml.safe_dump(written, sort_keys=False))

    def command(self) -> list[str]:
        address = f"127.0.0.1:{self.port}"
        return [
            *find_llama_swap(),
            "--config",
            str(self._config_path.resolve()),
            "--listen",
            address,
        ]

    def states(self) -> dict[str, str]:
        """Return the state of each model that has a process: starting, ready or stopping."""
        return {model["model"]: model["state"] for model in self._running()}

    def child_url(self, model: str) -> str:
        """Return the address of the process that serves a running model."""
        return next(str(each["proxy"]) for each in self._running() if each["model"] == model)

    def evaluated_tokens(self, model: str) -> int:
        """Return how many prompt tokens a running model's process has evaluated (not reused)."""
        return read_evaluated_tokens(self.request("GET", f"/upstream/{model}/metrics")[1])

    def _running(self) -> list[dict[str, Any]]:
        running: list[dict[str, Any]] = self.request("GET", "/running")[1]["running"]
        return running
