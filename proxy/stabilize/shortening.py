"""A body without the older part of its conversation, alike in all three forms.

Knows which messages begin a turn or a step, and what of a message a template renders. What clients put
before the first user text (environment, rules, skills) is no part of the conversation, so it moves to the
first text that is kept.
"""

from typing import Any

import msgspec

from proxy.stabilize.messages import (
    is_reminder,
    messages_of,
    n_leading_system,
    new_text,
    with_messages,
)
from proxy.stabilize.model import Form, Json
from proxy.stabilize.tool_results import has_results

_OF_MODEL = ("reasoning", "function_call")
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_RENDERED = ("content", "text", "output", "name", "arguments", "function", "tool_calls")


def conversation_of(form: Form, body: Json) -> list[Json]:
    """Return the messages behind the system prompt; raises UnknownShape."""
    messages = messages_of(form, body)
    return messages[n_leading_system(messages) :]


def begins_turn(message: Json) -> bool:
    """Return whether the user says something in a message, and not only a tool."""
    return message.get("role") == "user" and not has_results(message)


def begins_step(message: Json, before: Json | None) -> bool:
    """Return whether the model begins to answer; one answer may be several items in a row."""
    return _is_of_model(message) and not (before is not None and _goes_on(message, before))


def _goes_on(message: Json, before: Json) -> bool:
    is_item = "type" in message and "type" in before
    return is_item and _is_of_model(before)


def _is_of_model(message: Json) -> bool:
    return message.get("role") == "assistant" or message.get("type") in _OF_MODEL


def rendered_text(value: Any) -> str:
    """Return about what a template makes of a message; old reasoning is what many leave out."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(rendered_text, value)))
    if not isinstance(value, dict):
        return ""
    texts = [rendered_text(value[key]) for key in _RENDERED if key in value]
    if isinstance(value.get("input"), dict):
        texts.append(msgspec.json.encode(value["input"]).decode())
    return "\n".join(filter(None, texts))


def wanted_tokens(body: Json) -> int | None:
    """Return how long the client lets the answer become, None if it does not say."""
    limits = (body.get(name) for name in _LIMITS)
    return next((n for n in limits if isinstance(n, int) and not isinstance(n, bool)), None)


def shortened(form: Form, body: Json, first: int, asked: int | None) -> Json:
    """Return the body with the conversation from its message *first* on, behind message *asked*."""
    messages = messages_of(form, body)
    header = messages[: n_leading_system(messages)]
    conversation = messages[len(header) :]
    kept = conversation[first:]
    if asked is not None:
        kept = [conversation[asked], *kept]
    surroundings = [] if asked == 0 or first == 0 else _surroundings(conversation)
    if surroundings and kept and begins_turn(kept[0]):
        kept = [_with_surroundings(form, kept[0], surroundings), *kept[1:]]
    return with_messages(form, body, [*header, *kept])


def _surroundings(conversation: list[Json]) -> list[Json]:
    """Return the reminders that the first user text stands behind."""
    content = conversation[0].get("content") if begins_turn(conversation[0]) else None
    parts: list[Json] = content if isinstance(content, list) else []
    n_leading = next((i for i, part in enumerate(parts) if not is_reminder(part)), 0)
    return parts[:n_leading]


def _with_surroundings(form: Form, message: Json, surroundings: list[Json]) -> Json:
    content = message.get("content")
    own = content if isinstance(content, list) else [new_text(form, str(content or ""))]
    return {**message, "content": [*surroundings, *own]}
