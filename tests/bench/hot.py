"""Hot requests: the slot holds the conversation, and the next request adds about 20 tokens."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import median, quantiles
from typing import Any

from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.sides import Cpu, Side, Sides, ask
from tests.bench.traces.chat import Reply
from tests.lab.conversation import Message, answer, prose, system, tools, user
from tests.lab.server import LlamaServer

BARS = {
    1000: (1.10, 1.0),
    10000: (1.05, 1.5),
    32000: (1.05, 3.0),
    128000: (1.03, 8.0),
    240000: (1.03, 15.0),
}
"""By prompt length: how many times as long as alone, and how many milliseconds longer."""
N_TOOLS = 10
N_WARM_UP = 3
_ANSWER = {"temperature": 0, "seed": 1, "max_tokens": 4}
_ROOM_TOKENS = 4096
N_MESSAGES = 12001
MESSAGES_BAR = 1.2
_MESSAGES_CONTEXT = 128 << 10


@dataclass(frozen=True, slots=True)
class Hot:
    """One hot request: what its client saw, what it cost the processes, and the proxy's line on it.

    `cpu` is CPU time until the first token, `cpu_after` that from then on until nobody works any more.
    """

    reply: Reply
    cpu: Cpu
    cpu_after: Cpu
    line: dict[str, Any]

    @property
    def milliseconds(self) -> float:
        return 1000 * self.reply.first_token_seconds

    @property
    def n_prompt(self) -> int:
        return int(self.reply.timings["cache_n"] + self.reply.timings["prompt_n"])


@dataclass(frozen=True, slots=True)
class Opening:
    """What a conversation begins with."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


class Conversation:
    """A conversation that goes on with the model's real answers."""

    def __init__(self, opening: Opening) -> None:
        self._messages = list(opening.messages)
        self._tools = {"tools": opening.tools} if opening.tools else {}
        self._seeds = count(9000)

    def body(self) -> dict[str, Any]:
        return {"messages": self._messages, **self._tools, **_ANSWER}

    def go_on(self, reply: Reply) -> None:
        """Add the answer as it came, and the user's next message."""
        said = {"role": "user", "content": prose(next(self._seeds), 4)}
        self._messages += [reply.message, said]


def opening_of(server: LlamaServer, n_tokens: int) -> Opening:
    """Return the beginning of about *n_tokens*: tools, a system prompt, and turns of 300 tokens."""
    some_tools = tools(min(N_TOOLS, n_tokens // 1000))
    header = [system(min(1800, n_tokens // 12))]
    n_header = _count(server, Opening([*header, user(1)], some_tools))
    n_turn = (_count(server, Opening([*header, *_turns(8), user(1)], some_tools)) - n_header) / 8
    n_turns = max(0, round((n_tokens - n_header) / n_turn))
    return Opening([*header, *_turns(n_turns), user(1)], some_tools)


def opening_of_messages(n_messages: int) -> Opening:
    """Return the beginning of so many short messages, an odd number."""
    turns = [
        {"role": role, "content": prose(i, 1)}
        for i in range(n_messages // 2)
        for role in ("user", "assistant")
    ]
    return Opening([*turns, user(1)])


async def measure_hot(
    leftovers: ExitStack, sizes: Sequence[int], n_times: int, *, is_pinned: bool
) -> list[Section]:
    """Return the tables; each size has processes of its own."""
    times = _times_section("Hot request: time to first token", is_pinned, n_times)
    phases = _phases_section("hot request", is_pinned)
    for n_tokens in sizes:
        tell(f"hot request, {n_tokens:,} tokens")
        async with Sides(leftovers, n_ctx=context_for(n_tokens), is_pinned=is_pinned) as sides:
            opening = opening_of(sides.alone.stack.server, n_tokens)
            alone, ours = await play_pairs(sides, conversations(sides, opening), n_times)
        _add_times(times, alone, ours, BARS.get(n_tokens))
        _add_phases(phases, alone, ours)
    return [times, phases]


async def measure_messages(leftovers: ExitStack, n_times: int, *, is_pinned: bool) -> list[Section]:
    """Return the table of a hot conversation of very many short messages."""
    tell(f"{N_MESSAGES:,} messages")
    opening = opening_of_messages(N_MESSAGES)
    async with Sides(leftovers, n_ctx=_MESSAGES_CONTEXT, is_pinned=is_pinned) as sides:
        alone, ours = await play_pairs(sides, conversations(sides, opening), n_times)
    times = _times_section(
        f"Hot request of {N_MESSAGES:,} messages: time to first token", is_pinned, n_times
    )
    _add_times(times, alone, ours, (MESSAGES_BAR, None))
    phases = _phases_section(f"hot request of {N_MESSAGES:,} messages", is_pinned)
    _add_phases(phases, alone, ours)
    return [times, phases]


def conversations(sides: Sides, opening: Opening) -> dict[Side, Conversation]:
    """Return a conversation with each side that begins so."""
    return {side: Conversation(opening) for side in sides.both}


async def play_pairs(
    sides: Sides, of_side: dict[Side, Conversation], n_times: int
) -> tuple[list[Hot], list[Hot]]:
    """Return what each request cost alone and through the proxy, by turns, without the first ones."""
    played: dict[Side, list[Hot]] = {side: [] for side in sides.both}
    for i in range(N_WARM_UP + n_times):
        for side in sides.by_turns(i):
            for waited_for in sides.both:
                await waited_for.until_quiet()
            hot = await play(side, of_side[side].body())
            played[side].append(hot)
            of_side[side].go_on(hot.reply)
    alone, ours = (played[side][N_WARM_UP:] for side in sides.both)
    return alone, ours


async def play(side: Side, body: dict[str, Any]) -> Hot:
    """Send one request; return what it cost."""
    at_token: list[Cpu] = []
    before = side.cpu()
    reply = await asyncio.to_thread(ask, side.base_url, body, lambda: at_token.append(side.cpu()))
    await side.until_quiet()
    last_line = (side.log_lines() or [{}])[-1]
    return Hot(reply, at_token[0] - before, side.cpu() - at_token[0], last_line)


def where(is_pinned: bool) -> str:
    """Return where the processes run, in words."""
    return "llama-server has a core to itself" if is_pinned else "two cores for all"


def _times_section(title: str, is_pinned: bool, n_times: int) -> Section:
    return Section(
        f"{title} ({where(is_pinned)})",
        f"proxy / alone and milliseconds added, medians of {n_times} pairs",
        (
            *("prompt", "new: alone", "new: proxy", "alone, ms", "proxy, ms", "proxy / alone"),
            *("at most", "added, ms", "quartiles", "at most"),
        ),
    )


def _phases_section(what: str, is_pinned: bool) -> Section:
    return Section(
        f"Where the time of a {what} goes ({where(is_pinned)}), medians in ms",
        "",
        (
            *("prompt", "llama-server evaluates: alone", "proxy", "queued", "prepared"),
            *("CPU of the proxy: to the token", "after", "of llama-server: alone", "after"),
            *("through the proxy", "after"),
        ),
        is_documented=False,
    )


def _add_times(
    section: Section, alone: list[Hot], ours: list[Hot], bar: tuple[float, float | None] | None
) -> None:
    """Add the row of one kind of request; its bar is a ratio and milliseconds, as far as there is one."""
    theirs, through = (median(hot.milliseconds for hot in each) for each in (alone, ours))
    differences = [b.milliseconds - a.milliseconds for a, b in zip(alone, ours, strict=True)]
    low, added, high = quantiles(differences, n=4)
    ratio = through / theirs
    most_ratio, most_added = bar or (None, None)
    is_met = (most_ratio is None or ratio <= most_ratio) and (
        most_added is None or added <= most_added
    )
    section.add(
        f"{median(hot.n_prompt for hot in ours):,.0f}",
        *(f"{median(hot.reply.timings['prompt_n'] for hot in each):.0f}" for each in (alone, ours)),
        *(f"{theirs:.1f}", f"{through:.1f}", f"{ratio:.2f}"),
        "-" if most_ratio is None else f"{most_ratio:.2f}",
        *(f"{added:.1f}", f"{low:.1f} to {high:.1f}"),
        "-" if most_added is None else f"{most_added:.1f}",
        is_met=is_met if bar else None,
    )


def _add_phases(section: Section, alone: list[Hot], ours: list[Hot]) -> None:
    evaluations = (median(hot.reply.timings["prompt_ms"] for hot in each) for each in (alone, ours))
    lines = [
        median(1000 * (hot.line.get(name) or 0.0) for hot in ours)
        for name in ("queued_seconds", "prepared_seconds")
    ]
    cpu = (
        median(1000 * seconds for seconds in each)
        for each in (
            [hot.cpu.proxy for hot in ours],
            [hot.cpu_after.proxy for hot in ours],
            [hot.cpu.server for hot in alone],
            [hot.cpu_after.server for hot in alone],
            [hot.cpu.server for hot in ours],
            [hot.cpu_after.server for hot in ours],
        )
    )
    cells = (f"{value:.1f}" for value in (*evaluations, *lines, *cpu))
    section.add(f"{median(hot.n_prompt for hot in ours):,.0f}", *cells, is_met=None)


def context_for(n_tokens: int) -> int:
    """Return a context with room for a prompt of about *n_tokens* to grow."""
    return -(-(n_tokens + n_tokens // 20 + _ROOM_TOKENS) // 256) * 256


def _turns(n_turns: int) -> list[Message]:
    turns = []
    for i in range(n_turns):
        turns += [user(10 + i), answer(10 + i)]
    return turns


def _count(server: LlamaServer, opening: Opening) -> int:
    _, rendered = server.request("POST", "/apply-template", Conversation(opening).body())
    content = {"content": rendered["prompt"], "parse_special": True}
    return len(server.request("POST", "/tokenize", content)[1]["tokens"])
