"""The commands that list, pin, delete, check, export and import checkpoints."""

import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from proxy.cli import command
from proxy.core.rates import seconds_in_words, size_in_words
from proxy.explain import views
from proxy.explain.sketch import shortened
from proxy.explain.views import ListedCheckpoint, ListedNode
from proxy.settings import Settings
from proxy.store import offline
from proxy.store.files import StateFiles

# `llama-prefix-cache ls`: the stored checkpoints as a tree.


_N_SHOWN = 20
_DIGITS = 8
_MIN_DIGITS = 4
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

Checkpoints = Sequence[ListedCheckpoint]
_Under = defaultdict[str | None, list[ListedNode | ListedCheckpoint]]
"""What lies directly under each node, by its id: checkpoints by their length, nodes by their last use."""


@click.command()
@click.argument("name", required=False, metavar="[ID]")
@click.option("--all", "shows_all", is_flag=True, help=f"Show more than {_N_SHOWN} of a kind.")
@command.with_store
def ls(store: command.Store, name: str | None, shows_all: bool) -> None:
    """List the checkpoints as a tree.

    \b
    llama-prefix-cache ls
    llama-prefix-cache ls 5d3a90c2            only that header (or session, or namespace)
    llama-prefix-cache ls qwen3.5-35b-q4      only that model
    llama-prefix-cache ls --json | jq '.checkpoints | length'
    llama-prefix-cache ls --slot-save-path /var/lib/llama-prefix-cache     without a proxy

    Under each model (and API key that asked for it) are its headers (tools and system prompt, by the
    client that sends them), under each header its sessions, by the first words of their users. ID is the
    beginning of the digits behind them, 4 at least, or the name of a model. The worth of a checkpoint is
    the seconds of evaluation that its loss would cost; it falls while nobody uses the checkpoint.
    Checkpoints with the least worth for each byte are deleted first.
    """
    checkpoints = store.checkpoints() if name is None else all_named(store, [name])
    outline, tree, under = views.Outline(), Tree("", hide_root=True), _Under(list)
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.n_tokens):
        outline.add(checkpoint)
        under[checkpoint.parent].append(checkpoint)
    for node in sorted(outline.nodes({}, len(outline)), key=lambda node: -node.last_used_at):
        under[node.parent].append(node)
    _grow(tree, under, "", len(outline) if shows_all else _N_SHOWN)
    command.answer({"checkpoints": checkpoints}, Group(Text(_sum(checkpoints), style="bold"), tree))


def _grow(tree: Tree, under: _Under, node_id: str, n_shown: int) -> None:
    """Add what lies under a node: its checkpoints, and at most *n_shown* nodes."""
    for each in under[node_id]:
        if isinstance(each, ListedCheckpoint):
            tree.add(_leaf(each))
    nodes = [each for each in under[node_id] if isinstance(each, ListedNode)]
    for node in nodes[:n_shown]:
        used = command.age_in_words(time.time() - node.last_used_at)
        facts, digits = f" {size_in_words(node.size_bytes)}, {used}  ", node.id.rpartition("/")[2]
        name = digits[:_DIGITS] if digits.strip("0") else ""
        title = Text.assemble((_title(node), "bold"), facts, (name, "dim"))
        _grow(tree.add(title), under, node.id, n_shown)
    if left_out := nodes[n_shown:]:
        n_bytes = sum(node.size_bytes for node in left_out)
        stored = command.checkpoints_in_words(sum(n.n_checkpoints for n in left_out), n_bytes)
        tree.add(f"... and {len(left_out)} more with {stored}: --all")


def _title(node: ListedNode) -> str:
    """Return a node's name for people, so short that its size and age fit behind it in 80 columns."""
    if node.level == "namespace":
        return shortened(node.model or "a model that is not known", 30)
    if node.level == "header":
        if node.n_tokens <= 1:  # every prompt begins with the same first token
            # With one slot and full attention no header is looked for: nothing depends on it.
            return "no header," if node.n_tokens else "headers not told apart,"
        client = "warmed header" if node.client == views.OWN_CLIENT else node.client or "header"
        return f"{shortened(client, 28)}, {node.n_tokens:,} tokens,"
    words = f'"{shortened(node.title, 24)}"' if node.title else "session"
    return f"{words}, {node.n_tokens:,} tokens,"


def _leaf(checkpoint: ListedCheckpoint) -> Text:
    """Return a checkpoint in one line that fits into 80 columns in the tree; --json has all of it."""
    kind = "" if checkpoint.kind == "conversation" else f" {checkpoint.kind}"
    size, used = size_in_words(checkpoint.size_bytes), time.time() - checkpoint.last_used_at
    facts = [f"{kind} {checkpoint.n_tokens:,} tokens {size}", command.age_in_words(used)]
    if checkpoint.is_pinned:
        facts.append("pinned")
    elif checkpoint.value_seconds is not None:
        facts.append(f"worth {seconds_in_words(checkpoint.value_seconds)}")
    if checkpoint.quarantine:
        facts.append(f"quarantined: {checkpoint.quarantine.why}")
    return Text.assemble((checkpoint.id[:_DIGITS], "bold"), ", ".join(facts))


def _sum(checkpoints: Checkpoints) -> str:
    return command.checkpoints_in_words(len(checkpoints), sum(c.size_bytes for c in checkpoints))


# `llama-prefix-cache pin` and `unpin`: keep checkpoints whatever the budget says.


names_argument = click.argument("names", nargs=-1, required=True, metavar="ID...")


@click.command()
@names_argument
@command.with_store
def pin(store: command.Store, names: tuple[str, ...]) -> None:
    """Keep checkpoints whatever the budget says.

    \b
    llama-prefix-cache pin 00f3b1c2
    llama-prefix-cache pin 5d3a90c2           all checkpoints of a header or session

    ID is the beginning of an id that ls shows. Pinned checkpoints count in the budget: if they fill the
    budget, nothing new is saved.
    """
    _set_pinned(store, names, is_pinned=True)


@click.command()
@names_argument
@command.with_store
def unpin(store: command.Store, names: tuple[str, ...]) -> None:
    """Leave checkpoints to the budget again.

    \b
    llama-prefix-cache unpin 00f3b1c2
    """
    _set_pinned(store, names, is_pinned=False)


def _set_pinned(store: command.Store, names: Sequence[str], *, is_pinned: bool) -> None:
    found = all_named(store, names)
    changed = [checkpoint.id for checkpoint in found if checkpoint.is_pinned != is_pinned]
    for checkpoint_id in changed:
        store.pin(checkpoint_id, is_pinned=is_pinned)
    verb = "pinned" if is_pinned else "unpinned"
    command.answer({"changed": changed}, f"{verb} {len(changed)} (of {len(found)} named)")


# `llama-prefix-cache rm`: deletes checkpoints by name, by age, or all.


def age_seconds(text: str) -> int:
    """Return the length of an age such as 90s, 30m, 12h, 7d or 2w; raises BadParameter."""
    match = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if not match:
        raise click.BadParameter(f"{text!r} is not an age: write such as 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]


@click.command()
@click.argument("names", nargs=-1, metavar="[ID...]")
@click.option("--unused-for", metavar="AGE", type=age_seconds, default="0s", help="Unused for AGE.")
@click.option("--everything", is_flag=True, help="All checkpoints, in place of IDs.")
@click.option("--pinned", is_flag=True, help="Pinned checkpoints too.")
@command.yes_option
@command.with_store
def rm(
    store: command.Store, names: tuple[str, ...], unused_for: int, everything: bool, pinned: bool
) -> None:
    """Delete checkpoints by their ids, by age, or all.

    \b
    llama-prefix-cache rm 00f3b1c2
    llama-prefix-cache rm --yes 5d3a90c2      all of a header, without being asked
    llama-prefix-cache rm --unused-for 7d
    llama-prefix-cache rm --everything --pinned

    ID is the beginning of an id that ls shows, of a checkpoint or of a whole session, header or namespace;
    or the name of a model. AGE is written as 30m, 12h or 7d. Deleting several asks first. Pinned
    checkpoints stay, unless --pinned is given. Slots keep what they hold: to erase a text, restart
    llama-server as well. With --slot-save-path, copies in a shared_store stay there.
    """
    if everything == bool(names or unused_for):
        command.fail("give IDs and/or --unused-for, or --everything", command.Exit.USAGE)
    unused_since = time.time() - unused_for
    listed = all_named(store, names) if names else store.checkpoints()
    chosen = [checkpoint for checkpoint in listed if checkpoint.last_used_at <= unused_since]
    going = [checkpoint for checkpoint in chosen if pinned or not checkpoint.is_pinned]
    n_pinned = len(chosen) - len(going)
    if len(going) > 1:
        stay = f" (pinned ones stay: {n_pinned})" if n_pinned else ""
        command.agree(f"Delete {_sum(going)}{stay}?")
    deleted = [checkpoint for checkpoint in going if store.delete(checkpoint, with_pinned=pinned)]
    n_in_use = len(going) - len(deleted)
    words = [f"deleted {_sum(deleted)}"]
    if n_pinned:
        words.append(f"pinned ones stay: {n_pinned} (--pinned deletes them too)")
    if n_in_use:
        words.append(f"in use, try again: {n_in_use}")
    if store.n_stay_shared:
        words.append(f"copies stay in the shared store: {store.n_stay_shared}")
    content = {"deleted": [c.id for c in deleted], "n_pinned": n_pinned, "n_in_use": n_in_use}
    command.answer(content, "; ".join(words))
    if names and (n_pinned or n_in_use):
        sys.exit(command.Exit.FAILED)


# `llama-prefix-cache check`: compares the index with the files, and repairs it.


@click.command()
@click.option("--fix", is_flag=True, help="Repair the index, and remove broken files.")
@command.with_directory
def check(settings: Settings, fix: bool) -> None:
    """Compare every state with the index.

    \b
    llama-prefix-cache check --slot-save-path /var/lib/llama-prefix-cache
    llama-prefix-cache check --fix --slot-save-path /var/lib/llama-prefix-cache

    check reads every byte. No proxy may be running on the directory. A proxy that starts compares only the
    names of files; it verifies the content of a file before it uses the file. A damaged index is rebuilt
    from the states by --fix, and by every proxy that starts: times, counts and measured rates are then
    lost.
    Exit status: 0 all is well or mended, 1 something is wrong, 69 a proxy uses the directory.
    """
    with offline.open_offline(Path(settings.slot_save_path), mends_index=fix) as store:
        sizes = [checkpoint.size_bytes for checkpoint in store.index.all()]
        with command.progress("reading", sum(sizes)) as update:
            problems = offline.examine(store, lambda n: update(advance=n))
        if fix:
            offline.mend(store, problems)
    is_mended = fix and all(p.kind is not offline.ProblemKind.FILE_UNREADABLE for p in problems)
    rows = [
        (
            problem.name,
            f"{problem.kind} ({problem.detail})" if problem.detail else problem.kind,
            size_in_words(problem.size_bytes) if problem.size_bytes else "",
            problem.kind.cure if fix else f"with --fix {problem.kind.cure}",
        )
        for problem in problems
    ]
    stored = command.checkpoints_in_words(len(sizes), sum(sizes))
    looked_at = f"{stored} in {settings.slot_save_path}"
    n_problems = f"{len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'}"
    total = Text(f"{looked_at}: {n_problems}{', mended' if problems and is_mended else ''}")
    of_all = {"n_checkpoints": len(sizes), "size_bytes": sum(sizes)}
    content = {**of_all, "problems": problems, "is_mended": is_mended}
    command.answer(content, Group(command.table_of(rows), total) if rows else total)
    if problems and not is_mended:
        sys.exit(command.Exit.FAILED)


# `llama-prefix-cache export` and `import`: checkpoints as one file, from one store to another.


@click.command("export")
@names_argument
@command.file_option("--to", "-o", "file")
@command.yes_option
@command.with_directory
def export(settings: Settings, names: tuple[str, ...], file: Path) -> None:
    """Write checkpoints into one file.

    \b
    llama-prefix-cache export 1b70c4d2 -o session.lpc --slot-save-path /var/lib/llama-prefix-cache

    ID is the beginning of an id that ls shows, of a checkpoint or of a whole session, header or namespace.
    The file names the model of its states. It reveals as much as a transcript, and only you can read it. A
    proxy may be using the directory meanwhile.
    """
    files = StateFiles(Path(settings.slot_save_path))
    records = offline.read_records(files)
    models = {r.checkpoint.namespace: r.owner.known.name for r in records if r.owner}
    listed = [views.list_checkpoint(record.checkpoint, models) for record in records]
    ids = {c.id for name in names for c in named(name, listed)}
    chosen = [record for record in records if f"{record.checkpoint.id:016x}" in ids]
    with command.progress("exporting", sum(r.checkpoint.size_bytes for r in chosen)) as update:
        done = offline.export_checkpoints(files, chosen, file, lambda n: update(advance=n))
    n_bytes, n_gone = sum(r.checkpoint.size_bytes for r in done), len(chosen) - len(done)
    ids = {f"{record.checkpoint.id:016x}" for record in done}
    content = {"file": str(file), "exported": sorted(ids), "size_bytes": n_bytes}
    gone = f"; {n_gone} were deleted meanwhile" if n_gone else ""
    command.answer(content, f"{command.checkpoints_in_words(len(ids), n_bytes)} in {file}{gone}")


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@partial(command.with_directory, unset="made")
def import_(settings: Settings, file: Path) -> None:
    """Take over the checkpoints of an exported file.

    \b
    llama-prefix-cache import session.lpc                 into the directory of `run`
    llama-prefix-cache import session.lpc --slot-save-path /var/lib/llama-prefix-cache

    Only requests for the same model file, adapters, slot file version and answers find a state: import
    says if none such ran here yet. A state is refused (exit status 1) if it would leave less free space
    than saves leave (2 GiB, on a small disk a twentieth). Import only files that you trust: llama-server
    reads states unchecked. Run import as the proxy's user, while no proxy runs on the directory.
    """
    with offline.open_offline(Path(settings.slot_save_path), may_be_new=True) as store:
        with command.progress("importing", file.stat().st_size) as update:
            imported = offline.import_checkpoints(store, file, lambda n: update(advance=n))
    n_bytes = sum(checkpoint.size_bytes for checkpoint in imported.entered)
    entered = command.checkpoints_in_words(len(imported.entered), n_bytes)
    lines = [f"{entered} in {settings.slot_save_path}"]
    if imported.n_already_there:
        lines.append(f"there already: {imported.n_already_there}")
    if imported.is_new_model:
        lines.append("Their model never ran here: whether the states fit shows once it runs.")
    content = {
        "imported": [f"{checkpoint.id:016x}" for checkpoint in imported.entered],
        "size_bytes": n_bytes,
        "n_already_there": imported.n_already_there,
        "is_new_model": imported.is_new_model,
    }
    command.answer(content, "\n".join(lines))


# From hex digits or a model's name to checkpoints.


def named(text: str, checkpoints: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Return the checkpoints that *text* names: a model, or the beginning of an id.

    Exits if it is the beginning of no id, or of several.
    """
    if of_model := [checkpoint for checkpoint in checkpoints if checkpoint.model == text]:
        return of_model
    found: dict[str, list[ListedCheckpoint]] = {}
    for checkpoint in checkpoints:
        for node_id in (checkpoint.id, *views.path_to(checkpoint.parent)):
            digits = node_id.rpartition("/")[2]
            # Zeros name nothing: 0 is the id of everything unknown.
            if digits.strip("0") and digits.startswith(text.lower()):
                found.setdefault(node_id, []).append(checkpoint)
    if len(text) < _MIN_DIGITS:
        command.fail(f"{text!r} is too short: give {_MIN_DIGITS} digits of an id at least")
    if len(found) != 1:
        many = f"{len(found)} ids begin with {text!r}: give more digits"
        none = f"no model is called {text!r}, and no id begins so: see ls"
        command.fail(many if found else none)
    return next(iter(found.values()))


def all_named(store: command.Store, names: Sequence[str]) -> list[ListedCheckpoint]:
    """Return the checkpoints that *names* name, each once; exits if one of them names nothing."""
    checkpoints = store.checkpoints()
    return list({c.id: c for name in names for c in named(name, checkpoints)}.values())
