"""`llama-prefix-cache check`: holds the index against the files, and mends it."""

import sys
from pathlib import Path

import click
from rich.table import Table

from proxy.commands.access import directory_of, directory_option, find_directory
from proxy.commands.options import EXIT_FAILED, config_option, json_option
from proxy.commands.printing import bytes_progress, console, print_json
from proxy.commands.words import size_in_words
from proxy.offline.checking import CURES, Examined, examine, mend


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
    starts (sizes and times of files, not their content).
    Exit status: 0 all is well or mended, 1 something is wrong, 69 a proxy uses the directory.
    """
    with directory_of(find_directory(slot_save_path, config)) as store:
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
        _tell(examined, is_fixed=fix, is_mended=is_mended)
    if examined.problems and not is_mended:
        sys.exit(EXIT_FAILED)


def _tell(examined: Examined, *, is_fixed: bool, is_mended: bool) -> None:
    table = Table.grid(padding=(0, 2))
    for problem in examined.problems:
        cure = CURES[problem.kind] if is_fixed else f"with --fix {CURES[problem.kind]}"
        table.add_row(problem.name, problem.kind.value, size_in_words(problem.size_bytes), cure)
    shown = console()
    if examined.problems:
        shown.print(table)
    n_problems = len(examined.problems) or "no"
    shown.print(
        f"{examined.n_checkpoints} checkpoints with {size_in_words(examined.size_bytes)}: {n_problems} "
        f"problem{'' if len(examined.problems) == 1 else 's'}{', mended' if is_mended else ''}"
    )
