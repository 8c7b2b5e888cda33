"""Recent prompts, within a bound of bytes: which of them a new one is to be held against.

Owns: what is kept of them, and that it stays within the bound. What prompts share is kept once.
"""

from collections import OrderedDict
from dataclasses import dataclass

from proxy.core.explaining.prefix_tree import Node, PrefixTree
from proxy.core.explaining.sketch import Sketch
from proxy.core.prefix import Namespace, TokenIds, common_prefix_length, token_ids

KNOWN_BYTES = 4000
"""About what a known prompt takes besides its tokens, text and digests; most of it are its marks."""


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt that was evaluated by the llama-server process *process_id*, until *ended_at*."""

    id: str
    namespace: Namespace
    n_tokens: int
    sketch: Sketch
    process_id: str
    ended_at: float
    tokens_end: Node[TokenIds]
    text_end: Node[str] | None

    @property
    def size_bytes(self) -> int:
        return KNOWN_BYTES + self.sketch.size_bytes


@dataclass(frozen=True, slots=True)
class Loss:
    """What was last lost of a prompt: its state, up to so many tokens."""

    what: object = None
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """How many first tokens of a prompt were known, and of which prompt: the last that shares them."""

    n_common: int = 0
    nearest: KnownPrompt | None = None
    loss: Loss = Loss()


class _Trees:
    """The prompts of one namespace."""

    def __init__(self) -> None:
        self.tokens: PrefixTree[TokenIds] = PrefixTree(token_ids(()))
        self.texts: PrefixTree[str] = PrefixTree("")

    @property
    def size_bytes(self) -> int:
        return self.tokens.size_bytes + self.texts.size_bytes


class KnownPrompts:
    """Prompts, the newest of them; the oldest are forgotten first."""

    def __init__(self, max_bytes: int, max_prompts: int, *, keeps_text: bool) -> None:
        self._max_bytes = max_bytes
        self._max_prompts = max_prompts
        self._keeps_text = keeps_text
        self._known: OrderedDict[str, KnownPrompt] = OrderedDict()
        self._trees: dict[Namespace, _Trees] = {}
        self._by_mark: dict[tuple[Namespace, int, int], str] = {}
        self._own_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def size_bytes(self) -> int:
        """About what all of it takes."""
        return self._own_bytes + sum(trees.size_bytes for trees in self._trees.values())

    def look_up(self, namespace: Namespace, tokens: TokenIds) -> Sighting:
        """Return how much of a prompt is known."""
        trees = self._trees.get(namespace)
        if trees is None:
            return Sighting()
        walk = trees.tokens.walk(tokens)
        nearest = self._known.get(walk.node.latest) if walk.node.latest else None
        if nearest is None or not walk.n_common:
            return Sighting()
        return Sighting(walk.n_common, nearest, Loss(*trees.tokens.loss(walk)))

    def of_conversation(
        self, namespace: Namespace, sketch: Sketch, nearest: KnownPrompt | None
    ) -> KnownPrompt | None:
        """Return a prompt of the same conversation: *nearest* if it is, or else the last one."""
        for mark in sketch.marks():
            found = self._by_mark.get((namespace, *mark))
            if found is not None and found in self._known:
                is_nearest = nearest is not None and mark in nearest.sketch.marks()
                return nearest if is_nearest else self._known[found]
        return None

    def common(self, known: KnownPrompt, tokens: TokenIds) -> int:
        """Return how many first tokens a known prompt shares with others."""
        return common_prefix_length(self.tokens(known), tokens)

    def tokens(self, known: KnownPrompt) -> TokenIds:
        return self._trees[known.namespace].tokens.sequence(known.tokens_end)

    def tokens_at(self, known: KnownPrompt, begin: int, n_tokens: int) -> TokenIds:
        """Return a few tokens of a known prompt."""
        tree = self._trees[known.namespace].tokens
        return tree.part(known.tokens_end, known.n_tokens, begin, begin + n_tokens)

    def text(self, known: KnownPrompt) -> str:
        """Return a known prompt as it was rendered; empty if texts are not kept."""
        if known.text_end is None:
            return ""
        return self._trees[known.namespace].texts.sequence(known.text_end)

    def find(self, request_id: str) -> KnownPrompt | None:
        """Return the prompt of a request; None if it is not kept, or no more."""
        return self._known.get(request_id)

    def is_known(self, known: KnownPrompt) -> bool:
        return self._known.get(known.id) is known

    def add(
        self,
        request_id: str,
        namespace: Namespace,
        tokens: TokenIds,
        text: str,
        sketch: Sketch,
        process_id: str,
        ended_at: float,
    ) -> None:
        """Keep a prompt; older ones may be forgotten for it."""
        trees = self._trees.setdefault(namespace, _Trees())
        known = KnownPrompt(
            request_id,
            namespace,
            len(tokens),
            sketch,
            process_id,
            ended_at,
            trees.tokens.add(tokens, request_id),
            trees.texts.add(text, request_id) if self._keeps_text and text else None,
        )
        self._known[request_id] = known
        self._own_bytes += known.size_bytes
        self._by_mark.update(((namespace, *mark), request_id) for mark in sketch.marks())
        while self._known and (
            len(self._known) > self._max_prompts or self.size_bytes > self._max_bytes
        ):
            self._forget(self._known.popitem(last=False)[1])

    def note_loss(self, namespace: Namespace, tokens: TokenIds, what: object) -> None:
        """Note what became of the state of *tokens*."""
        if trees := self._trees.get(namespace):
            trees.tokens.note_loss(tokens, what)

    def _forget(self, known: KnownPrompt) -> None:
        trees = self._trees[known.namespace]
        trees.tokens.remove(known.tokens_end)
        if known.text_end is not None:
            trees.texts.remove(known.text_end)
        for mark in known.sketch.marks():
            if self._by_mark.get((known.namespace, *mark)) == known.id:
                del self._by_mark[(known.namespace, *mark)]
        self._own_bytes -= known.size_bytes
        if not trees.size_bytes:
            del self._trees[known.namespace]
