"""What the scripted llama-server can be made to do wrong, and places where it can be held.

A *place* is one kind of call: save, restore, erase, generate, evaluate (a generation of n_predict 0),
parse (a generation has no slot yet), chunk (a stream behind its first), event (half of a stream's first
event is sent), answered (a generation's slot is idle, and a whole answer not sent yet), or the last part of
a path: props, slots, models, lora-adapters, apply-template, tokenize, metrics.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.lab.waiting import HANG_SECONDS

Retokenize = Callable[[dict[str, Any], list[int]], list[int]]


@dataclass
class Faults:
    """What goes wrong; all of it can be changed while the server runs."""

    refuse: dict[str, int] = field(default_factory=dict)
    """Answer calls at a place with this status. A refused save leaves half a file behind."""
    drop: set[str] = field(default_factory=set)
    """Cut the connection instead of answering at a place."""
    break_off: set[str] = field(default_factory=set)
    """Answer at a place, but close the connection half-way."""
    cut_short: set[str] = field(default_factory=set)
    """Answer at a place with half of the JSON, as if it were whole."""
    slow_seconds: dict[str, float] = field(default_factory=dict)
    is_loading: bool = False
    props: dict[str, Any] = field(default_factory=dict)
    """What /props says otherwise."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What /v1/models says otherwise of the model."""
    n_bytes_lost: int = 0
    """How much shorter a saved file is than n_written says."""
    saves_nothing: bool = False
    """A save answers 200, and there is no file."""
    saves_other_tokens: bool = False
    """A saved file has other tokens than the slot, and one fewer: as if somebody else had used it."""
    clears_idle_slots: bool = False
    """Empty every other idle slot when one starts to run, as -np unset with a RAM cache does."""
    has_native_cache: bool = False
    """Keep what a prompt displaces from a slot, and bring it back, as --cache-ram, --cache-disk and
    --radix-cache do."""
    restores_are_inert: bool = False
    """A restore answers 200, and the next prompt starts from nothing."""
    retokenize: Retokenize | None = None
    """Turns the tokens that /tokenize reports into those that a chat really has."""
    forgets_dropped_actions: bool = False
    """A slot action whose client is gone when it is let on is not done."""
    has_gateway: bool = False
    """A gateway before it answers 502 with a page where the connection would be cut before an answer."""
    dies_at: dict[str, int] = field(default_factory=dict)
    """Die at a place so many times, and be back at once. A client's own generation is an `answer` before it
    begins, a `stream` once its headers are sent, and an `event` once half of its first event is."""
    dies_after_chunks: int | None = None
    """Close the connection of a stream after so many chunks, of another answer half-way."""
    chunk_seconds: float = 0.0
    n_out_of_cells: int = 0
    """Fail so many generations, and empty their slots, as where slots share too few cells."""


class Gate:
    """A place where calls stop until they are let on."""

    def __init__(self, n_calls: int | None = None) -> None:
        """Stop the next *n_calls* calls, or all."""
        self.n_reached = 0
        self._n_calls = n_calls
        self._reached = asyncio.Event()
        self._opened = asyncio.Event()

    async def arrive(self) -> None:
        self.n_reached += 1
        self._reached.set()
        if self._n_calls is None or self.n_reached <= self._n_calls:
            await self._opened.wait()

    async def reached(self) -> None:
        """Wait until a call has come to the gate."""
        async with asyncio.timeout(HANG_SECONDS):
            await self._reached.wait()

    def open(self) -> None:
        self._opened.set()
