"""What the model does in the scripted conversations: tool calls, written as models write them.

Claude Code sends such calls back changed on purpose of its own: keys in another order, a change of
folder left out, a default added, a text turned into the number that it says.
"""

import json
from pathlib import Path
from typing import Any

from tests.clients.script import Answer, Call

EARLIER, LATER = {"TZ": "Etc/GMT+12"}, {"TZ": "Pacific/Kiritimati"}
"""Environments: at every moment it is an earlier date in the one than in the other."""


def call(name: str, **arguments: Any) -> Call:
    return Call(name, json.dumps(arguments))


def claude_code_loop(repository: Path) -> tuple[Answer, ...]:
    """Return twelve answers with calls that Claude Code carries out, and one without."""
    one, two, three = (str(repository / "src" / f"{n}.py") for n in ("one", "two", "three"))
    edit = call("Edit", file_path=one, old_string="one_1 = 1", new_string="one_1 = 11")
    moved = f"cd {repository} && git diff | head -5"
    return (
        Answer("I look around.", (call("Bash", description="List", command="ls src"),), "First."),
        Answer("", (call("Read", file_path=one, offset="1", limit=20.0),), "Which part is it?"),
        Answer("Now I change it.", (edit,)),
        Answer("", (call("Bash", description="Show", command=moved, timeout=20000.0),), "So?"),
        Answer("Both.", (call("Read", file_path=two), call("Read", file_path=three)), "All."),
        *(
            Answer("", (call("Bash", description=f"Step {i}", command=f"seq {i} 40"),), f"{i}!")
            for i in range(7)
        ),
        Answer("The parser is mended.", thinking="That was all."),
    )


def opencode_loop(repository: Path) -> tuple[Answer, ...]:
    """Return twelve answers with calls that OpenCode carries out, and one without."""
    one, two, three = (str(repository / "src" / f"{n}.py") for n in ("one", "two", "three"))
    edit = call("edit", filePath=one, oldString="one_1 = 1", newString="one_1 = 11")
    return (
        Answer("I look around.", (call("bash", description="List", command="ls src"),), "First."),
        Answer("", (call("read", filePath=one, offset=1, limit=20.0),), "Which part is it?"),
        Answer("Now I change it.", (edit,)),
        Answer(
            "", (Call("bash", '{ "command" : "git diff",  "description":"Caf\\u00e9" }'),), "So?"
        ),
        Answer("Both.", (call("read", filePath=two), call("read", filePath=three)), "All."),
        Answer("", (call("nothing_of_the_kind", path=one),), "Is there such a tool?"),
        *(
            Answer("", (call("bash", description=f"Step {i}", command=f"seq {i} 40"),), f"{i}!")
            for i in range(6)
        ),
        Answer("The parser is mended.", thinking="That was all."),
    )


def claude_code_delegation() -> tuple[Answer, ...]:
    """Return answers that send out two agents at once and, when they are back, a third one.

    Agents work beside the conversation; that they are done comes later, as a message of its own.
    """
    one, two, three = (
        call("Agent", description=f"Look at {part}", prompt=f"Examine part {part}.")
        for part in ("one", "two", "three")
    )
    return (
        Answer("Two agents look at it.", (one, two)),
        Answer("I wait for them."),
        Answer("One more.", (three,)),
        Answer("I wait again."),
    )


def opencode_delegation() -> tuple[Answer, ...]:
    calls = tuple(
        call(
            "task",
            description=f"Look at {part}",
            prompt=f"Examine part {part}.",
            subagent_type="general",
        )
        for part in ("one", "two")
    )
    return Answer("Two agents look at it.", calls), Answer("They are back.")
