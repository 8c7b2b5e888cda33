"""What the model says in a scripted conversation: for each task the answers, one after another.

Which answer comes next is read from the request alone: how many there are already behind the user's
task. So retries, side requests and conversations at the same time need no order.
"""

from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A tool call; its arguments are the very text that the model writes."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """One answer: reasoning, text, calls, each of which may be missing."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thinking: str = ""


LAST = Answer("<summary>All of it is done, and nothing is left to do.</summary>")
"""To side requests, and when a task's answers are used up; clients also accept it as a summary."""


class Script:
    """Answers by task; a task is a phrase that occurs in the text that gives it, and nowhere else."""

    def __init__(self, answers: dict[str, tuple[Answer, ...]] | None = None) -> None:
        self._answers = answers or {}

    def next_answer(self, body: Body) -> Answer:
        if not body.get("tools"):
            return LAST
        messages = body["messages"]
        for i in reversed(range(len(messages))):
            for task, answers in self._answers.items():
                if messages[i]["role"] == "user" and task in _text(messages[i]):
                    n_given = sum(m["role"] == "assistant" for m in messages[i + 1 :])
                    return answers[n_given] if n_given < len(answers) else LAST
        return LAST


def _text(message: Body) -> str:
    """Return what a user wrote in a message; results of tools are nobody's task."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")
