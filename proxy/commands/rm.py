"""`llama-prefix-cache rm` and `purge`: delete checkpoints by name, or by what is said of them."""

import sys

import click
import msgspec

from proxy.commands.access import Access, with_store
from proxy.commands.naming import NotNamed, named
from proxy.commands.options import EXIT_FAILED, EXIT_USAGE, fail
from proxy.commands.pin import find_all, names_argument
from proxy.commands.printing import print_json
from proxy.commands.words import Age, size_in_words
from proxy.core.views.listing import Deleted
from proxy.core.views.selection import Selection
from proxy.core.views.tree import STORE, NodeId, parse_node_id

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
