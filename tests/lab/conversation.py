"""A coding-agent conversation: a long header of tools and system prompt, then turns with tool results.

Deterministic and free of any client's own text. Sizes are in characters; with the lab's vocabulary
about four of them are a token.
"""

import json
import random
from functools import cache
from typing import Any

Message = dict[str, Any]

_VERBS = ("read", "write", "search", "list", "run", "edit", "fetch", "plan", "review", "test")
_NOUNS = ("file", "folder", "symbol", "process", "branch", "patch", "page", "task", "diff", "log")
_WORDS = (
    "return value of the function must be checked before index is used because callers pass None "
    "when key was not found in mapping and then loop raises error that nobody expects here"
).split()


@cache
def prose(seed: int, n_words: int) -> str:
    """Return *n_words* of repeatable text."""
    chosen = random.Random(seed).choices(_WORDS, k=n_words)
    return " ".join(f"{word}{i % 89 or ''}" for i, word in enumerate(chosen))


def tools(n_tools: int = 10, n_words: int = 90, seed: int = 1) -> list[dict[str, Any]]:
    """Return tool definitions in the OpenAI form."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"{verb}_{noun}",
                "description": prose(seed + i, n_words),
                "parameters": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string", "description": prose(seed + 100 + i, 12)},
                        "limit": {"type": "integer", "description": prose(seed + 200 + i, 8)},
                    },
                    "required": ["path"],
                },
            },
        }
        for i, (verb, noun) in enumerate(zip(_VERBS[:n_tools], _NOUNS, strict=False))
    ]


def system(n_words: int, seed: int = 7) -> Message:
    return {"role": "system", "content": "You are a coding agent.\n" + prose(seed, n_words)}


def user(seed: int, n_words: int = 25) -> Message:
    return {"role": "user", "content": f"Task {seed}: {prose(1000 + seed, n_words)}"}


def tool_call(seed: int) -> Message:
    """Return an assistant message that reasons and then calls a tool."""
    arguments = json.dumps({"path": f"src/module_{seed}.py", "limit": seed})
    function = {"name": "read_file", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": prose(2000 + seed, 20),
        "tool_calls": [{"id": f"call_{seed}", "type": "function", "function": function}],
    }


def tool_result(seed: int, n_words: int = 30) -> Message:
    content = f"# src/module_{seed}.py\n{prose(3000 + seed, n_words)}"
    return {"role": "tool", "tool_call_id": f"call_{seed}", "content": content}


def answer(seed: int) -> Message:
    return {"role": "assistant", "content": prose(4000 + seed, 30)}


def agent_requests(
    n_turns: int, n_calls: int, *, header: list[Message], seed: int = 0
) -> list[list[Message]]:
    """Return the messages of each request of a conversation: every turn asks, calls tools, answers.

    The client's record of the answers is scripted, so that it differs from what the model generated:
    as with real agents, what was generated does not come back token for token.
    """
    messages = list(header)
    requests = []
    for turn in range(n_turns):
        messages.append(user(seed + 10 * turn))
        requests.append(list(messages))
        for call in range(n_calls):
            step = seed + 10 * turn + call
            messages += [tool_call(step), tool_result(step)]
            requests.append(list(messages))
        messages.append(answer(seed + 10 * turn))
    return requests
