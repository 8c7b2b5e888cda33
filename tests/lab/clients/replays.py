"""What clients of November 2026 change between two sessions or two turns: rows C1 to X12.

A row is the same requests twice: as the client sends them, and as they were if it changed nothing. What is
evaluated for the one beyond the other is what the change costs. `TAG` stands at the top of the system
prompt and of the first tool, so that no two replays share anything.
"""

import json
from dataclasses import dataclass
from typing import Any

from proxy.core.messages import Route
from proxy.stabilize.model import Name
from tests.lab.clients import claude_code as cc
from tests.lab.clients import opencode as oc
from tests.lab.conversation import prose

Body = dict[str, Any]

TAG = "agent_00"
PATHS = {
    Route.MESSAGES: "/v1/messages",
    Route.CHAT: "/v1/chat/completions",
    Route.RESPONSES: "/v1/responses",
}
PROMPTS = tuple(f"{TAG}: {verb} the tests." for verb in ("Run", "Read", "Mend", "Explain"))
UUIDS = (
    "6ad1e0d2-93b4-4c0f-8a55-0f3b9c7e1d20",
    "f2c7b8aa-1d6e-4f7b-9e02-7b1c5d3a9f44",
    "0b9d4e61-5a2c-4be8-b3f7-e8d21c60a975",
)
SESSIONS = ("session_01HqzX8vT3kYw2Rb", "session_01JmnP4cD9fLs7Ue", "session_01KaeG6xB1tVd5Wz")
DAYS = ("Saturday, November 21, 2026", "Sunday, November 22, 2026", "Monday, November 23, 2026")
ISO = ("2026-11-21", "2026-11-22", "2026-11-23")
CLOCKS = ("10:02", "10:17", "11:45")
ISO_DAYS = tuple(f"{iso} ({day.partition(',')[0]})" for iso, day in zip(ISO, DAYS, strict=True))


@dataclass(frozen=True)
class Replay:
    """Requests as sent, and without what changes in them; what then helps: by default, or a switch."""

    name: str
    words: str
    form: Route
    changed: tuple[Body, ...]
    unchanged: tuple[Body, ...]
    opt_in: frozenset[Name] = frozenset()
    switch: str = ""
    """What the client itself, or who runs it, can do."""
    cause: str = ""
    """What `explain` names where tokens are evaluated again."""

    @property
    def is_one_conversation(self) -> bool:
        """Whether the last request goes on from the first one."""
        return self.name.split()[0] not in ("C1", "C3", "C6", "C7", "X4", "X12")


def tagged(body: Body, tag: str) -> Body:
    tagged: Body = json.loads(json.dumps(body).replace(TAG, tag))
    return tagged


def _edited(body: Body, old: str, new: str) -> Body:
    text = json.dumps(body)
    assert json.dumps(old)[1:-1] in text, old
    edited: Body = json.loads(text.replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1]))
    return edited


def _tagged_tools(tools: list[Any], described: str) -> list[Any]:
    first = json.loads(json.dumps(tools[0]))
    holder = first.get("function", first)
    holder |= {"name": TAG, "description": f"{described}{holder['description']}"}
    return [first, *tools[1:]]


def _claude_code(prompt: str, *later: Any, line: str = "", **more: Any) -> Body:
    """Return a request of Claude Code with a *line* in the middle of its system prompt."""
    tools = _tagged_tools(cc.tools()[:4], "")
    body = cc.request(prompt, *later, **{"tools": tools, **more})
    body["system"][1]["text"] = f"{TAG}. You are an agent of the command line."
    body = _edited(body, "# Environment\n", f"# Environment\n{TAG}\n")
    return _edited(body, "Notes are kept", f"{line}\nNotes are kept") if line else body


def _chat(*messages: Any, line: str = "", behind: str = "", **more: Any) -> Body:
    """Return a request with a *line* in the middle of its system prompt, another one at its end."""
    body = oc.request(*messages, **more)
    system = body["messages"][0]["content"]
    at = system.index("<env>")
    middle = system.index("\n") + (at - system.index("\n")) // 2
    content = f"{TAG}.\n{system[:middle]}\n{line}\n{system[middle:]}{behind}"
    body["messages"][0] = {"role": "system", "content": content}
    return {**body, "tools": _tagged_tools(body["tools"][:3], "")}


def _turns(*later: Any) -> list[list[Any]]:
    """Return the messages of three turns of one conversation."""
    one = [oc.user(PROMPTS[0])]
    two = [*one, *oc.step(20), {"role": "assistant", "content": prose(30, 60)}, oc.user(PROMPTS[1])]
    return [one, two, [*two, *oc.step(40), *later]]


def _turns_of_chat(
    name: str, words: str, lines: tuple[str, ...], *, front: bool = False, **more: Any
) -> Replay:
    """Return turns of one conversation, each with another line."""

    def body(i: int, line: str) -> Body:
        turn = _turns()[i]
        if not front:
            return _chat(*turn, line=line)
        got = {"role": "assistant", "content": "Got it. Thanks for the context!"}
        return _chat(oc.user(f"{line}\n{prose(50, 700)}"), got, *turn)

    return _replay(name, words, Route.CHAT, body, lines, **more)


def _replay(
    name: str, words: str, form: Route, body: Any, lines: tuple[str, ...], **more: Any
) -> Replay:
    changed = tuple(body(i, line) for i, line in enumerate(lines))
    unchanged = tuple(body(i, lines[0]) for i in range(len(lines)))
    return Replay(name, words, form, changed, unchanged, **more)


def _of_claude_code(
    name: str, words: str, body: Any, values: tuple[Any, ...], **more: Any
) -> Replay:
    return _replay(name, words, Route.MESSAGES, body, values, **more)


SESSION: dict[str, Any] = {"opt_in": frozenset({Name.STICKY_SESSION}), "cause": "session id"}
DATE: dict[str, Any] = {"opt_in": frozenset({Name.STICKY_DATE}), "cause": "date"}


def _scratchpad(uuid: str) -> str:
    path = f"/tmp/claude-1000/-work-shop/{uuid}/scratchpad"
    return f"Scratchpad directory: {path} — always use it for temporary files"


def _c1_environment(i: int, uuid: str) -> Body:
    body = _claude_code(PROMPTS[i])
    return _edited(body, "# Environment\n", f"# Environment\n{_scratchpad(uuid)}\n")


def _c3(i: int, session: str) -> Body:
    line = f"Link the session in commits: https://claude.ai/code/{session}\n"
    return _claude_code(PROMPTS[i], tools=_tagged_tools(cc.tools()[:4], line))


def _c4(i: int, n_left: int) -> Body:
    def left(n: int) -> Any:
        return cc.text(f"<total_tokens>{n} tokens left</total_tokens>")

    steps = [m for k in range(i) for m in cc.step(20 + 10 * k, left(n_left - 1000 * k))]
    return _claude_code(PROMPTS[0], *steps)


def _c5(i: int, names: tuple[str, ...]) -> Body:
    steps = [m for k in range(i) for m in cc.step(20 + 10 * k)]
    more = [{**cc.tool("Agent"), "name": name} for name in names]
    return _claude_code(PROMPTS[0], *steps, tools=_tagged_tools([*cc.tools()[:4], *more], ""))


def _c6(i: int, status: str) -> Body:
    return _claude_code(PROMPTS[i], status=status)


def _c7(i: int, folder: str) -> Body:
    return _claude_code(PROMPTS[i], folder=folder)


def _c8(i: int, told: str) -> Body:
    hidden = {"role": "system", "content": told, "clear_at": "next_user_message"}
    later = [[], [*cc.step(20), hidden], [*cc.step(20), hidden, *cc.step(30)]][i]
    return _claude_code(PROMPTS[0], *later)


def _p1(i: int, form: str) -> Body:
    """Return a summary of the whole conversation asked for behind its prefix, or of its transcript."""
    asked, turn = "Sum up what was done.", _turns()[min(i, 1)]
    if i < 2:
        return _chat(*turn)
    if form == "prefix":
        return _chat(*turn, oc.user(asked))
    lines = (f"[{m['role'].title()}]: {m['content'] or m.get('tool_calls')}" for m in turn)
    return {"messages": [oc.user(f"{TAG} " + "\n".join((*lines, asked)))]}


def _p2(i: int, cleared: str) -> Body:
    turn = [oc.user(PROMPTS[0]), *(m for k in range(3) for m in oc.step(20 + 10 * k))]
    if i == 0:
        return _chat(*turn)
    kept = {"role": "tool", "tool_call_id": "call_20", "content": cleared}
    sent = (kept if m.get("tool_call_id") == "call_20" and cleared else m for m in turn)
    return _chat(*sent, *oc.step(70))


def _x12(i: int, stamp: str) -> Body:
    lines = f"<CURRENT_DATETIME>\nThe current date and time is: {stamp}\n</CURRENT_DATETIME>"
    return _chat(oc.user(PROMPTS[i]), line=lines)


def _p3(i: int, stamp: str) -> Body:
    lines = f"<memory_metadata>\nThe current date is: {stamp}\n</memory_metadata>"
    return _chat(*_turns()[i], line=lines)


def _x2(i: int, asked: str) -> Body:
    body = _chat(oc.user(asked)) if i == 1 else _chat(*_turns()[min(i, 1)])
    return {**body, "max_tokens": 1} if i == 1 else body


def _x4(i: int, day: str) -> Body:
    block = (
        f"<environment_context>\n  <cwd>/work/shop</cwd>\n  <current_date>{day}</current_date>\n"
    )
    items = [
        {"type": "message", "role": "developer", "content": [_input(prose(51, 300))]},
        {"type": "message", "role": "user", "content": [_input(f"{prose(52, 600)}")]},
        {"type": "message", "role": "user", "content": [_input(f"{block}</environment_context>")]},
        {"type": "message", "role": "user", "content": [_input(PROMPTS[i])]},
    ]
    return {"instructions": f"{TAG}. {prose(53, 1500)}", "input": items, "max_output_tokens": 4}


def _input(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


def _x6(i: int, outdated: str) -> Body:
    body = _p2(i, outdated)
    return body


def _x7(i: int, minute: str) -> Body:
    told = f"<info-msg>\nIt is currently {minute}:00\n</info-msg>"
    turn = _turns()[i]
    return _chat(*turn[:-1], oc.user(f"{turn[-1]['content']}\n{told}") if i < 2 else turn[-1])


def _x10(i: int, rules: str) -> Body:
    return _chat(*_turns()[i], rules=rules)


REPLAYS = (
    _of_claude_code(
        "C1",
        "Claude Code: scratchpad path in the system prompt",
        lambda i, uuid: _claude_code(PROMPTS[i], line=_scratchpad(uuid)),
        UUIDS,
        **SESSION,
    ),
    _of_claude_code("C1 env", "the same, under `# Environment`", _c1_environment, UUIDS, **SESSION),
    _of_claude_code(
        "C2",
        "`--fork-session`, `/branch`",
        lambda i, session: {
            **_claude_code(PROMPTS[0], *(cc.step(20) if i else [])),
            "metadata": {"user_id": json.dumps({"session_id": session})},
        },
        UUIDS,
    ),
    _of_claude_code("C3", "session URL in the `Bash` description", _c3, SESSIONS, **SESSION),
    _of_claude_code("C4", "`<total_tokens>` in tool results", _c4, (15000000,) * 3),
    _of_claude_code(
        "C5",
        "an MCP server's tools vanish and return",
        _c5,
        (("mcp_a", "mcp_b"), (), ("mcp_a", "mcp_b")),
        cause="tools added or removed",
        switch="load all tools at the start",
    ),
    _of_claude_code(
        "C6", "`gitStatus` as reminder", _c6, ("nothing to commit", "M a.py", "M b.py")
    ),
    _of_claude_code(
        "C7",
        "another folder",
        _c7,
        ("/work/shop", "/work/store", "/work/shop"),
        switch="`--exclude-dynamic-system-prompt-sections`",
        cause="system text changed",
    ),
    _of_claude_code("C8", "system message with `clear_at`", _c8, ("Look twice.",) * 3),
    _replay(
        "P1",
        "OpenCode: compaction as transcript",
        Route.CHAT,
        _p1,
        ("prefix", "prefix", "transcript"),
        cause="first sight",
        switch="OpenCode 2.0.12",
    ),
    _replay(
        "P2",
        "pruned tool results",
        Route.CHAT,
        _p2,
        ("", "[Old tool result content cleared]"),
        cause="edited message",
        switch="`compaction.prune: false` (default)",
    ),
    _replay(
        "P3",
        "`<memory_metadata>` of a plugin",
        Route.CHAT,
        _p3,
        tuple(f"{day}T10:02:1{i}.123Z" for i, day in enumerate(ISO)),
        **DATE,
    ),
    _turns_of_chat(
        "X1",
        "openclaw: `## Runtime`",
        ("## Runtime\nmodel=m | channel=web | reasoning=off",)
        + ("## Runtime\nmodel=m | channel=chat | reasoning=low",)
        + ("## Runtime\nmodel=m | channel=web | reasoning=high",),
        cause="system text changed",
        switch="one channel, one reasoning level in a conversation",
    ),
    _turns_of_chat(
        "X1 time",
        "openclaw: `Current time`",
        tuple(f"Current time: {day} — {c} (UTC)" for day, c in zip(DAYS, CLOCKS, strict=True)),
        **DATE,
    ),
    _replay("X2", "hermes: warming request", Route.CHAT, _x2, ("x",) * 3),
    _turns_of_chat(
        "X3",
        "hermes: `Conversation started`",
        tuple(f"Conversation started: {day} 10:02 AM" for day in DAYS),
        **DATE,
    ),
    _turns_of_chat(
        "X3 memory",
        "hermes: how full its memory is",
        tuple(
            f"MEMORY (your personal notes) [{n}% — {n * 22:,}/2,200 chars]" for n in (49, 51, 73)
        ),
        **SESSION,
    ),
    _replay("X4", "codex: `<current_date>`", Route.RESPONSES, _x4, ISO),
    _turns_of_chat(
        "X5",
        "qwen-code: date in the first message",
        tuple(f"Today's date is {day} (formatted according to the user's locale)." for day in DAYS),
        front=True,
        **DATE,
    ),
    _turns_of_chat(
        "X5 system",
        "qwen-code: `The current date is:`",
        tuple(f"The current date is: {day}." for day in DAYS),
        front=True,
        **DATE,
    ),
    _replay(
        "X6",
        "cline: `[outdated …]`",
        Route.CHAT,
        _x6,
        ("", "[outdated - see the latest file content]"),
        cause="edited message",
        switch="`CLINE_MESSAGE_BUILDER_MIN_OUTDATED_REWRITE_BYTES`",
    ),
    _replay(
        "X7",
        "goose, older: time in the newest message",
        Route.CHAT,
        _x7,
        tuple(f"2026-11-22 {clock}" for clock in CLOCKS),
    ),
    _turns_of_chat(
        "X8",
        "crush: `Today's date`",
        tuple(f"Today's date: 11/{day}/2026" for day in (21, 22, 23)),
        **DATE,
    ),
    _turns_of_chat(
        "X9 pi",
        "pi: date and time",
        tuple(f"Current date and time: {day} at 10:0{i}:31 AM UTC" for i, day in enumerate(DAYS)),
        **DATE,
    ),
    _turns_of_chat(
        "X9 oh-my-pi",
        "oh-my-pi: `Today: …` in the first message",
        tuple(f"Today: {day}; current working directory: '/work'." for day in ISO),
        front=True,
        **DATE,
    ),
    _turns_of_chat(
        "X9 vibe",
        "Mistral Vibe: `Today's date is …`",
        tuple(f"Today's date is {day}." for day in ISO_DAYS),
        **DATE,
    ),
    _turns_of_chat(
        "X9 anything-llm",
        "anything-llm: date and time",
        tuple(f"The current date and time is {d}, {c}." for d, c in zip(DAYS, CLOCKS, strict=True)),
        **DATE,
    ),
    _replay(
        "X10",
        "Zed: AGENTS.md edited",
        Route.CHAT,
        _x10,
        ("Write tests.", "Write few tests.", "Write no tests."),
        cause="system text changed",
        switch="edit rules between conversations",
    ),
    _turns_of_chat(
        "X11 kai",
        "kai: `- UTC:`",
        tuple(f"- UTC: {day}T00:2{i}:07.123Z" for i, day in enumerate(ISO)),
        **DATE,
    ),
    _turns_of_chat(
        "X11 nanobot",
        "nanobot: `## Current Time`",
        tuple(
            f"## Current Time\n{iso} {clock} ({day.partition(',')[0]})"
            for iso, clock, day in zip(ISO, CLOCKS, DAYS, strict=True)
        ),
        **DATE,
    ),
    _turns_of_chat(
        "X11 LibreChat",
        "LibreChat: `Current Date & Time`",
        tuple(f"Current Date & Time: {ISO[i]} ({i}) {CLOCKS[i]}" for i in range(3)),
        **DATE,
    ),
    _replay(
        "X12",
        "OpenHands: `The current date and time is:` to the second",
        Route.CHAT,
        _x12,
        tuple(f"{day}T10:02:1{i}.085602" for i, day in enumerate(ISO)),
        **SESSION,
    ),
)
