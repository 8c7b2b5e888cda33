"""What kind of text two prompts part in: known things that clients change in what they have sent before.

Owns: how each is recognized. All functions take the two texts and `at`, the number of characters that they
share at their beginning.
"""

import re

_BILLING = "x-anthropic-billing-header"
_NEAR = 64
"""So many characters before and behind the place a date is looked for."""
_LONG_LINE = 500
"""No more of a line is looked at before and behind a place."""
_GOES_ON = 8
"""So many characters behind a changed date must be the same again."""

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_ITEMS = (
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
_ITEM = "|".join(_ITEMS)
_DATE = re.compile(rf"(?:{_ITEM})(?:(?:[\s,]|\bat\b){{0,4}}(?:{_ITEM}))*")

_ENVIRONMENT_OPENS = (
    *("<env>", "<environment>", "<environment_context>", "<environment_details>"),
    *("# Environment", "gitStatus:", "useful information about the environment"),
)
_ENVIRONMENT_ENDS = ("</env", "\n# ")
_ENVIRONMENT_LINE = re.compile(
    r"\W*(?:primary |current )?(?:working directory|cwd|platform|os version|operating system|shell|"
    r"is directory a git repo|current branch|git status|recent commits)\b",
    re.IGNORECASE,
)
_REMINDER_OPENS, _REMINDER_ENDS = ("<system-reminder>",), ("</system-reminder>",)
_REASONING_OPENS = ("<think>", "<|channel|>analysis", "[THINK]", "<seed:think>", "<reasoning>")
_REASONING_ENDS = ("</think>", "<|end|>", "[/THINK]", "</seed:think>", "</reasoning>")


def is_billing(new: str, old: str, at: int) -> bool:
    """Return whether Claude Code's billing line differs, or is there on one side only."""
    return any(_BILLING in _line(text, at) for text in (new, old))


def are_both_billing(new: str, old: str, at: int) -> bool:
    """Return whether both have that line there."""
    return all(_BILLING in _line(text, at) for text in (new, old))


def is_date(new: str, old: str, at: int) -> bool:
    """Return whether both have a date or a time there, and go on alike behind it."""
    ends = [_end_of_date(text, at) for text in (new, old)]
    if ends[0] is None or ends[1] is None:
        return False
    return new[ends[0] : ends[0] + _GOES_ON] == old[ends[1] : ends[1] + _GOES_ON]


def is_environment(new: str, old: str, at: int) -> bool:
    """Return whether they part in the block that tells about folder, platform or git."""
    return any(
        _is_within(text, at, _ENVIRONMENT_OPENS, _ENVIRONMENT_ENDS)
        or _ENVIRONMENT_LINE.match(_line(text, at)) is not None
        for text in (new, old)
    )


def is_reminder(new: str, old: str, at: int) -> bool:
    """Return whether they part in a reminder, or where one of them has a reminder."""
    return any(
        _is_within(text, at, _REMINDER_OPENS, _REMINDER_ENDS) or _begins(text, at, _REMINDER_OPENS)
        for text in (new, old)
    )


def is_alike_without_reminders(new: str, old: str, begin: int, end: int) -> bool:
    """Return whether the old one has what *new* has from *begin* to *end*, reminders left out."""
    said = _without_reminders(new[begin:end]).strip()
    before = _without_reminders(old[begin:]).lstrip()
    return bool(said) and before.startswith(said)


def _without_reminders(text: str) -> str:
    """Return a text without reminders and the space behind them; one without an end stays."""
    (opens,), (ends,) = _REMINDER_OPENS, _REMINDER_ENDS
    kept, position = list[str](), 0
    while (begin := text.find(opens, position)) >= 0 and (end := text.find(ends, begin)) >= 0:
        kept.append(text[position:begin])
        position = end + len(ends)
        while text[position : position + 1].isspace():
            position += 1
    return "".join([*kept, text[position:]])


def is_reasoning_dropped(new: str, old: str, at: int) -> bool:
    """Return whether the old one has reasoning there, and the new one has none."""
    has_new, has_old = (
        _is_within(text, at, _REASONING_OPENS, _REASONING_ENDS)
        or _begins(text, at, _REASONING_OPENS)
        for text in (new, old)
    )
    return has_old and (not has_new or _is_within(old, at, _REASONING_OPENS, _REASONING_ENDS))


def _line(text: str, at: int) -> str:
    """Return the line in which a place lies, as much of it as is near."""
    nearest = max(0, at - _LONG_LINE)
    begin = max(nearest, text.rfind("\n", nearest, at) + 1)
    end = text.find("\n", at, at + _LONG_LINE)
    return text[begin : end if end >= 0 else at + _LONG_LINE]


def _end_of_date(text: str, at: int) -> int | None:
    begin = max(0, at - _NEAR)
    for found in _DATE.finditer(text, begin, at + _NEAR):
        if found.start() <= at <= found.end():
            return found.end()
    return None


def _is_within(text: str, at: int, opens: tuple[str, ...], ends: tuple[str, ...]) -> bool:
    """Return whether something was opened before *at* and not ended since."""
    opened = max(text.rfind(mark, 0, at) for mark in opens)
    return opened >= 0 and opened > max(text.rfind(mark, 0, at) for mark in ends)


def _begins(text: str, at: int, opens: tuple[str, ...]) -> bool:
    """Return whether something is opened there; its mark may begin before *at*, or after white space."""
    longest = max(map(len, opens))
    begin = max(0, at - longest)
    places = [text.find(mark, begin, at + longest + 4) for mark in opens]
    return any(place >= 0 and place <= at + 4 and not text[at:place].strip() for place in places)
