"""Where a new prompt first differs from a known one, and which change by client or template caused that.

Prompts are compared twice. Their sketches (digests of tools and messages) tell which message differs. Their
texts, where they are kept, tell which words differ. States are not looked at here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from proxy.core.messages import ID, list_of, without_reminders
from proxy.core.tokens import common_prefix_length
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.sketch import Sketch, first_difference, is_truncated, pieces_of, sketch_of

HEADER = (PromptPart.TOOLS, PromptPart.SYSTEM)
"""The parts that conversations share."""
_ALIKE_SHARE = 0.5
"""A system prompt that shares this much of its text with the old one was changed; any other one is new."""
_SHOWN_CHARACTERS = 80
"""About 20 tokens."""
_NEAR_CHARACTERS = 65536
"""A message's text is searched for at most this far behind the message before it."""


@dataclass
class Rendering:
    """A chat request, and the text of its rendered prompt, which is empty if it is not kept."""

    fields: dict[str, Any]
    text: str = ""

    @cached_property
    def sketch(self) -> Sketch:
        sketch = sketch_of(self.fields)
        return sketch if self.text else replace(sketch, tool_names=())

    def reduce(self) -> None:
        """Keep the sketch in place of the request."""
        self.sketch, self.fields = self.sketch, {}

    def contents(self, message: int) -> list[str]:
        """Return the pieces of a message's text that a template renders; none once reduced."""
        messages = list_of(self.fields.get("messages"))
        return list(pieces_of(messages[message])) if messages else []

    def message_at(self, at: int) -> int | None:
        """Return the first message that ends behind *at*; None if that is not known."""
        position, n_missing = 0, 0
        for index in range(len(self.sketch.messages)):
            for piece in self.contents(index):
                # Templates leave out or change some pieces: do not search the whole prompt for these.
                farthest = position + len(piece) + 2 * n_missing + _NEAR_CHARACTERS
                found = self.text.find(piece, position, farthest)
                if found < 0:
                    n_missing += len(piece)
                    continue
                position, n_missing = found + len(piece), 0
                if position > at:
                    return index
        return None

    def span(self, message: int) -> tuple[int, int]:
        """Return where a message begins and ends in the text; 0 and 0 if it is not found."""
        pieces = self.contents(message)
        if not pieces:
            return 0, 0
        begin = self.text.find(pieces[0])
        end = self.text.find(pieces[-1], max(0, begin))
        return (begin, end + len(pieces[-1])) if begin >= 0 and end >= 0 else (0, 0)


class Divergence(msgspec.Struct, frozen=True):
    """Where two prompts differ first: `before` is the same in both, then follow `known` and `now`.

    `message` is the message's number; None in the tools and in texts without messages. The texts are about
    20 tokens long, and empty unless explain_keep is text.
    """

    part: PromptPart = PromptPart.NOWHERE
    message: int | None = None
    before: str = ""
    known: str = ""
    now: str = ""


Change: TypeAlias = tuple[Cause, Divergence]
"""Why and where a prompt differs from a known one."""


class _Pair:
    """A new and a known prompt, whether they are of one conversation, and where they differ first.

    Their texts differ at character `at`; None if they are not kept. `differing` is the first message that
    the client changed, `message` the first one that is rendered differently, `part` the part it is in.
    """

    def __init__(self, new: Rendering, old: Rendering, *, is_same: bool) -> None:
        self.new, self.old, self.is_same = new, old, is_same
        self.at = common_prefix_length(new.text, old.text) if new.text and old.text else None
        self.differing = first_difference(new.sketch, old.sketch)
        self.part, self.message = self._place()

    def _place(self) -> tuple[PromptPart, int | None]:
        if not self.new.sketch.messages:
            return PromptPart.TEXT, None
        if self.new.sketch.tools != self.old.sketch.tools and not self._is_in_system():
            return PromptPart.TOOLS, None
        rendered = None if self.at is None else self.new.message_at(self.at)
        messages = [message for message in (self.differing, rendered) if message is not None]
        if not messages:
            return PromptPart.NOWHERE, None
        return self.new.sketch.part(min(messages)), min(messages)

    def _is_in_system(self) -> bool:
        """Return whether the system prompt differs first; templates put tools before or behind it."""
        if self.at is None or self.differing is None:
            return False
        begin, end = self.new.span(0)
        return self.differing < self.new.sketch.n_leading_system and begin <= self.at < end

    def is_by(self, is_such: Callable[[str, str, int], bool]) -> bool:
        """Return whether *is_such* holds for the texts; False if they are not kept."""
        return self.at is not None and is_such(self.new.text, self.old.text, self.at)


def find_change(new: Rendering, old: Rendering, *, is_same: bool) -> Change:
    """Return why and where *new* differs from *old*; the cause is first sight if that is expected."""
    pair = _Pair(new, old, is_same=is_same)
    cause, place, at = _cause(pair), (pair.part, pair.message), pair.at
    if at is None:
        return cause, Divergence(*place)
    before, end = new.text[max(0, at - _SHOWN_CHARACTERS) : at], at + _SHOWN_CHARACTERS
    return cause, Divergence(*place, before, old.text[at:end], new.text[at:end])


def _cause(pair: _Pair) -> Cause:
    if pair.part is PromptPart.TEXT:
        return _cause_in_bare_text(pair)
    in_header = pair.part in HEADER
    if pair.part is PromptPart.TOOLS and not pair.is_by(is_id):
        return _cause_in_tools(pair)
    # The second at which another session began names that session.
    if (pair.is_same or (in_header and not pair.is_by(is_id))) and pair.is_by(is_date):
        return Cause.DATE
    if (in_header or pair.is_same or pair.is_by(is_reminder)) and pair.is_by(is_id):
        return Cause.SESSION
    return _cause_in_system(pair) if in_header else _cause_in_messages(pair)


def _cause_in_tools(pair: _Pair) -> Cause:
    new, old = pair.new.sketch, pair.old.sketch
    if sorted(new.names) == sorted(old.names):
        return Cause.TOOL_TEXT if new.names == old.names else Cause.TOOL_ORDER
    has_other_system = pair.differing is not None and pair.differing < new.n_leading_system
    if not pair.is_same or (has_other_system and len(new.own) == 1):
        return Cause.FIRST_SIGHT  # another agent, though perhaps with the same question
    return Cause.SYSTEM_TEXT if has_other_system else Cause.TOOL_LIST


def _cause_in_system(pair: _Pair) -> Cause:
    # Another agent may be asked the same question, but has no history.
    goes_on = pair.is_same and (pair.at is None or len(pair.new.sketch.own) > 1)
    is_alike = pair.at is not None and _is_system_alike(pair.new, pair.old, pair.at)
    return Cause.SYSTEM_TEXT if goes_on or is_alike else Cause.FIRST_SIGHT


def _is_system_alike(new: Rendering, old: Rendering, at: int) -> bool:
    """Return whether most of the system prompt, before and behind the change together, is the same."""
    begin, end = new.span(0)
    old_end = begin + old.sketch.n_system_chars
    if not begin <= at <= min(end, old_end):
        return False
    n_behind = common_prefix_length(new.text[at:end][::-1], old.text[at:old_end][::-1])
    return at - begin + n_behind >= _ALIKE_SHARE * (max(end, old_end) - begin)


def _cause_in_messages(pair: _Pair) -> Cause:
    new, old, message = pair.new, pair.old, pair.message
    if pair.part is PromptPart.ASSISTANT and pair.is_by(is_reasoning_dropped):
        return Cause.REASONING
    if message is not None and pair.is_by(is_reminder):
        if pair.is_same or is_alike_without_reminders(new.text, old.text, *new.span(message)):
            return Cause.DATE if pair.is_by(is_date) else Cause.REMINDER
    if message is None or message != pair.differing:
        return Cause.REASONING if pair.part is PromptPart.ASSISTANT else Cause.RENDERED_OTHERWISE
    if is_truncated(new.sketch, old.sketch, message):
        return Cause.TRUNCATED_HISTORY
    is_first = message <= new.sketch.n_leading_system
    return Cause.FIRST_SIGHT if is_first and not pair.is_same else Cause.EDITED_MESSAGE


def _cause_in_bare_text(pair: _Pair) -> Cause:
    if pair.at is None:
        return Cause.UNKNOWN
    if pair.is_by(is_date):
        return Cause.DATE
    is_alike = pair.at >= _ALIKE_SHARE * len(pair.old.text)
    return Cause.EDITED_MESSAGE if is_alike else Cause.FIRST_SIGHT


# How each kind of change is recognized in two texts that share their first *at* characters.

_NEAR_DATE = 64
"""A date or an id is searched for this far before and behind the change."""
_SAME_BEHIND_DATE = 8
"""How many characters behind a changed date or id must be the same."""

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_ITEM = "|".join(
    (
        r"\d{4}[-/]\d{1,2}[-/]\d{1,2}(?:T[\d:.]+)?",
        r"\d{1,2}[./]\d{1,2}[./]\d{2,4}",
        r"\d{1,2}:\d{2}(?::\d{2})?(?:[.,]\d+)?",
        rf"{_MONTH}\s+{_DAY}(?:,?\s+\d{{4}})?",
        rf"{_DAY}\s+{_MONTH}(?:,?\s+\d{{4}})?",
        r"(?:Mon|Tue|Tues|Wed|Wednes|Thu|Thur|Thurs|Fri|Sat|Satur|Sun)(?:day)?\b",
        r"\b1\d{9}(?:\d{3})?\b",
        r"(?<=\d)\s?(?:[AaPp]\.?[Mm]\b\.?|Z\b|UTC|GMT|[A-Z]{3,4}\b|[+-]\d{2}:?\d{2})",
        r"\b20\d{2}\b",
    )
)
_DATE = re.compile(rf"(?:{_ITEM})(?:(?:[\s,(—–-]|\(\d\)|\bat\b){{0,4}}(?:{_ITEM}))*")


class _TextBlock(NamedTuple):
    """A kind of text block, by the tags that open and close it."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]

    def holds(self, text: str, at: int) -> bool:
        """Return whether a block that was opened before *at* is still open there."""
        opened = max(text.rfind(tag, 0, at) for tag in self.opens)
        return opened > max(text.rfind(tag, 0, at) for tag in self.closes)

    def is_at(self, text: str, at: int) -> bool:
        """Return whether *at* lies in a block, in its opening tag, or in white space before the tag."""
        longest = max(map(len, self.opens))
        begin, end = max(0, at - longest), at + longest + 4
        found = [text.find(tag, begin, end) for tag in self.opens]
        begins = any(0 <= tag_at <= at + 4 and not text[at:tag_at].strip() for tag_at in found)
        return begins or self.holds(text, at)


_REMINDER = _TextBlock(("<system-reminder>",), ("</system-reminder>",))
_REASONING = _TextBlock(
    ("<think>", "<|channel|>analysis", "[THINK]", "<seed:think>", "<reasoning>"),
    ("</think>", "<|end|>", "[/THINK]", "</seed:think>", "</reasoning>"),
)


def _is_changed(kind: re.Pattern[str], new: str, old: str, at: int) -> bool:
    """Return whether both texts have such words there, and the same text behind them."""
    behind = _behind(kind, new, at)
    return behind is not None and behind == _behind(kind, old, at)


def _behind(kind: re.Pattern[str], text: str, at: int) -> str | None:
    for found in kind.finditer(text, max(0, at - _NEAR_DATE), at + _NEAR_DATE):
        if found.start() <= at <= found.end():
            return text[found.end() : found.end() + _SAME_BEHIND_DATE]
    return None


is_date, is_id = partial(_is_changed, _DATE), partial(_is_changed, ID)


def is_reminder(new: str, old: str, at: int) -> bool:
    """Return whether the texts differ in a reminder, or only one of them has a reminder there."""
    return _REMINDER.is_at(new, at) or _REMINDER.is_at(old, at)


def is_alike_without_reminders(new: str, old: str, begin: int, end: int) -> bool:
    """Return whether *new* from *begin* to *end* also stands in *old*, apart from reminders and spaces."""
    now, before = ("".join(without_reminders(t).split()) for t in (new[begin:end], old[begin:]))
    return bool(now) and before.startswith(now)


def is_reasoning_dropped(new: str, old: str, at: int) -> bool:
    """Return whether the old text has reasoning there, and the new one has none."""
    is_kept = _REASONING.is_at(new, at) and not _REASONING.holds(old, at)
    return _REASONING.is_at(old, at) and not is_kept
