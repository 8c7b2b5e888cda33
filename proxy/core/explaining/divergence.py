"""Where a prompt leaves a known one, and which change of the client, or of the template, that is.

Owns: the place and its name. What became of the states is `explain`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.core.explaining.causes import Cause, Part
from proxy.core.explaining.sketch import Difference, Sketch, compare, is_truncated
from proxy.core.explaining.text_changes import (
    are_both_billing,
    is_alike_without_reminders,
    is_billing,
    is_date,
    is_environment,
    is_reasoning_dropped,
    is_reminder,
)
from proxy.core.prefix import common_prefix_length

_LIKE_SHARE = 0.5
"""A system prompt that shares so much of its text with the old one was changed; another one is new."""
_NEAR_CHARACTERS = 65536
"""No farther behind its place is a message's text looked for in the rendered prompt."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt as far as it is known what it is made of.

    `text` is empty where it is not kept. `contents` are the texts of its messages, each as the pieces
    that a template renders; only a new prompt has them.
    """

    sketch: Sketch
    text: str = ""
    contents: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """What was changed, and where: `message` is its number, None in the tools and in bare texts.

    `at` is how many characters the texts share, None if there are no texts.
    """

    cause: Cause
    part: Part
    message: int | None = None
    at: int | None = None


@dataclass(frozen=True, slots=True)
class _Departure:
    """Where *new* leaves *old*; `is_same` says that both are of one conversation."""

    new: Seen
    old: Seen
    difference: Difference
    part: Part
    message: int | None
    at: int | None
    is_same: bool

    def is_by(self, is_such: Callable[[str, str, int], bool]) -> bool:
        """Return whether it is such a change of the text, as far as there are texts."""
        return self.at is not None and is_such(self.new.text, self.old.text, self.at)


def find_change(new: Seen, old: Seen, *, is_same_conversation: bool) -> Change:
    """Return where *new* leaves *old*, and why; the cause is first sight if that is to be expected."""
    at = common_prefix_length(new.text, old.text) if new.text and old.text else None
    if not new.sketch.messages:
        return Change(_cause_in_bare_text(new, old, at), Part.TEXT, None, at)
    difference = compare(new.sketch, old.sketch)
    place = _place(new, difference, at)
    departure = _Departure(new, old, difference, *place, at, is_same_conversation)
    return Change(_cause(departure), *place, at)


def _place(new: Seen, difference: Difference, at: int | None) -> tuple[Part, int | None]:
    """Return in which part of the new prompt the two differ first."""
    sketch, message = new.sketch, difference.message
    is_in_system = message is not None and message < sketch.n_leading_system
    if difference.in_tools and not (is_in_system and _is_in_system(new, at)):
        return Part.TOOLS, None
    rendered = _message_at(new, at)
    if message is None or (rendered is not None and rendered < message):
        message = rendered
    if message is None:
        return Part.NOWHERE, None
    return sketch.part(message), message


def _is_in_system(new: Seen, at: int | None) -> bool:
    """Return whether a place lies in the system prompt; templates have the tools before or behind it."""
    if at is None:
        return False
    begin, end = _span(new, 0)
    return begin <= at < end


def _message_at(new: Seen, at: int | None) -> int | None:
    """Return the first message that is not all before a place, None if that is not known."""
    if at is None:
        return None
    position, n_missing = 0, 0
    for index, pieces in enumerate(new.contents):
        for piece in pieces:
            # A template may leave a piece out or write it otherwise: its like is not sought to the end.
            farthest = position + len(piece) + 2 * n_missing + _NEAR_CHARACTERS
            found = new.text.find(piece, position, farthest)
            if found < 0:
                n_missing += len(piece)
                continue
            position, n_missing = found + len(piece), 0
            if position > at:
                return index
    return None


def _span(new: Seen, message: int) -> tuple[int, int]:
    """Return where a message's text begins and ends in the rendered prompt; nowhere if it is not there."""
    pieces = new.contents[message] if message < len(new.contents) else ()
    if not pieces:
        return 0, 0
    begin = new.text.find(pieces[0])
    end = new.text.find(pieces[-1], max(0, begin))
    return (begin, end + len(pieces[-1])) if begin >= 0 and end >= 0 else (0, 0)


def _cause(d: _Departure) -> Cause:
    in_header = d.part in (Part.TOOLS, Part.SYSTEM)
    if d.part is not Part.TOOLS:
        if in_header and d.is_by(is_billing if d.is_same else are_both_billing):
            return Cause.BILLING_HEADER
        if (in_header or d.is_same) and d.is_by(is_date):
            return Cause.DATE
    if d.part is Part.TOOLS:
        return _cause_in_tools(d.new.sketch, d.old.sketch, d.difference, is_same=d.is_same)
    return _cause_in_system(d) if d.part is Part.SYSTEM else _cause_in_messages(d)


def _cause_in_tools(new: Sketch, old: Sketch, difference: Difference, *, is_same: bool) -> Cause:
    if sorted(new.tools) == sorted(old.tools):
        return Cause.TOOL_ORDER
    if new.names == old.names:
        return Cause.TOOL_TEXT
    if sorted(new.names) == sorted(old.names):
        return Cause.TOOL_ORDER
    if not is_same:
        return Cause.FIRST_SIGHT
    has_other_system = difference.message is not None and difference.message < new.n_leading_system
    return Cause.NEW_HEADER if has_other_system else Cause.TOOL_LIST


def _cause_in_system(d: _Departure) -> Cause:
    if d.is_by(is_environment):
        return Cause.ENVIRONMENT
    if d.is_by(is_reminder):
        return Cause.REMINDER
    if d.at is None or _is_alike(d.new, d.old, d.at):
        return Cause.SYSTEM_TEXT if d.at is not None or d.is_same else Cause.FIRST_SIGHT
    return Cause.NEW_HEADER if d.is_same else Cause.FIRST_SIGHT


def _is_alike(new: Seen, old: Seen, at: int) -> bool:
    """Return whether most of the system prompt is as it was, before and behind the change together."""
    begin, end = _span(new, 0)
    old_end = begin + old.sketch.n_system_chars
    if not begin <= at <= min(end, old_end):
        return False
    n_behind = common_prefix_length(new.text[at:end][::-1], old.text[at:old_end][::-1])
    return at - begin + n_behind >= _LIKE_SHARE * max(end, old_end) - begin * _LIKE_SHARE


def _cause_in_messages(d: _Departure) -> Cause:
    new, old, message = d.new, d.old, d.message
    if d.part is Part.ASSISTANT and d.is_by(is_reasoning_dropped):
        return Cause.REASONING
    if message is not None and d.is_by(is_reminder):
        if d.is_same or is_alike_without_reminders(new.text, old.text, *_span(new, message)):
            return Cause.REMINDER
    if d.difference.message is None or d.difference.message != message:
        return Cause.REASONING if d.part is Part.ASSISTANT else Cause.RENDERED_OTHERWISE
    if is_truncated(new.sketch, old.sketch, message):
        return Cause.TRUNCATED_HISTORY
    is_first = message <= new.sketch.n_leading_system
    return Cause.FIRST_SIGHT if is_first and not d.is_same else Cause.EDITED_MESSAGE


def _cause_in_bare_text(new: Seen, old: Seen, at: int | None) -> Cause:
    if at is None:
        return Cause.UNKNOWN
    if is_date(new.text, old.text, at):
        return Cause.DATE
    is_edited = at >= _LIKE_SHARE * len(old.text)
    return Cause.EDITED_MESSAGE if is_edited else Cause.FIRST_SIGHT
