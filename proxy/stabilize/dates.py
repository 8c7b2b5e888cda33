"""sticky_date: date and time in the system prompt as they were when the conversation began."""

import re

from proxy.stabilize.memory import Lesson, key_of
from proxy.stabilize.messages import rewrite_system_texts, system_text
from proxy.stabilize.model import Form, FromMemory, Json, Known, Rewrite
from proxy.stabilize.names import Name

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:Mon|Tue|Tues|Wed|Wednes|Thu|Thur|Thurs|Fri|Sat|Satur|Sun)(?:day)?,? )"
_CALENDAR = (
    rf"{_WEEKDAY}?(?:\d{{4}}[-/]\d\d?[-/]\d\d?|\d\d?[./]\d\d?[./]\d{{4}}"
    rf"|{_DAY} {_MONTH},? \d{{4}}|{_MONTH} {_DAY},? \d{{4}})"
)
_CLOCK = (
    r"\d\d?:\d\d(?::\d\d)?(?:[.,]\d+)?(?: ?[AP]\.?M\b\.?)?"
    r"(?: ?(?:Z\b|UTC\b|GMT\b|[+-]\d\d:?\d\d\b))?"
)
_BEHIND = rf"(?:(?:T|,? (?:at )?){_CLOCK})?"
_MOMENT = rf"(?:{_CALENDAR}{_BEHIND}|{_CLOCK}(?:,? (?:on )?{_CALENDAR})?)"
_DATE = re.compile(
    r"(?P<words>(?:Today(?:'s|’s) date|Current date(?: and time)?|Today)(?: is)?:? "
    # These may begin any sentence: only a whole date or time may follow them.
    r"|\b(?:It is(?: now| currently)?|Now|Date|Time|(?:The )?current time|The time)(?: is)?:? "
    rf"(?={_MOMENT}))"
    rf"(?P<date>{_MOMENT}|[^\n]{{0,30}}?\b\d{{4}}\b(?:[-/]\d\d?[-/]\d\d?)?{_BEHIND})",
    re.IGNORECASE,
)


def without_dates(text: str) -> str:
    """Return a text that stays the same whatever the time is."""
    return _DATE.sub(r"\g<words>", text)


def _dates(form: Form, body: Json) -> list[str]:
    return [match["date"] for match in _DATE.finditer(system_text(form, body))]


def _key(known: Known) -> str:
    return key_of("date", known.identity.conversation)


def _pin(form: Form, body: Json, known: Known) -> Rewrite | None:
    first = None if known.identity.begins else known.memory.get(_key(known))
    if not isinstance(first, list) or len(first) != len(_dates(form, body)):
        return None
    dates = iter(first)
    changed, edits = rewrite_system_texts(
        form, body, lambda text: _DATE.sub(lambda match: match["words"] + next(dates), text)
    )
    return Rewrite(changed, edits) if edits else None


def _learn(form: Form, body: Json, known: Known) -> list[Lesson]:
    dates = _dates(form, body)
    return [Lesson(_key(known), dates)] if dates else []


STABILIZER = FromMemory(Name.STICKY_DATE, frozenset(Form), _pin, _learn)
