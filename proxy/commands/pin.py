"""`llama-prefix-cache pin` and `unpin`: what is kept whatever the budget says."""

from collections.abc import Sequence

import click

from proxy.commands.access import Access, with_store
from proxy.commands.naming import NotNamed, named
from proxy.commands.options import EXIT_FAILED, fail
from proxy.commands.printing import print_json
from proxy.commands.words import size_in_words
from proxy.core.views.listing import ListedCheckpoint

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
