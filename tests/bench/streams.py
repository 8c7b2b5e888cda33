"""Many answers streamed at once: what the proxy adds to an event, and what the relaying costs it.

Only the time in which all streams run counts: from the last one's first event to the first one's end.
"""

import asyncio
import json
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from tests.bench.hot import where
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.sides import Cpu, Side, Sides
from tests.lab.conversation import user

N_TOKENS = {1: 600, 16: 300, 128: 400}
"""By the number of streams: how long each answer is."""
MOST_EVENTS = 50_000
"""Of one side: where a run takes long, there are fewer pairs."""
MOST_RATIO = 1.02
MOST_CPU_MICROSECONDS = 60.0
_SLOT_TOKENS = 1024
_RECEIVED_BYTES = 1 << 16
_EVENT, _END = b"data: ", b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Streamed:
    """What passed while all streams ran."""

    n_events: int
    seconds: float
    cpu: Cpu

    @property
    def microseconds(self) -> float:
        """Return the time of one event, of all streams together."""
        return 1e6 * self.seconds / self.n_events

    @property
    def proxy_microseconds(self) -> float:
        """Return the proxy's CPU time for one event."""
        return 1e6 * self.cpu.proxy / self.n_events


class _Stream:
    """One answer that is read as it comes, at as little cost as Python allows."""

    def __init__(self, base_url: str, body: dict[str, Any]) -> None:
        address = urlsplit(base_url)
        raw = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        self.socket = socket.create_connection((address.hostname, address.port))
        self.socket.sendall(head.encode() + raw)
        self.n_events = 0
        self.has_ended = False
        self._tail = b""

    def read(self) -> int:
        """Read what has come; return how many events it was."""
        data = self._tail + self.socket.recv(_RECEIVED_BYTES)
        if len(data) == len(self._tail):
            raise ConnectionError(f"the stream ended early: {data!r}")
        n_events = data.count(_EVENT) - self._tail.count(_EVENT)
        self._tail = data[1 - len(_END) :]
        self.n_events += n_events
        self.has_ended = _END in data
        return n_events


def stream_all(side: Side, bodies: Sequence[dict[str, Any]]) -> Streamed:
    """Stream all answers at once; raises ConnectionError if one breaks off."""
    streams = [_Stream(side.base_url, body) for body in bodies]
    n_silent, n_running, n_events = len(streams), len(streams), 0
    began = ended = 0.0
    before = after = Cpu(0.0)
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while n_running:
            for key, _ in selector.select():
                stream = key.data
                was_silent = not stream.n_events
                n_new = stream.read()
                if n_silent == 0 and not ended:
                    n_events += n_new
                n_silent -= was_silent and stream.n_events > 0
                if n_silent == 0 and not began:
                    began, before = time.perf_counter(), side.cpu()
                if stream.has_ended:
                    if not ended:
                        ended, after = time.perf_counter(), side.cpu()
                    selector.unregister(stream.socket)
                    stream.socket.close()
                    n_running -= 1
    return Streamed(n_events, ended - began, after - before)


async def measure_streams(
    leftovers: ExitStack, numbers: Sequence[int], n_times: int, *, is_pinned: bool
) -> list[Section]:
    """Return the table; each number of streams has processes of its own, with a slot for each stream."""
    section = Section(
        f"Streaming ({where(is_pinned)})",
        f"16 streams at most {MOST_RATIO} times as long as alone; at most {MOST_CPU_MICROSECONDS:.0f} µs "
        "of the proxy's CPU an event, medians",
        (
            *(
                "streams",
                "pairs",
                "events",
                "an event alone, µs",
                "through the proxy, µs",
                "proxy / alone",
            ),
            *("added to a token of a stream, µs", "CPU of the proxy an event, µs"),
            "CPU seconds of the proxy for 1,000 tokens",
        ),
    )
    for n_streams in numbers:
        n_tokens = N_TOKENS.get(n_streams, min(N_TOKENS.values()))
        n_pairs = min(n_times, max(3, MOST_EVENTS // (n_streams * n_tokens)))
        tell(f"{n_streams} streams, {where(is_pinned)}")
        n_ctx = _SLOT_TOKENS
        async with Sides(leftovers, n_slots=n_streams, n_ctx=n_ctx, is_pinned=is_pinned) as sides:
            alone, ours = await _play(sides, n_streams, n_tokens, n_pairs)
        theirs, through = (median(each.microseconds for each in side) for side in (alone, ours))
        cpu = median(each.proxy_microseconds for each in ours)
        is_slow = n_streams == 16 and through > MOST_RATIO * theirs
        section.add(
            *(n_streams, n_pairs, int(median(each.n_events for each in ours))),
            *(f"{theirs:.0f}", f"{through:.0f}", f"{through / theirs:.3f}"),
            *(f"{n_streams * (through - theirs):.0f}", f"{cpu:.0f}", f"{cpu / 1000:.3f}"),
            is_met=cpu <= MOST_CPU_MICROSECONDS and not is_slow,
        )
    return [section]


async def _play(
    sides: Sides, n_streams: int, n_tokens: int, n_times: int
) -> tuple[list[Streamed], list[Streamed]]:
    fixed = {"max_tokens": n_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    bodies = [{"messages": [user(i)], "seed": 1, **fixed} for i in range(n_streams)]
    played: dict[Side, list[Streamed]] = {side: [] for side in sides.both}
    for i in range(1 + n_times):
        for side in sides.by_turns(i):
            for waited_for in sides.both:
                await waited_for.until_quiet()
            played[side].append(await asyncio.to_thread(stream_all, side, bodies))
    alone, ours = (played[side][1:] for side in sides.both)
    return alone, ours
