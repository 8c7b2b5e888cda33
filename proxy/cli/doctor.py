"""`llama-prefix-cache doctor` and `bench`: whether caching will work here, and what it would bring."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.cli.access import find_directory
from proxy.cli.common import (
    EXIT_CUT_SHORT,
    EXIT_FAILED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    config_option,
    console,
    fail,
    json_option,
    print_json,
    setting_options,
    size_in_words,
)
from proxy.doctor.examination import Note, Subject
from proxy.doctor.facts import Survey
from proxy.doctor.findings import Finding, Severity, exit_status, summary
from proxy.doctor.gain import Measured, measure
from proxy.doctor.probes import FreeBytes, free_bytes_of
from proxy.doctor.survey import survey
from proxy.doctor.survey_findings import findings_of, is_complete
from proxy.errors import CacheFault, SettingsError, StoreLocked, UpstreamUnreachable
from proxy.llama.client import LlamaServer, new_session
from proxy.llama.routes import Target
from proxy.log import configure_logging
from proxy.serving.saver import RewriteStateFile, keep_as_saved
from proxy.settings import NAMES, Settings, load_settings, merge_settings, parse_urls
from proxy.store.catalogue import Limits

# `llama-prefix-cache doctor`: whether caching will work here, how well, and what mends it.


_SETTINGS = (
    "upstream",
    "slot_save_path",
    "upstream_api_key",
    "admin",
    "max_store_bytes",
    "min_free_bytes",
    "idle_save_seconds",
)
"""Those that doctor has flags for; the others are taken from a file and ignored."""
_MARKS = {Severity.OK: "ok", Severity.LIMIT: "limit", Severity.BLOCKER: "STOP"}
_STYLES = {Severity.OK: "green", Severity.LIMIT: "yellow", Severity.BLOCKER: "bold red"}


@click.command()
@setting_options(without=tuple(name for name in NAMES if name not in _SETTINGS))
@click.option(
    "--model", metavar="NAME", help="At a router or llama-swap: examine only this one, and load it."
)
@click.option("--json", "as_json", is_flag=True, help="Print facts and findings as JSON.")
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
    try:
        settings = load_settings(flags, os.environ, config)
    except SettingsError as error:
        fail(error, EXIT_USAGE)
    configure_logging("critical", "console")  # what an attach would log is reported
    try:
        found = asyncio.run(_examine_until_told(settings, model or ""))
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("interrupted; the probes are cleaned up", EXIT_CUT_SHORT)
    if as_json:
        print_json(json_report(found))
    else:
        click.echo(report(found, console()))
    sys.exit(exit_status(findings_of(found)))


async def _examine_until_told(settings: Settings, model: str) -> Survey:
    """Examine; SIGTERM ends it as Ctrl-C does, with the probes cleaned up."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    shown = Console(stderr=True)
    if not shown.is_terminal:
        return await examine(settings, model=model)
    with shown.status("") as status:
        return await examine(settings, model=model, note=status.update)


async def examine(
    settings: Settings,
    *,
    model: str = "",
    rewrite: RewriteStateFile = keep_as_saved,
    free_bytes: FreeBytes = free_bytes_of,
    note: Note = lambda text: None,
) -> Survey:
    """Return what there is to know about the llama-servers and the directory of *settings*.

    At a host of models only about *model*, if one is named.
    """
    key = settings.upstream_api_key
    async with new_session() as session:
        subject = Subject(
            roots=[LlamaServer(session, Target(url), key) for url in parse_urls(settings.upstream)],
            has_key=key is not None,
            directory=Path(settings.slot_save_path),
            admin=settings.admin,
            limits=Limits(settings.max_store_bytes, settings.min_free_bytes),
            idle_save_seconds=settings.idle_save_seconds,
            asked_for=model,
            rewrite=rewrite,
            free_bytes=free_bytes,
            note=note,
        )
        return await survey(subject)


def report(survey: Survey, shown: Console) -> str:
    """Return the verdict and every finding with its cure, as *shown* shows it.

    In a pipe the lines are of the same length everywhere, without colours or trailing spaces.
    """
    with shown.capture() as captured:
        _print(survey, shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _print(survey: Survey, shown: Console) -> None:
    findings = findings_of(survey)
    verdict = summary(findings, is_complete=is_complete(survey))
    shown.print(Text(verdict, style=_STYLES[Severity(exit_status(findings))]))
    has_headings = any(finding.about for finding in findings)
    n_columns = max(len(finding.topic) for finding in findings)
    for about, group in groupby(findings, key=lambda finding: finding.about):
        shown.print()
        if has_headings:
            shown.print(Text(about or "all", style="bold underline"))
        shown.print(_table(group, n_columns))


def _table(findings: Iterable[Finding], n_columns: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=max(map(len, _MARKS.values())))
    table.add_column(width=n_columns)
    for finding in findings:
        table.add_row(
            Text(_MARKS[finding.severity], style=_STYLES[finding.severity]),
            Text(finding.topic, no_wrap=True),
            _body(finding),
        )
    return table


def _body(finding: Finding) -> Text:
    body = Text(finding.text)
    if finding.cure:
        body.append("\n-> ", style="bold")
        body.append(finding.cure, style="bold")
    return body


def json_report(survey: Survey) -> dict[str, object]:
    """Return the same for a program: verdict, exit status, findings and facts."""
    findings = findings_of(survey)
    told = [{**asdict(each), "severity": each.severity.name.lower()} for each in findings]
    verdict = summary(findings, is_complete=is_complete(survey))
    return {
        "verdict": verdict,
        "exit_status": exit_status(findings),
        "findings": told,
        "facts": survey,
    }


# `llama-prefix-cache bench`: what this server and this model would gain.


_LENGTHS = "1000,4000,16000"


@click.command()
@click.argument("url")
@click.option(
    "--slot-save-path", type=click.Path(path_type=Path), help="llama-server's, seen from here."
)
@click.option(
    "--model", metavar="NAME", help="At a router or llama-swap: measure this one, and load it."
)
@click.option("--tokens", default=_LENGTHS, help=f"Lengths of prompts. [{_LENGTHS}]")
@click.option("--upstream-api-key", metavar="KEY", help="llama-server's --api-key.")
@config_option
@json_option
def bench(
    url: str,
    slot_save_path: Path | None,
    model: str | None,
    tokens: str,
    upstream_api_key: str | None,
    config: Path | None,
    as_json: bool,
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
    lengths = _lengths(tokens)
    directory = find_directory(slot_save_path, config)
    try:
        key = merge_settings({"upstream_api_key": upstream_api_key}, os.environ, config)
    except SettingsError as error:
        fail(error, EXIT_USAGE)
    try:
        measured = asyncio.run(
            _measure(url, key.get("upstream_api_key"), directory, lengths, model or "")
        )
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("interrupted; the slot is empty again", EXIT_CUT_SHORT)
    except StoreLocked:
        fail(f"a proxy uses {directory}: stop it first", EXIT_UNAVAILABLE)
    except UpstreamUnreachable as fault:
        fail(f"llama-server at {url} does not answer: {fault}", EXIT_UNAVAILABLE)
    except (CacheFault, OSError) as fault:
        fail(fault, EXIT_FAILED)
    if as_json:
        print_json(measured)
    else:
        _tell(measured)
    if not measured.gains or not all(gain.is_reused for gain in measured.gains):
        sys.exit(EXIT_FAILED)


def _lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 1:
        fail(f"--tokens {text!r}: write lengths such as {_LENGTHS}", EXIT_USAGE)
    return lengths


async def _measure(
    url: str, key: str | None, directory: Path, lengths: list[int], model: str
) -> Measured:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    shown = Console(stderr=True)
    async with new_session() as session:
        upstream = LlamaServer(session, Target(url.rstrip("/")), key)
        if not shown.is_terminal:
            return await measure(upstream, directory, lengths, lambda _: None, model)
        with shown.status("looking for an empty slot") as status:
            return await measure(upstream, directory, lengths, status.update, model)


def _tell(measured: Measured) -> None:
    shown = console()
    shown.print(f"{measured.model} on {measured.build}")
    if measured.loaded:
        gone = f", for which {', '.join(measured.unloaded)} had to go" if measured.unloaded else ""
        shown.print(f"{measured.loaded} was loaded for this, and stays{gone}.")
    shown.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (
        "prompt",
        "cold",
        "hot",
        "restored",
        "of that the restore",
        "sooner",
        "state",
        "save",
    ):
        table.add_column(name, justify="right")
    for gain in measured.gains:
        factor = f"{gain.factor:.1f} times" if gain.is_reused else "not reused"
        table.add_row(
            f"{gain.n_tokens:,} tokens",
            *(f"{s:.2f} s" for s in (gain.cold_seconds, gain.hot_seconds, gain.restored_seconds)),
            f"{gain.restore_seconds:.2f} s",
            factor,
            size_in_words(gain.size_bytes),
            f"{gain.save_seconds:.2f} s",
        )
    shown.print(table)
    if measured.left_out:
        lengths = ", ".join(f"{n:,}" for n in measured.left_out)
        shown.print(f"\nLeft out, for a slot has {measured.n_ctx:,} tokens: {lengths}")
