"""The commands that list, keep and delete checkpoints."""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence

import click
import msgspec
from rich.text import Text
from rich.tree import Tree

from proxy.cli.access import Access, NotNamed, named, with_store
from proxy.cli.common import (
    EXIT_FAILED,
    EXIT_USAGE,
    Age,
    age_in_words,
    console,
    fail,
    print_json,
    size_in_words,
)
from proxy.explain.views import STORE, Deleted, ListedCheckpoint, NodeId, Selection, parse_node_id

# `llama-prefix-cache ls`: what is stored, as a tree.


_N_SHOWN = 20
_DIGITS = 8
_TITLES = ("namespace", "header", "session")

Checkpoints = Sequence[ListedCheckpoint]


@click.command()
@click.argument("name", required=False, metavar="[ID]")
@click.option("--all", "shows_all", is_flag=True, help=f"Show more than {_N_SHOWN} of a kind.")
@with_store
def ls(store: Access, name: str | None, shows_all: bool, as_json: bool) -> None:
    """List the checkpoints as a tree.

    \b
    llama-prefix-cache ls
    llama-prefix-cache ls 5d3a90c2            only that header (or session, or namespace)
    llama-prefix-cache ls qwen3.5-35b-q4      only that model
    llama-prefix-cache ls --json | jq '.checkpoints | length'
    llama-prefix-cache ls --slot-save-path /var/lib/llama-prefix-cache     without a proxy

    ID is the beginning of what another ls has shown, 4 digits at least, or the name of a model. A
    namespace is a model (and the API key that asked for it), a header is tools and system prompt, a
    session is one conversation.
    """
    checkpoints = store.checkpoints()
    if name is not None:
        try:
            checkpoints = named(name, checkpoints)
        except NotNamed as complaint:
            fail(complaint, EXIT_FAILED)
    if as_json:
        print_json({"checkpoints": checkpoints})
        return
    n_shown = len(checkpoints) if shows_all else _N_SHOWN
    console().print(tree_of(checkpoints, time.time(), n_shown))


def tree_of(checkpoints: Checkpoints, now: float, n_shown: int) -> Tree:
    """Return all checkpoints as a tree, the last used first, *n_shown* at most under each node."""
    tree = Tree(_line(_count(checkpoints, "checkpoint"), size_in_words(_size(checkpoints))))
    _grow(tree, checkpoints, 0, now, n_shown)
    return tree


def _grow(tree: Tree, checkpoints: Checkpoints, level: int, now: float, n_shown: int) -> None:
    """Add what lies under a node; the levels are those of a parent's id: 0 is the namespace."""
    groups: defaultdict[str, list[ListedCheckpoint]] = defaultdict(list)
    for checkpoint in checkpoints:
        groups[[*checkpoint.parent.split("/"), "", ""][level]].append(checkpoint)
    ordered = sorted(groups.items(), key=lambda group: -max(c.last_used_at for c in group[1]))
    for node_id, group in ordered[:n_shown]:
        # What sessions share lies under the header itself.
        node = (
            tree
            if not node_id
            else tree.add(_line(_title(level, node_id, group), *_sums(group, now)))
        )
        if level < len(_TITLES) - 1:
            _grow(node, group, level + 1, now, n_shown)
        else:
            for checkpoint in sorted(group, key=lambda c: c.n_tokens):
                node.add(_line(*_facts(checkpoint, now)))
    if left_out := [c for _, group in ordered[n_shown:] for c in group]:
        words = (
            f"... and {len(ordered) - n_shown} more with {_count(left_out, 'checkpoint')}: --all"
        )
        tree.add(Text(words))


def _title(level: int, node_id: str, checkpoints: Checkpoints) -> str:
    if not node_id.strip("0"):
        return "no header known"
    words = f"{_TITLES[level]} {node_id[:_DIGITS]}"
    if level == 0:
        model = checkpoints[0].model
        return f"{words} of {model}" if model else words
    lengths = {1: [c.n_header_tokens for c in checkpoints], 2: [c.n_tokens for c in checkpoints]}
    return f"{words} of {max(lengths[level]):,} tokens" if level in lengths else words


def _sums(checkpoints: Checkpoints, now: float) -> list[str]:
    used = age_in_words(now - max(c.last_used_at for c in checkpoints))
    return [_count(checkpoints, "checkpoint"), size_in_words(_size(checkpoints)), f"used {used}"]


def _facts(checkpoint: ListedCheckpoint, now: float) -> list[str]:
    facts = [
        f"{checkpoint.id[:_DIGITS]} {checkpoint.kind}",
        f"{checkpoint.n_tokens:,} tokens",
        size_in_words(checkpoint.size_bytes),
        f"used {age_in_words(now - checkpoint.last_used_at)}",
        f"restored {checkpoint.n_restores}x",
    ]
    if checkpoint.value_seconds is not None:
        facts.append(f"worth {checkpoint.value_seconds:.1f} s")
    if checkpoint.quarantine:
        facts.append(f"quarantined: {checkpoint.quarantine.why}")
    return [*facts, "pinned"] if checkpoint.is_pinned else facts


def _line(first: str, *others: str) -> Text:
    return Text.assemble((first, "bold"), *(f"  {other}" for other in others))


def _count(checkpoints: Checkpoints, what: str) -> str:
    return f"{len(checkpoints):,} {what}{'' if len(checkpoints) == 1 else 's'}"


def _size(checkpoints: Checkpoints) -> int:
    return sum(checkpoint.size_bytes for checkpoint in checkpoints)


# `llama-prefix-cache pin` and `unpin`: what is kept whatever the budget says.


names_argument = click.argument("names", nargs=-1, required=True, metavar="ID...")


@click.command()
@names_argument
@with_store
def pin(store: Access, names: tuple[str, ...], as_json: bool) -> None:
    """Keep checkpoints whatever the budget says.

    \b
    llama-prefix-cache pin 00f3b1c2
    llama-prefix-cache pin 5d3a90c2           all checkpoints of a header or session

    ID is the beginning of what ls shows. What is pinned counts in the budget: if all of it is pinned,
    nothing new is saved.
    """
    _set_pinned(store, names, is_pinned=True, as_json=as_json)


@click.command()
@names_argument
@with_store
def unpin(store: Access, names: tuple[str, ...], as_json: bool) -> None:
    """Leave checkpoints to the budget again.

    \b
    llama-prefix-cache unpin 00f3b1c2
    """
    _set_pinned(store, names, is_pinned=False, as_json=as_json)


def find_all(store: Access, names: Sequence[str]) -> list[ListedCheckpoint]:
    """Return what all of *names* name, each once; exits if one names nothing."""
    checkpoints = store.checkpoints()
    try:
        found = [checkpoint for name in names for checkpoint in named(name, checkpoints)]
    except NotNamed as complaint:
        fail(complaint, EXIT_FAILED)
    return list({checkpoint.id: checkpoint for checkpoint in found}.values())


def _set_pinned(store: Access, names: Sequence[str], *, is_pinned: bool, as_json: bool) -> None:
    found = find_all(store, names)
    changed = [checkpoint for checkpoint in found if checkpoint.is_pinned != is_pinned]
    for checkpoint in changed:
        store.pin(checkpoint, is_pinned=is_pinned)
    pinned = [checkpoint for checkpoint in store.checkpoints() if checkpoint.is_pinned]
    n_bytes = sum(checkpoint.size_bytes for checkpoint in pinned)
    if as_json:
        ids = [checkpoint.id for checkpoint in changed]
        print_json({"changed": ids, "n_pinned": len(pinned), "pinned_bytes": n_bytes})
        return
    verb = "pinned" if is_pinned else "unpinned"
    click.echo(
        f"{verb} {len(changed)} (of {len(found)} named); pinned are now {len(pinned)} checkpoints with "
        f"{size_in_words(n_bytes)}"
    )


# `llama-prefix-cache rm` and `purge`: delete checkpoints by name, or by what is said of them.


_yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
_pinned_option = click.option("--pinned", is_flag=True, help="Pinned ones too.")


@click.command()
@names_argument
@_yes_option
@_pinned_option
@with_store
def rm(store: Access, names: tuple[str, ...], yes: bool, pinned: bool, as_json: bool) -> None:
    """Delete checkpoints by their ids.

    \b
    llama-prefix-cache rm 00f3b1c2
    llama-prefix-cache rm --yes 5d3a90c2      all of a header, without being asked

    ID is the beginning of what ls shows: a checkpoint, or all of a session, header or namespace; or the
    name of a model, for all of it. Pinned ones stay, unless --pinned. What slots hold stays too.
    """
    found = find_all(store, names)
    going = [checkpoint for checkpoint in found if pinned or not checkpoint.is_pinned]
    n_bytes = sum(checkpoint.size_bytes for checkpoint in going)
    if len(going) > 1:
        _confirm(len(going), n_bytes, is_confirmed=yes)
    replies = [store.delete(checkpoint, with_pinned=pinned) for checkpoint in going]
    deleted = Deleted(
        sum(reply.n_deleted for reply in replies),
        sum(reply.deleted_bytes for reply in replies),
        len(found) - len(going) + sum(reply.n_pinned for reply in replies),
        sum(reply.n_in_use for reply in replies),
    )
    _tell(deleted, as_json=as_json)
    if deleted.n_pinned or deleted.n_in_use:
        sys.exit(EXIT_FAILED)


@click.command()
@click.option("--namespace", metavar="ID", help="Only of this namespace or model, as ls shows it.")
@click.option("--unused-for", type=Age(), default=0, help="Only what was not used for so long.")
@click.option("--everything", is_flag=True, help="Without any condition.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@_yes_option
@_pinned_option
@with_store
def purge(
    store: Access,
    namespace: str | None,
    unused_for: int,
    everything: bool,
    dry_run: bool,
    yes: bool,
    pinned: bool,
    as_json: bool,
) -> None:
    """Delete checkpoints by namespace or age.

    \b
    llama-prefix-cache purge --unused-for 7d
    llama-prefix-cache purge --namespace 9f0c3a11 --dry-run
    llama-prefix-cache purge --everything --pinned --yes

    Pinned ones stay, unless --pinned. What slots hold stays too: if a text must go, restart llama-server
    as well.
    """
    if everything == bool(namespace or unused_for):
        fail("give --namespace and/or --unused-for, or --everything", EXIT_USAGE)
    selection = Selection(_node(store, namespace), unused_for, pinned)
    would = store.purge(selection, is_dry_run=True)
    if dry_run or not would.n_deleted:
        _tell(msgspec.structs.replace(would, is_dry_run=dry_run), as_json=as_json)
        return
    _confirm(would.n_deleted, would.deleted_bytes, is_confirmed=yes)
    _tell(store.purge(selection, is_dry_run=False), as_json=as_json)


def _node(store: Access, namespace: str | None) -> NodeId:
    if namespace is None:
        return STORE
    try:
        found = named(namespace, store.checkpoints())
    except NotNamed as complaint:
        fail(complaint, EXIT_FAILED)
    parent, *others = {c.parent.split("/")[0] for c in found}
    if others:
        fail(f"{namespace!r} has {1 + len(others)} namespaces: give the id of one", EXIT_FAILED)
    if not parent.startswith(namespace.lower()) and found[0].model != namespace:
        fail(f"{namespace!r} is not a namespace: see the first level of ls", EXIT_FAILED)
    return parse_node_id(parent)


def _confirm(n_going: int, n_bytes: int, *, is_confirmed: bool) -> None:
    """Ask, unless that is done with; where nobody can be asked, --yes is needed."""
    if is_confirmed:
        return
    words = f"delete {n_going} checkpoints with {size_in_words(n_bytes)}"
    if not sys.stdin.isatty():
        fail(f"would {words}: give --yes", EXIT_USAGE)
    if not click.confirm(f"{words.capitalize()}?", err=True):
        fail("nothing was deleted", EXIT_FAILED)


def _tell(deleted: Deleted, *, as_json: bool) -> None:
    if as_json:
        print_json(deleted)
        return
    verb = "would delete" if deleted.is_dry_run else "deleted"
    words = [f"{verb} {deleted.n_deleted} checkpoints with {size_in_words(deleted.deleted_bytes)}"]
    if deleted.n_pinned:
        words.append(f"{deleted.n_pinned} pinned ones stay (--pinned deletes them too)")
    if deleted.n_in_use:
        words.append(f"{deleted.n_in_use} were in use: try again")
    click.echo("; ".join(words))
