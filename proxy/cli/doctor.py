"""`llama-prefix-cache doctor`: whether caching will work here, how well, and what mends it."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from proxy.cli.common import (
    Exit,
    answer,
    console,
    fail,
    json_option,
    setting_options,
    settings_of,
    table_of,
)
from proxy.doctor.examination import Note, examine
from proxy.doctor.facts import Setup
from proxy.doctor.findings import Finding, Severity, exit_status, findings_of, summary
from proxy.log import configure_logging

_SHOWN = {
    Severity.OK: ("ok", "green"),
    Severity.LIMIT: ("limit", "yellow"),
    Severity.BLOCKER: ("STOP", "bold red"),
}


@click.command()
@setting_options(
    *("upstream", "slot_save_path", "upstream_api_key", "admin"),
    *("max_store_bytes", "min_free_bytes"),
)
@click.option(
    "--model", metavar="NAME", help="At a router or llama-swap: examine only this one, and load it."
)
@json_option
def doctor(config: Path | None, model: str | None, as_json: bool, **flags: Any) -> None:
    """Say whether caching will work here, how well, and what mends it.

    \b
    llama-prefix-cache doctor --upstream http://127.0.0.1:8080 --slot-save-path ~/slots
    llama-prefix-cache doctor --model qwen3 --slot-save-path ~/slots     at a router or llama-swap

    Takes the settings of serve, so its flags, variables and configuration file do; without a directory it
    is that of `run`. A proxy that uses the directory is asked what it stands before. Probes run in empty
    slots and leave nothing behind. Every llama-server of the upstream is examined; at a router or
    llama-swap the models that are loaded, or the one that is named, which is loaded if need be: another one
    may have to go for it. Exit status: 0 it will work, 1 with limits, 2 it will not.
    """
    settings = settings_of(flags, config, "known")
    configure_logging("critical", "console")  # what an attach would log is reported
    setup = _until_interrupted(lambda note: examine(settings, model=model or "", note=note))
    answer(json_report(setup), report(setup, console()), as_json=as_json)
    sys.exit(exit_status(findings_of(setup)))


def _until_interrupted(work: Callable[[Note], Coroutine[Any, Any, Setup]]) -> Setup:
    """Do the work, showing its notes; Ctrl-C and SIGTERM end it with its probes cleaned up."""

    async def run() -> Setup:
        if (task := asyncio.current_task()) is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with Console(stderr=True).status("") as status:  # shows nothing but on a terminal
            return await work(status.update)

    try:
        return asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("interrupted; the probes are cleaned up", Exit.CUT_SHORT)


def report(setup: Setup, shown: Console) -> str:
    """Return the verdict and every finding with its cure, as *shown* shows it.

    In a pipe the lines are of the same length everywhere, without colours or trailing spaces.
    """
    findings = findings_of(setup)
    has_headings = any(finding.about for finding in findings)
    n_columns = max(len(finding.topic) for finding in findings)
    with shown.capture() as captured:
        shown.print(Text(summary(setup), style=_SHOWN[Severity(exit_status(findings))][1]))
        for about, group in groupby(findings, key=lambda finding: finding.about):
            shown.print()
            if has_headings:
                shown.print(Text(about or "all", style="bold underline"))
            shown.print(table_of(_row(finding, n_columns) for finding in group))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _row(finding: Finding, n_columns: int) -> list[Text]:
    mark, style = _SHOWN[finding.severity]
    body = Text(finding.text)
    if finding.cure:
        body.append(f"\n-> {finding.cure}", style="bold")
    topic = Text(finding.topic.ljust(n_columns), no_wrap=True)
    return [Text(mark.ljust(5), style=style, no_wrap=True), topic, body]


def json_report(setup: Setup) -> dict[str, object]:
    """Return the same for a program: verdict, exit status, findings and facts."""
    findings = findings_of(setup)
    return {
        "verdict": summary(setup),
        "exit_status": exit_status(findings),
        "findings": [
            {**msgspec.to_builtins(each), "severity": each.severity.name.lower()}
            for each in findings
        ],
        "facts": setup,
    }
