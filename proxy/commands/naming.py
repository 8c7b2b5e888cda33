"""Finds the checkpoints that a few hex digits or a model's name stand for."""

from collections.abc import Iterator, Sequence

from proxy.core.views.listing import ListedCheckpoint

MIN_DIGITS = 4


class NotNamed(Exception):
    """Nothing, or more than one thing, is called so; the message says which."""


def named(text: str, checkpoints: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Return the checkpoints that *text* names: the beginning of an id, an id from /tree, or a model.

    Raises NotNamed.
    """
    of_model = [checkpoint for checkpoint in checkpoints if checkpoint.model == text]
    if "/" in text:
        found = {text: [c for c in checkpoints if f"{c.parent}/".startswith(f"{text}/")]}
    else:
        found = {}
        for checkpoint in checkpoints:
            for node_id in _nodes_of(checkpoint):
                if node_id.rpartition("/")[2].startswith(text.lower()):
                    found.setdefault(node_id, []).append(checkpoint)
    found = {node_id: below for node_id, below in found.items() if below}
    if of_model:
        if any(below != of_model for below in found.values()):
            raise NotNamed(f"{text!r} is a model's name and begins ids, too: give more digits")
        return of_model
    if len(text) < MIN_DIGITS:
        raise NotNamed(f"{text!r} is too short: give {MIN_DIGITS} digits of an id at least")
    if not found:
        raise NotNamed(f"no model is called {text!r}, and no id begins so: see ls")
    if len(found) > 1:
        raise NotNamed(f"{len(found)} ids begin with {text!r}: give more digits")
    return next(iter(found.values()))


def _nodes_of(checkpoint: ListedCheckpoint) -> Iterator[str]:
    """Yield the ids of a checkpoint and of all nodes above it; id 0 names what is not known."""
    yield checkpoint.id
    parts = checkpoint.parent.split("/")
    for n_parts in range(1, len(parts) + 1):
        if n_parts == 1 or int(parts[n_parts - 1], 16):
            yield "/".join(parts[:n_parts])
