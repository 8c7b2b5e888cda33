"""Requests in the shapes of Claude Code (Anthropic Messages form), in our own words.

Sizes are about those of its first request in a small repository: 7 kB of system prompt, 31 kB of tools
and 9 kB of environment.
"""

import hashlib
from typing import Any

from tests.lab.conversation import prose

Body = dict[str, Any]
Message = dict[str, Any]

TOOL_NAMES = (
    *("Agent", "Bash", "Edit", "Glob", "Grep", "Read", "Skill", "TodoWrite", "ToolSearch"),
    *("WebFetch", "DeferredToolPlaceholder", "Write"),
)
EPHEMERAL = {"type": "ephemeral"}


def text(content: str, **more: Any) -> Message:
    return {"type": "text", "text": content, **more}


def reminder(content: str) -> Message:
    return text(f"<system-reminder>\n{content}\n</system-reminder>\n")


def tool(name: str) -> Message:
    seed = sum(name.encode())
    properties = {
        key: {"type": "string", "description": prose(seed + i, 18)}
        for i, key in enumerate(("target", "reason", "limit"))
    }
    schema = {"type": "object", "properties": properties, "required": ["target"]}
    more = {"defer_loading": True} if name == "DeferredToolPlaceholder" else {}
    return {"name": name, "description": prose(seed, 340), "input_schema": schema, **more}


def tools(*more: str) -> list[Message]:
    """Return the tools in the client's order: by the alphabet, two of them at the end."""
    return [tool(name) for name in (*sorted((*TOOL_NAMES[:-2], *more)), *TOOL_NAMES[-2:])]


def system(
    prompt: str, *, folder: str = "/work/shop", nonce: str = "", seed: int = 1
) -> list[Message]:
    """Return the system prompt: a billing line, who the model is, and the long text."""
    digits = hashlib.sha256(prompt.encode()).hexdigest()[:3]
    billing = f"x-anthropic-billing-header: cc_version=2.1.329.{digits}; cc_entrypoint=sdk-cli;"
    memory = f"Notes are kept in ~/.notes/{folder.replace('/', '-')}/memory/."
    long = f"{prose(seed, 420)}\n{memory}\n{prose(seed + 1, 450)}"
    return [
        text(billing + (f" cch={nonce};" if nonce else "")),
        text("You are an agent of the command line.", cache_control=EPHEMERAL),
        text(long, cache_control=EPHEMERAL),
    ]


def environment(seed: int = 2, n_words: int = 1250) -> Message:
    """Return the message behind the first user text: folder, agents, skills, date."""
    told = f"# Environment\n{prose(seed, n_words)}\nDate: 2026-11-21"
    return {"role": "system", "content": told}


def first_user(prompt: str, *, status: str = "nothing to commit") -> Message:
    git = reminder(f"gitStatus: branch main\n{prose(3, 40)}\nStatus: {status}")
    return {"role": "user", "content": [git, reminder(prose(4, 25)), text(prompt)]}


def thinking(seed: int) -> Message:
    return {"type": "thinking", "thinking": prose(seed, 90), "signature": ""}


def use(call_id: str, name: str, arguments: dict[str, Any]) -> Message:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: Any) -> Message:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def step(seed: int, *beside: Message, call: Message | None = None) -> list[Message]:
    """Return an answer with a call, and the message with its result and what stands beside it."""
    made = call or use(f"toolu_{seed}", "Read", {"target": f"src/part_{seed}.py"})
    assistant = {"role": "assistant", "content": [thinking(seed), made]}
    user = {"role": "user", "content": [result(made["id"], prose(seed + 1, 160)), *beside]}
    return [assistant, user]


def answer(seed: int) -> Message:
    return {"role": "assistant", "content": [thinking(seed), text(prose(seed + 2, 60))]}


def user(prompt: str) -> Message:
    return {"role": "user", "content": prompt}


def request(prompt: str, *later: Message, **more: Any) -> Body:
    """Return a request of the conversation that begins with *prompt*."""
    status = more.pop("status", "nothing to commit")
    head = [first_user(prompt, status=status), environment()]
    return request_with([*head, *later], prompt=prompt, **more)


def request_with(
    messages: list[Message], *, prompt: str, tools: list[Message] | None = None, **of_system: Any
) -> Body:
    """Return a request with these messages; the last block of the last carries the moving mark."""
    return {
        "model": "local-model",
        "messages": [*messages[:-1], _marked(messages[-1])],
        "system": system(prompt, **of_system),
        "tools": globals()["tools"]() if tools is None else tools,
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "stream": True,
    }


def _marked(message: Message) -> Message:
    """Return a message with the mark on its last block; a string becomes a list for it."""
    content = message["content"]
    blocks = [text(content)] if isinstance(content, str) else list(content)
    return {**message, "content": [*blocks[:-1], {**blocks[-1], "cache_control": EPHEMERAL}]}
