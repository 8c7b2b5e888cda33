"""Settings that are a number of bytes, and how people write them."""

from typing import Any

from proxy.errors import SettingsError

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def is_size(name: str) -> bool:
    """Return whether a setting is in bytes: its name says so, as names say all units."""
    return "bytes" in name.split("_")


def parse_size(source: str, name: str, value: Any) -> Any:
    """Return a size written as 20GiB in bytes; anything else as it is."""
    if not is_size(name) or not isinstance(value, str):
        return value
    number, suffix = value.strip()[:-3], value.strip()[-3:]
    try:
        return int(float(number) * UNITS[suffix]) if suffix in UNITS else int(value)
    except (ValueError, OverflowError) as error:
        raise SettingsError(
            f"{source}: {value!r} is not a size, at `{name}`: write bytes, or such as 20GiB "
            f"({', '.join(UNITS)})"
        ) from error
