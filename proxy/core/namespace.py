"""Which known namespace a model belongs to, by what it predicts.

Owns: the canary's tokens and the comparison of two canaries. Weights that were replaced under the same
path, a merged adapter or a rope flag show in no field of llama-server's API; they show here. Measured:
0.0 between processes, -np, -c and thread counts, 0.0013 with flash attention off, 0.08 and more with
another rope scale.
"""

from collections.abc import Iterable, Sequence

import msgspec
import xxhash

CANARY_TOKENS = tuple((index * 2654435761 + 97) % 30011 for index in range(128))
"""Fixed ids, spread over the vocabulary; taken modulo its size. The last one is not evaluated with the
others but alone in another slot, to see whether that makes llama-server clear the first."""

TOLERANCE = 0.01


class KnownNamespace(msgspec.Struct, frozen=True):
    """A namespace's id and its canary: the likeliest tokens with their log-probabilities.

    `name` is what the model was called when it was last served.
    """

    id: bytes
    canary: list[tuple[int, float]]
    name: str = ""


def choose_namespace(
    known: Iterable[KnownNamespace], canary: Sequence[tuple[int, float]]
) -> KnownNamespace | None:
    """Return the known namespace whose canary is *canary* within the tolerance, or None."""
    return next((entry for entry in known if is_same_canary(entry.canary, canary)), None)


def new_namespace(
    static: str, known: Sequence[KnownNamespace], canary: list[tuple[int, float]], name: str
) -> KnownNamespace:
    """Return a namespace for a model that is none of those *known* under what is told of it."""
    return KnownNamespace(xxhash.xxh3_128_digest(f"{static} {len(known)}".encode()), canary, name)


def is_same_canary(left: Sequence[tuple[int, float]], right: Sequence[tuple[int, float]]) -> bool:
    """Return whether two canaries come from the same model.

    The tail of the list may differ by near ties; the likeliest token and half of all must be shared,
    and every shared one must have the same log-probability.
    """
    if not left or not right:
        return False
    a, b = dict(left), dict(right)
    shared = a.keys() & b.keys()
    if left[0][0] not in b or right[0][0] not in a or 2 * len(shared) < len(a):
        return False
    return all(abs(a[token] - b[token]) <= TOLERANCE for token in shared)
