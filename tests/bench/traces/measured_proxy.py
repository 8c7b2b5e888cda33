"""`llama-prefix-cache serve`, which leaves its metrics behind when it ends.

What is saved at shutdown counts too, when nobody can ask for /metrics any more. With --stripped, every
saved file loses its context checkpoints, as builds before 0.7.0 write it.

python -m tests.bench.traces.measured_proxy FOLDER [--stripped] [OPTION ...]
"""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from proxy import app
from proxy.app import Running, run_proxy
from proxy.cli import serve as command
from proxy.settings import Settings
from tests.lab.older_builds import (
    RewriteStateFile,
    keep_as_saved,
    rewriting,
    strip_context_checkpoints,
)


def main(folder: str, *options: str) -> None:
    """Serve with *options* until told to stop."""
    rewrite: RewriteStateFile = keep_as_saved
    if options[:1] == ("--stripped",):
        rewrite, options = strip_context_checkpoints, options[1:]

    @asynccontextmanager
    async def run_measured(settings: Settings, **more: Any) -> AsyncIterator[Running]:
        with rewriting(rewrite):
            async with run_proxy(settings, **more) as running:
                yield running
        file = Path(folder) / f"{os.getpid()}.metrics"
        file.write_bytes(running.shared.metrics.exposition())

    setattr(app, "run_proxy", run_measured)  # noqa: B010 - mypy forbids the plain assignment
    command.serve(list(options))


if __name__ == "__main__":
    main(*sys.argv[1:])
