"""From a request to its tokens and stable cuts, by asking llama-server to render and tokenize.

Owns: how a cut is found, and how little is tokenized. llama-server itself renders, so that every template
is covered. Results that hold for the later requests of a conversation are remembered, and checked against
the text and the tokens at hand before they are used. What one tenant's requests have taught helps no other
tenant: the time of an answer would tell that somebody has sent the same text.
"""

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from cachetools import LRUCache, TTLCache

from proxy.core.cuts import own_point
from proxy.core.messages import (
    DIGEST_BYTES,
    REMINDER_TAG,
    Route,
    is_system,
    n_leading_system,
    text_of,
)
from proxy.core.model import NO_CUTS, NO_RULE, Cuts, Prompt, Rule
from proxy.core.tokens import Namespace, TokenIds, common_prefix_length, token_ids
from proxy.errors import UpstreamFault, UpstreamRefused
from proxy.llama.client import MEDIA_MARKER, Headers, LlamaServer, TokenPiece
from proxy.llama.requests import GenerationBody, conversation_of
from proxy.serving.request import Request

_N_REMEMBERED = 256
_REMEMBERED_SECONDS = 600.0
"""How long a header is remembered: some templates show the date in it, which changes at midnight."""
_OTHER_TEXTS = ("1 header", "Zheader")
"""Two user texts to render instead of the user's own; no text begins like both."""
_OTHER_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": t} for t in _OTHER_TEXTS]

_MARKUP = re.compile(r"[!-/:-@[-^`{-~].*[^\W\d_].*[!-/:-@[-^`{-~]")
"""The text of a special token, `<|im_start|>` or `[INST]`: vocabularies split letters from signs, so that
no other token looks like it; `}_{` does not. The signs are of ASCII: vowel signs of Hindi or Tamil are no
letters for Python. Some stay whole even where llama-server does not parse special tokens."""
_SEARCHED_TOKENS = 24
"""How far back from the end of a text its last special token is looked for."""

_SEARCHED_CHARACTERS = 400
"""How much of a text's end is searched for a special token: templates begin each message with one."""

_SPELLED_CHARACTERS = 2048
"""Up to so many, llama-server tells the text of each token sooner than it tokenizes the end again."""
_N_TEXTS = 16
_CHECKED = 64
"""One in so many texts is also tokenized as a whole, as a check."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A prompt as text and as tokens, and its body in the chat form.

    `headers` are the client's keys, `namespace` is the tenant's. `digests` are those of its Conversation,
    which begins with `n_system` system messages.
    """

    text: str
    tokens: TokenIds
    body: GenerationBody
    headers: Headers
    namespace: Namespace
    digests: bytes = b""
    n_system: int = 0

    def key_to(self, n_messages: int) -> bytes:
        """Return a key of the tenant, the first *n_messages*, and all else that is rendered with them."""
        return self.namespace + self.digests[: (1 + n_messages) * DIGEST_BYTES]


class _Shared(NamedTuple):
    """How much a prompt shares with another rendering; no characters if a token straddles their end."""

    n_tokens: int
    n_characters: int


class PromptReader:
    """Reads the prompts of one llama-server's requests."""

    def __init__(self, upstream: LlamaServer, n_ctx: int, *, shares_headers: bool = True) -> None:
        """No cut is sought in a prompt that does not fit into *n_ctx* tokens: it will be refused.

        With *shares_headers* a header is found under any rule: other slots may use its state.
        """
        self._upstream = upstream
        self._n_ctx = n_ctx
        self._shares_headers = shares_headers
        self.known = KnownTexts(upstream)
        self._headers: TTLCache[bytes, TokenIds] = TTLCache(_N_REMEMBERED, _REMEMBERED_SECONDS)
        self._turns: LRUCache[bytes, TokenIds] = LRUCache(_N_REMEMBERED)
        self._endings: LRUCache[tuple[str, str, bytes], str] = LRUCache(_N_REMEMBERED)
        self._tails: LRUCache[tuple[Namespace, str], TokenIds] = LRUCache(_N_TEXTS)

    async def read(self, request: Request, body: GenerationBody, rule: Rule) -> Prompt:
        """Return the prompt of a request, whose *body* is in the chat form; raises UpstreamFault."""
        headers, namespace = request.keys, request.namespace
        if request.route is Route.COMPLETION:
            prompt = body.fields["prompt"]
            # Of a larger number llama-server reads 32 bits.
            if isinstance(prompt, list) and all(type(n) is int and n >> 31 == 0 for n in prompt):
                tokens = TokenIds("i", prompt)
            else:
                tokens = await self._upstream.tokenize(prompt, headers, add_special=True)
            # A bare prompt has no messages; all but its last token is its stable part.
            cuts = Cuts(message_end=len(tokens) - 1) if rule.is_end_only else NO_CUTS
            return Prompt(tokens, namespace, cuts, text=prompt if isinstance(prompt, str) else "")
        text, cuts = await self._upstream.apply_template(body.raw, headers), NO_CUTS
        if is_before_media := body.has_media:
            # The marker stands for the first image; how many tokens this image takes is not told.
            text = text[: m.start() if (m := MEDIA_MARKER.search(text)) else 0]
        tokens = await self.known.tokenize(text, headers, namespace)
        digests = (request.conversation or conversation_of(body)).digests
        n_system = n_leading_system(body.messages)
        rendering = _Rendered(text, tokens, body, headers, namespace, digests, n_system)
        rule = rule if len(tokens) < self._n_ctx else NO_RULE
        if is_before_media:
            cuts = Cuts(await self._header_end(rendering))
        elif rule.is_any_prefix and self._shares_headers:
            # Other sessions share header and surroundings; no other boundary needs a cut.
            newest = len(body.messages) - 1 if body.messages else None
            header, surroundings = await asyncio.gather(
                self._header_end(rendering), self._surroundings_end(rendering, newest)
            )
            cuts = Cuts(header, surroundings=surroundings)
        elif rule.can_restore and not rule.is_any_prefix:
            cuts = await self._find_cuts(rendering, rule)
        return Prompt(tokens, namespace, cuts, text=text, is_before_media=is_before_media)

    async def _find_cuts(self, rendering: _Rendered, rule: Rule) -> Cuts:
        """Find all cuts. Where a turn starts is remembered from the request that began the turn."""
        messages, tokens = rendering.body.messages, rendering.tokens
        users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
        last_user = users[-1] if users else None
        begins_turn = last_user is not None and all(map(is_system, messages[last_user + 1 :]))
        if begins_turn or rule.is_end_only:
            newest = last_user if begins_turn else None
            header, end, last_turn, surroundings = await asyncio.gather(
                self._header_end(rendering),
                self._message_end(rendering, rule),
                self._last_turn_end(rendering, newest),
                self._surroundings_end(rendering, newest),
            )
            cuts = Cuts(header, message_end=end, last_turn_end=last_turn, surroundings=surroundings)
        else:  # within a turn only the header is of use
            cuts = Cuts(await self._header_end(rendering))
        if last_user is None:
            return cuts
        key = rendering.key_to(last_user + 1)
        if begins_turn:
            self._turns[key] = tokens[: cuts.message_end]
        elif key not in self._turns:  # the turn began before the proxy did, or its prompt was cut
            shared = await self._compare(rendering, messages[: last_user + 1])
            self._turns[key] = tokens[: shared.n_tokens]
        return replace(cuts, turn_start=_length_if_prefix(self._turns.get(key), tokens))

    async def _header_end(self, rendering: _Rendered) -> int:
        """Return the end of tools and system prompt.

        Not every template renders a header alone (Qwen3.5's refuses). So the header is the text that two
        renderings with different user texts share, up to the last special token: text after that token
        may merge with whatever follows. Where none is near, as in Llama 3.3, which writes the tools into
        the user's message, only the last token is left out.
        """
        key = rendering.key_to(rendering.n_system)
        if key not in self._headers:
            try:
                self._headers[key] = await self._shared_header(rendering)
            except UpstreamRefused:
                self._headers[key] = TokenIds("i")
        return _length_if_prefix(self._headers.get(key), rendering.tokens)

    async def _shared_header(self, rendering: _Rendered) -> TokenIds:
        body, headers = rendering.body, rendering.headers
        system = body.messages[: rendering.n_system]
        bodies = (with_messages(body, [*system, message]) for message in _OTHER_MESSAGES)
        texts = await asyncio.gather(*(self._upstream.apply_template(b, headers) for b in bodies))
        shared = texts[0][: common_prefix_length(*texts)]
        pieces = await self._upstream.pieces(shared, headers, is_whole=True)
        searched = range(len(pieces), max(0, len(pieces) - _SEARCHED_TOKENS), -1)
        ends = (n for n in searched if _is_special(pieces[n - 1]))
        return token_ids(piece.id for piece in pieces[: next(ends, len(pieces) - 1)])

    async def _message_end(self, rendering: _Rendered, rule: Rule) -> int:
        """Return the end of the last complete message: where the generation prompt begins.

        Every answer begins with a generation prompt (`<|im_start|>assistant`, then `<think>`). If that is
        so long that llama-server itself makes a context checkpoint within it, the end is there.
        """
        messages, n_own = rendering.body.messages, own_point(len(rendering.tokens))
        plain = partial(self._compare, rendering, messages)
        n_end = await self._cut_at_ending(rendering, "end", "", plain)
        n_end = min(n_end, len(rendering.tokens) - 1)
        if rule.is_end_only or n_own <= n_end:
            return n_end
        added = ({"role": role, "content": _OTHER_TEXTS[1]} for role in ("assistant", "user"))
        find = partial(self._compare, rendering, [*messages, *added])
        return max(n_end, min(n_own, await self._cut_at_ending(rendering, "answer", "", find)))

    async def _last_turn_end(self, rendering: _Rendered, newest: int | None) -> int:
        """Return where the newest user message begins; 0 if only the header is before it.

        A rendering with another user text differs from there on. A rendering without that message would
        not do: some templates would show the turn before as unfinished, with its reasoning. In a first
        message of several texts only the last is the user's own: agents put their surroundings before it.
        What agents put into later messages may be gone from the next request: qwen-code tells the date so.
        """
        if newest is None:
            return 0
        message = rendering.body.messages[newest]
        others = [{**message, "content": text} for text in _OTHER_TEXTS]
        own = text_of(message, "content")
        if newest <= rendering.n_system:
            if not _has_several_texts(message):
                return 0
            *before, last = message["content"]
            texts = ({**last, "text": text} for text in _OTHER_TEXTS)
            others = [{**message, "content": [*before, text]} for text in texts]
            own = text_of(last, "text")
        find = partial(self._compare_replaced, rendering, newest, others)
        if own:
            return await self._cut_at_ending(rendering, "own", own, find)
        return (await find()).n_tokens

    async def _surroundings_end(self, rendering: _Rendered, newest: int | None) -> int:
        """Return where the first user message's leading reminder ends; 0 if it begins with none.

        This reminder changes less often than the text after it: Claude Code's environment is followed by
        the status of the repository, which differs in the next session.
        """
        if newest is None or newest > rendering.n_system:
            return 0
        message = rendering.body.messages[newest]
        if message.get("role") != "user" or not _has_several_texts(message):
            return 0
        first = message["content"][0]
        if not text_of(first, "text").startswith(REMINDER_TAG):
            return 0
        contents = ([first, {"type": "text", "text": text}] for text in _OTHER_TEXTS)
        others = [{**message, "content": content} for content in contents]
        return (await self._compare_replaced(rendering, newest, others)).n_tokens

    async def _cut_at_ending(
        self, rendering: _Rendered, kind: str, own: str, find: Callable[[], Awaitable[_Shared]]
    ) -> int:
        """Return how many tokens come before a prompt's ending: *own* text, then text of the template.

        The template's text is learned once, from *find*, which renders and returns as `_compare` does.
        After that nothing is rendered for requests that end alike.
        """
        text, messages = rendering.text, rendering.body.messages
        key = kind, text_of(messages[-1], "role"), rendering.key_to(0)
        if key in self._endings and text.endswith(own + self._endings[key]):
            n_characters = len(text) - len(own) - len(self._endings[key])
            if n_cut := await self._tokens_before(rendering, n_characters):
                return n_cut
        n_cut, n_characters = await find()
        if n_characters and text.startswith(own, n_characters):
            self._endings[key] = text[n_characters + len(own) :]
        return n_cut

    async def _compare_replaced(
        self, rendering: _Rendered, index: int, others: list[dict[str, object]]
    ) -> _Shared:
        """Return the least that the prompt shares with renderings of one of *others* at *index*."""
        body = rendering.body
        before, behind = body.messages[:index], body.messages[index + 1 :]
        conversations = [[*before, other, *behind] for other in others]
        return min([await self._compare(rendering, messages) for messages in conversations])

    async def _compare(self, rendering: _Rendered, messages: list[dict[str, Any]]) -> _Shared:
        """Return how much the prompt shares with the rendering of other *messages*."""
        other = with_messages(rendering.body, messages)
        try:
            other_text = await self._upstream.apply_template(other, rendering.headers)
        except UpstreamRefused:
            return _Shared(0, 0)
        end = common_prefix_length(rendering.text, other_text)
        if n_cut := await self._tokens_before(rendering, end):
            return _Shared(n_cut, end)
        # A token straddles that point: compare the tokens of the two renderings.
        tokens = await self.known.tokenize(other_text, rendering.headers, rendering.namespace)
        return _Shared(common_prefix_length(rendering.tokens, tokens), 0)

    async def _tokens_before(self, rendering: _Rendered, n_characters: int) -> int:
        """Return how many tokens the first *n_characters* make; 0 if a token straddles their end."""
        tail = rendering.text[n_characters:]
        ends = self.known.ends.get((rendering.namespace, rendering.text), {})
        if n_tail := ends.get(len(tail.encode())):
            return len(rendering.tokens) - n_tail
        tokens = self._tails.get(key := (rendering.namespace, tail))
        if tokens is None:
            tokens = await self._upstream.tokenize(tail, rendering.headers, add_special=False)
            self._tails[key] = tokens
        n_cut = len(rendering.tokens) - len(tokens)
        return n_cut if rendering.tokens[n_cut:] == tokens else 0

    async def read_next(self, request: Request, body: GenerationBody, said: str) -> TokenIds:
        """Return what the prompt behind an answer with the text *said* begins with; raises UpstreamFault.

        No tokens if that depends on whether the client sends the answer's reasoning back.
        """
        headers, namespace = request.keys, request.namespace
        answer = {"role": "assistant", "content": said}
        user, other = _OTHER_MESSAGES
        messages = [*body.messages, answer, user]
        reasoned = {**answer, "reasoning_content": _OTHER_TEXTS[0]}
        raw = with_messages(body, messages)
        with_reasoning = with_messages(body, [*body.messages, reasoned, user])
        text = await self._upstream.apply_template(raw, headers)
        if text != await self._upstream.apply_template(with_reasoning, headers):
            return TokenIds("i")
        tokens = await self.known.tokenize(text, headers, namespace)
        next_body = GenerationBody(raw, {**body.fields, "messages": messages})
        rendering = _Rendered(text, tokens, next_body, headers, namespace)
        shared = await self._compare_replaced(rendering, len(messages) - 1, [other])
        return tokens[: shared.n_tokens]


def _length_if_prefix(remembered: TokenIds | None, tokens: TokenIds) -> int:
    """Return how many tokens are *remembered*; 0 if a prompt does not begin with them."""
    return len(remembered) if remembered and tokens[: len(remembered)] == remembered else 0


def _is_special(token: TokenPiece) -> bool:
    return isinstance(token.piece, str) and bool(_MARKUP.fullmatch(token.piece))


class KnownTexts:
    """Tokenizes the renderings of one llama-server, each part of a conversation only once.

    Special tokens split a text: what comes before one gives the same tokens whatever follows. The mark is
    the special token that the template writes most often. The tokens of the newest texts are remembered.
    Of a new text, only the part after the last mark that it shares with one of them is tokenized. Some
    texts are also tokenized as a whole, as a check.
    """

    def __init__(self, upstream: LlamaServer) -> None:
        self._upstream = upstream
        self._texts: deque[tuple[Namespace, str, TokenIds]] = deque(maxlen=_N_TEXTS)
        self.ends: LRUCache[tuple[Namespace, str], dict[int, int]] = LRUCache(_N_TEXTS)
        """How many tokens the last n bytes of a text are, for each n at which a token begins."""
        self._mark = "", 0
        self.n_spliced = 0

    async def tokenize(self, text: str, headers: Headers, namespace: Namespace) -> TokenIds:
        """Return the tokens of a rendering for a tenant; raises UpstreamFault."""
        tokens = await self._splice(text, headers, namespace)
        if tokens is None:
            tokens = await self._upstream.tokenize(text, headers, add_special=True)
            await self._choose_mark(text, headers)
        theirs = (known for known in self._texts if known[0] == namespace)
        earlier = [k for k in theirs if text.startswith(k[1][:-_SEARCHED_CHARACTERS])]
        if earlier:  # of the same conversation
            self._texts.remove(earlier[0])
        self._texts.append((namespace, text, tokens))
        return tokens

    async def _choose_mark(self, text: str, headers: Headers) -> None:
        if not self._texts.maxlen:
            return
        with suppress(UpstreamFault):
            ending = text[-_SEARCHED_CHARACTERS:]
            pieces = await self._upstream.pieces(ending, headers, is_whole=False)
            marks = [(str(p.piece), p.id) for p in reversed(pieces) if _is_special(p)]
            self._mark = max(marks, key=lambda mark: text.count(mark[0]), default=self._mark)

    async def was_wrong(self, text: str, tokens: TokenIds, headers: Headers) -> bool:
        """Return whether a text was tokenized wrongly; if so, all later texts are tokenized as a whole."""
        if await self._upstream.tokenize(text, headers, add_special=True) == tokens:
            return False
        self._texts = deque(maxlen=0)  # requests on their way would bring wrong tokens back
        self.ends.clear()
        return True

    async def _splice(self, text: str, headers: Headers, namespace: Namespace) -> TokenIds | None:
        """Return the tokens of a text whose head is known; None if none is, or if the check failed."""
        mark, mark_id = self._mark
        begin, head = 0, TokenIds("i")
        for whose, known, known_tokens in self._texts if mark else ():
            n_common = common_prefix_length(known, text) if whose == namespace else 0
            end = text.rfind(mark, 0, n_common)
            if end > begin:
                backwards, at = known_tokens[::-1], -1
                with suppress(ValueError):  # fewer tokens than marks in the text
                    for _ in range(known.count(mark, end)):
                        at = backwards.index(mark_id, at + 1)
                    begin, head = end, known_tokens[: len(known_tokens) - 1 - at]
        if not begin:
            return None
        tail, ends = text[begin:], dict[int, int]()
        if len(tail) <= _SPELLED_CHARACTERS:
            pieces = await self._upstream.pieces(tail, headers, is_whole=False)
            tokens = head + token_ids(piece.id for piece in pieces)
            texts = [t.encode() if isinstance(t := p.piece, str) else bytes(t) for p in pieces]
            if b"".join(texts) == tail.encode():  # some tokenizers write a space before a text
                ends = {n: i for i, n in enumerate(accumulate(map(len, reversed(texts))), 1)}
        else:
            tokens = head + await self._upstream.tokenize(tail, headers, add_special=False)
        self.n_spliced += 1
        if self.n_spliced % _CHECKED == 1 and await self.was_wrong(text, tokens, headers):
            return None
        self.ends[namespace, text] = ends
        return tokens


# Messages with other texts, to see where renderings differ.


def _has_several_texts(message: dict[str, Any]) -> bool:
    """Return whether a message's content is several parts, the last of them a text."""
    content = message.get("content")
    return isinstance(content, list) and len(content) > 1 and "text" in content[-1]


def with_messages(body: GenerationBody, messages: list[dict[str, Any]]) -> bytes:
    """Return a body that renders *messages* as the request would, without the generation prompt."""
    changed = {"messages": messages, "add_generation_prompt": False}
    return msgspec.json.encode({**body.fields, **changed})
