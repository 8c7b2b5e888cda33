"""Traces in the shapes of real clients: everything that they change in what they have sent before.

All rows of the table in docs/clients.md, one after the other, as if by one user in one repository.
"""

from proxy.core.messages import Route
from tests.bench.traces.trace import Message, Request, Trace, one_client
from tests.lab.clients.catalogue import ROWS
from tests.lab.clients.mutation import Mutation


def claude_code() -> Trace:
    """Claude Code's requests, in the form of Anthropic's API."""
    return _trace("claude-code", Route.MESSAGES)


def opencode() -> Trace:
    """OpenCode's requests, chat completions."""
    return _trace("opencode", Route.CHAT)


def _trace(name: str, form: Route) -> Trace:
    mutations = [row.mutation for row in ROWS if row.mutation.form is form]
    requests = [request for mutation in mutations for request in _requests(mutation)]
    return Trace(name, (one_client(requests),), slots=(2,))


def _requests(mutation: Mutation) -> list[Request]:
    return [
        Request(
            f"{mutation.name}.{number}",
            _asked(body["messages"]),
            tuple(body.get("tools", ())),
            tuple(body.get("system", ())),
        )
        for number, body in enumerate(mutation.requests, 1)
    ]


def _asked(messages: list[Message]) -> tuple[Message, ...]:
    """Return the messages up to the last that waits for an answer."""
    n = len(messages)
    while messages[n - 1]["role"] == "assistant":
        n -= 1
    return tuple(messages[:n])
