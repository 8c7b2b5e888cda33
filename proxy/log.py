"""structlog set-up. Prompt text is never logged; one canonical line tells each request's story.

On a console, people read the `says` of each event, one sentence; an event without `says` is shown only if
it is a warning or worse. JSON has all fields of all events, and so has a console at level debug.
"""

import logging
import os
import re
import sys
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

import structlog

_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_NO_FACTS = ("event", "component", "level", "timestamp")
_STDERR = 2
_MAX_LINES = 10_000
_LAST_SECONDS = 1.0


class _Writer(AbstractContextManager["_Writer"]):
    """Writes lines to stderr in a thread, so that a terminal stopped by Ctrl-S holds up no request.

    Lines that nobody reads are dropped in the end; so are lines that cannot be written, because a disk is
    full, a pipe is dead or a terminal was closed.
    """

    def __init__(self) -> None:
        self._lines = SimpleQueue[str]()  # which is cheaper than a Queue of limited size
        self._thread = Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def __call__(self, _: Any, __: str, line: Any) -> NoReturn:
        if self._lines.qsize() < _MAX_LINES:
            self._lines.put(f"{line}\n")
        raise structlog.DropEvent  # there is nothing left for a logger to do

    def _write_all(self) -> None:
        # Not by sys.stderr, which Python closes at its end: Python dies if a thread still writes there.
        while line := self._lines.get():
            data = line.encode(errors="backslashreplace")
            with suppress(OSError):
                while data:
                    data = data[os.write(_STDERR, data) :]

    def __exit__(self, *_: object) -> None:
        """Wait until all lines are written, for a second at most."""
        self._lines.put("")
        self._thread.join(_LAST_SECONDS)


def configure_logging(level: str, log_format: str) -> AbstractContextManager[object]:
    """Send log lines of *level* and above to stderr, as `console` or `json`.

    All are written once the block of what is returned is left.
    """
    writer = _Writer()
    is_json, is_for_people = log_format == "json", log_format == "console" and level != "debug"
    console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    renderers = [_without_words, structlog.processors.JSONRenderer() if is_json else console]
    form = "%H:%M:%S" if is_for_people else "iso"
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            # People read local time, programs UTC.
            structlog.processors.TimeStamper(fmt=form, utc=is_json),
            structlog.processors.format_exc_info,
            *([_words] if is_for_people else renderers),
            writer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
    )
    logging.getLogger("aiohttp.server").addFilter(_is_no_clients_fault)
    return writer


def _is_no_clients_fault(record: logging.LogRecord) -> bool:
    """Return False for aiohttp's reports of heads that are no HTTP: such heads may hold secrets."""
    from aiohttp.http_exceptions import HttpProcessingError  # commands log, too, and start sooner

    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _without_words(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    told = {name: value for name, value in event.items() if name != "says"}
    return {n: _CONTROLS.sub("�", v) if isinstance(v, str) else v for n, v in told.items()}


def _words(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    """Return the text of an event for people; raises DropEvent if it has none."""
    says, level, trace = event.pop("says", ""), event["level"], event.pop("exception", "")
    if level not in ("info", "debug"):
        fields = [f"{name}: {value}" for name, value in event.items() if name not in _NO_FACTS]
        told = "; ".join([event.pop("event"), *fields]).replace("\n", "�")  # no line of its own
        says = f"{level}: {says or told}"
    if not says:
        raise structlog.DropEvent
    said = "\n".join(filter(None, [f"{event['timestamp']}  {says}", trace]))
    return _CONTROLS.sub("�", said)  # a client's path may have such


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger
