"""The command line: `llama-prefix-cache serve`, the same as `python -m proxy serve`."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from proxy import __version__
from proxy.app import run_proxy
from proxy.config import ENVIRONMENT_PREFIX, Settings, describe, load_settings
from proxy.errors import SettingsError, StoreLocked
from proxy.log import configure_logging, get_logger

EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="llama-prefix-cache")
def main() -> None:
    """A persistent, token-exact prefix cache in front of an unmodified llama-server."""


def setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one option for each setting."""
    for field in reversed(msgspec.structs.fields(Settings)):
        has_default = field.default not in (msgspec.NODEFAULT, None, False)
        default = f" [{field.default}]" if has_default else ""
        description, type_ = describe(field.name)
        is_flag = type_ is bool
        command = click.option(
            "--" + field.name.replace("_", "-"),
            metavar=None if is_flag else field.name.rpartition("_")[2].upper(),
            is_flag=is_flag,
            default=None,
            help=description + default,
        )(command)
    return command


@main.command()
@setting_options
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar=ENVIRONMENT_PREFIX + "CONFIG",
    help="YAML file with settings; flags and LLAMA_PREFIX_CACHE_* beat it.",
)
def serve(config: Path | None, **flags: Any) -> None:
    """Serve in front of a llama-server that is already running (or will be)."""
    try:
        settings = load_settings(flags, os.environ, config)
    except SettingsError as error:
        click.echo(f"llama-prefix-cache: {error}", err=True)
        sys.exit(EXIT_USAGE)
    configure_logging(settings.log_level, settings.log_format)
    try:
        asyncio.run(_serve_until_told(settings))
    except (StoreLocked, OSError) as error:
        click.echo(f"llama-prefix-cache: {error}", err=True)
        sys.exit(EXIT_UNAVAILABLE)


async def _serve_until_told(settings: Settings) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    log = get_logger("main")
    async with run_proxy(settings):
        log.info(
            "serving", listen=settings.listen, admin=settings.admin, upstream=settings.upstream
        )
        await told.wait()
        log.info("finishing requests and saving slots")
    log.info("stopped")


if __name__ == "__main__":
    main(prog_name="python -m proxy" if sys.argv[0].endswith("__main__.py") else None)
