"""The messages of requests in all chat forms, and parsed JSON, read as llama-server reads it."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec


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
REMINDER_TAG = "<system-reminder>"
"""Agents write such a tag in front of the text that they add to the user's."""
_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)


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


def list_of(value: Any) -> list[Any]:
    """Return *value* if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def is_system(message: Any) -> bool:
    return text_of(message, "role") in SYSTEM_ROLES


def n_leading_system(messages: list[Any]) -> int:
    """Return how many system messages a conversation begins with."""
    return next((i for i, m in enumerate(messages) if not is_system(m)), len(messages))


def without_reminders(text: str) -> str:
    """Return a user's text without the reminders that agents added to it."""
    return _REMINDER.sub("", text).strip()


def has_reminder(text: str) -> bool:
    return _REMINDER.search(text) is not None


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
