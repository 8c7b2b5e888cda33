"""How numbers are shown to people, and how people write ages."""

import re

import click

from proxy.sizes import UNITS

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGES = (("d", 86400.0, 2.0), ("h", 3600.0, 1.0), ("min", 60.0, 1.0), ("s", 1.0, 0.0))


def size_in_words(n_bytes: float) -> str:
    """Return a number of bytes with the largest unit that leaves a whole one."""
    for unit, factor in reversed(UNITS.items()):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes:.0f} bytes"


def age_in_words(seconds: float) -> str:
    """Return how long ago something was, roughly."""
    unit, factor, _ = next((a for a in _AGES if seconds >= a[1] * a[2]), _AGES[-1])
    return f"{max(0, seconds) / factor:.0f} {unit} ago"


class Age(click.ParamType[int]):
    """A length of time such as 90s, 30m, 12h, 7d or 2w."""

    name = "age"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+)([smhdw])", str(value).strip())
        if not match:
            self.fail(f"{value!r} is not an age: write such as 30m, 12h or 7d", param, ctx)
        return int(match[1]) * _SECONDS[match[2]]
