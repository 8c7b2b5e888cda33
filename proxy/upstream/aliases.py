"""Model names: what clients call a model, and what llama-server calls it."""

from collections.abc import Mapping

import msgspec

Aliases = Mapping[str, str]


def parse_aliases(text: str) -> dict[str, str]:
    """Return the names of a setting in the form `client name = server name, ...`."""
    pairs = (pair.partition("=") for pair in text.split(",") if pair.strip())
    return {name.strip(): meant.strip() for name, _, meant in pairs}


def with_alias(raw: bytes, aliases: Aliases) -> bytes:
    """Return a body with its model named as llama-server does; all else stays as it was sent."""
    if not aliases:
        return raw
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(fields["model"], type=str)
        fields["model"] = msgspec.Raw(msgspec.json.encode(aliases[name]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return raw
    return msgspec.json.encode(fields)
