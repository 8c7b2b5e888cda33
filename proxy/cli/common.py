"""Shared by all commands: exit statuses, options, texts, tables, and the signals that end a command."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import click
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from proxy.errors import SettingsError, in_words
from proxy.log import get_logger
from proxy.settings import (
    ENVIRONMENT_PREFIX,
    NAMES,
    SCHEMA,
    Settings,
    complete_settings,
    default_directory,
    is_size,
    kinds_of,
    merge_settings,
    size_in_words,
    written,
)


class Exit(IntEnum):
    """The exit statuses of all commands; the help of `doctor` and `explain` says more about theirs."""

    FAILED = 1
    """Something that the command needs is missing or broken, or the command was refused."""
    USAGE = 2
    """A setting or a flag is wrong, or two contradict each other."""
    UNAVAILABLE = 69
    """A port or the directory is taken, or no proxy answers (EX_UNAVAILABLE of sysexits.h)."""
    LLAMA_SERVER_DIED = 70
    """The llama-server that `run` started has ended by itself (EX_SOFTWARE)."""
    CUT_SHORT = 130
    """A signal cut the work, or the end of it, short."""


def fail(complaint: object, exit_status: int = Exit.FAILED) -> NoReturn:
    """Say on stderr what is wrong, and exit."""
    said = in_words(complaint) if isinstance(complaint, BaseException) else complaint
    click.echo(f"llama-prefix-cache: {said}", err=True)
    sys.exit(exit_status)


def agree(question: str) -> None:
    """Ask whether to go on, unless --yes is given; exit if the user refuses, or without a terminal."""
    if not (_is_on("yes") or (sys.stdin.isatty() and click.confirm(question, err=True))):
        fail(f"{question} Nothing was done: --yes does it without asking", Exit.USAGE)


def settings_of(
    flags: Mapping[str, Any],
    config: Path | None,
    directory: Literal["given", "known", "made", "any"] = "given",
) -> Settings:
    """Return the settings of flags, environment and file; exits if one is wrong.

    *directory* says what to do if none of them sets one: "given" requires it; "known" takes `run`'s
    directory if it exists; "made" makes it; "any" takes it even if it does not exist.
    """
    try:
        merged = merge_settings(flags, os.environ, config)
        if directory == "made" and "slot_save_path" not in merged:
            default_directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory == "any" or (directory != "given" and default_directory().is_dir()):
            merged.setdefault("slot_save_path", str(default_directory()))
        return complete_settings(merged, needs_directory=directory != "any")
    except (SettingsError, OSError) as error:
        fail(error, Exit.USAGE)


# The output of commands: tables for people, JSON for programs.


_PIPED_COLUMNS = 80
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGES = (("d", 86400.0, 2.0), ("h", 3600.0, 1.0), ("min", 60.0, 1.0), ("s", 1.0, 0.0))


def console() -> Console:
    """Return the console for people: the terminal, or lines of a fixed length in a pipe."""
    shown = Console(highlight=False)
    if not shown.is_terminal:
        shown.width = _PIPED_COLUMNS
    return shown


def table_of(rows: Iterable[Iterable[str | Text]]) -> Table:
    """Return a table without borders."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def answer(content: object, shown: object) -> None:
    """Print *content* if --json is given, else *shown* for people: lines, or a renderable of rich."""
    if _is_on("json"):
        click.echo(msgspec.json.format(msgspec.json.encode(content)).decode())
    elif isinstance(shown, str):
        click.echo(shown)
    else:
        console().print(shown, soft_wrap=isinstance(shown, Text))


def checkpoints_in_words(n_checkpoints: int, n_bytes: int) -> str:
    """Return a number of checkpoints and their size, in words."""
    plural = "" if n_checkpoints == 1 else "s"
    return f"{n_checkpoints:,} checkpoint{plural} with {size_in_words(n_bytes)}"


def age_in_words(seconds: float) -> str:
    """Return an age in words, roughly: "5 min ago"."""
    unit, factor, _ = next((a for a in _AGES if seconds >= a[1] * a[2]), _AGES[-1])
    return f"{max(0, seconds) / factor:.0f} {unit} ago"


def age_seconds(text: str) -> int:
    """Return the length of an age such as 90s, 30m, 12h, 7d or 2w; raises BadParameter."""
    match = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if not match:
        raise click.BadParameter(f"{text!r} is not an age: write such as 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Any]:
    """Show on a terminal how much of *total* is done; yields the `update` of rich for this task."""
    shown = Console(stderr=True)
    with Progress(console=shown, disable=not shown.is_terminal, transient=True) as bar:
        yield partial(bar.update, bar.add_task(what, total=total))


# Options.


Command = Callable[..., Any]


def setting_options(*names: str) -> Callable[[Command], Command]:
    """Give a command --config, and one option for each setting in *names*, by default for all settings.

    The file may contain other settings too: one file serves all commands.
    """

    def decorate(command: Command) -> Command:
        command = config_option(command)
        for name in reversed(names or NAMES):
            command = _setting_option(name)(command)
        return command

    return decorate


def _setting_option(name: str) -> Callable[[Command], Command]:
    flag, said = name.replace("_", "-"), SCHEMA[name]["description"]
    if "boolean" in kinds_of(name):
        return click.option(f"--{flag}/--no-{flag}", default=None, help=said)
    metavar = "BYTES" if is_size(name) else name.rpartition("_")[2].upper()
    if default := SCHEMA[name].get("default"):
        said += f" [{written(name, default)}]"
    return click.option(f"--{flag}", metavar=metavar, help=said)


FILE = click.Path(dir_okay=False, path_type=Path)
config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar=ENVIRONMENT_PREFIX + "CONFIG",
    help="YAML file with settings; flags and LLAMA_PREFIX_CACHE_* beat it.",
)


def _note(context: click.Context, option: click.Parameter, is_on: bool) -> None:
    context.meta[str(option.name)] = is_on


def _is_on(name: str) -> bool:
    """Return whether the command that runs was given a switch; one without that switch was not."""
    return bool(click.get_current_context().meta.get(name))


# Not arguments of the commands: only `answer` and `agree` read these switches.
_switch = partial(click.option, is_flag=True, is_eager=True, expose_value=False, callback=_note)
json_option = _switch("--json", help="Print JSON.")
yes_option = _switch("--yes", "-y", help="Do not ask.")


# Signals: the first one stops the command in order, each further one cuts a step short.


def told_to_stop() -> asyncio.Event:
    """Return an event that SIGINT, SIGTERM or SIGHUP sets.

    Each further signal cancels the task that called this: the current wait is cut short, and the next step
    of the shutdown begins.
    """
    told, task, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()

    def tell() -> None:
        if not told.is_set():
            told.set()
        elif task is not None:
            get_logger("main").warning("told again: not waiting any longer")
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # An ignored SIGHUP comes from nohup and stays so; SIGINT is ignored after a shell's "&".
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, tell)
    return told
