"""What a prompt is made of, as digests: enough to tell where two of them differ, and not what they say.

Owns: the comparison. Must never know how a body is read.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from proxy.core.explaining.causes import Part

if TYPE_CHECKING:
    Digests: TypeAlias = array[int]
else:
    Digests = array

_PARTS = {
    "s": Part.SYSTEM,
    "u": Part.USER,
    "a": Part.ASSISTANT,
    "t": Part.TOOL_RESULT,
}


_N_MARKED = 12


def digests(values: "list[int]") -> Digests:
    """Return 64-bit digests, eight bytes each."""
    return array("Q", values)


@dataclass(frozen=True, slots=True)
class Sketch:
    """A chat request: its tools by name and whole, and its messages, whole, in the chat form.

    `roles` has a letter for each message: system, user, assistant or tool; A is an answer so long that
    hardly two conversations have it. A prompt without messages has an empty sketch. `n_system_chars` is
    the length of the leading system message's text.
    """

    names: Digests
    tools: Digests
    roles: str
    messages: Digests
    n_system_chars: int = 0

    @property
    def size_bytes(self) -> int:
        return 8 * (2 * len(self.tools) + len(self.messages)) + len(self.roles) + 400

    @property
    def n_leading_system(self) -> int:
        return len(self.roles) - len(self.roles.lstrip("s"))

    def part(self, message: int) -> Part:
        """Return what part of a prompt a message is."""
        return _PARTS.get(self.roles[message].lower(), Part.USER)

    def marks(self) -> Iterator[tuple[int, int]]:
        """Yield what tells a conversation from others, the newest first.

        That is two messages in a row, behind the leading system ones, or a long answer. Any other single
        message may be said in many: the first one goes to whoever finds a title for it, too. The last few
        are enough: earlier requests of the conversation ended with the ones before them.
        """
        first, n_messages = self.n_leading_system, len(self.messages)
        for index in range(n_messages - 1, max(first, n_messages - _N_MARKED) - 1, -1):
            if index > first:
                yield self.messages[index - 1], self.messages[index]
            if self.roles[index] == "A":
                yield 0, self.messages[index]


EMPTY = Sketch(digests([]), digests([]), "", digests([]))


def begin_alike(new: Sketch, old: Sketch) -> bool:
    """Return whether two prompts begin with the same user message under about the same header.

    Whoever finds a title for a conversation is sent that message, too, but is told something else.
    """
    if not have_same_first_message(new, old):
        return False
    first, before = new.n_leading_system, old.n_leading_system
    has_same_tools = len(new.tools) > 0 and new.tools == old.tools
    return has_same_tools or (first > 0 and new.messages[:first] == old.messages[:before])


def have_same_first_message(new: Sketch, old: Sketch) -> bool:
    """Return whether what follows the leading system messages is the same message in both."""
    first, before = new.n_leading_system, old.n_leading_system
    return new.messages[first : first + 1] == old.messages[before : before + 1]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two sketches differ first, if they do: in the tools, and at which message.

    `message` is None if all that both have is the same, so that one goes on from the other.
    """

    in_tools: bool
    message: int | None

    @property
    def is_none(self) -> bool:
        return not self.in_tools and self.message is None


def compare(new: Sketch, old: Sketch) -> Difference:
    """Return where two prompts differ first."""
    n_both = min(len(new.messages), len(old.messages))
    message = next((i for i in range(n_both) if new.messages[i] != old.messages[i]), None)
    return Difference(new.tools != old.tools, message)


def is_truncated(new: Sketch, old: Sketch, message: int) -> bool:
    """Return whether *new* goes on from *message*, or soon after it, with later messages of *old*.

    Two of them in a row must be there: short ones repeat themselves. Right after *message* there may be a
    summary of what was left out.
    """
    places: dict[tuple[int, int], int] = {}
    for index in range(message, len(old.messages) - 1):
        places.setdefault((old.messages[index], old.messages[index + 1]), index)
    last = min(message + 3, len(new.messages) - 1)
    pairs = ((i, (new.messages[i], new.messages[i + 1])) for i in range(message, last))
    return any(places.get(pair, i) > i for i, pair in pairs)
