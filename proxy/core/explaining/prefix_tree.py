"""Sequences kept so that what they begin with alike is kept once.

Owns: the tree. A node's edge is what its sequences have in common behind its parent; two children of a
node begin differently. Must never know what the sequences mean.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import iadd
from typing import Generic, TypeVar

from proxy.core.prefix import TokenIds, common_prefix_length

S = TypeVar("S", TokenIds, str)

NODE_BYTES = 400
"""About what a node takes besides its edge."""


class Node(Generic[S]):
    """The end of a stretch that some sequences share; `latest` is the owner that last came by.

    `loss` says what became of the state of sequences that came this way, in the first `n_lost` of its edge.
    """

    __slots__ = ("children", "edge", "latest", "loss", "n_lost", "n_owners", "parent")

    def __init__(self, edge: S, parent: "Node[S] | None") -> None:
        self.edge: S = edge
        self.parent: Node[S] | None = parent
        self.children: dict[object, Node[S]] = {}
        self.n_owners = 0
        self.latest: str | None = None
        self.loss: object = None
        self.n_lost = 0

    @property
    def size_bytes(self) -> int:
        return sys.getsizeof(self.edge) + NODE_BYTES

    def path(self) -> "Iterator[Node[S]]":
        """Yield the node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Walk(Generic[S]):
    """How far a sequence is known: `n_common` of it, the last `n_in_edge` of them in the edge of `node`."""

    n_common: int
    node: Node[S]
    n_in_edge: int


class PrefixTree(Generic[S]):
    """Some sequences of one kind."""

    def __init__(self, empty: S) -> None:
        self._empty: S = empty
        self._root: Node[S] = Node(empty, None)
        self.size_bytes = 0

    def walk(self, sequence: S) -> Walk[S]:
        """Return how far a sequence is known."""
        node, n_common = self._root, 0
        while n_common < len(sequence):
            child = node.children.get(sequence[n_common])
            if child is None:
                break
            stretch = sequence[n_common : n_common + len(child.edge)]
            if stretch != child.edge:
                n_in_edge = common_prefix_length(stretch, child.edge)
                return Walk(n_common + n_in_edge, child, n_in_edge)
            node, n_common = child, n_common + len(child.edge)
        return Walk(n_common, node, len(node.edge))

    def add(self, sequence: S, owner: str) -> Node[S]:
        """Keep a sequence for *owner*; return its end, by which it is read and removed."""
        walk = self.walk(sequence)
        end = self._split(walk.node, walk.n_in_edge) if walk.n_in_edge else walk.node
        if walk.n_common < len(sequence):
            leaf = Node(sequence[walk.n_common :], end)
            end.children[sequence[walk.n_common]] = leaf
            self.size_bytes += leaf.size_bytes
            end = leaf
        for node in end.path():
            node.n_owners += 1
            node.latest = owner
        return end

    def remove(self, end: Node[S]) -> None:
        """Forget a sequence that was added once, by its end."""
        for node in list(end.path()):
            node.n_owners -= 1
            if not node.n_owners and node.parent is not None:
                self.size_bytes -= node.size_bytes
                del node.parent.children[node.edge[0]]

    def sequence(self, end: Node[S]) -> S:
        """Return the whole sequence that ends there."""
        return self._joined([node.edge for node in end.path()][::-1])

    def part(self, end: Node[S], n: int, begin: int, stop: int) -> S:
        """Return the elements from *begin* to *stop* of the sequence of length *n* that ends there."""
        edges = []
        for node in end.path():
            n -= len(node.edge)
            if n < stop:
                edges.append(node.edge[max(0, begin - n) : stop - n])
            if n <= begin:
                break
        return self._joined(edges[::-1])

    def note_loss(self, sequence: S, loss: object) -> None:
        """Note what became of the state of *sequence*, wherever others that are kept share it."""
        walk = self.walk(sequence)
        for node in walk.node.path():
            node.loss = loss
            node.n_lost = walk.n_in_edge if node is walk.node else len(node.edge)

    def loss(self, walk: Walk[S]) -> tuple[object, int]:
        """Return what was last lost of a sequence, and how far that reached; None and 0 if nothing."""
        n_behind, n_in_edge = walk.n_common, walk.n_in_edge
        for node in walk.node.path():
            n_behind -= n_in_edge
            if node.n_lost:
                return node.loss, n_behind + min(node.n_lost, n_in_edge)
            n_in_edge = len(node.parent.edge) if node.parent else 0
        return None, 0

    def _joined(self, edges: list[S]) -> S:
        if isinstance(self._empty, str):
            return self._empty.join(edges)
        return reduce(iadd, edges, self._empty[:])

    def _split(self, node: Node[S], n_upper: int) -> Node[S]:
        """Return the node at which the first *n_upper* of an edge end."""
        if n_upper == len(node.edge) or node.parent is None:
            return node
        upper = Node(node.edge[:n_upper], node.parent)
        upper.n_owners, upper.latest, upper.loss = node.n_owners, node.latest, node.loss
        upper.n_lost, node.n_lost = min(node.n_lost, n_upper), max(0, node.n_lost - n_upper)
        node.parent.children[node.edge[0]] = upper
        self.size_bytes -= node.size_bytes
        node.edge, node.parent = node.edge[n_upper:], upper
        upper.children[node.edge[0]] = node
        self.size_bytes += node.size_bytes + upper.size_bytes
        return upper
