"""What commands print: tables and trees for people, JSON for programs."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

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
