"""sticky_reminders: reminders stay at the user message where they were first sent.

OpenCode attaches the reminder of its plan mode to the newest user message only, so that each new
prompt changes the message before. A message is known by what the user wrote in it and by its number.
"""

from collections.abc import Iterator

from proxy.stabilize.memory import Lesson, key_of
from proxy.stabilize.messages import (
    has_reminder,
    is_text,
    message_path,
    messages_of,
    with_messages,
    without_reminders,
)
from proxy.stabilize.model import Edit, Form, FromMemory, Json, Known, Rewrite
from proxy.stabilize.names import Name


def _keep(form: Form, body: Json, known: Known) -> Rewrite | None:
    messages = list(messages_of(form, body))
    edits = []
    for index, key in list(_prompts(messages, known))[:-1]:
        first, now = known.memory.get(key), messages[index]["content"]
        if first is not None and first != now:
            edits.append(Edit(f"{message_path(form, index)}.content", now, first))
            messages[index] = {**messages[index], "content": first}
    return Rewrite(with_messages(form, body, messages), tuple(edits)) if edits else None


def _prompts(messages: list[Json], known: Known) -> Iterator[tuple[int, str]]:
    """Yield index and key of each message that a user wrote."""
    n_prompts = 0
    for index, message in enumerate(messages):
        text = _text(message) if message.get("role") == "user" else None
        if text is None:
            continue
        n_prompts += 1
        written = without_reminders(text)
        yield index, key_of("reminder", known.identity.conversation, str(n_prompts), written)


def _text(message: Json) -> str | None:
    """Return the text of a message, or None if there is more than text in it."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(is_text(part) for part in content):
        return "\n".join(part["text"] for part in content)
    return None


def _learn(form: Form, body: Json, known: Known) -> list[Lesson]:
    messages = messages_of(form, body)
    prompts = list(_prompts(messages, known))
    # The newest may have lost its reminder by being asked again in another mode.
    return [
        Lesson(key, messages[index]["content"])
        for index, key in prompts
        if has_reminder(_text(messages[index]) or "")
        or (index == prompts[-1][0] and known.memory.get(key) is not None)
    ]


STABILIZER = FromMemory(Name.STICKY_REMINDERS, frozenset(Form), _keep, _learn)
