"""Stabilizers that look at one request alone."""

import re
from typing import Any

import msgspec

from proxy.stabilize.messages import (
    append_text,
    as_reminder,
    is_reminder,
    is_system,
    is_text,
    message_path,
    messages_of,
    n_leading_system,
    new_text,
    rewrite_system_texts,
    text_of,
    tools_of,
    with_messages,
)
from proxy.stabilize.model import (
    Edit,
    Form,
    FromBody,
    Json,
    Marks,
    Name,
    RequestFacts,
    Rewrite,
    UnknownShape,
)

# drop_billing_header: the line that Claude Code writes in front of its system prompt.
#
# `x-anthropic-billing-header: cc_version=...; cch=...;` holds digits that depend on the first user text
# and, in some versions, on the request. llama-server masks `cch` only (server-chat.cpp).


_HEADERS = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n+|\Z))+")


def _drop_billing(form: Form, body: Json, facts: RequestFacts) -> Rewrite | None:
    changed, edits = rewrite_system_texts(form, body, lambda text: _HEADERS.sub("", text))
    return Rewrite(changed, edits) if edits else None


BILLING = FromBody(Name.DROP_BILLING_HEADER, frozenset(Form), _drop_billing)


# drop_cache_control: the marks where a client wants Anthropic's own cache to end.
#
# They stand at known places only: the same key inside a tool's schema or arguments is someone's data.


_KEY = "cache_control"


def _drop_cache_control(form: Form, body: Json, facts: RequestFacts) -> Rewrite | None:
    edits: list[Edit] = []
    changed = _without(body, "", edits)
    if "system" in body:
        changed["system"] = _from_parts(body["system"], "system", edits)
    messages = messages_of(form, body)
    if messages:
        changed["messages"] = [
            _from_message(message, message_path(form, i), edits)
            for i, message in enumerate(messages)
        ]
    tools = tools_of(body)
    if tools:
        changed["tools"] = [_without(tool, f"tools[{i}].", edits) for i, tool in enumerate(tools)]
    return Rewrite(changed, tuple(edits)) if edits else None


def _from_message(message: Json, path: str, edits: list[Edit]) -> Json:
    bare = _without(message, f"{path}.", edits)
    if isinstance(bare.get("content"), list):
        bare["content"] = _from_parts(bare["content"], f"{path}.content", edits)
    return bare


def _from_parts(content: Any, path: str, edits: list[Edit]) -> Any:
    if not isinstance(content, list):
        return content
    return [
        _from_message(part, f"{path}[{i}]", edits) if isinstance(part, dict) else part
        for i, part in enumerate(content)
    ]


def _without(holder: Json, path: str, edits: list[Edit]) -> Json:
    if _KEY in holder:
        edits.append(Edit(path + _KEY, holder[_KEY], None))
    return {key: value for key, value in holder.items() if key != _KEY}


CACHE_CONTROL = FromBody(
    Name.DROP_CACHE_CONTROL, frozenset({Form.ANTHROPIC, Form.CHAT}), _drop_cache_control
)


# tool_results_first and glue_text_to_results: text beside tool results in one Anthropic message.
#
# llama-server makes one user message of a message's texts and puts it before the tool results, wherever
# the client had written it (convert_anthropic_to_oai in server-chat.cpp). Text that is the user's follows
# the results as a message of its own; a reminder becomes part of the last result, so that it begins no
# new turn. The opt-in treats all text like a reminder.


def is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def has_results(message: Json) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(is_result(block) for block in content)


def append_to_last_result(blocks: list[Any], text: str, path: str) -> list[Any]:
    """Return the blocks of a message with *text* behind its last tool result; raises UnknownShape."""
    index = max(i for i, block in enumerate(blocks) if is_result(block))
    result = blocks[index]
    content = append_text(Form.ANTHROPIC, result.get("content"), text, f"{path}.content[{index}]")
    return [*blocks[:index], {**result, "content": content}, *blocks[index + 1 :]]


def _results_first(form: Form, body: Json, facts: RequestFacts) -> Rewrite | None:
    return _rewrite(form, body, is_reminder)


def _glue(form: Form, body: Json, facts: RequestFacts) -> Rewrite | None:
    return _rewrite(form, body, is_text)


def _rewrite(form: Form, body: Json, belongs_to_result: Any) -> Rewrite | None:
    messages: list[Json] = []
    edits: list[Edit] = []
    for i, message in enumerate(messages_of(form, body)):
        parts = _ordered(message, belongs_to_result, message_path(form, i))
        if parts != [message]:
            after = [part["content"] for part in parts]
            edits.append(Edit(f"{message_path(form, i)}.content", message["content"], after))
        messages += parts
    return Rewrite(with_messages(form, body, messages), tuple(edits)) if edits else None


def _ordered(message: Json, belongs_to_result: Any, path: str) -> list[Json]:
    """Return the one or two messages that are rendered in the order in which a client wrote one."""
    if message.get("role") != "user" or not has_results(message):
        return [message]
    content = message["content"]
    first = next(i for i, block in enumerate(content) if is_result(block))
    results = [block for block in content[first:] if is_result(block)]
    beside = [block for block in content[first:] if not is_result(block)]
    head = content[:first] + results
    while beside and belongs_to_result(beside[0]):
        head = append_to_last_result(head, beside[0]["text"], path)
        beside = beside[1:]
    ordered = {**message, "content": head}
    return [ordered, {"role": "user", "content": beside}] if beside else [ordered]


RESULTS_FIRST = FromBody(Name.TOOL_RESULTS_FIRST, frozenset({Form.ANTHROPIC}), _results_first)
GLUE = FromBody(Name.GLUE_TEXT_TO_RESULTS, frozenset({Form.ANTHROPIC}), _glue)


# tool_reference_text: what a tool search found, said in words.
#
# llama-server makes nothing of a tool_reference block (convert_anthropic_to_oai in server-chat.cpp), so
# that the result of a successful search is an empty text.


def _say(form: Form, body: Json, facts: RequestFacts) -> Rewrite | None:
    edits: list[Edit] = []
    messages = [
        _in_message(message, message_path(form, i), edits)
        for i, message in enumerate(messages_of(form, body))
    ]
    return Rewrite(with_messages(form, body, messages), tuple(edits)) if edits else None


def _in_message(message: Json, path: str, edits: list[Edit]) -> Json:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    blocks = [
        _in_result(block, f"{path}.content[{i}].content", edits) if is_result(block) else block
        for i, block in enumerate(content)
    ]
    return {**message, "content": blocks}


def _in_result(result: Json, path: str, edits: list[Edit]) -> Json:
    content = result.get("content")
    if not isinstance(content, list):
        return result
    parts = []
    for i, part in enumerate(content):
        spoken = _spoken(part, is_first=i == 0)
        if spoken is not None:
            edits.append(Edit(f"{path}[{i}]", part, spoken))
        parts.append(spoken or part)
    return {**result, "content": parts}


def _spoken(part: Any, *, is_first: bool) -> Json | None:
    """Return a reference in words; llama-server joins the texts of a result with nothing between."""
    if not isinstance(part, dict) or part.get("type") != "tool_reference":
        return None
    if not isinstance(part.get("tool_name"), str):
        return None
    line_break = "" if is_first else "\n"
    return {"type": "text", "text": f"{line_break}The tool {part['tool_name']} is now available."}


REFERENCES = FromBody(Name.TOOL_REFERENCE_TEXT, frozenset({Form.ANTHROPIC}), _say)


# hoist_system_message and fold_system_messages: system messages inside a conversation.
#
# Claude Code puts a long text (environment, skills, agents) into a system message behind the first user
# message, and short ones (a new date) behind later messages. Strict templates refuse them. Where they are
# accepted, the first still stands behind the user's own text, so that two sessions share nothing of it;
# the later ones do no harm. What a message becomes depends only on what stands before it: a later request
# must be rendered alike.


def _hoist(form: Form, body: Json, facts: RequestFacts) -> Rewrite | None:
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


def _fold(form: Form, body: Json, facts: RequestFacts) -> Rewrite | None:
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


# inline_reasoning: the reasoning of earlier turns, kept as text of the answers it led to.
#
# Templates drop `reasoning_content` of all answers before the newest user message; what is in `content`
# they keep. How a template writes reasoning is a fact about it, so that the text is the one that stood in
# the prompt while the turn was running.


_NO_REASONING = " "
"""Said to have none, a template does not look for it in the text; llama-server leaves out an empty one."""


def inline_reasoning(form: Form, body: Json, facts: RequestFacts) -> Rewrite | None:
    """Return the body with the reasoning of all answers before the newest user message in their text."""
    if facts.reasoning_marks is None:
        return None
    messages = messages_of(form, body)
    changed = list(messages)
    edits = []
    for i in range(_newest_user_index(messages)):
        path = message_path(form, i)
        if messages[i].get("role") != "assistant":
            continue
        read = _as_chat if form is Form.ANTHROPIC else _as_it_is
        message = _inlined(read(messages[i], path), facts.reasoning_marks, path)
        if message is not None:
            changed[i] = message
            edits.append(Edit(path, messages[i], message))
    return Rewrite(with_messages(form, body, changed), tuple(edits)) if edits else None


def _newest_user_index(messages: list[Json]) -> int:
    indices = [
        i for i, m in enumerate(messages) if m.get("role") == "user" and not _is_all_results(m)
    ]
    return max(indices, default=0)


def _is_all_results(message: Json) -> bool:
    if not has_results(message):
        return False
    return all(block.get("type") == "tool_result" for block in message["content"])


def _inlined(message: Json, marks: Marks, path: str) -> Json | None:
    reasoning = message.get("reasoning_content") or ""
    if not isinstance(reasoning, str) or reasoning == _NO_REASONING:
        return None
    if not reasoning.strip() and not marks.writes_empty:
        return None
    content = message.get("content") or ""
    if isinstance(content, list):
        if not all(is_text(part) for part in content):
            raise UnknownShape(f"{path}.content is not text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UnknownShape(f"{path}.content is not text")
    if content.startswith(marks.begin):
        return None
    ends_in_calls = not content and message.get("tool_calls")
    end = marks.end_before_calls if ends_in_calls else marks.end
    kept = marks.begin + (reasoning.strip() if marks.strips else reasoning) + end
    return {**message, "content": kept + content, "reasoning_content": _NO_REASONING}


def _as_it_is(message: Json, path: str) -> Json:
    return message


def _as_chat(message: Json, path: str) -> Json:
    """Return an Anthropic answer as the chat message that llama-server makes of it.

    llama-server passes a message whose content is a string as it is (convert_anthropic_to_oai in
    server-chat.cpp), which is the only way to have both reasoning in the text and none beside it.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    thinking, texts, calls = "", "", []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thinking += block.get("thinking", "")
        elif kind == "text":
            texts += block["text"]
        elif kind == "tool_use":
            calls.append(_as_chat_call(block))
        else:
            raise UnknownShape(f"{path}.content has a block of another kind")
    chat: Json = {"role": "assistant", "content": texts, "reasoning_content": thinking}
    return {**chat, "tool_calls": calls} if calls else chat


def _as_chat_call(block: Json) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input", {})).decode()
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


REASONING = FromBody(
    Name.INLINE_REASONING, frozenset({Form.ANTHROPIC, Form.CHAT}), inline_reasoning
)


# A body without the older part of its conversation, alike in all three forms.
#
# Knows which messages begin a turn or a step, and what of a message a template renders. What clients put
# before the first user text (environment, rules, skills) is no part of the conversation, so it moves to
# the first text that is kept.


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
