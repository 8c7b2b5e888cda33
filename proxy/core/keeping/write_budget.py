"""How much was written lately, and which saves are still worth their bytes.

Owns: the bytes of the last 24 hours by the hour, and who gets what is left of a day's budget. Pure; must
never know files or read the clock.

A save's worth is the seconds of evaluation that it spares for each byte. While half of the budget is left,
everything is saved. Then a save must be worth something, and the more the less is left: at the end as much
as those of the last day were on average. So what would write a long state again for a few new tokens is
refused first.
"""

from dataclasses import dataclass, field

WINDOW_HOURS = 24
PLENTY_SHARE = 0.5
"""While so much of the budget is left, nobody asks what a save is worth."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A save of at most *n_bytes*; `spared_seconds` is None where nobody knows what it would spare."""

    n_bytes: int
    spared_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Hour:
    """What was written in an hour; `wanted_bytes` were foreseen for what spares `spared_seconds`."""

    n_bytes: int = 0
    wanted_bytes: int = 0
    spared_seconds: float = 0.0

    def __add__(self, other: "Hour") -> "Hour":
        return Hour(
            self.n_bytes + other.n_bytes,
            self.wanted_bytes + other.wanted_bytes,
            self.spared_seconds + other.spared_seconds,
        )


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, by the hour of the epoch."""

    hours: dict[int, Hour] = field(default_factory=dict)

    def after(self, n_bytes: int, wanted: Wanted, now: float) -> "Written":
        """Return what was written once a save that was *wanted* has written *n_bytes*."""
        if wanted.spared_seconds is None:
            hour = Hour(n_bytes)
        else:
            hour = Hour(n_bytes, wanted.n_bytes, wanted.spared_seconds)
        this, hours = int(now // 3600), self._last_day(now)
        return Written({**hours, this: hours.get(this, Hour()) + hour})

    def last_day_bytes(self, now: float) -> int:
        """Return the bytes of the last 24 hours, and of the whole hour in which they began."""
        return sum(hour.n_bytes for hour in self._last_day(now).values())

    def seconds_per_byte(self, now: float) -> float:
        """Return what the saves of the last day were worth on average; 0 if none is known."""
        total = sum(self._last_day(now).values(), Hour())
        return total.spared_seconds / total.wanted_bytes if total.wanted_bytes else 0.0

    def _last_day(self, now: float) -> dict[int, Hour]:
        this, recent = int(now // 3600), dict[int, Hour]()
        for number, hour in self.hours.items():
            if number >= this - WINDOW_HOURS:
                # What lies ahead was written before somebody set the clock back.
                at = min(number, this)
                recent[at] = recent.get(at, Hour()) + hour
        return recent


def why_refused(
    wanted: Wanted, written: Written, budget_bytes: int, now: float, pending_bytes: int = 0
) -> str | None:
    """Return why a save is not made within *budget_bytes* a day (0: no limit), or None if it is.

    *pending_bytes* are those of saves that were begun and are not counted as written yet.
    """
    if not budget_bytes:
        return None
    left_bytes = budget_bytes - written.last_day_bytes(now) - pending_bytes
    if left_bytes <= 0 or wanted.n_bytes > left_bytes:
        return (
            f"{wanted.n_bytes:,} bytes would be written, and {max(0, left_bytes):,} are left "
            f"of max_write_bytes_per_day ({budget_bytes:,})"
        )
    needed = written.seconds_per_byte(now) * scarcity(left_bytes, budget_bytes)
    if wanted.spared_seconds is None or wanted.spared_seconds >= needed * wanted.n_bytes:
        return None
    return (
        f"{wanted.n_bytes:,} bytes for {wanted.spared_seconds:.3g} s of evaluation are not worth it: "
        f"{left_bytes:,} are left of max_write_bytes_per_day ({budget_bytes:,})"
    )


def scarcity(left_bytes: int, budget_bytes: int) -> float:
    """Return 0 while there is plenty, rising to 1 when nothing is left."""
    return min(1.0, max(0.0, 1 - left_bytes / (PLENTY_SHARE * budget_bytes)))
