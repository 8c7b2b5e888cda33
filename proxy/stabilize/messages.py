"""Reading and changing the parts of a body, alike in all three forms.

Knows where the forms keep their messages, system texts and tools, and nothing about any stabilizer.
"""

import re
from collections.abc import Callable
from typing import Any

from proxy.stabilize.model import Edit, Form, Json, UnknownShape

SYSTEM_ROLES = ("system", "developer")
TEXT_TYPES = ("text", "input_text", "output_text")
_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)

RewriteText = Callable[[str], str]


def list_name(form: Form) -> str:
    """Return the field that holds the messages."""
    return "input" if form is Form.RESPONSES else "messages"


def system_field(form: Form) -> str | None:
    """Return the field that holds the system prompt, if it is not the first message."""
    return {Form.ANTHROPIC: "system", Form.RESPONSES: "instructions"}.get(form)


def messages_of(form: Form, body: Json) -> list[Json]:
    """Return the messages, or the items of a Responses body; raises UnknownShape."""
    name = list_name(form)
    messages = body.get(name, [])
    if form is Form.RESPONSES and isinstance(messages, str):
        return []
    if not isinstance(messages, list):
        raise UnknownShape(f"{name} is not a list")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UnknownShape(f"{name}[{i}] is not an object")
    return messages


def with_messages(form: Form, body: Json, messages: list[Json]) -> Json:
    return {**body, list_name(form): messages}


def message_path(form: Form, index: int) -> str:
    return f"{list_name(form)}[{index}]"


def is_system(message: Json) -> bool:
    return message.get("role") in SYSTEM_ROLES


def n_leading_system(messages: list[Json]) -> int:
    """Return how many system messages the conversation begins with."""
    return next((i for i, m in enumerate(messages) if not is_system(m)), len(messages))


def is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") in TEXT_TYPES
        and isinstance(part.get("text"), str)
    )


def new_text(form: Form, text: str) -> Json:
    """Return a part of a user message."""
    return {"type": "input_text" if form is Form.RESPONSES else "text", "text": text}


def text_of(content: Any, path: str) -> str:
    """Return the text of a message's content; raises UnknownShape if there is more than text in it."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(is_text(part) for part in content):
        return "\n".join(part["text"] for part in content)
    raise UnknownShape(f"{path} is not text")


def append_text(form: Form, content: Any, text: str, path: str) -> Any:
    """Return a content with *text* behind it, in the same string where it ends in one.

    Clients change between a string and a list with one text; both must be rendered alike.
    """
    if content is None or content == "" or content == []:
        return text
    if isinstance(content, str):
        return f"{content}\n\n{text}"
    if not isinstance(content, list):
        raise UnknownShape(f"{path} is neither text nor a list")
    if is_text(content[-1]):
        last = {**content[-1], "text": f"{content[-1]['text']}\n\n{text}"}
        return [*content[:-1], last]
    return [*content, new_text(form, text)]


def without_reminders(text: str) -> str:
    """Return what a user wrote, without the reminders that clients put beside it."""
    return _REMINDER.sub("", text).strip()


def has_reminder(text: str) -> bool:
    return _REMINDER.search(text) is not None


def is_reminder(part: Any) -> bool:
    """Return whether a part of a message is nothing but reminders."""
    return is_text(part) and has_reminder(part["text"]) and not without_reminders(part["text"])


def as_reminder(text: str) -> str:
    """Return a text marked as not the user's own."""
    if text.startswith("<system-reminder>"):
        return text
    return f"<system-reminder>\n{text}\n</system-reminder>"


def rewrite_system_texts(
    form: Form, body: Json, rewrite: RewriteText
) -> tuple[Json, tuple[Edit, ...]]:
    """Return the body with every text of its system prompt rewritten, and what that changed.

    A text in a list goes altogether if nothing is left of it.
    """
    edits: list[Edit] = []
    changed = dict(body)
    name = system_field(form)
    if name is not None and name in body:
        changed[name] = _rewrite_content(body[name], name, rewrite, edits)
    messages = messages_of(form, body)
    leading = [
        _rewrite_message(message, message_path(form, i), rewrite, edits)
        for i, message in enumerate(messages[: n_leading_system(messages)])
    ]
    if leading:
        changed[list_name(form)] = leading + messages[len(leading) :]
    return (changed if edits else body), tuple(edits)


def _rewrite_message(message: Json, path: str, rewrite: RewriteText, edits: list[Edit]) -> Json:
    if "content" not in message:
        return message
    content = _rewrite_content(message["content"], f"{path}.content", rewrite, edits)
    return {**message, "content": content}


def _rewrite_content(content: Any, path: str, rewrite: RewriteText, edits: list[Edit]) -> Any:
    if isinstance(content, str):
        text = rewrite(content)
        if text != content:
            edits.append(Edit(path, content, text))
        return text
    if not isinstance(content, list):
        return content
    kept = []
    for i, part in enumerate(content):
        if not is_text(part) or (text := rewrite(part["text"])) == part["text"]:
            kept.append(part)
            continue
        edits.append(Edit(f"{path}[{i}].text", part["text"], text or None))
        if text:
            kept.append({**part, "text": text})
    return kept


def system_text(form: Form, body: Json) -> str:
    """Return the system prompt as one text."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    rewrite_system_texts(form, body, note)
    return "\n".join(texts)


def tools_of(body: Json) -> list[Json]:
    """Return the tools; raises UnknownShape."""
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise UnknownShape("tools is not a list")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise UnknownShape(f"tools[{i}] is not an object")
    return tools
