"""Traces in which agents of several kinds meet: subagents, titles, and all of it together."""

from tests.bench.traces.agents import HEADER_CHARACTERS
from tests.bench.traces.session import Session, header
from tests.bench.traces.trace import Client, Header, Request, Stage, Trace, one_client

CHILD_CHARACTERS = 12_000
TITLE_CHARACTERS = 300


def subagents() -> Trace:
    """A parent that spawns children with another header: in sequence, then three at once."""
    parent = Session("parent", header(0, HEADER_CHARACTERS * 2 // 3), 8000)
    child = header(50, CHILD_CHARACTERS)
    requests = [parent.ask().request(), parent.call(2000).request()]
    for index in range(2):
        requests += _child(f"child{index + 1}", child, 8100 + 100 * index)
        requests.append(parent.call(800).request())
    requests.append(parent.answer().ask().request())
    at_once = tuple(tuple(_child(f"child{n}", child, 8000 + 100 * n)) for n in (3, 4, 5))
    after = [parent.call(800, n_calls=3).request(), parent.call(2000).request()]
    after.append(parent.answer().ask().request())
    stages = (one_client(requests), Stage(at_once), one_client(after))
    return Trace("subagents", stages, slots=(1, 2, 4))


def _child(name: str, child: Header, seed: int) -> list[Request]:
    session = Session(name, child, seed)
    return [session.ask().request(), *(session.call(2500).request() for _ in range(3))]


def titles() -> Trace:
    """A session with a small request, which has a header of its own, in or after every turn."""
    session = Session("t", header(0, HEADER_CHARACTERS // 2), 9000)
    requests: list[Request] = []
    for turn in range(8):
        title = [_title(turn, 9500 + turn)]
        in_turn, after_turn = (title, []) if turn % 2 else ([], title)
        requests += [session.ask().request(), *in_turn]
        requests += [session.call(2000).request(), *after_turn]
        session.answer()
    return Trace("titles", (one_client(requests),), slots=(1, 2, 4))


def _title(number: int, seed: int) -> Request:
    title = Session(f"title{number + 1}", header(60, TITLE_CHARACTERS, n_tools=0), seed)
    return title.ask(160).request()


def mixed() -> Trace:
    """Four clients at once on two slots, a restart, and on again."""
    halves = [_in_halves(list(client)) for client in _mixed_clients()]
    first, second = (tuple(tuple(half[i]) for half in halves) for i in (0, 1))
    return Trace("mixed", (Stage(first), Stage(second, restarts=True)), slots=(2,))


def _in_halves(requests: list[Request]) -> tuple[list[Request], list[Request]]:
    half = len(requests) // 2
    return requests[:half], requests[half:]


def _mixed_clients() -> tuple[Client, ...]:
    main = header(0, HEADER_CHARACTERS)
    return (
        tuple(_with_titles(main)),
        tuple(_with_children(main)),
        tuple(_tool_loops(main)),
        tuple(_small_talk()),
    )


def _with_titles(main: Header) -> list[Request]:
    session = Session("m1", main, 11_000)
    requests = []
    for turn in range(5):
        requests.append(session.ask().request())
        requests.append(_title(100 + turn, 11_500 + turn))
        requests.append(session.call(3000).request())
        session.answer()
    return requests


def _with_children(main: Header) -> list[Request]:
    parent, child = Session("m2", main, 12_000), header(50, CHILD_CHARACTERS)
    requests = [parent.ask().request()]
    for index in range(3):
        requests += _child(f"m2child{index + 1}", child, 12_100 + 100 * index)
        requests.append(parent.call(800).request())
    return requests


def _tool_loops(main: Header) -> list[Request]:
    session = Session("m3", main, 13_000)
    requests = []
    for _ in range(2):
        requests.append(session.ask().request())
        requests += [session.call(800, n_reasoning=300).request() for _ in range(10)]
        session.answer()
    return requests


def _small_talk() -> list[Request]:
    """Return short chats, and a session that is regenerated and taken back."""
    session = Session("m4", header(70, 9000), 14_000)
    requests = []
    for turn in range(4):
        mark = session.n_messages
        requests.append(session.ask().request())
        chat = Session(f"m4chat{turn}", Header(None), 14_500 + 10 * turn)
        requests += [chat.ask(80).request(), chat.real_answer().ask(60).request()]
        requests.append(session.call(1500).request())
        session.answer()
        if turn == 1:
            session = session.fork("m4back", mark)
    return [*requests, requests[-1]]
