"""Which conversation a request belongs to, by what stays the same in it.

That is the system prompt without its date, and what the user first wrote, without reminders; the
client's own name for the session tells apart what begins alike.
"""

from typing import Any

from proxy.stabilize.dates import without_dates
from proxy.stabilize.memory import key_of
from proxy.stabilize.messages import is_text, messages_of, system_text, without_reminders
from proxy.stabilize.model import Facts, Form, Identity, Json

_ANSWERS = ("function_call", "reasoning")


def identify(form: Form, body: Json, facts: Facts) -> Identity:
    """Return which requests this one belongs with; raises UnknownShape."""
    system = without_dates(system_text(form, body))
    first = _first_user_text(form, body)
    return Identity(
        conversation=key_of("conversation", facts.tenant, facts.session, system, first),
        header=key_of("header", facts.tenant, form, system),
        begins=not any(_is_answer(message) for message in messages_of(form, body)),
    )


def _is_answer(message: Json) -> bool:
    return message.get("role") == "assistant" or message.get("type") in _ANSWERS


def _first_user_text(form: Form, body: Json) -> str:
    if form is Form.RESPONSES and isinstance(body.get("input"), str):
        return without_reminders(body["input"])
    users = (m for m in messages_of(form, body) if m.get("role") == "user")
    content: Any = next(users, {}).get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if is_text(part))
    return without_reminders(content) if isinstance(content, str) else ""
