"""The newest prompts, within a number of bytes, and the choice of those to compare a new prompt with.

A later prompt that continues a known one replaces it, so that mostly the newest prompt of each conversation
is kept.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from proxy.core.messages import list_of
from proxy.core.tokens import Namespace, TokenIds, common_prefix_length
from proxy.explain.causes import Cause
from proxy.explain.compare import Rendering
from proxy.explain.sketch import Sketch, begin_alike, have_same_first_message

SLACK_TOKENS = 64
"""Fewer missed tokens are not explained: a state ends a few tokens before its prompt."""
MAX_IDS = 100
"""How many request ids are kept with a prompt; `warm --from-request` finds the prompt by them."""
_OWN_BYTES, _MESSAGE_BYTES = 2000, 480
"""About the size of a known prompt without its tokens and text, and of the keys of each message."""


Loss = tuple[Cause | None, int]
"""Why the state of the first tokens of a prompt is gone, and how many tokens these are."""
NO_LOSS: Loss = (None, 0)


@dataclass(eq=False)
class KnownPrompt:
    """The prompt of a request that has ended.

    `slot` is where it was evaluated: the llama-server process and the slot's number. `ended_at` is when the
    request ended, by the monotonic clock. `ids` are those of the requests whose prompts this prompt begins
    with, the newest last. `loss` says whether its state was lost since.
    """

    namespace: Namespace
    tokens: TokenIds
    rendering: Rendering
    slot: tuple[str, int]
    ended_at: float
    ids: tuple[str, ...]
    loss: Loss = NO_LOSS
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        n_messages = len(list_of(self.rendering.fields.get("messages")))
        prompt_bytes = sys.getsizeof(self.tokens) + sys.getsizeof(self.rendering.text)
        self.size_bytes = prompt_bytes + _MESSAGE_BYTES * n_messages + _OWN_BYTES

    @property
    def sketch(self) -> Sketch:
        return self.rendering.sketch

    @cached_property
    def keys(self) -> frozenset[int]:
        """The keys of the prompt's conversation. Once they are made, only the request's sketch is kept."""
        self.rendering.reduce()
        return frozenset(self.sketch.conversation_keys(self.namespace))


@dataclass(frozen=True, slots=True)
class Match:
    """A known prompt, and the length of the prefix that a new prompt shares with it."""

    known: KnownPrompt
    n_common: int
    is_same_conversation: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the new prompt begins with the known one, except for a few tokens at its end."""
        n_known = len(self.known.tokens)
        return self.n_common >= max(n_known - SLACK_TOKENS, (n_known + 1) // 2)

    @property
    def replaces(self) -> bool:
        """Whether the new prompt replaces the known one."""
        is_exact = self.n_common == len(self.known.tokens)
        return is_exact or (self.is_same_conversation and self.is_whole)


Matches = tuple[Match | None, Match | None]
"""The nearest known prompt, and the one to compare a new prompt with."""


class KnownPrompts:
    """Keeps prompts, and forgets the oldest of them first."""

    def __init__(self, max_bytes: int, max_prompts: int) -> None:
        self._max_bytes = max_bytes
        self._max_prompts = max_prompts
        self._known: list[KnownPrompt] = []
        self._by_key: dict[int, KnownPrompt] = {}
        self._keyless: list[KnownPrompt] = []
        self.size_bytes = 0
        """About the size of all prompts, without the requests that those without keys still hold."""

    def newest(self) -> list[KnownPrompt]:
        """Return a new list of all known prompts, the newest first."""
        return self._known[::-1]

    def continued(self, new: KnownPrompt, n_reused: int) -> Match | None:
        """Return the last prompt of a slot if a new prompt continues it there and all of it is reused.

        The first *n_reused* tokens were compared when the request was planned. Only the last of them are
        compared again here, because another prompt may have been in the slot meanwhile. Returns None if
        another known prompt may share more.
        """
        in_slot = (known for known in reversed(self._known) if known.slot == new.slot)
        last, end = next(in_slot, None), n_reused + SLACK_TOKENS
        if last is None or last.namespace != new.namespace:
            return None
        # A prompt that shares more has the same few tokens before `end`, and the same token behind it.
        place = slice(end - SLACK_TOKENS, end + 1)
        few, longer = new.tokens[place], (k for k in self._known if len(k.tokens) > end)
        if any(known.tokens[place] == few for known in longer):
            return None
        begin = max(0, min(n_reused, len(last.tokens)) - SLACK_TOKENS)
        n_common = begin + common_prefix_length(last.tokens[begin:], new.tokens[begin:])
        match = Match(last, n_common, is_same_conversation=True)
        is_as_planned = n_common >= min(n_reused, len(last.tokens))
        return match if is_as_planned and match.is_whole and len(last.tokens) <= end else None

    def matches(self, new: KnownPrompt, newest: list[KnownPrompt], planned_at: float) -> Matches:
        """Return the nearest known prompt, and the prompt to compare a new one with.

        *newest* were known when the new prompt was planned, at *planned_at*. There are four cases:
        1. The new prompt continues the last prompt of its conversation: that one is both.
        2. The nearest prompt is of the same conversation: it is compared.
        3. The nearest prompt is of another conversation: the last prompt of this conversation is compared.
           But if the nearest prompt ended later, shares more and has the same first message, it began this
           conversation anew, and is compared instead.
        4. No request of this conversation had ended: the nearest prompt is compared.
        """
        for known in self._keyless:  # the oldest first
            self._by_key.update(dict.fromkeys(known.keys, known))
        self._keyless.clear()
        by_key, last = self._by_key, None
        keys = new.sketch.conversation_keys(new.namespace)
        key = next((key for key in keys if key in by_key), None)
        if key is not None and by_key[key].ended_at < planned_at:
            n_common = common_prefix_length(by_key[key].tokens, new.tokens)
            last = Match(by_key[key], n_common, is_same_conversation=True)
            if last.is_whole:
                return last, last
        nearest = _nearest(new, newest)
        if nearest is None:
            return None, last
        is_same = key in nearest.known.keys or (
            last is not None
            and nearest.known.ended_at > last.known.ended_at
            and nearest.n_common > last.n_common
            and have_same_first_message(new.sketch, nearest.known.sketch)
        )
        if last is not None and not is_same:
            return nearest, last
        is_same = is_same or begin_alike(new.sketch, nearest.known.sketch)
        return nearest, replace(nearest, is_same_conversation=is_same)

    def add(self, known: KnownPrompt, matches: Iterable[Match | None]) -> None:
        """Keep a prompt, in place of the *matches* that it replaces; the oldest may be forgotten."""
        self._known.append(known)
        self._keyless.append(known)
        self.size_bytes += known.size_bytes
        for match in matches:
            if match is not None and match.replaces and match.known in self._known:
                known.ids = (*match.known.ids, *known.ids)[-MAX_IDS:]
                self._forget(match.known)
        while len(self._known) > self._max_prompts or self.size_bytes > self._max_bytes:
            self._forget(self._known[0])

    def find(self, request_id: str) -> KnownPrompt | None:
        """Return a known prompt that begins with the prompt of a request; None if there is none."""
        return next((known for known in self._known if request_id in known.ids), None)

    def note_loss(self, namespace: Namespace, tokens: TokenIds | None, cause: Cause) -> None:
        """Note the loss of the state of *tokens*, if these are known, with all prompts that begin alike."""
        if tokens is None:
            return
        for known in self._known:
            others, n_lost = known.tokens, known.loss[1]
            if n_lost < min(len(tokens), len(others)) and tokens[n_lost] == others[n_lost]:
                n_common = common_prefix_length(others, tokens)
                if n_common > n_lost and known.namespace == namespace:
                    known.loss = cause, n_common

    def _forget(self, known: KnownPrompt) -> None:
        self._known.remove(known)
        self.size_bytes -= known.size_bytes
        if known in self._keyless:
            return self._keyless.remove(known)
        for key in known.keys:
            if self._by_key.get(key) is known:
                del self._by_key[key]


def _nearest(new: KnownPrompt, newest: list[KnownPrompt]) -> Match | None:
    """Return the known prompt that shares the most first tokens; of several the newest."""
    tokens = new.tokens
    nearest, n_common, next_token = None, 0, tokens[0]
    for known in newest:
        others = known.tokens
        # One token rules out most prompts: a longer common prefix must have this token at this place.
        if n_common < len(others) and others[n_common] == next_token:
            n_tokens = common_prefix_length(others, tokens)
            if n_tokens > n_common and known.namespace == new.namespace:
                nearest, n_common = known, n_tokens
                if n_common == len(tokens):
                    break
                next_token = tokens[n_common]
    return None if nearest is None else Match(nearest, n_common)
