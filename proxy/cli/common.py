"""What all commands share: options, exit statuses, words, tables, and the running proxy."""

import asyncio
import io
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from proxy.llama.client import new_session
from proxy.log import get_logger
from proxy.settings import ENVIRONMENT_PREFIX, UNITS, Settings, describe, is_size

# How numbers are shown to people, and how people write ages.


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGES = (("d", 86400.0, 2.0), ("h", 3600.0, 1.0), ("min", 60.0, 1.0), ("s", 1.0, 0.0))


def size_in_words(n_bytes: float) -> str:
    """Return a number of bytes with the largest unit that leaves a whole one."""
    for unit, factor in reversed(UNITS.items()):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes:.0f} bytes"


def age_in_words(seconds: float) -> str:
    """Return how long ago something was, roughly."""
    unit, factor, _ = next((a for a in _AGES if seconds >= a[1] * a[2]), _AGES[-1])
    return f"{max(0, seconds) / factor:.0f} {unit} ago"


class Age(click.ParamType[int]):
    """A length of time such as 90s, 30m, 12h, 7d or 2w."""

    name = "age"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+)([smhdw])", str(value).strip())
        if not match:
            self.fail(f"{value!r} is not an age: write such as 30m, 12h or 7d", param, ctx)
        return int(match[1]) * _SECONDS[match[2]]


# What commands print: tables and trees for people, JSON for programs.


_PIPED_COLUMNS = 110


def console() -> Console:
    """Return where people read: the terminal, or lines of one length in a pipe."""
    shown = Console(highlight=False)
    if not shown.is_terminal:
        shown.width = _PIPED_COLUMNS
    return shown


def print_json(content: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(content)).decode())


@contextmanager
def bytes_progress(what: str, n_bytes: int) -> Iterator["ByteCount"]:
    """Show on a terminal how many of *n_bytes* are done."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as bar:
        yield ByteCount(bar, n_bytes)


class ByteCount:
    """Counts bytes that are done."""

    def __init__(self, bar: Progress, n_bytes: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=n_bytes)

    def __call__(self, n_bytes: int) -> None:
        self._bar.advance(self._task, n_bytes)


# What all commands share: an option for each setting, and the exit statuses.


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
    flag, kinds = "--" + field.name.replace("_", "-"), get_args(type_)
    is_flag = bool in (type_, *kinds)
    return click.option(
        f"{flag}/--no-{flag.removeprefix('--')}" if is_flag and kinds else flag,
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


# Asks a running proxy at its admin listener.


T = TypeVar("T")
Query = Mapping[str, str]


class Admin:
    """The admin listener of one proxy."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, path: str, type_: type[T], query: Query | None = None) -> T:
        """Return what a request is answered with; exits with a plain word if it is not."""
        return self.decode(self.raw(method, path, query), type_)

    async def ask_async(self, path: str, type_: type[T]) -> T:
        """Return what GET *path* is answered with; exits as `ask` does."""
        return self.decode((await self._raw("GET", path, None, ()))[1], type_)

    def decode(self, body: bytes, type_: type[T]) -> T:
        """Return what an answer says; exits if it is not one of ours."""
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.DecodeError:
            self.fail_foreign()

    def raw(self, method: str, path: str, query: Query | None = None) -> bytes:
        """Return an answer's body; exits as `ask` does."""
        return self.try_raw(method, path, query)[1]

    def try_raw(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        refusals: tuple[int, ...] = (),
    ) -> tuple[int, bytes]:
        """Return an answer's status and body; exits as `ask` does, but not for *refusals*."""
        return asyncio.run(self._raw(method, path, query, refusals))

    async def _raw(
        self, method: str, path: str, query: Query | None, refusals: tuple[int, ...]
    ) -> tuple[int, bytes]:
        async with new_session() as session:
            try:
                async with session.request(method, self.url + path, params=query) as reply:
                    body = await reply.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.fail_unreachable(error)
        if reply.status not in (200, *refusals):
            _fail_refused(reply.status, body)
        return reply.status, body

    async def follow(
        self,
        path: str,
        body: bytes,
        query: Query,
        headers: Query,
        on_line: Callable[[Any], None],
    ) -> None:
        """Post *body* and hand over each line of JSON of the answer; exits as `ask` does."""
        async with new_session() as session:
            try:
                async with session.post(
                    self.url + path, data=io.BytesIO(body), params=query, headers=headers
                ) as reply:
                    if reply.status != 200:
                        _fail_refused(reply.status, await reply.read())
                    async for line in reply.content:
                        on_line(self.decode(line, Any))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.fail_unreachable(error)

    def fail_foreign(self) -> NoReturn:
        fail(f"what answers at {self.url} is not llama-prefix-cache", EXIT_UNAVAILABLE)

    def fail_unreachable(self, error: Exception) -> NoReturn:
        context = click.get_current_context(silent=True)
        can_do_without = context is not None and any(
            option.name == "slot_save_path" for option in context.command.params
        )
        fail(
            f"no proxy answers at {self.url} ({error}). If one runs with another `admin`, give --admin "
            "http://HOST:PORT"
            + ("; if none runs, --slot-save-path to work on the directory" * can_do_without),
            EXIT_UNAVAILABLE,
        )


def _fail_refused(status: int, body: bytes) -> NoReturn:
    fail(complaint(body), EXIT_UNAVAILABLE if status == 503 else EXIT_FAILED)


def complaint(body: bytes) -> str:
    """Return what an error body says."""
    try:
        return str(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace").strip()


# Signals: the first one asks to finish, every further one to hurry.


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """Tells when to stop; owns the handlers of SIGINT, SIGTERM and SIGHUP.

    Further signals cancel the task that made this, once each: what is waited for then is cut short, and
    the next step of the shutdown begins.
    """

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            # SIGHUP is ignored at nohup's wish; SIGINT merely for shells that start us with an "&".
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._tell)

    def _tell(self) -> None:
        if not self.told.is_set():
            self.told.set()
        elif self._task is not None:
            get_logger("main").warning("told again: not waiting any longer")
            self._task.cancel()
