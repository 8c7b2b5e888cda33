"""Traces of single users: short chats, branches, edits, and a large store of facts."""

from tests.bench.traces.agents import HEADER_CHARACTERS
from tests.bench.traces.session import Session, header
from tests.bench.traces.text import passage
from tests.bench.traces.trace import NO_HEADER, Header, Request, Trace, one_client

LONG_CHARACTERS = 11_000
"""About 3,000 tokens."""
EDITED_CHARACTERS = (700, 3500, 1400)
"""How much of the end of a long message is written again: about 200, 1,000 and 400 tokens."""

N_CHATS = 24
STATIC_CHARACTERS = 366_000
"""About 100,000 tokens."""
N_QUESTIONS = 10


def short() -> Trace:
    """Chats of 30 to 100 tokens whose answers come back as they were given.

    Half of them one after the other, the others by turns.
    """
    one_by_one = [_chat(n) for n in range(N_CHATS // 2)]
    by_turns = [_chat(n) for n in range(N_CHATS // 2, N_CHATS)]
    requests = [request for chat in one_by_one for request in chat]
    for first in range(0, len(by_turns), 3):
        group = by_turns[first : first + 3]
        n_longest = max(len(chat) for chat in group)
        requests += [chat[n] for n in range(n_longest) for chat in group if n < len(chat)]
    return Trace("short", (one_client(requests),), slots=(2,))


def _chat(number: int) -> list[Request]:
    """Return a long question and one more, or a short one and two more: at most 100 tokens."""
    session = Session(f"c{number}", NO_HEADER, 20_000 + 10 * number)
    is_long = number % 2 == 0
    requests = [session.ask((95 if is_long else 60) + 5 * (number % 5)).request()]
    for _ in range(1 if is_long else 2):
        requests.append(session.real_answer().ask(40).request())
    return requests


def branch() -> Trace:
    """A session that is regenerated, edited and taken back."""
    first = Session("b", header(0, 9000), 6000)
    requests, marks = [], []
    for _ in range(4):
        marks.append(first.n_messages)
        requests.append(first.ask().request())
        requests.append(first.call(2000).request())
        first.answer()
    requests += [requests[-1], requests[-1]]  # regenerated twice
    edited = first.fork("edited", marks[2])
    requests += _turns(edited, 2)
    back = first.fork("back", marks[2] + 4)  # two turns back, behind the second answer
    requests += _turns(back, 2)
    requests += _turns(first, 1)
    requests += _turns(edited, 1)
    return Trace("branch", (one_client(requests),))


def edits() -> Trace:
    """Long user messages whose ends are written again, the last time after another session had the slot."""
    agent_header = header(0, HEADER_CHARACTERS)
    requests: list[Request] = []
    for number in range(2):
        session = Session(f"e{number + 1}", agent_header, 8000 + 1000 * number)
        if number:  # the first session's long message is its first
            requests += _turns(session, 1)
        n_before, text = session.n_messages, passage(8500 + number, LONG_CHARACTERS)
        requests.append(session.say(text).request())
        requests.append(session.call(2000).request())
        for edit, n_characters in enumerate(EDITED_CHARACTERS):
            if edit == len(EDITED_CHARACTERS) - 1:
                requests += _turns(Session(f"o{number + 1}", agent_header, 30_000 + number), 1)
            session = session.fork(f"{session.name}e", n_before)
            text = text[:-n_characters] + passage(8600 + 10 * number + edit, n_characters)
            requests.append(session.say(text).request())
        requests.append(session.call(2000).request())
        requests += _turns(session.answer(), 1)
    return Trace("edits", (one_client(requests),))


def _turns(session: Session, n_turns: int) -> list[Request]:
    requests = []
    for _ in range(n_turns):
        requests.append(session.ask().request())
        requests.append(session.call(2000).request())
        session.answer()
    return requests


def memory_store() -> Trace:
    """Questions about 100,000 tokens of facts, each in a conversation of its own."""
    content = "Answer from these notes.\n" + passage(1, STATIC_CHARACTERS)
    facts = Header({"role": "system", "content": content})
    questions = [
        Session(f"q{n + 1}", facts, 7000 + n).ask(200).request() for n in range(2 * N_QUESTIONS)
    ]
    first, second = questions[:N_QUESTIONS], questions[N_QUESTIONS:]
    stages = (one_client(first), one_client(second, restarts=True))
    return Trace("memory-store", stages, n_ctx=122_880)
