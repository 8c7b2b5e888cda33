"""Members of parsed JSON as llama-server reads them: what is absent, null or of another type is a default.

json_value in tools/server/server-common.h.
"""

from typing import Any


def member(value: Any, key: str, default: Any = None) -> Any:
    """Return a member of an object; null counts as absent, and anything else has no members."""
    found = value.get(key) if isinstance(value, dict) else None
    return default if found is None else found


def text_of(value: Any, key: str, default: str = "") -> str:
    """Return a member that is a string."""
    found = member(value, key)
    return found if isinstance(found, str) else default


def list_of(value: Any) -> list[Any]:
    """Return a list, empty if the value is none."""
    return value if isinstance(value, list) else []
