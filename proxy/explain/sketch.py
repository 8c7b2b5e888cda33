"""The digests of a chat request's tools and messages, and how two requests differ."""

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any, TypeAlias

import msgspec
import xxhash

from proxy.core.messages import is_system, json_of, list_of, member, text_of, without_reminders
from proxy.core.tokens import Namespace
from proxy.explain.causes import PromptPart

Digests: TypeAlias = "array[int]"
"""64-bit digests, eight bytes each."""

_PARTS = {"s": PromptPart.SYSTEM, "a": PromptPart.ASSISTANT, "t": PromptPart.TOOL_RESULT}
_LETTERS = {"system": "s", "developer": "s", "user": "u", "assistant": "a", "tool": "t"}
_LONG_BYTES = 200
_N_TITLE, _LOOKED_AT = 60, 400
"""The most characters of a title, and of the text that the title is made from."""
_BEFORE = re.compile("</(?:current_datetime|environment_context)>")
"""The end of what Copilot and codex write before the user's own words."""
_BEHIND = re.compile("<(?:environment_details|turn-context)>")
"""The beginning of what Kilo and goose write behind them."""
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line ends, changes of the writing direction, and halves of characters.

Not `isprintable`, which also refuses the joiners of emoji, the Chinese and Japanese space, and new emoji.
"""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The digests of a chat request: its tools by name and whole, and its messages in the chat form.

    `roles` has a letter for each message: s, u, a or t for system, user, assistant or tool, and A for an
    answer so long that hardly two conversations share it. A prompt without messages has an empty sketch.
    `n_system_chars` is the length of the leading system message's text. `sizes` are those of the tools,
    then of the messages, about in bytes. `tool_names` are only kept where text is kept.
    """

    names: Digests
    tools: Digests
    roles: str
    messages: Digests
    n_system_chars: int = 0
    sizes: tuple[int, ...] = ()
    tool_names: tuple[str, ...] = ()

    @property
    def n_leading_system(self) -> int:
        return len(self.roles) - len(self.roles.lstrip("s"))

    @property
    def own(self) -> Digests:
        """The digests of the messages behind the leading system messages."""
        return self.messages[self.n_leading_system :]

    def part(self, message: int) -> PromptPart:
        """Return the part of the prompt that a message belongs to."""
        return _PARTS.get(self.roles[message].lower(), PromptPart.USER)

    def conversation_keys(self, namespace: Namespace) -> Iterator[int]:
        """Yield keys that identify this conversation, the newest first.

        A key is two messages in a row, behind the leading system messages, or a long answer. Any other
        single message may occur in many conversations: a request for a title repeats the first message.
        """
        for index in range(len(self.messages) - 1, self.n_leading_system - 1, -1):
            if index > self.n_leading_system:
                yield hash((namespace, self.messages[index - 1], self.messages[index]))
            if self.roles[index] == "A":
                yield hash((namespace, self.messages[index]))


def begin_alike(new: Sketch, old: Sketch) -> bool:
    """Return whether two prompts have the same first message under about the same header.

    A request for a title repeats the first message of its conversation, but under another header.
    """
    has_same_tools = len(new.tools) > 0 and new.tools == old.tools
    header, of_old = (sketch.messages[: sketch.n_leading_system] for sketch in (new, old))
    has_same_header = len(header) > 0 and header == of_old
    return have_same_first_message(new, old) and (has_same_tools or has_same_header)


def have_same_first_message(new: Sketch, old: Sketch) -> bool:
    """Return whether the same message follows the leading system messages in both."""
    return new.own[:1] == old.own[:1]


def goes_on(new: Sketch, old: Sketch) -> bool:
    """Return whether one of two prompts begins with all tools and messages of the other."""
    return new.tools == old.tools and first_difference(new, old) is None


def first_difference(new: Sketch, old: Sketch) -> int | None:
    """Return the index of the first message that differs; None if one prompt only has more messages."""
    n_both = min(len(new.messages), len(old.messages))
    return next((i for i in range(n_both) if new.messages[i] != old.messages[i]), None)


class Cost(msgspec.Struct, frozen=True):
    """The estimated tokens of a part of a prompt: the tool called `name`, or the `message` of that number.

    `is_changed` says that the compared prompt has another part there, or none.
    """

    part: PromptPart
    n_tokens: int
    name: str = ""
    message: int | None = None
    is_changed: bool = False


def costs_of(sketch: Sketch, n_whole: int, n_tokens: int, old: Sketch, n_known: int) -> list[Cost]:
    """Return the costs of the first *n_tokens* of a prompt of *n_whole* tokens, estimated from sizes.

    The parts are compared with *old*, or with the first *n_known* tokens if *old* is the same sketch.
    """
    costs, n_before, n_tools = list[Cost](), 0.0, len(sketch.tools)
    scale = n_whole / max(1, sum(sketch.sizes))
    for index, size in enumerate(sketch.sizes):
        is_tool, n_part = index < n_tools, size * scale
        middle, n_before = n_before + n_part / 2, n_before + n_part
        if middle > n_tokens:
            break  # part of a later request
        at = index if is_tool else index - n_tools
        new, known = (sketch.tools, old.tools) if is_tool else (sketch.messages, old.messages)
        is_changed = middle > n_known if old is sketch else new[at : at + 1] != known[at : at + 1]
        name = sketch.tool_names[at] if is_tool and sketch.tool_names else ""
        part = PromptPart.TOOLS if is_tool else sketch.part(at)
        costs.append(Cost(part, round(n_part), name, None if is_tool else at, is_changed))
    return costs


def is_truncated(new: Sketch, old: Sketch, message: int) -> bool:
    """Return whether later messages of *old* occur in *new* at *message*, or soon behind it.

    Two in a row must match, because short messages repeat themselves. A summary of the messages that were
    left out may come before them.
    """
    indexes: dict[tuple[int, int], int] = {}
    for i, pair in enumerate(pairwise(old.messages[message:])):
        indexes.setdefault(pair, i)
    first = enumerate(islice(pairwise(new.messages[message:]), 3))
    return any(indexes.get(pair, i) > i for i, pair in first)


def sketch_of(fields: dict[str, Any]) -> Sketch:
    """Return the sketch of a body in the chat form; an empty one if it has no messages."""
    messages = list_of(fields.get("messages"))
    tools = list_of(fields.get("tools")) if messages else []
    names = [text_of(member(tool, "function", {}), "name") for tool in tools]
    leading = messages[0] if messages and is_system(messages[0]) else {}
    parts, encoded = [_part(message) for message in messages], list(map(msgspec.json.encode, tools))
    return Sketch(
        array("Q", [xxhash.xxh3_64_intdigest(name.encode()) for name in names]),
        array("Q", list(map(xxhash.xxh3_64_intdigest, encoded))),
        "".join(letter for letter, _, _ in parts),
        array("Q", [digest for _, digest, _ in parts]),
        sum(len(piece) for piece in _texts(leading.get("content"))),
        (*map(len, encoded), *(size for _, _, size in parts)),
        tuple(names),
    )


def _part(message: dict[str, Any]) -> tuple[str, int, int]:
    """Return the letter, the digest and the size of a message, without the bytes of its images."""
    letter, encoded = _LETTERS.get(text_of(message, "role"), "u"), json_of(message)
    letter = "A" if letter == "a" and len(encoded) > _LONG_BYTES else letter
    parts = list_of(message.get("content"))
    media = (member(part, "image_url", member(part, "input_audio")) for part in parts)
    n_media = sum(len(text_of(each, "url") + text_of(each, "data")) for each in media)
    return letter, xxhash.xxh3_64_intdigest(encoded), len(encoded) - n_media


def words_of(fields: dict[str, Any]) -> str:
    """Return a conversation's first words on one line: from the first user message, or from the prompt."""
    users = (m for m in list_of(fields.get("messages")) if text_of(m, "role") == "user")
    texts = (without_reminders(" ".join(_texts(m.get("content")))) for m in users)
    own = (_BEHIND.split(_BEFORE.split(text)[-1], 1)[0].strip() for text in texts)
    text = next(filter(None, own), "") or text_of(fields, "prompt")
    words = " ".join("".join(c if c.isprintable() else " " for c in text[:_LOOKED_AT]).split())
    # `opencode run` puts them between quotation marks.
    return shortened(words.strip('"') if words[:1] == words[-1:] == '"' else words, _N_TITLE)


def said_in(fields: dict[str, Any]) -> str:
    """Return all texts of the messages, in the form that `words_of` gives."""
    texts = chain.from_iterable(_texts(m.get("content")) for m in list_of(fields.get("messages")))
    return " ".join(" ".join(texts).split())


def visible(text: str) -> str:
    """Return a text without characters that change what a terminal does."""
    return _CONTROLS.sub("�", text)


def shortened(text: str, n_characters: int) -> str:
    """Return a text as `visible` does, cut off if it is longer than *n_characters*."""
    shown = visible(text[: n_characters + 1])
    return shown if len(shown) <= n_characters else shown[: n_characters - 1].rstrip() + "…"


def pieces_of(message: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a message, as templates write them."""
    if reasoning := text_of(message, "reasoning_content").strip():
        yield reasoning
    yield from _texts(message.get("content"))
    for call in list_of(message.get("tool_calls")):
        if name := text_of(member(call, "function", {}), "name"):
            yield name


def _texts(content: Any) -> Iterator[str]:
    parts = list_of(content)
    texts = [content] if isinstance(content, str) else [text_of(part, "text") for part in parts]
    yield from (text.strip() for text in texts if text.strip())
