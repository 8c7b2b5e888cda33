"""Stabilizers that need no memory of earlier requests, and bodies cut to the newer part of a conversation.

The first line of a stabilizer's docstring says why the stabilizer exists, for the table in the docs.
"""

import re
from collections.abc import Callable
from itertools import groupby, takewhile
from typing import Any

import msgspec

from proxy.core.messages import (
    REMINDER_TAG,
    SYSTEM_ROLES,
    Route,
    has_reminder,
    is_system,
    list_of,
    member,
    n_leading_system,
    text_of,
    without_reminders,
)
from proxy.errors import UnknownShape
from proxy.llama.conversions import chat_messages_of
from proxy.stabilize import model
from proxy.stabilize.model import Draft, Json, Marks, is_of_model, is_text, plain_text, with_list

_BILLING_HEADERS = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n+|\Z))+")
_MARKS = frozenset(("cache_control", "copilot_cache_control"))
"""Anthropic's field, and that of VS Code's Copilot, which marks messages for every server."""


def drop_billing_header(draft: Draft) -> None:
    """Its digits change with every session, some with every request, at the top of the prompt.

    Claude Code writes `x-anthropic-billing-header: cc_version=...; cch=...;`, with digits that depend on
    the first user text and, in some versions, on the request. llama-server masks `cch` only
    (server-chat.cpp).
    """
    draft.rewrite_system(lambda text: _BILLING_HEADERS.sub("", text))


def drop_cache_control(draft: Draft, message: Json) -> list[Json]:
    """Marks for another server's cache; they move with every request and mean nothing here.

    Only marks at known places are dropped: the same key inside a tool's schema or arguments is data.
    """
    return [_unmarked(message)]


def drop_cache_control_of_request(draft: Draft) -> None:
    """Remove the marks from the request, except from its messages."""
    draft.body = _unmarked(draft.body)
    for name in ("system", "tools"):
        draft.body = model.with_items(draft.body, name, _unmarked)


def _unmarked(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if not _MARKS.isdisjoint(part):
        part = {key: value for key, value in part.items() if key not in _MARKS}
    return model.with_items(part, "content", _unmarked)


# Text beside tool results in one Anthropic message. llama-server moves the texts of the message into one
# user message before the tool results, wherever the client wrote the texts (convert_anthropic_to_oai in
# server-chat.cpp).


def tool_results_first(draft: Draft, message: Json) -> list[Json]:
    """llama-server renders text beside tool results before them; the client wrote it after them.

    The user's own text becomes a separate message after the results. A reminder becomes part of the last
    result, so that the reminder begins no new turn.
    """
    return _ordered(message, _is_reminder)


def glue_text_to_results(draft: Draft, message: Json) -> list[Json]:
    """Text beside tool results begins a new turn, for which many templates drop old reasoning."""
    return _ordered(message, is_text)


def _ordered(message: Json, belongs_to_result: Callable[[Any], bool]) -> list[Json]:
    """Return a message as one or two messages that are rendered in the order that the client wrote."""
    if message.get("role") != "user" or not _has_results(message):
        return [message]
    content = message["content"]
    first = next(i for i, block in enumerate(content) if _is_result(block))
    results = [block for block in content[first:] if _is_result(block)]
    beside = [block for block in content[first:] if not _is_result(block)]
    texts = [block["text"] for block in takewhile(belongs_to_result, beside)]
    head, beside = content[:first] + results, beside[len(texts) :]
    if texts:
        head = _append_to_last_result(head, "\n\n".join(texts))
    ordered = with_list(message, "content", head)
    return [ordered, {"role": "user", "content": beside}] if beside else [ordered]


def _is_result(block: Any) -> bool:
    return text_of(block, "type") == "tool_result"


def _has_results(message: Json) -> bool:
    return any(map(_is_result, list_of(message.get("content"))))


def _is_reminder(part: Any) -> bool:
    """Return whether a part of a message is nothing but reminders."""
    return is_text(part) and has_reminder(part["text"]) and not without_reminders(part["text"])


def _append_to_last_result(blocks: list[Any], text: str) -> list[Any]:
    """Return the blocks of a message with *text* behind its last tool result; raises UnknownShape."""
    index = max(i for i, block in enumerate(blocks) if _is_result(block))
    result = _with_text_behind(Route.MESSAGES, blocks[index], "content", text)
    return [*blocks[:index], result, *blocks[index + 1 :]]


def _with_text_behind(route: Route, holder: Json, key: str, text: str) -> Json:
    """Return an object with *text* behind its content, in the last string if the content ends in one.

    Clients switch between a string and a list with one text; both must be rendered alike.
    """
    content = holder.get(key)
    if content in (None, "", []):
        return {**holder, key: text}
    if isinstance(content, str):
        return {**holder, key: f"{content}\n\n{text}"}
    if not isinstance(content, list):
        raise UnknownShape(f"{key} is neither text nor a list")
    *others, last = content
    if is_text(last):
        return {**holder, key: [*others, {**last, "text": f"{last['text']}\n\n{text}"}]}
    return {**holder, key: [*content, _new_text(route, text)]}


def _new_text(route: Route, text: str) -> Json:
    """Return a part of a user message."""
    return {"type": "input_text" if route is Route.RESPONSES else "text", "text": text}


def tool_reference_text(draft: Draft, message: Json) -> list[Json]:
    """llama-server drops tool_reference blocks, so the model is never told what was loaded.

    llama-server ignores such a block (convert_anthropic_to_oai in server-chat.cpp), so that the result of a
    successful search is an empty text. It joins the texts of a result without a separator. It also drops
    blocks of system messages that add or remove a tool.
    """

    def in_result(block: Any) -> Any:
        if not _is_result(block):
            return block
        parts = enumerate(list_of(block.get("content")))
        return with_list(block, "content", [_in_words(p, "\n" * bool(i)) for i, p in parts])

    return [model.with_items(message, "content", _in_words if is_system(message) else in_result)]


_CHANGES = {
    "tool_reference": "is now available",
    "tool_addition": "is now available",
    "tool_removal": "is no longer available",
}


def _in_words(part: Any, line_break: str = "") -> Any:
    """Return a text that says what a block does to a tool; any other block is returned unchanged."""
    tool = member(part, "tool", {})
    names = (member(part, "tool_name"), member(tool, "name"), member(tool, "server_name"))
    change, named = _CHANGES.get(text_of(part, "type")), [n for n in names if isinstance(n, str)]
    definition = member(tool, "definition")
    if isinstance(definition, dict):
        named = [msgspec.json.encode(definition).decode()]
    if not change or not named:
        return part
    return {"type": "text", "text": f"{line_break}The tool {named[0]} {change}."}


# System messages inside a conversation. Claude Code puts a long text (environment, skills, agents) into a
# system message behind the first user message, and short texts (a new date) into system messages behind
# later messages. Strict templates refuse such messages. Templates that accept them render the first one
# behind the user's own text, so that two sessions cannot share it; the later ones do no harm. The rewrite
# of a message depends only on the messages before it: a later request repeats the same rewritten messages.


def hoist_system_message(draft: Draft) -> None:
    """A long constant system message behind the first user text cannot be shared by sessions.

    Move the system messages behind the first user message in front of its text.
    """
    route = draft.route
    if route is not Route.MESSAGES and draft.facts.accepts_late_system is not False:
        return
    messages = draft.messages
    first = n_leading_system(messages)
    end = first + 1 + n_leading_system(messages[first + 1 :])
    if end <= first + 1:
        return
    user = messages[first]
    if user.get("role") != "user" or "content" not in user or _has_results(user):
        return
    late = [_text_at(draft, i) for i in range(first + 1, end)]
    texts = [as_reminder(text) + "\n" for text in late if text]
    content = user["content"]
    own = [_new_text(route, content)] if isinstance(content, str) else content
    if not isinstance(own, list):
        raise UnknownShape("the first user message's content is neither text nor a list")
    hoisted = {**user, "content": [*(_new_text(route, text) for text in texts), *own]}
    draft.messages = [*messages[:first], hoisted, *messages[end:]]


def fold_system_messages(draft: Draft) -> None:
    """Many templates refuse system messages in the middle of a conversation.

    Append every system message but the first to the text before it. A system message without text (Claude
    Code sends `output_config` alone) is dropped: it tells the model nothing, and llama-server refuses it.
    """
    accepts, name = draft.facts.accepts_late_system, draft.system_field
    if draft.route is not Route.MESSAGES and accepts is not False:
        return
    folded, body = list[Json](), draft.body
    others = [m.get("role") for m in draft.messages[0 if name in body else 1 :]]
    if not any(role in others for role in SYSTEM_ROLES):
        return  # most requests end here, also those with thousands of messages
    # In groups, because to append thousands of texts one by one would take minutes.
    for is_of_system, group in groupby(enumerate(draft.messages), lambda each: is_system(each[1])):
        found, n_first = [*group], not (folded or name in body)
        if is_of_system:
            said = [e for e in found[n_first:] if plain_text(e[1].get("content") or "") != ""]
            found = found[:n_first] + said
        n_kept = len(found) if accepts or not is_of_system else n_first
        folded += [message for _, message in found[:n_kept]]
        texts = [_text_at(draft, i) for i, _ in found[n_kept:]]
        if texts and folded:
            folded[-1:] = followed_by(draft.route, folded[-1], *texts)
        elif texts and name in body:
            body = _with_text_behind(draft.route, body, name, "\n\n".join(texts))
    draft.body = with_list(body, draft.list_name, folded)


def _text_at(draft: Draft, index: int) -> str:
    """Return the text of a message; raises UnknownShape if the message has more than text."""
    if (text := plain_text(draft.messages[index].get("content") or "")) is None:
        raise UnknownShape(f"{draft.list_name}[{index}].content is not text")
    return text


def as_reminder(text: str) -> str:
    """Return a text as a reminder, which marks it as not the user's own."""
    return text if text.startswith(REMINDER_TAG) else f"{REMINDER_TAG}\n{text}\n</system-reminder>"


def followed_by(route: Route, message: Json, *texts: str) -> list[Json]:
    """Return a message followed by system texts, as part of the message unless the model wrote it."""
    if is_system(message):
        return [_with_text_behind(route, message, "content", "\n\n".join(texts))]
    reminder = "\n\n".join(map(as_reminder, texts))
    if _has_results(message):
        return [{**message, "content": _append_to_last_result(message["content"], reminder)}]
    key = "output" if message.get("type") == "function_call_output" else "content"
    if message.get("role") in ("user", "tool") or key == "output":
        return [_with_text_behind(route, message, key, reminder)]
    return [message, {"role": "user", "content": reminder}]


# The reasoning of earlier turns, kept in the text of their answers. Templates drop `reasoning_content` of
# all answers before the newest user message, but keep `content`. The reasoning is written as the template
# writes it, so that the text is the same as in the prompt while the turn was running.


_NO_REASONING = " "
"""With this, a template looks for no reasoning in the text; llama-server leaves out an empty string."""


def inline_reasoning(draft: Draft) -> None:
    """Many templates drop old reasoning at each new user message, and with it the prefix.

    Put the reasoning of all answers before the newest user message into their text.
    """
    marks = draft.facts.reasoning_marks
    if marks is None:
        return
    messages = draft.messages
    newest = max((i for i, m in enumerate(messages) if begins_turn(m)), default=0)
    draft.messages = [
        _inlined(m, draft.route, marks) if i < newest and m.get("role") == "assistant" else m
        for i, m in enumerate(messages)
    ]


def _inlined(given: Json, route: Route, marks: Marks) -> Json:
    """Return an answer with its reasoning in its text; the same object if there is none to move."""
    # In Messages' own form no answer can have reasoning in its text and none beside it.
    messages = [*chat_messages_of(given)] if route is Route.MESSAGES else [given]
    if len(messages) != 1:
        return given  # it has nothing to render, or tool results
    message = messages[0]
    reasoning = message.get("reasoning_content") or ""
    if not isinstance(reasoning, str) or reasoning == _NO_REASONING:
        return given
    if not reasoning.strip() and not marks.writes_empty:
        return given
    if (content := plain_text(message.get("content") or "", "")) is None:
        raise UnknownShape("an answer's content is not text")
    if content.startswith(marks.begin):
        return given
    ends_in_calls = not content and message.get("tool_calls")
    end = marks.end_before_calls if ends_in_calls else marks.end
    # Templates strip it, and so does llama-server when it reads an answer.
    inlined = marks.begin + reasoning.strip() + end + content
    return {**message, "content": inlined, "reasoning_content": _NO_REASONING}


# A body without the older part of its conversation, for all three routes. The parts that clients put before
# the first user text (environment, rules, skills) do not belong to the conversation: they move to the first
# text that is kept.


_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_RENDERED = ("content", "text", "output", "name", "arguments", "function", "tool_calls")


def conversation_of(route: Route, body: Json) -> list[Json]:
    """Return the messages behind the system prompt; raises UnknownShape."""
    messages = model.messages_of(route, body)
    return messages[n_leading_system(messages) :]


def begins_turn(message: Json) -> bool:
    """Return whether a message is the user's, and does not hold tool results."""
    return message.get("role") == "user" and not _has_results(message)


def begins_step(message: Json, before: Json | None) -> bool:
    """Return whether a message begins an answer; one answer may be several items in a row."""
    goes_on = before is not None and "type" in message and "type" in before and is_of_model(before)
    return is_of_model(message) and not goes_on


def rendered_text(value: Any) -> str:
    """Return about the text that a template renders of a message, without reasoning."""
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
    """Return the client's limit on the tokens of the answer, None if there is none."""
    limits = (body.get(name) for name in _LIMITS)
    return next((n for n in limits if isinstance(n, int) and not isinstance(n, bool)), None)


def shortened(route: Route, body: Json, first: int, asked: int | None) -> Json:
    """Return the body with its conversation cut to message *asked*, if any, and those from *first* on."""
    messages = model.messages_of(route, body)
    header = messages[: n_leading_system(messages)]
    conversation = messages[len(header) :]
    kept = conversation[first:] if asked is None else [conversation[asked], *conversation[first:]]
    if asked != 0 and first != 0 and kept and begins_turn(kept[0]):
        if surroundings := _surroundings(conversation[0]):
            content = kept[0].get("content")
            own = content if isinstance(content, list) else [_new_text(route, str(content or ""))]
            kept[0] = {**kept[0], "content": [*surroundings, *own]}
    return {**body, model.list_name(route): [*header, *kept]}


def _surroundings(first: Json) -> list[Json]:
    """Return the reminders before the text of the first user message."""
    parts = list_of(first.get("content")) if begins_turn(first) else []
    return parts[: next((i for i, part in enumerate(parts) if not _is_reminder(part)), 0)]
