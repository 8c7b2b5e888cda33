"""`llama-prefix-cache check`, `export` and `import`: what is done to a directory that no proxy uses."""

import os
import sys
from pathlib import Path

import click
from rich.table import Table

from proxy.cli.access import OfDirectory, directory_of, directory_option, find_directory
from proxy.cli.common import (
    EXIT_FAILED,
    EXIT_USAGE,
    bytes_progress,
    config_option,
    console,
    fail,
    json_option,
    print_json,
    size_in_words,
)
from proxy.cli.store import find_all
from proxy.errors import SettingsError
from proxy.settings import load_settings
from proxy.store.offline import Examined, examine, mend
from proxy.store.transfer import BundleRefused, Imported, export_checkpoints, import_checkpoints

# `llama-prefix-cache check`: holds the index against the files, and mends it.


@click.command()
@click.option("--fix", is_flag=True, help="Remove what is broken, and make anew what can be.")
@directory_option
@config_option
@json_option
def check(fix: bool, slot_save_path: Path | None, config: Path | None, as_json: bool) -> None:
    """Hold every state against the index.

    \b
    llama-prefix-cache check --slot-save-path /var/lib/llama-prefix-cache
    llama-prefix-cache check --fix --slot-save-path /var/lib/llama-prefix-cache

    Reads every byte, while no proxy runs on the directory. A proxy does a quick form of this whenever it
    starts (sizes of files); their content it verifies before it is used. A damaged index is made anew from
    the states with --fix, and by every proxy that starts; times, counts and measured rates are then lost.
    Exit status: 0 all is well or mended, 1 something is wrong, 69 a proxy uses the directory.
    """
    with directory_of(find_directory(slot_save_path, config), mends_index=fix) as store:
        n_bytes = sum(checkpoint.size_bytes for checkpoint in store.checkpoints())
        with bytes_progress("reading", n_bytes) as note:
            examined = examine(store, note)
        if fix:
            mend(store, examined.problems)
    is_mended = fix and examined.is_curable
    if as_json:
        print_json(
            {
                "n_checkpoints": examined.n_checkpoints,
                "size_bytes": examined.size_bytes,
                "problems": examined.problems,
                "is_mended": is_mended,
            }
        )
    else:
        _tell_checked(examined, is_fixed=fix, is_mended=is_mended)
    if examined.problems and not is_mended:
        sys.exit(EXIT_FAILED)


def _tell_checked(examined: Examined, *, is_fixed: bool, is_mended: bool) -> None:
    table = Table.grid(padding=(0, 2))
    for problem in examined.problems:
        cure = problem.kind.cure if is_fixed else f"with --fix {problem.kind.cure}"
        detail = f" ({problem.detail})" if problem.detail else ""
        size = size_in_words(problem.size_bytes) if problem.size_bytes else ""
        table.add_row(problem.name, problem.kind.value + detail, size, cure)
    shown = console()
    if examined.problems:
        shown.print(table)
    n_problems = len(examined.problems) or "no"
    shown.print(
        f"{examined.n_checkpoints} checkpoints with {size_in_words(examined.size_bytes)}: {n_problems} "
        f"problem{'' if len(examined.problems) == 1 else 's'}{', mended' if is_mended else ''}"
    )


# `llama-prefix-cache export` and `import`: checkpoints as one file, from one store to another.


@click.command("export")
@click.argument("names", nargs=-1, required=True, metavar="ID...")
@click.option(
    "--to",
    "-o",
    "file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File.",
)
@directory_option
@config_option
@json_option
def export(
    names: tuple[str, ...],
    file: Path,
    slot_save_path: Path | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Write checkpoints into one file.

    \b
    llama-prefix-cache export 1b70c4d2 -o session.lpc --slot-save-path /var/lib/llama-prefix-cache

    ID is the beginning of what ls shows: a checkpoint, or all of a session, header or namespace. The file
    says which model its states are of. It is as good as a transcript, and readable for you alone. No proxy
    may run on the directory meanwhile.
    """
    with directory_of(find_directory(slot_save_path, config)) as store:
        ids = {checkpoint.id for checkpoint in find_all(OfDirectory(store), names)}
        chosen = [c for c in store.checkpoints() if f"{c.id:016x}" in ids]
        n_bytes = sum(checkpoint.size_bytes for checkpoint in chosen)
        with bytes_progress("exporting", n_bytes) as note:
            export_checkpoints(store, chosen, file, note)
    if as_json:
        print_json({"file": str(file), "exported": sorted(ids), "size_bytes": n_bytes})
    else:
        click.echo(f"{len(chosen)} checkpoints with {size_in_words(n_bytes)} are in {file}")


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--other-model", is_flag=True, help="Even if the directory knows only other models.")
@directory_option
@config_option
@json_option
def import_(
    file: Path, other_model: bool, slot_save_path: Path | None, config: Path | None, as_json: bool
) -> None:
    """Take over the checkpoints of an exported file.

    \b
    llama-prefix-cache import session.lpc --slot-save-path /var/lib/llama-prefix-cache

    Refused (exit status 1) if the directory was used with models, and with none that the states are of:
    the same model file, adapters and slot file version, with the same answers. A new directory takes
    everything; there, states of another model are just never found. Take files only from whom you trust:
    llama-server reads states as they are. Refused as well if it would leave less free than the setting
    min_free_bytes says (2 GiB). Run it as the user that the proxy runs as, while no proxy runs on the
    directory.
    """
    directory = find_directory(slot_save_path, config)
    with directory_of(directory, may_be_new=True) as store:
        try:
            settings = load_settings({"slot_save_path": str(directory)}, os.environ, config)
            with bytes_progress("importing", file.stat().st_size) as note:
                imported = import_checkpoints(
                    store,
                    file,
                    note,
                    min_free_bytes=settings.min_free_bytes,
                    may_be_other_model=other_model,
                )
        except SettingsError as error:
            fail(error, EXIT_USAGE)
        except BundleRefused as refusal:
            fail(f"{file} is refused: {refusal}", EXIT_FAILED)
    _tell(imported, directory, as_json=as_json)


def _tell(imported: Imported, directory: Path, *, as_json: bool) -> None:
    n_bytes = sum(checkpoint.size_bytes for checkpoint in imported.entered)
    if as_json:
        print_json(
            {
                "imported": [f"{checkpoint.id:016x}" for checkpoint in imported.entered],
                "size_bytes": n_bytes,
                "n_already_there": imported.n_already_there,
                "is_new_model": imported.is_new_model,
            }
        )
        return
    click.echo(
        f"{len(imported.entered)} checkpoints with {size_in_words(n_bytes)} are in {directory}"
    )
    if imported.n_already_there:
        click.echo(f"{imported.n_already_there} were there already")
    if imported.is_new_model:
        click.echo(
            "This directory has not met their model yet: whether they fit shows when it does."
        )
