"""`llama-prefix-cache bench`: what this server and this model would gain."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from proxy.commands.access import find_directory
from proxy.commands.options import (
    EXIT_CUT_SHORT,
    EXIT_FAILED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    config_option,
    fail,
    json_option,
)
from proxy.commands.printing import console, print_json
from proxy.commands.words import size_in_words
from proxy.doctor.gain import Measured, measure
from proxy.errors import CacheFault, SettingsError, StoreLocked, UpstreamUnreachable
from proxy.loading import merge_settings
from proxy.upstream.llama_server import LlamaServer, new_session
from proxy.upstream.target import Target

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
