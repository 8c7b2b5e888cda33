"""The log: in both forms, and without a word of any prompt."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import structlog
from aiohttp.http_exceptions import BadHttpMessage

from proxy.core.rates import seconds_in_words
from proxy.errors import UpstreamRefused
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.views import RequestRecord, in_words
from proxy.health import Faults
from proxy.log import configure_logging, get_logger
from proxy.metrics import Metrics

SECRET = "the-users-own-words"


def fail_with_prompt_at_hand() -> None:
    prompt = [SECRET]
    raise ValueError(f"{len(prompt)} is wrong")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_log_tells_what_failed_but_not_what_it_was_about(
    log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        with configure_logging("info", log_format):
            faults = Faults(Metrics())
            faults.record("tokenize", UpstreamRefused(500, f"parse error; last read: '{SECRET}'"))
            try:
                fail_with_prompt_at_hand()
            except ValueError as error:
                faults.record("settle", error)
            get_logger("cache").info("request", id="5f0c1a2b", confirmed=7)
    finally:
        structlog.reset_defaults()
    told = capfd.readouterr().err
    assert SECRET not in told
    if log_format == "console":
        # llama-server may refuse the request too, as it refuses images without an mmproj.
        assert "answered 500 to the prompt); requests are answered all the same" in told
        assert "id" not in told.splitlines()[-1]  # an event without words is for machines
        get = [line for line in told.splitlines() if "the cache failed" in line]
        assert [" warning: " in line for line in get] == [True, True]
    assert "answered 500" in told and "1 is wrong" in told and "fail_with_prompt_at_hand" in told
    if log_format == "json":
        lines = [json.loads(line) for line in told.splitlines()]
        assert [line["event"] for line in lines] == ["cache fault", "cache fault", "request"]
        assert lines[2]["id"] == "5f0c1a2b" and lines[2]["level"] == "info"
        assert lines[2]["timestamp"].endswith("Z"), "programs get UTC"


def test_console_says_words_and_debug_says_everything(capfd: pytest.CaptureFixture[str]) -> None:
    said = {}
    try:
        for level in ("info", "debug"):
            with configure_logging(level, "console"):
                log = get_logger("main")
                log.info("serving", admin="a:1", says="ready")
                log.info("store opened", n_checkpoints=3)
                log.warning("stopped early", n_left=2)
            said[level] = capfd.readouterr().err
    finally:
        structlog.reset_defaults()
    lines = [line.partition("  ")[2] for line in said["info"].splitlines()]
    assert lines == ["ready", "warning: stopped early; n_left: 2"]
    assert "admin=a:1" in said["debug"] and "n_checkpoints=3" in said["debug"]
    assert "says" not in said["debug"]


@contextmanager
def stderr_is(fd: int) -> Iterator[None]:
    before = os.dup(2)
    os.dup2(fd, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(fd)
        structlog.reset_defaults()


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_log_that_cannot_be_written_fails_nobody(log_format: str) -> None:
    """As on a full disk, and when a terminal was closed or the reader of a pipe has ended."""
    with stderr_is(os.open("/dev/full", os.O_WRONLY)):
        with configure_logging("info", log_format):
            get_logger("main").warning("stopped early", n_left=2)


def test_log_that_nobody_reads_holds_up_nobody() -> None:
    """As a terminal after Ctrl-S."""
    reader, writer = os.pipe()
    with stderr_is(writer):
        with (log := configure_logging("info", "console")):
            for number in range(5000):
                get_logger("main").warning("stopped early", n_left=number)
        os.close(reader)
        with log:  # until the rest has failed
            pass


def test_control_characters_of_a_client_do_not_reach_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    try:
        with configure_logging("info", "console"):
            get_logger("front").warning("request failed", path="/slots/\x1b[31m\n10:00:00  stopped")
    finally:
        structlog.reset_defaults()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("path: /slots/\ufffd[31m\ufffd10:00:00  stopped")


@pytest.mark.parametrize("level", ["info", "debug"])
def test_control_characters_of_an_error_do_not_reach_the_terminal(
    capfd: pytest.CaptureFixture[str], level: str
) -> None:
    try:
        with configure_logging(level, "console"):
            try:
                raise ValueError("\x1b[31m")
            except ValueError:
                get_logger("cache").warning("cache fault", path="/\x1b[31m", exc_info=True)
    finally:
        structlog.reset_defaults()
    assert "\x1b" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (0.0231, "23 ms"), (0.56, "0.56 s"), (9.81, "9.8 s"), (1234.5, "1,234 s")],
)
def test_seconds_are_never_nought_where_milliseconds_are_meant(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words


RECORD = RequestRecord(
    id="5f0c1a2b", at=0.0, path="/v1/chat/completions", outcome="hit", cause=Cause.HIT, status=200,
    chosen="restore", slot=0, n_prompt=10_634, confirmed=10_490, saved_seconds=9.81,
    first_token_seconds=0.561, seconds=2.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {},
            "chat  10,634 tokens, 10,490 reused (98.6 %), first token 0.56 s, saved 9.8 s"
            "  slot 0 <- disk",
        ),
        (
            {"cause": Cause.DATE, "part": PromptPart.SYSTEM, "confirmed": 0, "chosen": "nothing",
             "saved_seconds": None, "first_token_seconds": 0.0123},
            "chat  10,634 tokens, 0 reused (0.0 %), first token 12 ms  slot 0"
            "  miss: date in system (explain 5f0c1a2b)",
        ),
        (
            {"path": "/v1/messages", "cause": Cause.FIRST_SIGHT, "chosen": "live",
             "first_token_seconds": None, "saved_seconds": 0.0, "server": "qwen"},
            "/v1/messages  10,634 tokens, 10,490 reused (98.6 %), answered in 2.0 s"
            "  qwen  slot 0  the rest is new",
        ),
        (
            {"n_prompt": None, "why": "images", "chosen": None},
            "chat  answered in 2.0 s, not cached: images",
        ),
        (
            {"outcome": "degraded", "cause": Cause.RESTORE_REFUSED, "confirmed": 0,
             "saved_seconds": None},
            "chat  10,634 tokens, 0 reused (0.0 %), first token 0.56 s  slot 0"
            "  miss: restore refused (explain 5f0c1a2b)",
        ),
        (
            {"confirmed": None, "why": "a free slot", "cause": Cause.NOT_ANSWERED},
            "chat  ended after 2.0 s, llama-server did not say what it reused  id 5f0c1a2b",
        ),
        (
            {"status": 501, "cause": Cause.REFUSED},
            "chat  llama-server refused it (status 501)  id 5f0c1a2b",
        ),
        (
            {"status": 400, "cause": Cause.REFUSED, "why": "'messages' is required"},
            "chat  llama-server refused it (status 400: 'messages' is required)  id 5f0c1a2b",
        ),
    ],
)  # fmt: skip
def test_line_of_a_request_is_read_by_people(changed: dict[str, Any], line: str) -> None:
    assert in_words(msgspec.structs.replace(RECORD, **changed)) == line


def test_head_that_is_no_http_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    try:
        configure_logging("info", "console")
    finally:
        structlog.reset_defaults()
    server_log = logging.getLogger("aiohttp.server")
    for error in (BadHttpMessage(SECRET), ValueError("a fault of our own")):
        server_log.error("Error handling request", exc_info=error)
    assert SECRET not in caplog.text and "a fault of our own" in caplog.text
