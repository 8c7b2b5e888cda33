"""What stabilizers are worth: how much more of a request begins like an earlier one than without them.

Counted in characters of what templates render (tools, system prompt, messages), for a client's own
requests are never rendered. A request as it came is held against earlier ones as they came, and as it was
sent against earlier ones as they were sent; where the former parts from all of them tells which
stabilizer was needed. Reasoning that templates drop is not seen here.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import xxhash

from proxy.stabilize.messages import list_name, messages_of, system_field, tools_of
from proxy.stabilize.model import Form, Json, Stabilized
from proxy.stabilize.names import Name
from proxy.stabilize.shortening import rendered_text

_MAX_BEGINNINGS = 1 << 16

Rendered = dict[int, list[str]]
"""The texts of messages, by their identity."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tool, or one text of the system prompt or of a message; `holder` is where it stands in the body."""

    holder: str
    text: str


class Beginnings:
    """Remembers how earlier requests began, by digests."""

    def __init__(self, max_beginnings: int = _MAX_BEGINNINGS) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._max_beginnings = max_beginnings

    def enter(self, owner: bytes, pieces: list[Piece]) -> int:
        """Return how many of the first pieces an earlier request of the owner began with; remember all."""
        digest, n_known, is_known = owner, 0, True
        for piece in pieces:
            digest = xxhash.xxh3_128_digest(digest + piece.text.encode())
            is_known = is_known and digest in self._known
            n_known += is_known
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > self._max_beginnings:
            self._known.popitem(last=False)
        return n_known


class Effect:
    """Tells of each request what its stabilizers were worth; each is told once, in order."""

    def __init__(self) -> None:
        self._as_they_came = Beginnings()
        self._as_they_were_sent = Beginnings()

    def of(
        self, form: Form, came: Json, stabilized: Stabilized, tenant: str
    ) -> tuple[Name, int] | None:
        """Return which stabilizer was needed, and for how many characters; None if none was.

        Raises UnknownShape.
        """
        owner = f"{form} {tenant}".encode()
        rendered: Rendered = {}
        raw = list(_pieces(form, came, rendered))
        is_same = stabilized.body is came
        sent = raw if is_same else list(_pieces(form, stabilized.body, rendered))
        n_raw = self._as_they_came.enter(owner, raw)
        n_sent = self._as_they_were_sent.enter(owner, sent)
        n_more = _length(sent[:n_sent]) - _length(raw[:n_raw])
        if n_more <= 0 or n_raw == len(raw):
            return None
        needed = _stabilizer_at(raw[n_raw].holder, stabilized)
        return None if needed is None else (needed, n_more)


def _stabilizer_at(holder: str, stabilized: Stabilized) -> Name | None:
    """Return the first stabilizer that changed a place, or else the first that changed a message."""
    places = (holder, holder.partition("[")[0])  # of some, the whole list is changed
    names = [c.stabilizer for c in stabilized.changes if _holder_of(c.path) in places]
    others = [c.stabilizer for c in stabilized.changes if not c.path.endswith("cache_control")]
    return next(iter([*names, *others]), None)


def _holder_of(path: str) -> str:
    """Return the tool, message or system prompt that a path leads into."""
    head, bracket, rest = path.partition("[")
    is_listed = bracket and head not in ("system", "instructions")
    return f"{head}[{rest.partition(']')[0]}]" if is_listed else head.partition(".")[0]


def _pieces(form: Form, body: Json, rendered: Rendered) -> Iterator[Piece]:
    for i, tool in enumerate(tools_of(body)):
        known = {key: value for key, value in tool.items() if key != "cache_control"}
        yield Piece(f"tools[{i}]", msgspec.json.encode(known).decode())
    name = system_field(form)
    if name is not None:
        yield from (Piece(name, text) for text in _texts(body.get(name)))
    for i, message in enumerate(messages_of(form, body)):
        holder = f"{list_name(form)}[{i}]"
        if id(message) not in rendered:  # a rewritten body shares the messages that it leaves alone
            rendered[id(message)] = _message_texts(message)
        yield from (Piece(holder, text) for text in rendered[id(message)])


def _message_texts(message: Json) -> list[str]:
    rest = rendered_text({key: v for key, v in message.items() if key != "content"})
    texts = [str(message.get("role") or message.get("type")), *_texts(message.get("content"))]
    return [*texts, rest] if rest else texts


def _texts(content: object) -> Iterator[str]:
    """Yield what is rendered of each part; a text alone is the same as a list with it."""
    for part in content if isinstance(content, list) else [content]:
        if text := rendered_text(part):
            yield text


def _length(pieces: list[Piece]) -> int:
    return sum(len(piece.text) for piece in pieces)
