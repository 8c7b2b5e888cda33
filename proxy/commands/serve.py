"""`llama-prefix-cache serve`: in front of a llama-server that somebody else runs."""

import asyncio
import os
from pathlib import Path
from typing import Any

import click

from proxy.app import run_proxy
from proxy.commands.options import (
    EXIT_CUT_SHORT,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    fail,
    setting_options,
)
from proxy.commands.stopping import Stopping
from proxy.config import Settings
from proxy.errors import SettingsError, StoreLocked
from proxy.loading import load_settings
from proxy.log import configure_logging, get_logger


@click.command()
@setting_options()
def serve(config: Path | None, **flags: Any) -> None:
    """Serve in front of a llama-server that is already running (or will be)."""
    try:
        settings = load_settings(flags, os.environ, config)
    except SettingsError as error:
        fail(error, EXIT_USAGE)
    configure_logging(settings.log_level, settings.log_format)
    try:
        asyncio.run(_serve_until_told(settings))
    except (StoreLocked, OSError) as error:
        fail(error, EXIT_UNAVAILABLE)
    except asyncio.CancelledError:
        fail("stopped before everything was saved", EXIT_CUT_SHORT)


async def _serve_until_told(settings: Settings) -> None:
    stopping = Stopping()
    log = get_logger("main")
    async with run_proxy(settings):
        log.info(
            "serving", listen=settings.listen, admin=settings.admin, upstream=settings.upstream
        )
        await stopping.told.wait()
        log.info("finishing requests and saving slots")
    log.info("stopped")
