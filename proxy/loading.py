"""Where the values of settings come from.

Flags beat the environment (LLAMA_PREFIX_CACHE_*), which beats the YAML file, which beats the defaults.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from proxy.complaints import complain, require_directory
from proxy.config import NAMES, Settings
from proxy.errors import SettingsError
from proxy.sizes import parse_size
from proxy.sources import read_environment, read_file


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> Settings:
    """Return the settings from all sources; raises SettingsError naming the first that is wrong."""
    return complete_settings(merge_settings(flags, environment, file))


def merge_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> dict[str, Any]:
    """Return what all sources set, each checked by itself; raises SettingsError."""
    from_file = read_file(file) if file else {}
    from_environment = read_environment(environment, NAMES)
    given = {name: value for name, value in flags.items() if value is not None}
    sources: list[tuple[str, dict[str, Any]]] = [
        (str(file), from_file),
        ("environment", from_environment),
        ("command line", given),
    ]
    merged: dict[str, Any] = {}
    for source, values in sources:
        # Each source is checked by itself, so that the complaint names where the value came from.
        _convert({"slot_save_path": ".", **values}, source, strict=source == str(file))
        merged |= values
    return merged


def complete_settings(merged: dict[str, Any]) -> Settings:
    """Return the settings with their defaults; raises SettingsError if one without default is missing."""
    if "slot_save_path" not in merged:
        raise SettingsError("slot_save_path is missing: give llama-server's --slot-save-path")
    settings = _convert(merged, "settings", strict=False)
    path = str(Path(settings.slot_save_path).expanduser())
    settings = msgspec.structs.replace(settings, slot_save_path=path)
    require_directory(settings.slot_save_path)
    return settings


def _convert(values: dict[str, Any], source: str, *, strict: bool) -> Settings:
    sized = {name: parse_size(source, name, value) for name, value in values.items()}
    try:
        return msgspec.convert(sized, Settings, strict=strict)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {complain(str(error), describe, NAMES)}") from error


def describe(name: str) -> tuple[str, Any]:
    """Return a setting's description and its bare type."""
    annotation = next(f.type for f in msgspec.structs.fields(Settings) if f.name == name)
    description = ""
    while hasattr(annotation, "__metadata__"):
        for meta in annotation.__metadata__:
            description = description or getattr(meta, "description", None) or ""
        annotation = get_args(annotation)[0]
    return description, annotation
