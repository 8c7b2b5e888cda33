"""sticky_date: the date in the system prompt as it was when the conversation began."""

import re

from proxy.stabilize.memory import Lesson, key_of
from proxy.stabilize.messages import rewrite_system_texts, system_text
from proxy.stabilize.model import Form, FromMemory, Json, Known, Rewrite
from proxy.stabilize.names import Name

_DATE = re.compile(
    r"(?P<words>(?:Today(?:'s|’s) date|Current date|Today)(?: is)?:? )"
    r"(?P<date>[^\n]{0,30}?\b\d{4}\b(?:[-/]\d\d?[-/]\d\d?)?)",
    re.IGNORECASE,
)


def without_dates(text: str) -> str:
    """Return a text that stays the same over midnight."""
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
