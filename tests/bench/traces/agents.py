"""Traces of coding agents that work by themselves or by turns."""

from tests.bench.traces.session import Session, header
from tests.bench.traces.trace import Request, Trace, one_client

HEADER_CHARACTERS = 35_500
"""About 10,000 tokens."""
AGENT_TURNS = 12
N_SESSIONS = 3


def agent_requests(name: str, seed: int, n_turns: int = AGENT_TURNS) -> list[Request]:
    """Return a session whose every turn asks, calls a tool and answers."""
    session = Session(name, header(0, HEADER_CHARACTERS), seed)
    requests = []
    for _ in range(n_turns):
        requests.append(session.ask().request())
        requests.append(session.call(3000).request())
        session.answer()
    return requests


def agent() -> Trace:
    """One session."""
    return Trace("agent", (one_client(agent_requests("a", 100)),))


def restart() -> Trace:
    """The same session, with both processes stopped half-way."""
    requests = agent_requests("a", 100)
    half = len(requests) // 2
    stages = (one_client(requests[:half]), one_client(requests[half:], restarts=True))
    return Trace("restart", stages)


def fresh() -> Trace:
    """New sessions with the same header, one after the other."""
    requests: list[Request] = []
    for index in range(5):
        requests += agent_requests("abcde"[index], 1000 * (index + 1), n_turns=1)
    return Trace("fresh", (one_client(requests),))


def interleaved() -> Trace:
    """Three sessions with the same header, taking turns up to 16,000 tokens each."""
    return Trace("interleaved", (one_client(_taking_turns(6, 4200)),))


def grown() -> Trace:
    """Three sessions with the same header, taking turns up to 38,000 tokens each."""
    return Trace("grown", (one_client(_taking_turns(12, 8000, n_said=700)),), n_ctx=49152)


def _taking_turns(n_turns: int, n_characters: int, *, n_said: int = 0) -> list[Request]:
    """Return sessions that take turns request by request: a task, then tool results."""
    names = "abc"[:N_SESSIONS]
    shared = header(0, HEADER_CHARACTERS)
    sessions = [Session(name, shared, 1000 * (i + 1)) for i, name in enumerate(names)]
    requests = [session.ask().request() for session in sessions]
    for _ in range(n_turns - 1):
        requests += [session.call(n_characters, n_said=n_said).request() for session in sessions]
    return requests


def reasoning() -> Trace:
    """Turns of 21 tool calls whose reasoning is gone after the next user message."""
    session = Session("r", header(0, 9000), 5000)
    requests = []
    for _ in range(3):
        requests.append(session.ask().request())
        for _ in range(21):
            requests.append(session.call(600, n_reasoning=300).request())
        session.answer()
    return Trace("reasoning", (one_client(requests),))
