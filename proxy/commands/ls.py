"""`llama-prefix-cache ls`: what is stored, as a tree."""

import time
from collections import defaultdict
from collections.abc import Sequence

import click
from rich.text import Text
from rich.tree import Tree

from proxy.commands.access import Access, with_store
from proxy.commands.naming import NotNamed, named
from proxy.commands.options import EXIT_FAILED, fail
from proxy.commands.printing import console, print_json
from proxy.commands.words import age_in_words, size_in_words
from proxy.core.views.listing import ListedCheckpoint

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
    return [*facts, "pinned"] if checkpoint.is_pinned else facts


def _line(first: str, *others: str) -> Text:
    return Text.assemble((first, "bold"), *(f"  {other}" for other in others))


def _count(checkpoints: Checkpoints, what: str) -> str:
    return f"{len(checkpoints):,} {what}{'' if len(checkpoints) == 1 else 's'}"


def _size(checkpoints: Checkpoints) -> int:
    return sum(checkpoint.size_bytes for checkpoint in checkpoints)
