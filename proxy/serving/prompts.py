"""From a request to its tokens and stable cuts, by asking llama-server to render and tokenize.

Owns: how a cut is found. The renderings are llama-server's own, so that every template is covered;
what does not change between the requests of a conversation is remembered, and checked against the
tokens at hand before it is used.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash
from cachetools import LRUCache

from proxy.core.messages import SYSTEM_ROLES, Route
from proxy.core.model import NO_CUTS, Cuts, Prompt, Rule, RuleKind
from proxy.core.tokens import Namespace, TokenIds, common_prefix_length
from proxy.errors import UpstreamRefused
from proxy.llama.bodies import (
    GenerationBody,
    begins_with_reminder,
    has_several_texts,
    is_first_message,
    last_user_index,
    leading_system,
    rendering_key,
    with_first_text_and,
    with_last_text,
    with_messages,
)
from proxy.llama.client import LlamaServer

_N_REMEMBERED = 256
_OTHER_TEXTS = ("1 header", "Zheader")
"""What users may write otherwise: no text begins like both."""

_SEARCHED_TOKENS = 24
"""How far back from the end of a shared header its last special token is looked for."""

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _RenderedPrompt:
    """A prompt as text and as tokens, the body in the chat form that it was made of, and the client's
    keys."""

    text: str
    tokens: TokenIds
    body: GenerationBody
    headers: Headers


class PromptReader:
    """Reads the prompts of one llama-server's requests."""

    def __init__(self, upstream: LlamaServer, *, shares_headers: bool = True) -> None:
        """With *shares_headers* a header is found whatever the rule: other slots may want its state."""
        self._upstream = upstream
        self._shares_headers = shares_headers
        self._cuts: LRUCache[bytes, TokenIds] = LRUCache(_N_REMEMBERED)
        self._tails: LRUCache[str, TokenIds] = LRUCache(_N_REMEMBERED)

    async def read(
        self, route: Route, body: GenerationBody, headers: Headers, namespace: Namespace, rule: Rule
    ) -> Prompt:
        """Return a prompt, that of a *body* in the chat form if it has messages; raises UpstreamFault."""
        if route is Route.COMPLETION:
            prompt = body.fields["prompt"]
            if isinstance(prompt, list) and all(type(part) is int for part in prompt):
                tokens = TokenIds("i", prompt)
            else:
                tokens = await self._upstream.tokenize(prompt, headers, add_special=True)
            # A bare prompt has no messages; all but its last token is its stable part.
            cuts = Cuts(message_end=len(tokens) - 1) if rule.kind is RuleKind.END_ONLY else NO_CUTS
            return Prompt(tokens, namespace, cuts, text=prompt if isinstance(prompt, str) else "")
        text = await self._upstream.apply_template(body.raw, headers)
        tokens = await self._upstream.tokenize(text, headers, add_special=True)
        rendering = _RenderedPrompt(text, tokens, body, headers)
        cuts = NO_CUTS
        if rule.kind is RuleKind.ANY_PREFIX and self._shares_headers:
            # Other sessions share these; no other boundary needs a cut.
            newest = len(body.messages) - 1 if body.messages else None
            header, surroundings = await asyncio.gather(
                self._header(rendering), self._surroundings(rendering, newest)
            )
            cuts = Cuts(header, surroundings=surroundings)
        elif rule.kind not in (RuleKind.ANY_PREFIX, RuleKind.NOTHING):
            cuts = await self._find_cuts(rendering, rule)
        return Prompt(tokens, namespace, cuts, text=text)

    async def _find_cuts(self, rendering: _RenderedPrompt, rule: Rule) -> Cuts:
        body, tokens = rendering.body, rendering.tokens
        last_user = last_user_index(body)
        begins_turn = last_user is not None and all(
            message.get("role") in SYSTEM_ROLES for message in body.messages[last_user + 1 :]
        )
        newest = last_user if begins_turn else None
        header, message_end, last_turn_end, surroundings = await asyncio.gather(
            self._header(rendering),
            self._message_end(rendering, is_wanted=begins_turn or rule.kind is RuleKind.END_ONLY),
            self._last_turn_end(rendering, newest),
            self._surroundings(rendering, newest),
        )
        if last_user is None:
            return Cuts(header, 0, message_end)
        messages = body.messages[: last_user + 1]
        key = _digest(b"turn start", rendering_key(body, messages))
        if begins_turn:
            self._cuts[key] = tokens[:message_end]
            return Cuts(
                header,
                message_end,
                message_end,
                last_turn_end=last_turn_end,
                surroundings=surroundings,
            )
        if key not in self._cuts:  # a turn that began before the proxy did, or whose prompt was cut
            head = with_messages(body, messages, generation_prompt=False)
            self._cuts[key] = tokens[: await self._cut_before(rendering, head)]
        return Cuts(header, self._remembered(key, tokens), message_end)

    def _remembered(self, key: bytes, tokens: TokenIds) -> int:
        known = self._cuts.get(key)
        return len(known) if known is not None and tokens[: len(known)] == known else 0

    async def _last_turn_end(self, rendering: _RenderedPrompt, newest: int | None) -> int:
        """Return where the newest user message begins; 0 if only the header is before it.

        That is where a rendering with another text differs. Without that message the turn before it would
        be rendered as one that still runs, by some templates with its reasoning. Of a message of several
        texts only the last is the user's own: agents put their surroundings before it.
        """
        if newest is None:
            return 0
        body = rendering.body
        message = body.messages[newest]
        if is_first_message(body, newest) and not has_several_texts(message):
            return 0
        others = [with_last_text(message, text) for text in _OTHER_TEXTS]
        return await self._shared_with(rendering, newest, others)

    async def _surroundings(self, rendering: _RenderedPrompt, newest: int | None) -> int:
        """Return where the first reminder of the first user message ends, 0 if that is not its beginning.

        What agents put there changes less than what follows: behind Claude Code's environment comes the
        status of the repository, which is another one in the next session.
        """
        body = rendering.body
        if newest is None or not is_first_message(body, newest):
            return 0
        message = body.messages[newest]
        if message.get("role") != "user" or not begins_with_reminder(message):
            return 0
        others = [with_first_text_and(message, text) for text in _OTHER_TEXTS]
        return await self._shared_with(rendering, newest, others)

    async def _shared_with(
        self, rendering: _RenderedPrompt, index: int, others: list[dict[str, object]]
    ) -> int:
        """Return how many tokens a prompt shares with renderings that have another message at *index*."""
        body = rendering.body
        before, behind = body.messages[:index], body.messages[index + 1 :]
        bodies = [
            with_messages(body, [*before, other, *behind], generation_prompt=False)
            for other in others
        ]
        return min([await self._cut_before(rendering, other) for other in bodies])

    async def _message_end(self, rendering: _RenderedPrompt, *, is_wanted: bool) -> int:
        """Return the end of the last complete message: where the generation prompt begins."""
        if not is_wanted:
            return 0
        plain = with_messages(rendering.body, rendering.body.messages, generation_prompt=False)
        return min(await self._cut_before(rendering, plain), len(rendering.tokens) - 1)

    async def _cut_before(self, rendering: _RenderedPrompt, other: bytes) -> int:
        """Return how many tokens the prompt shares with the rendering of the body *other*."""
        text, tokens, headers = rendering.text, rendering.tokens, rendering.headers
        try:
            other_text = await self._upstream.apply_template(other, headers)
        except UpstreamRefused:
            return 0
        end = common_prefix_length(text, other_text)
        tail = text[end:]
        if tail not in self._tails:
            self._tails[tail] = await self._upstream.tokenize(tail, headers, add_special=False)
        n_cut = len(tokens) - len(self._tails[tail])
        if tokens[n_cut:] == self._tails[tail]:
            return n_cut
        # A token straddles the cut: go by what the two renderings' tokens share.
        other_tokens = await self._upstream.tokenize(other_text, headers, add_special=True)
        return common_prefix_length(tokens, other_tokens)

    async def _header(self, rendering: _RenderedPrompt) -> int:
        """Return the end of tools and system prompt.

        A header alone cannot be rendered by every template (Qwen3.5's refuses), so it is what two
        renderings with different user texts share, back to the last special token: text behind that
        may merge with whatever follows.
        """
        body = rendering.body
        system = leading_system(body)
        key = _digest(b"header", rendering_key(body, system))
        if key not in self._cuts:
            try:
                self._cuts[key] = await self._shared_header(body, system, rendering.headers)
            except UpstreamRefused:
                self._cuts[key] = TokenIds("i")
        return self._remembered(key, rendering.tokens)

    async def _shared_header(
        self, body: GenerationBody, system: list[dict[str, object]], headers: Headers
    ) -> TokenIds:
        texts = await asyncio.gather(
            *(
                self._upstream.apply_template(
                    with_messages(
                        body, [*system, {"role": "user", "content": user}], generation_prompt=False
                    ),
                    headers,
                )
                for user in _OTHER_TEXTS
            )
        )
        shared = texts[0][: common_prefix_length(*texts)]
        tokens = await self._upstream.tokenize(shared, headers, add_special=True)
        return tokens[: await self._last_special_token(shared, tokens, headers)]

    async def _last_special_token(self, text: str, tokens: TokenIds, headers: Headers) -> int:
        """Return how many of *tokens* end with the last special one.

        Special is what becomes something else when special tokens are read as ordinary text.
        """
        pieces = await self._upstream.pieces(text, headers)
        for index in range(len(tokens) - 1, max(-1, len(tokens) - 1 - _SEARCHED_TOKENS), -1):
            piece = pieces[index]
            if isinstance(piece.piece, str) and len(piece.piece) > 2:
                plain = await self._upstream.tokenize(
                    piece.piece, headers, add_special=False, parse_special=False
                )
                if plain.tolist() != [piece.id]:
                    return index + 1
        return 0


def _digest(kind: bytes, data: bytes) -> bytes:
    return xxhash.xxh3_128(kind + b"\0" + data).digest()
