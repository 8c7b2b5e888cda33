"""`llama-prefix-cache doctor`: whether caching will work here, how well, and what mends it."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from proxy.addresses import parse_urls
from proxy.commands.options import EXIT_CUT_SHORT, EXIT_USAGE, fail, setting_options
from proxy.config import NAMES, Settings
from proxy.doctor.directory import FreeBytes, free_bytes_of
from proxy.doctor.findings import findings_of
from proxy.doctor.hosts import Note
from proxy.doctor.report import json_report, report
from proxy.doctor.survey_facts import SettingsFacts, Survey
from proxy.doctor.surveying import Subject, Surveying
from proxy.doctor.verdict import exit_status
from proxy.driver.saving.saver import RewriteStateFile, keep_as_saved
from proxy.errors import SettingsError
from proxy.loading import load_settings
from proxy.store.budget import Limits
from proxy.upstream.llama_server import LlamaServer, new_session
from proxy.upstream.target import Target

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
    try:
        survey = asyncio.run(_examine_until_told(settings, model or ""))
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("interrupted; the probes are cleaned up", EXIT_CUT_SHORT)
    click.echo(json_report(survey) if as_json else report(survey, Console(highlight=False)))
    sys.exit(exit_status(findings_of(survey)))


async def _examine_until_told(settings: Settings, model: str) -> Survey:
    """Examine; SIGTERM ends it as Ctrl-C does, with the probes cleaned up."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console(stderr=True)
    if not console.is_terminal:
        return await examine(settings, model=model)
    with console.status("") as status:
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
            settings=SettingsFacts(idle_save_seconds=settings.idle_save_seconds, asked_for=model),
        )
        surveying = Surveying(subject, rewrite=rewrite, free_bytes=free_bytes, note=note)
        return await surveying.run()
