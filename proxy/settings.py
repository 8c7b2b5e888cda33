"""Settings: their names, types, defaults and limits, and where their values come from."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import yaml
from msgspec import Meta

from proxy.errors import SettingsError
from proxy.stabilize.model import SWITCHES_PATTERN

# Settings that are a number of bytes, and how people write them.


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


def size_in_words(n_bytes: float) -> str:
    """Return a number of bytes with the largest unit that leaves a whole one."""
    for unit, factor in reversed(UNITS.items()):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes:.0f} bytes"


# Settings that are an address to listen on, and how people write them.


_PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
Address = Annotated[str, Meta(title="HOST:PORT", pattern=rf"^([^:]*|\[[0-9a-fA-F:]+\]):{_PORT}$")]
Hosts = Annotated[
    str,
    Meta(title="names, separated by commas", pattern=r"^\s*([\w.-]+\s*(,\s*[\w.-]+\s*)*)?$"),
]

_URL = r"https?://[^/?#,\s]+[^?#,\s]*"
Urls = Annotated[
    str,
    Meta(
        title="http:// or https:// URL, or several, separated by commas",
        pattern=rf"^\s*{_URL}\s*(,\s*{_URL}\s*)*$",
    ),
]

_ANY_HOST = ("", "0.0.0.0", "[::]")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def parse_hosts(hosts: str) -> list[str]:
    """Return the names of a setting that has several, separated by commas."""
    return [host.strip() for host in hosts.split(",") if host.strip()]


def parse_urls(urls: str) -> list[str]:
    """Return the base URLs of a setting that has several, separated by commas."""
    return [url.strip().rstrip("/") for url in urls.split(",") if url.strip()]


def reachable(address: str) -> str:
    """Return where a listener at HOST:PORT is reached from this machine."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in _ANY_HOST else address


# Settings: their names, types, defaults and limits.
#
# Flags, environment, file and documentation name the same settings, so this struct is the only list of
# them.


def _more(words: str) -> dict[str, str]:
    """Return what the documentation says of a setting beyond its one-line description."""
    return {"more": words}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of the proxy.

    Descriptions go into --help, what is `_more` than that into docs/configuration.md and
    deploy/config.example.yaml as well; `make docs` writes both.
    """

    upstream: Annotated[
        Urls,
        Meta(
            description="URL of llama-server, of its router or of llama-swap.",
            extra=_more(
                "If it runs with --api-prefix, the prefix belongs to the URL. Several llama-servers with "
                "the same model and the same slot_save_path are separated by commas; see docs/models.md."
            ),
        ),
    ] = "http://127.0.0.1:8080"
    slot_save_path: Annotated[
        str,
        Meta(
            min_length=1,
            description="The directory that llama-server has as --slot-save-path, seen from here.",
            examples=["/var/lib/llama-prefix-cache"],
            extra=_more(
                "Both write to it: llama-server the states, the proxy everything else. States are as "
                "good as transcripts: keep the directory to yourself (chmod 700)."
            ),
        ),
    ]
    listen: Annotated[
        Address,
        Meta(
            description="HOST:PORT for clients.",
            extra=_more("Point OpenCode and the like at http://HOST:PORT/v1."),
        ),
    ] = "127.0.0.1:8081"
    admin: Annotated[
        Address,
        Meta(
            description="HOST:PORT for the live page, /health, /metrics, /checkpoints and /requests.",
            extra=_more("For operators, not for clients: it asks for no key."),
        ),
    ] = "127.0.0.1:8082"
    admin_hosts: Annotated[
        Hosts,
        Meta(
            description="Names by which the admin listener may be asked, such as llm.example.org.",
            extra=_more(
                "Besides addresses, names without a dot, private ones (.local, .lan, .internal) and that "
                "in admin. Under any other name only /health and /metrics are answered: a page of another "
                "site could have a name of its own lead here."
            ),
        ),
    ] = ""
    upstream_api_key: Annotated[
        str | None,
        Meta(
            description="llama-server's --api-key, for the proxy's own calls.",
            extra=_more("Clients' own keys are passed on as they are."),
        ),
    ] = None
    context_checkpoints: Annotated[
        int,
        Meta(
            ge=0,
            description="llama-server's --ctx-checkpoints.",
            extra=_more(
                "How many context checkpoints it keeps in a slot of a hybrid, recurrent or sliding-window "
                "model. Fewer make smaller files: try 8 for both."
            ),
        ),
    ] = 32
    max_store_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="Disk budget for checkpoints, such as 20GiB.",
            extra=_more(
                "Those being written count. What is cheapest to evaluate again goes first."
            ),
        ),
    ] = 20 << 30
    min_free_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Free space that saves leave on the disk, such as 2GiB.",
            extra=_more("Checkpoints go for it, too; without it nothing is saved."),
        ),
    ] = 2 << 30
    max_write_bytes_per_day: Annotated[
        int,
        Meta(
            ge=0,
            description="What saves may write within 24 hours, such as 50GiB; 0 is no limit.",
            extra=_more(
                "Flash wears out by being written to. Once less than half is left, what spares few seconds "
                "of evaluation for its bytes is not saved any more; restarts do not reset the count."
            ),
        ),
    ] = 0
    verify_interval_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Stored states are verified in the background so often; 0 is never.",
            extra=_more(
                "Each is verified before its first restore in any case. This finds what a failing disk has "
                "damaged meanwhile; it reads at most 32 MiB a second."
            ),
        ),
    ] = 604800.0
    idle_save_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="A slot idle for this long is saved.",
            extra=_more("Unless a file already covers what it holds."),
        ),
    ] = 10.0
    max_requests: Annotated[
        int,
        Meta(
            ge=1,
            description="Generation requests at once; more are answered 503.",
            extra=_more("Waiting ones count; the 503 carries Retry-After."),
        ),
    ] = 256
    upstream_wait_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="How long a request waits for a llama-server that is away or loading.",
            extra=_more(
                "In arrival order, and counted by max_requests; then it is told 503 with Retry-After. Once "
                "llama-server has been unreachable for that long, requests fail at once, as they do if it "
                "was never reached. Give more than a large model takes to load."
            ),
        ),
    ] = 60.0
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Largest request body of a generation.",
            extra=_more("Other requests stream through without a limit."),
        ),
    ] = 256 << 20
    drain_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="How long running requests may go on at shutdown.",
            extra=_more("Then slots are saved, in as long again at most."),
        ),
    ] = 30.0
    share_between_api_keys: Annotated[
        bool | None,
        Meta(
            description="Let clients with different API keys reuse each other's prefixes.",
            extra=_more(
                "Unset, they do where llama-server asks for no key. Where it asks, or if this is false, "
                "they share nothing; llama-server needs --cache-ram 0 for that, too. See docs/security.md."
            ),
        ),
    ] = None
    stabilizers: Annotated[
        str,
        Meta(
            title="`safe`, `all`, `none` and names, separated by commas",
            pattern=SWITCHES_PATTERN,
            description="Which rewrites of requests keep prompts from changing at their beginning.",
            extra=_more("Such as `safe, sticky_date, -keep_tool_order`; see docs/stabilizers.md."),
        ),
    ] = "safe"
    context_overflow: Annotated[
        Literal["pass", "stable"],
        Meta(
            description="A conversation that outgrows the context: pass to llama-server, or cut.",
            extra=_more(
                "pass: llama-server refuses it, and clients that can compact it. stable: the proxy leaves "
                "out the oldest turns, many at once, and goes on without them; see "
                "docs/context-overflow.md."
            ),
        ),
    ] = "pass"
    aliases: Annotated[
        str,
        Meta(
            title="`name = name of llama-server`, separated by commas",
            pattern=r"^\s*([^\s=,]+\s*=\s*[^\s=,]+\s*(,\s*[^\s=,]+\s*=\s*[^\s=,]+\s*)*)?$",
            description="What llama-server calls the models that clients name.",
            extra=_more("Such as `claude-opus-4-6 = qwen`; any other name is passed on as it is."),
        ),
    ] = ""
    explain_keep: Annotated[
        Literal["none", "tokens", "text"],
        Meta(
            description="What is kept of prompts to explain misses: none, tokens or text.",
            extra=_more(
                "In memory only, and shown on the admin listener alone; see docs/misses.md."
            ),
        ),
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(
            description="Least level logged: debug, info, warning or error.",
            extra=_more("Prompt text is never logged."),
        ),
    ] = "info"
    log_format: Annotated[
        Literal["console", "json"],
        Meta(
            description="Form of the log lines: console or json.",
            extra=_more("Console is for people, json for machines."),
        ),
    ] = "console"


NAMES = Settings.__struct_fields__


# Where settings come from besides the command line: a YAML file and the environment.


ENVIRONMENT_PREFIX = "LLAMA_PREFIX_CACHE_"


def read_file(file: Path) -> dict[str, Any]:
    """Return the `name: value` lines of a YAML file; raises SettingsError."""
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{file}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise SettingsError(f"{file}: expected `name: value` lines")
    return content


def read_environment(environment: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the settings among *names* that are set; raises SettingsError for one that does not exist."""
    keys = {ENVIRONMENT_PREFIX + name.upper(): name for name in names}
    for key in environment:
        if key.startswith(ENVIRONMENT_PREFIX) and key not in {*keys, ENVIRONMENT_PREFIX + "CONFIG"}:
            raise SettingsError(f"environment: {key} is not a setting; allowed: {', '.join(names)}")
    return {name: environment[key] for key, name in keys.items() if key in environment}


# What is said of a setting that is wrong: where, and what is allowed instead.


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


# Where the values of settings come from.
#
# Flags beat the environment (LLAMA_PREFIX_CACHE_*), which beats the YAML file, which beats the defaults.


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
