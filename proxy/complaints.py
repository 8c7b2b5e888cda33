"""What is said of a setting that is wrong: where, and what is allowed instead."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from proxy.errors import SettingsError

Describe = Callable[[str], tuple[str, Any]]


def complain(message: str, describe: Describe, names: Sequence[str]) -> str:
    """Return msgspec's complaint with what is allowed instead."""
    if "unknown field" in message:
        return f"{message.replace('Object contains u', 'U')}; allowed: {', '.join(names)}"
    complaint, _, place = message.partition(" - at `$.")
    name = place.rstrip("`")
    if "regex" in complaint:
        complaint = "Not of the right form"
    description, _ = describe(name)
    return f"{complaint}, at `{name}` ({description})"


def require_directory(path: str) -> None:
    """Raise SettingsError unless the directory for states is there."""
    try:
        is_directory = Path(path).is_dir()
    except OSError as error:
        raise SettingsError(f"slot_save_path: {path}: {error.strerror}") from error
    if not is_directory:
        raise SettingsError(
            f"slot_save_path: {path} is not a directory; create it and give it to llama-server too"
        )
