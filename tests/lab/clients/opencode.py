"""Requests in the shapes of OpenCode (OpenAI chat form), in our own words.

Sizes are about those of its first request: 9.5 kB of system prompt with the date near its end, and
21 kB of tools.
"""

import json
from typing import Any

from tests.lab.conversation import prose

Body = dict[str, Any]
Message = dict[str, Any]

TOOL_NAMES = (
    "bash",
    "edit",
    "glob",
    "grep",
    "read",
    "skill",
    "task",
    "todowrite",
    "webfetch",
    "write",
)
PLAN = f"<system-reminder>\nPlan only, change nothing. {prose(11, 190)}\n</system-reminder>"
BUILD = "<system-reminder>\nThe mode is now build: files may be changed.\n</system-reminder>"


def tool(name: str, *, is_plan: bool = False) -> Message:
    seed = sum(name.encode())
    description = prose(seed, 260)
    if name == "task":
        agents = "explore: looks around" if is_plan else "explore: looks around\ngeneral: does it"
        description = f"{prose(seed, 130)}\nAgents:\n{agents}\n{prose(seed + 1, 130)}"
    properties = {
        key: {"type": "string", "description": prose(seed + i, 14)}
        for i, key in enumerate(("path", "why"))
    }
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def tools(*, is_plan: bool = False) -> list[Message]:
    return [tool(name, is_plan=is_plan) for name in TOOL_NAMES]


def system(
    *, date: str = "Sat Nov 21 2026", folder: str = "/work/shop", rules: str = "Write tests."
) -> Message:
    environment = f"<env>\n  Working directory: {folder}\n  Today's date: {date}\n</env>"
    content = f"You are a coding agent.\n{prose(5, 1300)}\n{environment}\n{rules}\n{prose(6, 70)}"
    return {"role": "system", "content": content}


def user(prompt: str, *reminders: str) -> Message:
    """Return a prompt; with a reminder it is sent as several parts."""
    if not reminders:
        return {"role": "user", "content": prompt}
    parts = [{"type": "text", "text": content} for content in (prompt, *reminders)]
    return {"role": "user", "content": parts}


def call(call_id: str, name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def step(seed: int, made: Message | None = None) -> list[Message]:
    """Return an answer that reasons and calls a tool, and the tool's result."""
    arguments = json.dumps({"path": f"src/part_{seed}.py"}, separators=(",", ":"))
    made = made or call(f"call_{seed}", "read", arguments)
    assistant = {
        "role": "assistant",
        "content": "",
        "reasoning_content": prose(seed, 90),
        "tool_calls": [made],
    }
    return [assistant, result(made["id"], prose(seed + 1, 160))]


def answer(seed: int) -> Message:
    return {
        "role": "assistant",
        "content": prose(seed + 2, 60),
        "reasoning_content": prose(seed, 40),
    }


def request(*messages: Message, is_plan: bool = False, **of_system: Any) -> Body:
    return {
        "model": "local-model",
        "max_tokens": 8192,
        "messages": [system(**of_system), *messages],
        "tools": tools(is_plan=is_plan),
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
