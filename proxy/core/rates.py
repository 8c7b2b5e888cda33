"""How long this server takes to evaluate, restore and save, learned from measurements.

Owns: the cost functions and how they learn. Pure: a measurement goes in, new rates come out. Must never
know where or when it was measured.

A predicted time is a sum of parts: one part for the call itself, and one part for each token or byte. When
a measurement differs from the prediction, each part is corrected in proportion to its share of the
predicted time. A part that has been measured often is corrected less. Defaults only rank options until the
server was measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

POSITIONS = (1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, math.inf)
"""A separate evaluation rate is learned up to each of these positions: later ones cost more attention."""

MIN_TOKENS = 64
MIN_BYTES = 64 << 10
"""A smaller measurement tells more about the round trip than about the rate, and is ignored."""

MAX_STEP = 16.0
"""The largest factor by which one measurement can change a new part; a quarter of it for a part measured
often. Any measurement may have met a cold disk or a busy server."""

MEMORY = 3.0
"""After so many large measurements, each later one corrects a part by a quarter of the difference."""

_SURPRISE = 0.4
"""Earlier measurements count less after a miss of more than this logarithm: 1.5 times, or two thirds."""

_LARGE_TOKENS = 256
_LARGE_BYTES = 256 << 10
"""A measurement of this size counts half, a larger one more."""

_LEAST_SECONDS = 1e-6

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def seconds_in_words(seconds: float) -> str:
    """Return a duration for people to read: 23 ms, 0.56 s, 9.8 s, 120 s."""
    if 0 < abs(seconds) < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    n_digits = 2 if 0 < abs(seconds) < 1 else 1 if 0 < abs(seconds) < 100 else 0
    return f"{seconds:,.{n_digits}f} s"


def size_in_words(n_bytes: float) -> str:
    """Return a number of bytes with the largest unit that leaves a whole one."""
    for unit, factor in reversed(UNITS.items()):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes:.0f} bytes"


@dataclass(frozen=True, slots=True)
class UnitCost:
    """Seconds for one unit (a call, a token, a byte), after `n_seen` measurements; 0 is a default."""

    seconds: float
    n_seen: float = 0.0

    def moved(self, miss: float, share: float, weight: float) -> "UnitCost":
        """Return the part after a measurement was *miss* times the prediction.

        A miss beyond the largest step is an outlier or a lasting change: earlier measurements count half
        from then on, and less the larger the miss. A default that makes up all of a prediction gives way to
        the first measurement, however fast: a disturbed server only seems slower than it is.
        """
        certainty = 1 + min(self.n_seen, MEMORY)
        largest = MAX_STEP / certainty
        step = min(max(miss, 1 / largest if self.n_seen else _LEAST_SECONDS), largest)
        exponent = share * weight / certainty if self.n_seen else max(share, weight)
        n_seen = self.n_seen + share * weight if step == miss else self.n_seen / 2
        n_seen /= max(1.0, abs(math.log(step)) / _SURPRISE)
        return UnitCost(self.seconds * step**exponent, max(n_seen, 0.1))


@dataclass(frozen=True, slots=True)
class Transfer:
    """The cost of saves, or of warm or cold restores: seconds for the call and for each byte."""

    call: UnitCost
    byte: UnitCost

    def seconds(self, size_bytes: int) -> float:
        return self.call.seconds + size_bytes * self.byte.seconds

    def after(self, size_bytes: int, seconds: float) -> "Transfer":
        """Return the cost after a transfer of *size_bytes* took *seconds*."""
        if size_bytes < MIN_BYTES or seconds <= 0:
            return self
        weight = size_bytes / (size_bytes + _LARGE_BYTES)
        return Transfer(*_taught((self.call, self.byte), (1.0, size_bytes), seconds, weight))

    @property
    def bytes_per_second(self) -> float:
        """The rate without the call; 0 until it was measured."""
        return 1 / self.byte.seconds if self.byte.n_seen else 0.0


def _transfer(bytes_per_second: float) -> Transfer:
    return Transfer(UnitCost(0.005, 1.0), UnitCost(1 / bytes_per_second))


_DEFAULT_TOKEN = UnitCost(1 / 500)
_FOR_EACH = Meta(min_length=len(POSITIONS), max_length=len(POSITIONS))
_UnitCosts = Annotated[tuple[UnitCost, ...], _FOR_EACH]
"""One for each of POSITIONS: a store may hold the rates of a version that had other ones."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speeds of this server; the defaults only rank options until it has been measured."""

    evaluation_call: UnitCost = UnitCost(0.005, 1.0)
    tokens: _UnitCosts = (_DEFAULT_TOKEN,) * len(POSITIONS)
    cold_restore: Transfer = _transfer(5e8)
    warm_restore: Transfer = _transfer(2e9)
    save: Transfer = _transfer(1e9)

    @property
    def is_measured(self) -> bool:
        """Whether any evaluation was timed on this server."""
        return any(part.n_seen for part in self.tokens)

    def evaluation_seconds(self, n_from: int, n_to: int) -> float:
        """Return how long it takes to evaluate the tokens behind the first *n_from*, up to *n_to*."""
        if n_to <= n_from:
            return 0.0
        seconds = self.evaluation_call.seconds
        for part, n_tokens in zip(_believed(self.tokens), _amounts(n_from, n_to), strict=True):
            seconds += part.seconds * n_tokens
        return seconds

    def restore_seconds(self, size_bytes: int, *, is_warm: bool) -> float:
        """Return how long a restore takes; *is_warm* says that the file is in the page cache."""
        warm = self.warm_restore.seconds(size_bytes)
        cold = self.cold_restore.seconds(size_bytes)
        # If only one of the two was measured, it bounds the other.
        if is_warm:
            return warm if self.warm_restore.byte.n_seen else min(warm, cold)
        return cold if self.cold_restore.byte.n_seen else max(warm, cold)

    def save_seconds(self, size_bytes: int) -> float:
        return self.save.seconds(size_bytes)

    def after_evaluation(self, n_from: int, n_to: int, seconds: float) -> "Rates":
        """Return the rates after evaluating from *n_from* to *n_to* took *seconds*."""
        n_tokens = n_to - n_from
        if n_tokens < MIN_TOKENS or seconds <= 0:
            return self
        weight = n_tokens / (n_tokens + _LARGE_TOKENS)
        parts, amounts = (self.evaluation_call, *_believed(self.tokens)), _amounts(n_from, n_to)
        call, *tokens = _taught(parts, (1.0, *amounts), seconds, weight)
        reached = zip(self.tokens, tokens, amounts, strict=True)
        learned = tuple(new if n >= MIN_TOKENS else old for old, new, n in reached)
        return replace(self, evaluation_call=call, tokens=learned)

    def after_restore(self, size_bytes: int, seconds: float, *, is_warm: bool) -> "Rates":
        """Return the rates after a restore of *size_bytes* took *seconds*."""
        if is_warm:
            return replace(self, warm_restore=self.warm_restore.after(size_bytes, seconds))
        return replace(self, cold_restore=self.cold_restore.after(size_bytes, seconds))

    def after_save(self, size_bytes: int, seconds: float) -> "Rates":
        """Return the rates after a save of *size_bytes* took *seconds*."""
        return replace(self, save=self.save.after(size_bytes, seconds))

    def tokens_per_second(self, position: float) -> float:
        """Return the rate up to one of POSITIONS, without the call; 0 until it was measured."""
        part = self.tokens[POSITIONS.index(position)]
        return 1 / part.seconds if part.n_seen else 0.0


@lru_cache(maxsize=64)
def _believed(tokens: tuple[UnitCost, ...]) -> tuple[UnitCost, ...]:
    """Return the parts of all positions. A part that was never measured equals the nearest measured part
    before it, or else the first measured part."""
    nearest = next((part for part in tokens if part.n_seen), None)
    believed = []
    for part in tokens:
        nearest = part if part.n_seen else nearest
        believed.append(part if part.n_seen or not nearest else UnitCost(nearest.seconds))
    return tuple(believed)


def _amounts(n_from: int, n_to: int) -> list[float]:
    """Return how many of the tokens from *n_from* to *n_to* lie in each range of POSITIONS."""
    begins = zip((0, *POSITIONS), POSITIONS, strict=False)
    return [max(0, min(n_to, end) - max(n_from, begin)) for begin, end in begins]


def _taught(
    parts: Sequence[UnitCost], amounts: Sequence[float], seconds: float, weight: float
) -> list[UnitCost]:
    """Return *parts*, moved so that *amounts* of them would take nearer to *seconds*."""
    each = [part.seconds * amount for part, amount in zip(parts, amounts, strict=True)]
    predicted = sum(each)
    miss = max(seconds, _LEAST_SECONDS) / predicted
    shares = [part_seconds / predicted for part_seconds in each]
    # With shares s, moving the logarithm of each part by s / sum(s * s) makes up for the whole miss.
    squares = sum(share * share for share in shares)
    return [
        part.moved(miss, min(1.0, share / squares), weight) if share else part
        for part, share in zip(parts, shares, strict=True)
    ]
