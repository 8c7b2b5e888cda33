"""Settings: their names, types, defaults and limits, and where their values come from.

Flags beat the environment (LLAMA_PREFIX_CACHE_*), which beats the YAML file, which beats the defaults.
All four name the same settings, so this struct is the only list of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import yaml
from msgspec import Meta

from proxy.errors import SettingsError

ENVIRONMENT_PREFIX = "LLAMA_PREFIX_CACHE_"
_SUFFIXES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

_PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
Address = Annotated[str, Meta(pattern=rf"^([^:]*|\[[0-9a-fA-F:]+\]):{_PORT}$")]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of the proxy."""

    upstream: Annotated[
        str,
        Meta(pattern=r"^https?://[^/?#]+[^?#]*$", description="URL of llama-server."),
    ] = "http://127.0.0.1:8080"
    slot_save_path: Annotated[
        str,
        Meta(
            min_length=1,
            description="The directory that llama-server has as --slot-save-path, seen from here.",
        ),
    ]
    listen: Annotated[Address, Meta(description="HOST:PORT for clients.")] = "127.0.0.1:8081"
    admin: Annotated[Address, Meta(description="HOST:PORT for operators.")] = "127.0.0.1:8082"
    upstream_api_key: Annotated[
        str | None,
        Meta(description="llama-server's --api-key, for the proxy's own calls."),
    ] = None
    max_store_bytes: Annotated[
        int, Meta(ge=1 << 20, description="Disk budget for checkpoints, such as 20GiB.")
    ] = 20 << 30
    min_free_bytes: Annotated[
        int, Meta(ge=0, description="Free space that saves leave on the disk, such as 2GiB.")
    ] = 2 << 30
    idle_save_seconds: Annotated[
        float, Meta(gt=0, description="A slot idle for this long is saved.")
    ] = 10.0
    max_requests: Annotated[
        int, Meta(ge=1, description="Generation requests at once; more are answered 503.")
    ] = 256
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="Largest request body of a generation.")
    ] = 256 << 20
    drain_seconds: Annotated[
        float, Meta(ge=0, description="How long running requests may go on at shutdown.")
    ] = 30.0
    share_between_api_keys: Annotated[
        bool, Meta(description="Let clients with different API keys reuse each other's prefixes.")
    ] = False
    allow_state_changes: Annotated[
        bool, Meta(description="Let clients POST to /slots and /lora-adapters.")
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least level logged: debug, info, warning or error."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Form of the log lines: text or json.")
    ] = "text"


NAMES = Settings.__struct_fields__


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> Settings:
    """Return the settings from all sources; raises SettingsError naming the first that is wrong."""
    from_file = _read_file(file) if file else {}
    from_environment = {
        name: environment[key]
        for name in NAMES
        if (key := ENVIRONMENT_PREFIX + name.upper()) in environment
    }
    _refuse_unknown_environment(environment)
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
    if "slot_save_path" not in merged:
        raise SettingsError("slot_save_path is missing: give llama-server's --slot-save-path")
    settings = _convert(merged, "settings", strict=False)
    _require_directory(settings.slot_save_path)
    return settings


def _convert(values: dict[str, Any], source: str, *, strict: bool) -> Settings:
    sized = {name: _parse_size(name, value) for name, value in values.items()}
    try:
        return msgspec.convert(sized, Settings, strict=strict)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_explain(str(error))}") from error


def _explain(message: str) -> str:
    """Return msgspec's complaint with what is allowed instead."""
    if "unknown field" in message:
        return f"{message.replace('Object contains u', 'U')}; allowed: {', '.join(NAMES)}"
    complaint, _, place = message.partition(" - at `$.")
    name = place.rstrip("`")
    if "regex" in complaint:
        complaint = "Not of the right form"
    description, _ = describe(name)
    return f"{complaint}, at `{name}` ({description})"


def describe(name: str) -> tuple[str, Any]:
    """Return a setting's description and its bare type."""
    annotation = next(f.type for f in msgspec.structs.fields(Settings) if f.name == name)
    description = ""
    while hasattr(annotation, "__metadata__"):
        for meta in annotation.__metadata__:
            description = description or getattr(meta, "description", None) or ""
        annotation = get_args(annotation)[0]
    return description, annotation


def _parse_size(name: str, value: Any) -> Any:
    """Return a `_bytes` setting written as 20GiB in bytes; anything else as it is."""
    if not name.endswith("_bytes") or not isinstance(value, str):
        return value
    number, suffix = value.strip()[:-3], value.strip()[-3:]
    try:
        return int(float(number) * _SUFFIXES[suffix]) if suffix in _SUFFIXES else int(value)
    except (ValueError, OverflowError):
        return value


def _read_file(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{file}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise SettingsError(f"{file}: expected `name: value` lines")
    return content


def _refuse_unknown_environment(environment: Mapping[str, str]) -> None:
    known = {ENVIRONMENT_PREFIX + name.upper() for name in NAMES} | {ENVIRONMENT_PREFIX + "CONFIG"}
    for key in environment:
        if key.startswith(ENVIRONMENT_PREFIX) and key not in known:
            raise SettingsError(f"environment: {key} is not a setting; allowed: {', '.join(NAMES)}")


def _require_directory(path: str) -> None:
    if not Path(path).is_dir():
        raise SettingsError(
            f"slot_save_path: {path} is not a directory; create it and give it to llama-server too"
        )


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
