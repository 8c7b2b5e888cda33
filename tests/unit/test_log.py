"""The log: in both forms, and without a word of any prompt."""

import json

import pytest
import structlog

from proxy.errors import UpstreamRefused
from proxy.health import Faults
from proxy.log import configure_logging, get_logger
from proxy.metrics import Metrics

SECRET = "the-users-own-words"


def fail_with_prompt_at_hand() -> None:
    prompt = [SECRET]
    raise ValueError(f"{len(prompt)} is wrong")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_log_tells_what_failed_but_not_what_it_was_about(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        configure_logging("info", log_format)
        faults = Faults(Metrics())
        faults.record("tokenize", UpstreamRefused(500, f"parse error; last read: '{SECRET}'"))
        try:
            fail_with_prompt_at_hand()
        except ValueError as error:
            faults.record("settle", error)
        get_logger("cache").info("request", id="5f0c1a2b", confirmed=7)
    finally:
        structlog.reset_defaults()
    told = capsys.readouterr().err
    assert SECRET not in told
    assert "answered 500" in told and "1 is wrong" in told and "fail_with_prompt_at_hand" in told
    if log_format == "json":
        lines = [json.loads(line) for line in told.splitlines()]
        assert [line["event"] for line in lines] == ["cache fault", "cache fault", "request"]
        assert lines[2]["id"] == "5f0c1a2b" and lines[2]["level"] == "info"
