"""The messages of requests in all chat forms, and parsed JSON, read as llama-server reads it."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from proxy.core.tokens import common_prefix_length


class Route(StrEnum):
    """The kinds of generation routes: the form of the prompt, and whether the proxy can choose the slot."""

    CHAT = "chat"
    COMPLETION = "completion"
    MESSAGES = "messages"
    """Anthropic's Messages; llama-server drops id_slot and chooses the slot itself."""
    RESPONSES = "responses"
    """OpenAI's Responses; honours id_slot."""
    PINNED = "pinned"
    """Honours id_slot; its prompt is not read (yet)."""
    UNPINNED = "unpinned"
    """llama-server never reads id_slot and chooses the slot itself."""


CONVERSATIONS = (Route.CHAT, Route.MESSAGES, Route.RESPONSES)
"""The routes whose bodies hold a conversation."""
SYSTEM_ROLES = ("system", "developer")
REMINDER_TAG, _REMINDER_END = "<system-reminder>", "</system-reminder>"
"""Agents write such tags around the text that they add to the user's."""
_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)
ID = re.compile(
    r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|(?<=tmp)[._]?\w{6,}"
    r"|(?<![A-Za-z0-9])(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{8,}(?![A-Za-z0-9])"
    r"|(?<=_ID: )[\w-]+|\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z| [AP]M)?"
)
"""A name of a session, a run or a temporary file: a UUID, letters and digits without a meaning, what is
called an ID, or the second at which the session began."""


def object_in(raw: bytes | str) -> dict[str, Any] | None:
    """Return a text parsed as a JSON object; None if it is anything else, or nested too deeply."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None


def member(value: Any, key: str, default: Any = None) -> Any:
    """Return a member of an object; null counts as absent, and anything else has no members.

    The functions here follow json_value in tools/server/server-common.h: a value of the wrong type
    counts as the default.
    """
    found = value.get(key) if isinstance(value, dict) else None
    return default if found is None else found


def text_of(value: Any, key: str) -> str:
    """Return a member that is a string; empty if it is none."""
    found = member(value, key)
    return found if isinstance(found, str) else ""


def error_text(content: Any) -> str:
    """Return the message of llama-server's error, or of llama-swap's, which is a text itself."""
    error = member(content, "error")
    return error if isinstance(error, str) and "src" in content else text_of(error, "message")


def list_of(value: Any) -> list[Any]:
    """Return *value* if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def json_of(message: dict[str, Any], encoded: bytes = b"") -> bytes:
    """Return a message as JSON, where a list of one text counts as that text; it may be *encoded* already.

    Claude Code sends its newest text as a list, with a mark for caching, and later as a string.
    """
    match message.get("content"):
        case [{"type": "text", "text": str(text), **rest}] if not rest:
            return msgspec.json.encode({**message, "content": text})
    return encoded or msgspec.json.encode(message)


def is_system(message: Any) -> bool:
    return member(message, "role") in SYSTEM_ROLES


def n_leading_system(messages: list[Any]) -> int:
    """Return how many system messages a conversation begins with."""
    return next((i for i, m in enumerate(messages) if not is_system(m)), len(messages))


def without_reminders(text: str) -> str:
    """Return a user's text without the reminders that agents added to it."""
    text = text.replace("system_reminder>", "system-reminder>")  # crush writes it so
    # Behind the last end every tag would be a search to the end of the text.
    head, end, rest = text.rpartition(_REMINDER_END)
    return (_REMINDER.sub("", head + end) + rest).strip()


def has_reminder(text: str) -> bool:
    return _REMINDER_END in text.partition(REMINDER_TAG)[2]


DIGEST_BYTES = 8
BYTES_PER_TOKEN = 4
"""A message as JSON has about so many bytes for each token."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Digests, roles and sizes of everything in a chat request that its prompt is rendered from.

    `digests` has eight bytes for everything but the messages, then eight for each message. So a
    conversation continues another one if its digests begin with the digests of the other. `sizes_bytes`
    are the sizes of the messages as JSON.
    """

    digests: bytes
    roles: tuple[str, ...]
    sizes_bytes: tuple[int, ...]

    def n_behind(self, earlier: bytes) -> int:
        """Return how many messages follow those of the *earlier* digests; 0 if these are not continued."""
        is_longer = earlier and self.digests.startswith(earlier)
        return (len(self.digests) - len(earlier)) // DIGEST_BYTES if is_longer else 0


def count_messages(digests: bytes) -> int:
    """Return how many messages the digests of a Conversation stand for; 0 if there are none."""
    return max(0, len(digests) // DIGEST_BYTES - 1)


# The kind of each request, by the messages of earlier requests. Clients ask for titles and summaries unseen
# by their users, and shorten conversations: such a request may look like a miss.


class Kind(StrEnum):
    """The role of a request in its conversation; empty if no messages of the request were read."""

    NONE = ""
    FIRST = "first"
    USER_TURN = "user turn"
    TOOL_TURN = "tool round trip"
    REWRITE = "rewritten history"
    COMPACTION = "compaction"
    SIDE = "side call"
    RETRY = "retry"
    AHEAD = "evaluated ahead"


_MIN_QUOTED = 12
"""Fewer characters may stand in two conversations by chance."""


class Chat(NamedTuple):
    """The features of a chat request that tell its kind.

    `asker` are its model and its client's key, and the session. `header` has the digests of everything
    before the first message that is not a system message, `own` those of the messages from there on, with
    the `roles`. `words` are the user's first words, empty if text is not kept.
    """

    asker: tuple[bytes, str]
    header: bytes
    own: bytes
    roles: tuple[str, ...]
    has_tools: bool = False
    kind: Kind = Kind.FIRST
    words: str = ""


def chat_asked(asker: tuple[bytes, str], conversation: Conversation, *, has_tools: bool) -> Chat:
    """Return a chat request without its kind and its words."""
    roles, parts = conversation.roles, conversation.digests
    n_system = next((i for i, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    n_header = (1 + n_system) * DIGEST_BYTES
    return Chat(asker, parts[:n_header], parts[n_header:], roles[n_system:], has_tools)


def kind_of(new: Chat, earlier: Iterable[Chat], text: Callable[[], str] = str) -> Kind:
    """Return the kind of a request, given *earlier* requests, the newest first.

    *text* returns all the text of a request without tools; it is empty if text is not kept.

    1. It begins with all messages of an earlier request: its last message tells, or it is a retry.
    2. It begins like an earlier request, then differs: the history was rewritten, or a side call asks about
       the conversation under another header.
    3. It has later messages of an earlier request: the conversation was compacted if they stand nearer to
       the front, else the history was rewritten. Or it has the session of an earlier request, or quotes its
       first words: it is a side call, or, much shorter in the same session, a compaction.
    """
    others = [old for old in earlier if old.asker[0] == new.asker[0] and old.own]
    n_common, nearest, first = 0, None, new.own[:DIGEST_BYTES]
    for old in others:
        if not old.own.startswith(first) or len(old.own) <= n_common * DIGEST_BYTES:
            continue
        if (n_same := common_prefix_length(new.own, old.own) // DIGEST_BYTES) > n_common:
            n_common, nearest = n_same, old
    if nearest is not None and n_common == len(nearest.roles):
        return _going_on(new, nearest)
    if nearest is not None:
        has_history = "assistant" in new.roles  # else it begins with what a client puts first
        return Kind.SIDE if _is_aside(new, nearest) else Kind.REWRITE if has_history else Kind.FIRST
    starts = range(0, min(3 * DIGEST_BYTES, len(new.own) - DIGEST_BYTES), DIGEST_BYTES)
    pairs = {at: new.own[at : at + 2 * DIGEST_BYTES] for at in starts}
    places = [(old.own.find(pair), at) for at, pair in pairs.items() for old in others]
    if repeated := [place > at for place, at in places if place >= 0]:
        return Kind.COMPACTION if any(repeated) else Kind.REWRITE
    session = [old for old in others if old.asker == new.asker and new.asker[1]]
    if not session and (said := text()):  # a title is asked for with the words that it is for
        session = [o for o in others if len(o.words) >= _MIN_QUOTED and o.words in said]
    alike = next((old for old in session if old.header == new.header), None)
    # goose asks for a title before anything else: nothing tells that such a request is a side call.
    if any(_is_aside(new, old) for old in session) or (alike and alike.kind is Kind.SIDE):
        return Kind.SIDE
    # Whoever has another session has begun another conversation, with these words by chance.
    n_before = len(alike.roles) if alike and alike.asker == new.asker else 0
    return Kind.COMPACTION if n_before >= max(3, 2 * len(new.roles)) else Kind.FIRST


def _is_aside(new: Chat, old: Chat) -> bool:
    """Return whether a request has another header and lacks the tools of the other request."""
    return new.header != old.header and old.has_tools and not new.has_tools


def _going_on(new: Chat, old: Chat) -> Kind:
    """Return the kind of a request that begins with all messages of the *old* one."""
    added = [role for role in new.roles[len(old.roles) :] if role not in SYSTEM_ROLES]
    is_same_system = new.header[DIGEST_BYTES:] == old.header[DIGEST_BYTES:]
    # crush asks for a summary behind the whole conversation, under another system prompt. An agent's last
    # step may have no tools, either.
    if _is_aside(new, old) and not (is_same_system and len(old.roles) > 1):
        return Kind.SIDE
    if not added and len(old.roles) == 1 and new.header != old.header:
        return Kind.FIRST  # the same words begin another conversation
    if not added or added[-1] == "assistant":
        return Kind.RETRY
    return Kind.TOOL_TURN if added[-1] == "tool" else Kind.USER_TURN
