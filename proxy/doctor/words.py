"""Numbers as a person reads them."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size(n_bytes: float) -> str:
    """Return a number of bytes as 1.5 GiB."""
    unit = 0
    while n_bytes >= 1024 and unit < len(_UNITS) - 1:
        n_bytes, unit = n_bytes / 1024, unit + 1
    return (
        f"{n_bytes:.1f} {_UNITS[unit]}"
        if unit and n_bytes < 10
        else f"{n_bytes:.0f} {_UNITS[unit]}"
    )


def seconds(value: float) -> str:
    """Return a duration as 0.05 s, 1.2 s or 340 s."""
    if value < 0.01:
        return "less than 0.01 s"
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def counted(n: int, noun: str) -> str:
    """Return "1 slot" or "2 slots"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
