"""How a chat template treats late system messages and old reasoning, read from renderings.

Owns: the bodies to render, and the meaning of their renderings. `BODIES` are chat bodies for
/apply-template; a body that llama-server refuses has no rendering.
"""

from collections.abc import Mapping
from typing import Any

from proxy.core.messages import Route
from proxy.stabilize.drops import inline_reasoning
from proxy.stabilize.model import Draft, Json, Marks, Memory, RequestFacts

_ASKS, _ASKS_AGAIN = "Zaq asks", "Zaq asks again"
_COMMANDS, _RETURNS = "Zaq commands", "Zaq returns"
_REASONING = "Zaq reasons"
_PADDED = f"\n {_REASONING}\n "
_TEXT = "Zaq answers"
_FUNCTION = {"name": "zaq", "arguments": "{}"}
_CALL = {"id": "call_0000", "type": "function", "function": _FUNCTION}
_PARAMETERS = {"type": "object", "properties": {}}
_TOOL = {
    "type": "function",
    "function": {"name": "zaq", "description": "", "parameters": _PARAMETERS},
}


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
    "running padded": _running(_TEXT, _PADDED),
    "running bare": _running(_TEXT, ""),
}
"""Turns still running, and an old one: with reasoning, padded reasoning or none, text or only a call."""
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
    inline_reasoning(draft)
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
    probes = ("old", "running", "running call", "running padded", "running bare")
    old, running, called, padded, with_bare = (renderings.get(probe) or "" for probe in probes)
    if _REASONING in old or not all(_REASONING in text for text in (running, called, padded)):
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
    bare = running.replace(begin + _REASONING + end, begin + end, 1)
    return Marks(
        begin,
        end,
        before_result.removesuffix(behind_text),
        strips=begin + _PADDED not in padded,
        writes_empty=bool(begin) and with_bare == bare,
    )
