"""Sketches of chat bodies: what their prompts are made of."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec
import xxhash

from proxy.core.explaining.sketch import EMPTY, Sketch, digests
from proxy.upstream.bodies import SYSTEM_ROLES, GenerationBody
from proxy.upstream.json_values import list_of, member, text_of

_LETTERS = {"system": "s", "developer": "s", "user": "u", "assistant": "a", "tool": "t"}
_SEEDS = {role: seed for seed, role in enumerate(_LETTERS, 1)}
_LONG_BYTES = 200


def sketch_of(body: GenerationBody) -> Sketch:
    """Return the sketch of a body in the chat form; an empty one if it has no messages."""
    messages = body.fields.get("messages")
    if not isinstance(messages, list):
        return EMPTY
    tools = list_of(body.fields.get("tools"))
    names = [text_of(member(tool, "function", {}), "name") for tool in tools]
    leading = messages[0] if messages and messages[0].get("role") in SYSTEM_ROLES else {}
    parts = [_part(message) for message in messages]
    return Sketch(
        digests([xxhash.xxh3_64_intdigest(name.encode()) for name in names]),
        digests([_digest(tool) for tool in tools]),
        "".join(letter for letter, _ in parts),
        digests([digest for _, digest in parts]),
        sum(len(piece) for piece in _texts(leading.get("content"))),
    )


def _part(message: dict[str, Any]) -> tuple[str, int]:
    """Return the letter and the digest of a message."""
    role, content = text_of(message, "role"), message.get("content")
    if len(message) == 2 and role in _SEEDS and isinstance(content, str):
        # Most messages are no more than that, and to encode them would take as long as all the rest.
        size_bytes, digest = len(content), xxhash.xxh3_64_intdigest(content.encode(), _SEEDS[role])
    else:
        encoded = msgspec.json.encode(message)
        size_bytes, digest = len(encoded), xxhash.xxh3_64_intdigest(encoded)
    letter = _LETTERS.get(role, "u")
    return "A" if letter == "a" and size_bytes > _LONG_BYTES else letter, digest


class Contents(Sequence[list[str]]):
    """The texts of each message of a body in the chat form, as templates write them; read when asked."""

    def __init__(self, body: GenerationBody) -> None:
        self._messages = list_of(body.fields.get("messages"))

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> list[str]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[str]]: ...

    def __getitem__(self, index: int | slice) -> list[str] | list[list[str]]:
        if isinstance(index, slice):
            return [list(_pieces(message)) for message in self._messages[index]]
        return list(_pieces(self._messages[index]))


def _pieces(message: dict[str, Any]) -> Iterator[str]:
    if reasoning := text_of(message, "reasoning_content").strip():
        yield reasoning
    yield from _texts(message.get("content"))
    for call in list_of(message.get("tool_calls")):
        if name := text_of(member(call, "function", {}), "name"):
            yield name


def _texts(content: Any) -> Iterator[str]:
    texts = (
        [content] if isinstance(content, str) else [text_of(p, "text") for p in list_of(content)]
    )
    yield from (text.strip() for text in texts if text.strip())


def _digest(value: Any) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(value))
