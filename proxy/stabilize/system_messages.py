"""hoist_system_message and fold_system_messages: system messages inside a conversation.

Claude Code puts a long text (environment, skills, agents) into a system message behind the first user
message, and short ones (a new date) behind later messages. Strict templates refuse them. Where they
are accepted, the first still stands behind the user's own text, so that two sessions share nothing of
it; the later ones do no harm. What a message becomes depends only on what stands before it: a later
request must be rendered alike.
"""

from proxy.stabilize.messages import (
    append_text,
    as_reminder,
    is_system,
    message_path,
    messages_of,
    n_leading_system,
    new_text,
    text_of,
    with_messages,
)
from proxy.stabilize.model import Edit, Facts, Form, FromBody, Json, Rewrite, UnknownShape
from proxy.stabilize.names import Name
from proxy.stabilize.tool_results import append_to_last_result, has_results


def _hoist(form: Form, body: Json, facts: Facts) -> Rewrite | None:
    """Move the system messages behind the first user message in front of its text."""
    if form is not Form.ANTHROPIC and facts.accepts_late_system is not False:
        return None
    messages = messages_of(form, body)
    first = n_leading_system(messages)
    n_hoisted = n_leading_system(messages[first + 1 :])
    if not n_hoisted or not _is_plain_user(messages[first]):
        return None
    end = first + 1 + n_hoisted
    texts = _reminders(form, messages, range(first + 1, end))
    path = f"{message_path(form, first)}.content"
    parts = [new_text(form, text + "\n") for text in texts]
    user = {**messages[first], "content": parts + _as_parts(form, messages[first]["content"], path)}
    edits = [Edit(message_path(form, i), messages[i], None) for i in range(first + 1, end)]
    edits.append(Edit(path, None, parts))
    changed = [*messages[:first], user, *messages[end:]]
    return Rewrite(with_messages(form, body, changed), tuple(edits))


def _is_plain_user(message: Json) -> bool:
    return message.get("role") == "user" and "content" in message and not has_results(message)


def _reminders(form: Form, messages: list[Json], indices: range) -> list[str]:
    return [as_reminder(_text(form, messages, i)) for i in indices]


def _text(form: Form, messages: list[Json], index: int) -> str:
    path = f"{message_path(form, index)}.content"
    return text_of(messages[index].get("content"), path)


def _as_parts(form: Form, content: object, path: str) -> list[object]:
    if isinstance(content, str):
        return [new_text(form, content)]
    if not isinstance(content, list):
        raise UnknownShape(f"{path} is neither text nor a list")
    return content


def _fold(form: Form, body: Json, facts: Facts) -> Rewrite | None:
    """Make all but the first system message part of what stands before it."""
    if facts.accepts_late_system is True:
        return None
    if form is not Form.ANTHROPIC and facts.accepts_late_system is None:
        return None
    messages = messages_of(form, body)
    folded: list[Json] = []
    edits: list[Edit] = []
    has_first = _has_system_text(form, body)
    for i, message in enumerate(messages):
        if not is_system(message) or (not folded and not has_first):
            folded.append(message)
            continue
        text = _text(form, messages, i)
        if not folded:
            body = {**body, **_with_more_system(form, body, text)}
        else:
            folded[-1:] = _followed_by(form, folded[-1], text, message_path(form, i))
        edits.append(Edit(message_path(form, i), message, text))
    return Rewrite(with_messages(form, body, folded), tuple(edits)) if edits else None


def _has_system_text(form: Form, body: Json) -> bool:
    name = {Form.ANTHROPIC: "system", Form.RESPONSES: "instructions"}.get(form)
    return name is not None and name in body


def _with_more_system(form: Form, body: Json, text: str) -> Json:
    """Return the field of the system prompt with *text* behind it."""
    name = "system" if form is Form.ANTHROPIC else "instructions"
    return {name: append_text(form, body[name], text, name)}


def _followed_by(form: Form, message: Json, text: str, path: str) -> list[Json]:
    """Return a message with a system text behind it: part of it, unless the model wrote it."""
    if is_system(message):
        content = append_text(form, message.get("content"), text, path)
        return [{**message, "content": content}]
    reminder = as_reminder(text)
    if has_results(message):
        blocks = append_to_last_result(message["content"], reminder, path)
        return [{**message, "content": blocks}]
    name = "output" if message.get("type") == "function_call_output" else "content"
    if message.get("role") in ("user", "tool") or name == "output":
        return [{**message, name: append_text(form, message.get(name), reminder, path)}]
    return [message, {"role": "user", "content": reminder}]


HOIST = FromBody(Name.HOIST_SYSTEM_MESSAGE, frozenset(Form), _hoist)
FOLD = FromBody(Name.FOLD_SYSTEM_MESSAGES, frozenset(Form), _fold)
