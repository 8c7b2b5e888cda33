"""The API key of a request, and the tenant that it makes."""

from collections.abc import Mapping

import xxhash

_HEADERS = ("Authorization", "X-Api-Key")


def keys_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that carry a key, as far as they are there."""
    return {name: headers[name] for name in _HEADERS if name in headers}


def tenant_of(keys: Mapping[str, str], *, is_shared: bool) -> bytes:
    """Return a digest of the API key that llama-server would check, empty if there is none or no matter."""
    key = keys.get("Authorization") or keys.get("X-Api-Key", "")
    if is_shared or not key:
        return b""
    return xxhash.xxh3_128_digest(key.removeprefix("Bearer ").encode())
