"""`llama-prefix-cache doctor` and `bench`: whether caching will work here, and what it would bring."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from proxy.cli.common import (
    EXIT_CUT_SHORT,
    EXIT_FAILED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
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
from proxy.doctor.gain import Measured, measure
from proxy.errors import CacheFault, StoreLocked, UpstreamUnreachable
from proxy.llama.client import LlamaServer, new_session
from proxy.llama.routes import Target
from proxy.log import configure_logging
from proxy.settings import size_in_words

T = TypeVar("T")

# `llama-prefix-cache doctor`: whether caching will work here, how well, and what mends it.


_SHOWN = {
    Severity.OK: ("ok", "green"),
    Severity.LIMIT: ("limit", "yellow"),
    Severity.BLOCKER: ("STOP", "bold red"),
}


@click.command()
@setting_options(
    *("upstream", "slot_save_path", "upstream_api_key", "admin"),
    *("max_store_bytes", "min_free_bytes", "idle_save_seconds"),
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

    Takes the settings of serve, so its flags, variables and configuration file do. Probes run in empty
    slots and leave nothing behind. Every llama-server of the upstream is examined; at a router or
    llama-swap the models that are loaded, or the one that is named, which is loaded if need be: another one
    may have to go for it. Exit status: 0 it will work, 1 with limits, 2 it will not.
    """
    settings = settings_of(flags, config)
    configure_logging("critical", "console")  # what an attach would log is reported
    setup = _until_interrupted(lambda note: examine(settings, model=model or "", note=note))
    answer(json_report(setup), report(setup, console()), as_json=as_json)
    sys.exit(exit_status(findings_of(setup)))


def _until_interrupted(work: Callable[[Note], Awaitable[T]]) -> T:
    """Do the work, showing its notes; Ctrl-C and SIGTERM end it with its probes cleaned up."""

    async def run() -> T:
        if (task := asyncio.current_task()) is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        shown = Console(stderr=True)
        if not shown.is_terminal:
            return await work(lambda _: None)
        with shown.status("") as status:
            return await work(status.update)

    try:
        return asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("interrupted; the probes are cleaned up", EXIT_CUT_SHORT)


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


# `llama-prefix-cache bench`: what this server and this model would gain.


_LENGTHS = "1000,4000,16000"


@click.command()
@click.argument("url")
@click.option(
    "--model", metavar="NAME", help="At a router or llama-swap: measure this one, and load it."
)
@click.option("--tokens", default=_LENGTHS, help=f"Lengths of prompts. [{_LENGTHS}]")
@setting_options("slot_save_path", "upstream_api_key")
@json_option
def bench(
    url: str, model: str | None, tokens: str, config: Path | None, as_json: bool, **flags: Any
) -> None:
    """Measure what restoring saves on a server.

    \b
    llama-prefix-cache bench http://127.0.0.1:8080 --slot-save-path /var/lib/llama-prefix-cache
    llama-prefix-cache bench http://127.0.0.1:8080 --slot-save-path ~/slots --tokens 1000,8000,30000
    llama-prefix-cache bench http://127.0.0.1:8080 --slot-save-path ~/slots --model qwen3

    Each prompt is evaluated cold (nothing is there), hot (its slot still holds it) and restored (from a
    file that was just written, so most likely from memory). An empty slot is used and left empty, and no
    file is left; no proxy may run on the directory meanwhile. At a router or llama-swap the loaded model is
    measured, or the one that is named: others may be unloaded for it.

    Exit status: 0 measured, 1 restored states were not reused, or no slot is empty, or there is no such
    model, 69 llama-server does not answer, or a proxy uses the directory.
    """
    if not all(part.isdecimal() and int(part) for part in tokens.split(",")):
        fail(f"--tokens {tokens!r}: write lengths such as {_LENGTHS}", EXIT_USAGE)
    lengths = sorted({int(part) for part in tokens.split(",")})
    settings = settings_of(flags, config)
    directory = Path(settings.slot_save_path)

    async def measure_all(note: Note) -> Measured:
        async with new_session() as session:
            root = LlamaServer(session, Target(url.rstrip("/")), settings.upstream_api_key)
            return await measure(root, directory, lengths, note, model or "")

    try:
        measured = _until_interrupted(measure_all)
    except StoreLocked:
        fail(f"a proxy uses {directory}: stop it first", EXIT_UNAVAILABLE)
    except UpstreamUnreachable as fault:
        fail(f"llama-server at {url} does not answer: {fault}", EXIT_UNAVAILABLE)
    except (CacheFault, OSError) as fault:
        fail(fault)
    answer(measured, _table(measured), as_json=as_json)
    if not measured.gains or not all(gain.is_reused for gain in measured.gains):
        sys.exit(EXIT_FAILED)


def _table(measured: Measured) -> Group:
    names = ("prompt", "cold", "hot", "restored", "of that the restore", "sooner", "state", "save")
    columns = (Column(name, justify="right") for name in names)
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for gain in measured.gains:
        sooner = f"{gain.cold_seconds / max(1e-6, gain.restored_seconds):.1f} times"
        seconds = (gain.cold_seconds, gain.hot_seconds, gain.restored_seconds, gain.restore_seconds)
        table.add_row(
            f"{gain.n_tokens:,} tokens",
            *(f"{s:.2f} s" for s in seconds),
            sooner if gain.is_reused else "not reused",
            size_in_words(gain.size_bytes),
            f"{gain.save_seconds:.2f} s",
        )
    shown = Group(Text(f"{measured.model} on {measured.build}\n"), table)
    if measured.left_out:
        lengths = ", ".join(f"{n:,}" for n in measured.left_out)
        words = f"\nLeft out, for a slot has {measured.n_ctx:,} tokens: {lengths}"
        shown.renderables.append(Text(words))
    return shown
