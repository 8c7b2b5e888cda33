"""Stabilizers that keep parts of a prompt as they were first sent.

Each of them replaces parts of a new request by the parts that its conversation had before, and then learns
the parts of the request. The first line of a stabilizer's docstring says why the stabilizer exists, for the
table in the docs.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from msgspec.json import decode, encode

from proxy.core.messages import (
    ID,
    Route,
    has_reminder,
    member,
    object_in,
    text_of,
    without_reminders,
)
from proxy.stabilize import model
from proxy.stabilize.drops import as_reminder, begins_turn, followed_by, rendered_text
from proxy.stabilize.model import COUNT, Call, Draft, Json, call_key, plain_text, with_list

# Words at the beginning of a prompt that a conversation keeps as first sent: one mechanism for dates, names
# of sessions, counts and the texts of tools. A place is known again by the text around its words. If the
# words have changed, a reminder in the newest user message tells the model the present ones, and later
# requests repeat this reminder in the same message: no part of the prompt that was sent before changes.

_MASK = "…"
_TOOL_TEXT = re.compile(r"(?s)\A.+\Z")
_LINE_WITH_ID = re.compile(rf"(?m)^.*?(?:{ID.pattern}).*$")
_LINE_WITH_COUNT = re.compile(rf"(?m)^.*?(?:{COUNT.pattern}).*$")


_Told = tuple[int, str, dict[str, str]]
"""The index of a message, the reminder that was put behind it, and the present words in that reminder, by
their places."""


class _Changing(NamedTuple):
    """A kind of words that change: the pattern that finds them, and the text around them."""

    name: str
    pattern: re.Pattern[str]
    around: Callable[[re.Match[str]], str]
    is_shared: bool = False
    """Whether conversations share places. If two conversations have other words at a place, later ones show
    only the text around it: the model might use the words of another session by mistake."""
    is_told: bool = True
    """Whether a reminder tells the model the present words."""


_DATES = _Changing("date", model.DATE, lambda found: found["words"])
_IDS = _Changing(
    "name of this session", _LINE_WITH_ID, lambda found: ID.sub(_MASK, found[0]), is_shared=True
)
_COUNTS = _Changing("count", _LINE_WITH_COUNT, lambda found: COUNT.sub(_MASK, found[0]))
_TOOL_TEXTS = _Changing("tool text", _TOOL_TEXT, lambda found: "", is_told=False)


def sticky_date(draft: Draft) -> None:
    """A date or time in front changes, and the whole prompt with it."""
    _Holding(draft, _DATES).hold()


def sticky_session(draft: Draft) -> None:
    """An id, a temporary path or a count in front names the session, and all behind it differs."""
    _Holding(draft, _IDS).hold()
    _Holding(draft, _COUNTS).hold()


def sticky_tool_text(draft: Draft) -> None:
    """Modes such as plan and build change a tool's description in mid-conversation.

    All fields of a tool but its description identify it.
    """
    _Holding(draft, _TOOL_TEXTS).hold()


@lru_cache(256)
def _find(kind: _Changing, tenant: str, where: str, text: str) -> list[tuple[int, int, str, str]]:
    """Return where words begin and end, a key of the text around them, and that text if it is needed.

    Cached, as each request of a tenant repeats its system prompt and tools: to search 50 kB takes 10 ms.
    """
    return [
        (*found.span(), model.key_of(kind.name, tenant, where, around), around * kind.is_shared)
        for found in kind.pattern.finditer(text)
        for around in (kind.around(found),)
    ]


class _Holding:
    """Replaces one kind of words in a request by those that its conversation sent first."""

    def __init__(self, draft: Draft, kind: _Changing) -> None:
        self._draft = draft
        self._kind = kind
        self._key = draft.key(f"held {kind.name}")
        held = draft.recall(self._key) or {"first": {}, "told": []}
        self._held_first: dict[str, str] = held["first"]
        """The first words of each place, as earlier requests learned them."""
        self._held_told: list[_Told] = held["told"]
        """The reminders of earlier requests."""
        self._opening = f"Above, a {kind.name} is left out or out of date. It now reads:"
        newest = draft.messages[-1] if draft.messages else {}
        self._can_tell = begins_turn(newest) and self._opening not in rendered_text(newest)
        self._first: dict[str, str] = {}
        self._now: dict[str, str] = {}
        self._counted = Counter[str]()

    def hold(self) -> None:
        """Put the first words back, and the reminders behind their messages."""
        draft, kind = self._draft, self._kind
        if kind is not _TOOL_TEXTS:
            draft.rewrite_system(partial(self._rewrite, "system"))
            draft.rewrite_first_users(self._rewrite_user)
        draft.body = model.with_items(draft.body, "tools", self._rewrite_tool)
        for index, text, _ in (told := self._told()):
            messages = draft.messages
            if begins_turn(messages[index]) and text not in rendered_text(messages[index]):
                behind = followed_by(draft.route, messages[index], text)
                draft.messages = [*messages[:index], *behind, *messages[index + 1 :]]
        if self._first:
            draft.lessons[self._key] = {"first": self._first, "told": told}

    def _rewrite(self, where: str, text: str) -> str:
        find = _find if len(text) < 100_000 else _find.__wrapped__  # bounds the memory
        parts, behind = list[str](), 0
        for begin, end, place, around in find(self._kind, self._draft.facts.tenant, where, text):
            parts += text[behind:begin], self._kept(place, around, text[begin:end])
            behind = end
        return "".join((*parts, text[behind:]))

    def _rewrite_user(self, text: str) -> str:
        """Rewrite a text before the first answer; if the kind is shared, not the user's own text."""
        is_own = self._kind.is_shared and not text.startswith("<")
        return text if is_own else self._rewrite("user", text)

    def _rewrite_tool(self, tool: Json) -> Json:
        described = _described(tool)
        text = described.get("description")
        if not isinstance(text, str):
            return tool
        rest = {**tool, **described, "description": "", "function": None}
        kept = self._rewrite(encode(rest).decode(), text)
        if kept == text:
            return tool
        changed = {**described, "description": kept}
        return changed if described is tool else {**tool, "function": changed}

    def _kept(self, place: str, around: str, words: str) -> str:
        """Return the words to send in place of the *words* found at a *place*."""
        self._counted[place] += 1
        place += f"/{self._counted[place]}"
        first = self._held_first.get(place)
        if first is None and self._kind.is_shared:
            shared = self._draft.memory.get(place)
            if shared not in (None, words) and not self._can_tell:
                return words
            self._draft.lessons[place] = first = words if shared in (None, words) else around
        self._first[place] = first or words
        if self._first[place] != words:
            self._now[place] = words
        return self._first[place]

    def _told(self) -> list[_Told]:
        """Return the reminders of this conversation, with a new one if words have changed since."""
        messages, now = self._draft.messages, self._now
        told = [one for one in self._held_told if one[0] < len(messages) - 1]
        before = told[-1][2] if told else {}
        changed = [words for place, words in now.items() if before.get(place) != words]
        changed += [self._first[p] for p in before if p in self._first and p not in now]
        is_said = any(text in rendered_text(messages[index]) for index, text, _ in told)
        if changed and self._can_tell and self._kind.is_told and not is_said:
            told.append((len(messages) - 1, as_reminder("\n".join((self._opening, *changed))), now))
        return told


def sticky_reminders(draft: Draft) -> None:
    """Reminders move from the old user message to the newest, which changes the old one.

    OpenCode attaches the reminder of its plan mode to the newest user message only. A message is
    identified by its number and the user's own text.
    """
    messages = list(draft.messages)
    users = [(i, m.get("content")) for i, m in enumerate(messages) if m.get("role") == "user"]
    prompts = [(i, text) for i, content in users if (text := plain_text(content)) is not None]
    for number, (i, text) in enumerate(prompts, 1):
        key = draft.key("reminder", str(number), without_reminders(text))
        first, is_newest = draft.memory.get(key), number == len(prompts)
        if first is not None and first != messages[i]["content"] and not is_newest:
            messages[i] = {**messages[i], "content": first}
        # The newest message may have lost its reminder, if it was asked again in another mode.
        is_reminding = has_reminder(plain_text(messages[i]["content"]) or "")
        if is_reminding or (is_newest and first is not None):
            draft.lessons[key] = messages[i]["content"]
    draft.messages = messages


# The tools of a conversation as they were first sent.

_MAX_TOOLS = 1000
"""The order of this many tools is kept; of more tools, the oldest names are forgotten."""


def keep_tool_order(draft: Draft) -> None:
    """A tool loaded later is inserted in the middle of the list; at the end it costs nothing.

    The order is that of the conversation. A new conversation takes the order in which its tenant's tools
    were first seen under any system prompt: the tools come before the system prompt, which changes with the
    folder. So do the keys within a tool: Mistral Vibe orders its parameters anew each time that it starts.
    """
    given: list[Json] = draft.body.get("tools") or []  # a list, says Draft
    tools = {_name(tool): tool for tool in given}
    if not tools or len(tools) != len(given):
        return  # two of one name have no order
    keys = draft.key("tool order"), model.key_of("tool order", draft.facts.tenant, draft.route)
    orders: list[list[str]] = [draft.recall(keys[0]) or [], draft.memory.get(keys[1]) or []]
    positions = {name: i for i, name in enumerate(dict.fromkeys(orders[0] + orders[1]))}
    # Sorting is stable, so unknown tools keep the client's order at the end.
    names = sorted(tools, key=lambda name: positions.get(name, len(positions)))
    ordered = [_as_first_sent(draft, tools[name]) for name in names]
    draft.body = with_list(draft.body, "tools", ordered)
    for key, order in zip(keys, orders, strict=True):
        draft.lessons[key] = list(dict.fromkeys(order + names))[-_MAX_TOOLS:]


def _as_first_sent(draft: Draft, tool: Json) -> Json:
    """Return a tool with its keys in the order in which they first came."""
    raw = encode(tool).decode()
    key = _tool_key(raw, draft.facts.tenant)
    first: str = draft.memory.get(key) or raw
    draft.lessons[key] = first
    return tool if first == raw else decode(first)


@lru_cache(_MAX_TOOLS)
def _tool_key(raw: str, tenant: str) -> str:
    """Return a memory key, the same for any order of keys; cached, as each request repeats its tools."""
    return model.key_of("tool", tenant, encode(decode(raw), order="deterministic").decode())


def _name(tool: Json) -> str:
    """Return the name of a tool, or its type if it has none; empty without either."""
    return text_of(_described(tool), "name") or text_of(tool, "type")


def _described(tool: Json) -> dict[str, Any]:
    """Return the object that holds name and description."""
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


# Tool calls as the model wrote them. Claude Code and OpenCode send calls back changed: other key order,
# a default added, a leading `cd ... &&` removed, "1" turned into 1. A call is restored only if the returned
# call still means the same, so that a call which the user edited stays edited. Arguments that are not JSON
# are never restored: llama-server answers 500 to them.


_CHANGE_OF_FOLDER = re.compile(r"""\Acd (?:"[^"\n]*"|'[^'\n]*'|[^\s;&|"']+) && """)
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,6})?")
_ADDED_BY_CLIENT = ("replace_all", False)
_REFUSED_BY_CLIENT = "invalid"
"""OpenCode's name for a call that it could not run; the arguments then name the tool and the error."""


def restore_tool_arguments(draft: Draft, message: Json) -> list[Json]:
    """Clients send tool calls back with other keys, order or numbers than the model wrote."""

    def in_call(call: Any) -> Any:
        function = member(call, "function")
        if not isinstance(function, dict):
            return call
        restored = _restored(draft, function, call.get("id"))
        return call if restored is function else {**call, "function": restored}

    def in_block(block: Any) -> Any:
        is_call = text_of(block, "type") == "tool_use"
        return _restored(draft, block, block.get("id")) if is_call else block

    if message.get("type") == "function_call" and draft.route is Route.RESPONSES:
        return [_restored(draft, message, message.get("call_id"))]
    if message.get("role") != "assistant" or draft.route is Route.RESPONSES:
        return [message]
    is_anthropic = draft.route is Route.MESSAGES
    key, restored = ("content", in_block) if is_anthropic else ("tool_calls", in_call)
    return [model.with_items(message, key, restored)]


def _restored(draft: Draft, holder: Json, call_id: Any) -> Json:
    """Return the object that holds a call's name and arguments, with both as the model wrote them.

    The arguments are an object in the Anthropic form, a text in the others.
    """
    is_object = draft.route is Route.MESSAGES
    key = "input" if is_object else "arguments"
    name, arguments = holder.get("name"), holder.get(key)
    if not isinstance(call_id, str) or not isinstance(name, str):
        return holder
    if made := draft.memory.calls(call_id, draft.facts.tenant):
        draft.lessons[call_key(call_id, draft.facts.tenant)] = made  # later requests need it too
    if not isinstance(arguments, dict if is_object else str):
        return holder
    raw_arguments = arguments if isinstance(arguments, str) else encode(arguments).decode()
    if (chosen := choose_call(made, name, raw_arguments)) is None:
        return holder
    written = object_in(chosen[1]) if is_object else chosen[1]
    restored = {**holder, "name": chosen[0], key: written}
    return holder if encode(restored) == encode(holder) else restored


def choose_call(made: list[Call], name: str, raw_arguments: str) -> Call | None:
    """Return the call of those *made* that came back changed, or None if that is not certain.

    A call with equal values, where only spaces and escapes differ, comes before one with known changes.
    """
    returned = object_in(raw_arguments)
    if returned is None or (name, raw_arguments) in made:
        return None
    values = {call: value for call in made if (value := object_in(call[1])) is not None}
    exact = [c for c, v in values.items() if c[0] == name and encode(v) == encode(returned)]
    # Where some were forgotten, those that are left may be of other conversations.
    known = values if len(made) < model.MAX_VARIANTS else {}
    candidates = exact or [c for c, v in known.items() if _came_back_as(c[0], v, name, returned)]
    return candidates[0] if len(candidates) == 1 else None


def _came_back_as(made_name: str, written: Json, name: str, returned: Json) -> bool:
    if name == _REFUSED_BY_CLIENT and name != made_name:
        return returned.get("tool") == made_name and "error" in returned
    return made_name == name and means_the_same(written, returned)


def means_the_same(written: Any, returned: Any, key: str = "") -> bool:
    """Return whether *returned* is *written*, apart from the known changes of clients.

    Both are the arguments of a call, or the values of a *key* in them.
    """
    match written, returned:
        case dict(), dict():
            kept = {k: v for k, v in returned.items() if k in written or (k, v) != _ADDED_BY_CLIENT}
            alike = (means_the_same(v, kept[k], k) for k, v in written.items())
            return kept.keys() == written.keys() and all(alike)
        case list(), list():
            return len(written) == len(returned) and all(map(means_the_same, written, returned))
        case str(), str():
            without_folder = _CHANGE_OF_FOLDER.sub("", written) if key == "command" else written
            return returned in (written, without_folder)
        case str(), bool():  # the client has turned a text into what it says
            return written == str(returned).lower()
        case str(), int() | float():
            return _NUMBER.fullmatch(written) is not None and float(written) == float(returned)
        case (bool(), _) | (_, bool()):
            return written is returned
    return bool(written == returned)
