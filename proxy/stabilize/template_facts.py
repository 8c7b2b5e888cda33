"""What a chat template does with late system messages and old reasoning, read from renderings.

Owns: which bodies to render, and what their renderings mean. `BODIES` are chat bodies for
/apply-template; a body that llama-server refuses has no rendering.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from proxy.stabilize.model import Facts, Form, Json, Marks
from proxy.stabilize.reasoning import inline_reasoning

_ASKED = {"role": "user", "content": "Zaq asks"}
_ASKED_AGAIN = {"role": "user", "content": "Zaq asks again"}
_REASONING = "Zaq reasons"
_PADDED = f"\n {_REASONING}\n "
_TEXT = "Zaq answers"
_LATE = "Zaq commands"
_CALL = {
    "id": "call_0000",
    "type": "function",
    "function": {"name": "zaq", "arguments": "{}"},
}
_RESULT = {"role": "tool", "tool_call_id": "call_0000", "content": "Zaq returns"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "zaq",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Probe(StrEnum):
    """The renderings that tell what a template does."""

    LATE_SYSTEM = "late system"
    RUNNING_TEXT = "text of a running turn"
    RUNNING_CALL = "call of a running turn"
    RUNNING_PADDED = "padded reasoning of a running turn"
    RUNNING_BARE = "answer without reasoning of a running turn"
    OLD_TEXT = "text of an old turn"


def _answer(content: str, reasoning: str = _REASONING) -> list[Json]:
    answer: Json = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
    reasoned = {"reasoning_content": reasoning} if reasoning else {}
    return [_ASKED, {**answer, **reasoned}, _RESULT]


def _old(content: str, reasoning: str = _REASONING) -> list[Json]:
    closed = {"role": "assistant", "content": "Zaq ends"}
    return [*_answer(content, reasoning), closed, _ASKED_AGAIN]


_SYSTEM = {"role": "system", "content": "Zaq"}
_LATE_SYSTEM = [
    _SYSTEM,
    _ASKED,
    {"role": "assistant", "content": _TEXT},
    _ASKED_AGAIN,
    {"role": "system", "content": _LATE},
]
_MESSAGES: dict[Probe, list[Json]] = {
    Probe.LATE_SYSTEM: _LATE_SYSTEM,
    Probe.RUNNING_TEXT: _answer(_TEXT),
    Probe.RUNNING_CALL: _answer(""),
    Probe.RUNNING_PADDED: _answer(_TEXT, _PADDED),
    Probe.RUNNING_BARE: _answer(_TEXT, ""),
    Probe.OLD_TEXT: _old(_TEXT),
}
BODIES: dict[Probe, dict[str, Any]] = {
    probe: {"messages": messages, "tools": [_TOOL]} for probe, messages in _MESSAGES.items()
}


def read_facts(renderings: Mapping[Probe, str | None]) -> Facts:
    """Return what is known of a template by the renderings of `BODIES`; None for those refused."""
    late = renderings.get(Probe.LATE_SYSTEM)
    return Facts(
        # Rendered somewhere else than where it was said, it would change the beginning.
        accepts_late_system=late is not None and late.find(_LATE) > late.find("Zaq asks again"),
        reasoning_marks=_read_marks(renderings),
    )


def inlined_body(facts: Facts) -> dict[str, Any] | None:
    """Return a body whose rendering shows whether the reasoning marks hold, if there are any."""
    old = {"messages": [*_old(""), *_old(_TEXT), *_old(_TEXT, "")], "tools": [_TOOL]}
    rewrite = inline_reasoning(Form.CHAT, old, facts)
    return None if rewrite is None else rewrite.body


def keeps_inlined(rendering: str | None, renderings: Mapping[Probe, str | None]) -> bool:
    """Return whether the rendering of `inlined_body` begins as the turn did while it was running."""
    marks = _read_marks(renderings)
    if rendering is None or marks is None or rendering.count(_REASONING) != 2:
        return False
    running = renderings[Probe.RUNNING_CALL] or ""
    bare = (renderings[Probe.RUNNING_BARE] or "").split(str(_ASKED["content"]), 1)[-1]
    has_bare = bare.split(str(_RESULT["content"]))[0] in rendering
    begins_alike = rendering.startswith(running[: running.find(str(_RESULT["content"]))])
    return begins_alike and (has_bare or not marks.writes_empty)


def _read_marks(renderings: Mapping[Probe, str | None]) -> Marks | None:
    """Return how reasoning is written, or None if it is kept anyway or cannot be told."""
    running = renderings.get(Probe.RUNNING_TEXT) or ""
    old = renderings.get(Probe.OLD_TEXT) or ""
    called = renderings.get(Probe.RUNNING_CALL) or ""
    padded = renderings.get(Probe.RUNNING_PADDED) or ""
    if _REASONING in old or not all(_REASONING in text for text in (running, called, padded)):
        return None
    if _TEXT not in old or _TEXT not in running:
        return None
    begins = old.index(_TEXT)
    begin, behind = running[begins:].split(_REASONING, 1)
    if running[:begins] != old[:begins]:
        return None
    before_calls = _before_calls(called, old)
    if before_calls is None:
        return None
    end = behind.split(_TEXT, 1)[0]
    bare = running.replace(begin + _REASONING + end, begin + end, 1)
    return Marks(
        begin,
        end,
        before_calls,
        strips=begin + _PADDED not in padded,
        writes_empty=bool(begin) and renderings.get(Probe.RUNNING_BARE) == bare,
    )


def _before_calls(called: str, old: str) -> str | None:
    """Return what stands behind reasoning that calls follow, less what the template adds to text."""
    behind_reasoning = called.split(_REASONING, 1)[1].split(str(_RESULT["content"]))[0]
    behind_text = old.split(_TEXT, 1)[1].split(str(_RESULT["content"]))[0]
    if not behind_reasoning.endswith(behind_text):
        return None
    return behind_reasoning.removesuffix(behind_text)
