"""Rewriting the body of a request, so that its prompt keeps its prefix.

`stabilize` is pure: the same request with the same memory, facts and switches gives the same result, and
stabilizing the result changes nothing. It raises nothing: stabilizers leave unknown shapes alone. The facts
about the chat template that stabilizers need come from `read_facts`.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.json import encode

from proxy.core.messages import CONVERSATIONS, Route
from proxy.core.tokens import common_prefix_length
from proxy.errors import UnknownShape
from proxy.stabilize import drops, sticky
from proxy.stabilize.model import Draft, Json, Marks, Memory, Name, RequestFacts, why_failed

# The sticky stabilizers need the key of a conversation. So the key depends on the changes of stabilizers
# before them, and must not depend on the changes of later ones. `inline_reasoning` comes last, because the
# messages that it has changed no longer have the Anthropic form.
OF_MESSAGES: dict[Name, Callable[[Draft, Json], list[Json]]] = {
    Name.DROP_CACHE_CONTROL: drops.drop_cache_control,
    Name.TOOL_REFERENCE_TEXT: drops.tool_reference_text,
    Name.GLUE_TEXT_TO_RESULTS: drops.glue_text_to_results,
    Name.TOOL_RESULTS_FIRST: drops.tool_results_first,
    Name.RESTORE_TOOL_ARGUMENTS: sticky.restore_tool_arguments,
}
"""The stabilizers that are applied first, to each message by itself, in this order."""
OF_REQUESTS: dict[Name, Callable[[Draft], None]] = {
    Name.DROP_CACHE_CONTROL: drops.drop_cache_control_of_request,
    Name.DROP_BILLING_HEADER: drops.drop_billing_header,
    Name.HOIST_SYSTEM_MESSAGE: drops.hoist_system_message,
    Name.FOLD_SYSTEM_MESSAGES: drops.fold_system_messages,
    Name.KEEP_TOOL_ORDER: sticky.keep_tool_order,
    Name.STICKY_TOOL_TEXT: sticky.sticky_tool_text,
    Name.STICKY_DATE: sticky.sticky_date,
    Name.STICKY_SESSION: sticky.sticky_session,
    Name.STICKY_REMINDERS: sticky.sticky_reminders,
    Name.INLINE_REASONING: drops.inline_reasoning,
}
"""The stabilizers that are applied next, to the request as a whole, in this order."""
_ROUTES: dict[Name, Collection[Route]] = {
    Name.DROP_CACHE_CONTROL: (Route.MESSAGES, Route.CHAT),
    Name.TOOL_REFERENCE_TEXT: (Route.MESSAGES,),
    Name.GLUE_TEXT_TO_RESULTS: (Route.MESSAGES,),
    Name.TOOL_RESULTS_FIRST: (Route.MESSAGES,),
    Name.INLINE_REASONING: (Route.MESSAGES, Route.CHAT),
}
"""The routes of the stabilizers that are not for every route."""
NO_FACTS = RequestFacts()


Change = tuple[list[Json], tuple[Name, ...]]
"""The messages that replace a message, and the stabilizers that made them."""


class Seen(NamedTuple):
    """The messages of a request as received, and the changes of single messages by index, ascending.

    Later requests of the conversation repeat these messages, so that only new ones are looked at. They are
    encoded: objects with another order of keys are equal, but are rendered differently.
    """

    messages: list[bytes] = []
    changes: dict[int, Change] = {}


NOTHING_SEEN = Seen()


@dataclass(slots=True)
class Stabilized:
    """A stabilized request; `body` is the given object itself if nothing was changed.

    `failures` are the stabilizers that failed and left the request, or one of its messages, alone, each
    with the reason, without prompt text. Give `lessons` to `Memory.learn` once the request is sent, and
    `seen` to the next request of the conversation.
    """

    body: Json
    changed_by: tuple[Name, ...] = ()
    failures: dict[Name, str] = field(default_factory=dict)
    lessons: dict[str, Any] = field(default_factory=dict)
    seen: Seen = NOTHING_SEEN


def stabilize(
    route: Route,
    body: Json,
    memory: Memory,
    switches: Collection[Name],
    facts: RequestFacts = NO_FACTS,
    seen: Seen = NOTHING_SEEN,
) -> Stabilized:
    """Return the body with the stabilizers of *switches* applied, and which of them changed it.

    *seen* comes from an earlier request of the same tenant under the same switches.
    """
    result = Stabilized(body)
    try:
        draft = Draft(route, body, memory, facts)
    except UnknownShape:
        return result  # llama-server will refuse it
    messages = draft.messages
    names = [n for n in Name if n in switches and route in _ROUTES.get(n, CONVERSATIONS)]
    received = [encode(message) for message in messages]
    n_seen = common_prefix_length(seen.messages, received)
    changes = {index: change for index, change in seen.changes.items() if index < n_seen}
    for index in range(n_seen, len(messages)):
        if change := _change_of(messages[index], draft, names, result):
            changes[index] = change
    if changes:
        made = (changes[i][0] if i in changes else [same] for i, same in enumerate(messages))
        draft.messages = [message for group in made for message in group]
    changed_by = _change_request(draft, [n for n in OF_REQUESTS if n in names], result)
    changed_by = changed_by.union(*(made_by for _, made_by in changes.values()))
    # One stabilizer may undo what another did: sticky_tool_text puts a tool's first description back, and
    # sticky_session leaves the name of the session out of that description again.
    if changed_by and draft.body == body and encode(draft.body) == encode(body):
        draft.body, changed_by = body, set()
    result.body, result.lessons = draft.body, draft.lessons
    result.changed_by = tuple(name for name in names if name in changed_by)
    if not result.failures:
        result.seen = Seen(received, changes)
    return result


def _change_request(draft: Draft, names: list[Name], result: Stabilized) -> set[Name]:
    """Apply stabilizers of requests; return those that changed it, and note failures in *result*."""
    changed_by = set[Name]()
    for name in names:
        before, lessons = draft.body, dict(draft.lessons)
        try:
            OF_REQUESTS[name](draft)
        except Exception as error:
            draft.body, draft.lessons = before, lessons
            result.failures[name] = why_failed(error)
        if draft.body is not before:
            changed_by.add(name)
    return changed_by


def _change_of(
    message: Json, draft: Draft, names: Collection[Name], result: Stabilized
) -> Change | None:
    """Return the change of a single message, None if there is none; note failures in *result*."""
    made, changed_by = [message], list[Name]()
    for name, apply in OF_MESSAGES.items():
        if name in names:
            try:
                new = [after for before in made for after in apply(draft, before)]
            except Exception as error:
                result.failures[name] = why_failed(error)
                continue
            if len(new) != len(made) or not all(map(operator.is_, new, made)):
                made = new
                changed_by.append(name)
    return (made, tuple(changed_by)) if changed_by else None


# How a chat template treats late system messages and old reasoning, read from renderings of `BODIES`: chat
# bodies for /apply-template. A body that llama-server refuses has no rendering.

_ASKS, _ASKS_AGAIN = "Zaq asks", "Zaq asks again"
_COMMANDS, _RETURNS = "Zaq commands", "Zaq returns"
_REASONING = "Zaq reasons"
_TEXT = "Zaq answers"
_FUNCTION = {"name": "zaq", "arguments": "{}"}
_CALL = {"id": "call_0000", "type": "function", "function": _FUNCTION}
_DEFINITION = {"name": "zaq", "description": "", "parameters": {"type": "object", "properties": {}}}
_TOOL = {"type": "function", "function": _DEFINITION}


def _says(role: str, content: str) -> Json:
    return {"role": role, "content": content}


def _running(content: str, reasoning: str = _REASONING) -> list[Json]:
    reasoned = {"reasoning_content": reasoning} if reasoning else {}
    answer = {**_says("assistant", content), "tool_calls": [_CALL], **reasoned}
    return [_says("user", _ASKS), answer, {**_says("tool", _RETURNS), "tool_call_id": _CALL["id"]}]


def _old(content: str, reasoning: str = _REASONING) -> list[Json]:
    closed = _says("assistant", "Zaq ends")
    return [*_running(content, reasoning), closed, _says("user", _ASKS_AGAIN)]


_MESSAGES: dict[str, list[Json]] = {
    "late system": [
        _says("system", "Zaq"),
        _says("user", _ASKS),
        _says("assistant", _TEXT),
        _says("user", _ASKS_AGAIN),
        _says("system", _COMMANDS),
    ],
    "old": _old(_TEXT),
    "running": _running(_TEXT),
    "running call": _running(""),
    "running bare": _running(_TEXT, ""),
}
"""Turns still running, and an old one: with reasoning or none, text or only a call."""
BODIES: dict[str, dict[str, Any]] = {
    name: {"messages": messages, "tools": [_TOOL]} for name, messages in _MESSAGES.items()
}


def read_facts(renderings: Mapping[str, str | None]) -> RequestFacts:
    """Return the facts about a template from the renderings of `BODIES`; None for those refused."""
    late = renderings.get("late system")
    return RequestFacts(
        # Rendered at another place, the message would change the beginning of the prompt.
        accepts_late_system=late is not None and late.find(_COMMANDS) > late.find(_ASKS_AGAIN),
        reasoning_marks=_read_marks(renderings),
    )


def inlined_body(facts: RequestFacts) -> dict[str, Any] | None:
    """Return a body whose rendering shows whether the reasoning marks hold, if there are any."""
    old = {"messages": [*_old(""), *_old(_TEXT), *_old(_TEXT, "")], "tools": [_TOOL]}
    draft = Draft(Route.CHAT, old, Memory(), facts)
    drops.inline_reasoning(draft)
    return None if draft.body is old else draft.body


def keeps_inlined(rendering: str | None, renderings: Mapping[str, str | None]) -> bool:
    """Return whether the rendering of `inlined_body` begins like that of the running turn."""
    marks = _read_marks(renderings)
    if rendering is None or marks is None or rendering.count(_REASONING) != 2:
        return False
    running = renderings["running call"] or ""
    bare = (renderings["running bare"] or "").split(_ASKS, 1)[-1]
    begins_alike = rendering.startswith(running[: running.find(_RETURNS)])
    return begins_alike and (not marks.writes_empty or bare.split(_RETURNS)[0] in rendering)


def _read_marks(renderings: Mapping[str, str | None]) -> Marks | None:
    """Return the reasoning marks, or None if the template keeps old reasoning or shows no clear marks."""
    probes = ("old", "running", "running call", "running bare")
    old, running, called, with_bare = (renderings.get(probe) or "" for probe in probes)
    if _REASONING in old or _REASONING not in running or _REASONING not in called:
        return None
    if _TEXT not in old or _TEXT not in running:
        return None
    begins = old.index(_TEXT)
    if running[:begins] != old[:begins]:
        return None
    begin, behind = running[begins:].split(_REASONING, 1)
    end = behind.split(_TEXT, 1)[0]
    # The text between reasoning and the tool result, less the text that the template adds behind content.
    before_result = called.split(_REASONING, 1)[1].split(_RETURNS)[0]
    behind_text = old.split(_TEXT, 1)[1].split(_RETURNS)[0]
    if not before_result.endswith(behind_text):
        return None
    end_before_calls = before_result.removesuffix(behind_text)
    bare = running.replace(begin + _REASONING + end, begin + end, 1)
    return Marks(begin, end, end_before_calls, writes_empty=bool(begin) and with_bare == bare)
