"""What all commands share: an option for each setting, and the exit statuses."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from proxy.config import Settings
from proxy.loading import describe
from proxy.sizes import is_size
from proxy.sources import ENVIRONMENT_PREFIX

EXIT_USAGE = 2
"""A setting or a flag is wrong, or two contradict each other."""
EXIT_FAILED = 1
"""What was asked for is not there, was refused, or is not as it should be."""
EXIT_UNAVAILABLE = 69
"""A port or the directory is taken, or no proxy answers (EX_UNAVAILABLE of sysexits.h)."""
EXIT_LLAMA_SERVER_DIED = 70
"""The llama-server that `run` started has ended by itself (EX_SOFTWARE)."""
EXIT_CUT_SHORT = 130
"""A signal cut the work, or the end of it, short."""

Command = Callable[..., Any]


def setting_options(
    *, without: tuple[str, ...] = (), descriptions: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """Give a command one option for each setting, and --config; *descriptions* replace their help."""

    def decorate(command: Command) -> Command:
        command = config_option(command)
        for field in reversed(msgspec.structs.fields(Settings)):
            if field.name not in without:
                command = _setting_option(field, (descriptions or {}).get(field.name))(command)
        return command

    return decorate


def config_option(command: Command) -> Command:
    """Give a command --config."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar=ENVIRONMENT_PREFIX + "CONFIG",
        help="YAML file with settings; flags and LLAMA_PREFIX_CACHE_* beat it.",
    )(command)


def json_option(command: Command) -> Command:
    """Give a command --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _setting_option(
    field: msgspec.structs.FieldInfo, description: str | None
) -> Callable[[Command], Command]:
    own_description, type_ = describe(field.name)
    has_default = field.default not in (msgspec.NODEFAULT, None, False)
    is_flag = type_ is bool
    return click.option(
        "--" + field.name.replace("_", "-"),
        metavar=None if is_flag else _metavar(field.name),
        is_flag=is_flag,
        default=None,
        help=(description or own_description) + (f" [{field.default}]" if has_default else ""),
    )


def _metavar(name: str) -> str:
    return "BYTES" if is_size(name) else name.rpartition("_")[2].upper()


def fail(complaint: object, status: int) -> NoReturn:
    """Say on stderr what is wrong, and exit."""
    click.echo(f"llama-prefix-cache: {complaint}", err=True)
    sys.exit(status)
