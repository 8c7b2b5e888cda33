"""Settings: their names, types, defaults and limits, and where their values come from."""

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from proxy.core.conditions import docstrings_of_fields
from proxy.core.rates import UNITS
from proxy.core.sharing import SharedLimits
from proxy.errors import SettingsError, in_words
from proxy.stabilize.model import SWITCHES, WORDS, unknown_words

ENVIRONMENT_PREFIX = "LLAMA_PREFIX_CACHE_"
ADMIN_TOKEN = "admin-token"
"""File beside the states with a token that the proxy has made."""
MAX_REQUESTS = 1024
"""Generation requests for each URL of `upstream` that run or wait at once; more are answered 503."""

_PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
_HOST = r"([\w-]{1,63}(\.[\w-]{1,63})*\.?|\[[0-9a-fA-F:.%\w]+\])"
_ADDRESS = rf"{_HOST}?:{_PORT}"
_URL = rf"https?://{_HOST}(:{_PORT})?(/[^?#,\s]*)?"
_URLS = rf"\s*{_URL}\s*(,\s*{_URL}\s*)*"
_OPEN = r"(health|metrics)"
_OPEN_PATHS = rf"\s*({_OPEN}\s*(,\s*{_OPEN}\s*)?)?"
_ALIAS = r"[^\s=,]+\s*=\s*[^\s=,]+\s*"
_ALIASES = rf"\s*({_ALIAS}(,\s*{_ALIAS})*)?"
_SHARED_URL = r"((s3|gs|az)://|file:///)[^\s,=]+"
_SHARED_SIZES = tuple(SharedLimits.__dataclass_fields__)
_SIZE = r"(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})\s*([kKmMgGtT]?)([iI]?)([bB]?)"
_SHARED_SIZE = rf"({'|'.join(_SHARED_SIZES)})\s*=\s*{_SIZE}"
_SHARED_PAIR = rf"\s*(url\s*=\s*{_SHARED_URL}|key_file\s*=\s*[^,\s][^,]*|{_SHARED_SIZE})\s*"
_SHARED_STORE = rf"\s*({_SHARED_URL}|(?=(.*,)?\s*url\s*=){_SHARED_PAIR}(,{_SHARED_PAIR})*)?\s*"


def _text(title: str, pattern: str) -> Meta:
    """Return the form of a text: in words, and as a regular expression."""
    return Meta(title=title, pattern=f"^{pattern}$")


Address = Annotated[str, _text("HOST:PORT", _ADDRESS)]
# Bytes that are not UTF-8 come as these characters.
Directory = Annotated[str, _text("path in UTF-8", r"[^\ud800-\udfff]+")]
Urls = Annotated[str, _text("http:// or https:// URL, or several, separated by commas", _URLS)]
OpenPaths = Annotated[str, _text("`health`, `metrics` or both, separated by a comma", _OPEN_PATHS)]
Switches = Annotated[str, _text("`safe`, `all`, `none` and names, separated by commas", SWITCHES)]
Aliases = Annotated[str, _text("`name = name of llama-server`, separated by commas", _ALIASES)]
SharedStoreText = Annotated[
    str, _text("URL, or `url = URL, key_file = FILE, capacity = 50GiB, ...`", _SHARED_STORE)
]
Seconds = Annotated[float, Meta(ge=0, le=604800)]
"""At most a week: timers take no infinite time."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of the proxy.

    This struct is the only list of settings: flags, environment variables, the settings file,
    docs/configuration.md and deploy/config.example.yaml are made from it (`make docs`). The first sentence
    below each setting stands in --help, all of them in the documents.
    """

    upstream: Urls = "http://127.0.0.1:8080"
    """URL of llama-server, of its router or of llama-swap.

    With --api-prefix, add the prefix to the URL. Separate several llama-servers with the same model
    and the same slot_save_path by commas; see docs/models.md.
    """
    slot_save_path: Annotated[Directory, Meta(examples=["/var/lib/llama-prefix-cache"])]
    """The directory that llama-server has as --slot-save-path, seen from here.

    llama-server writes the states to it, the proxy everything else. A state is as private as the
    conversation that it holds: keep other users out (chmod 700).
    """
    listen: Address = "127.0.0.1:8081"
    """HOST:PORT for clients.

    Point OpenCode and the like at http://HOST:PORT/v1.
    """
    admin: Address = "127.0.0.1:8082"
    """HOST:PORT for the live page, /health, /metrics, /checkpoints and /requests.

    This listener is for operators, not for clients. On an address that other machines reach, it
    asks for a token; see admin_token_file.
    """
    admin_token_file: str = ""
    """File with the token that the admin listener asks for.

    Unset: none is asked for on a loopback address. On any other address the proxy makes a token,
    prints it once and keeps it in slot_save_path/admin-token. See docs/security.md.
    """
    admin_open: OpenPaths = ""
    """What the admin listener answers without its token: health, metrics.

    Neither shows any text of a prompt. For probes and for Prometheus.
    """
    upstream_api_key: str | None = None
    """llama-server's --api-key, for the proxy's own calls.

    The proxy passes on the keys of clients unchanged.
    """
    max_store_bytes: Annotated[int, Meta(ge=1 << 20)] = 20 << 30
    """Disk budget for checkpoints, such as 20GiB.

    Files that are still being written count. When the budget is full, the proxy first deletes the
    checkpoints that are cheapest to evaluate again. 2 GiB of the disk, of a small one a twentieth,
    stay free whatever the budget says.
    """
    max_write_bytes_per_day: Annotated[int, Meta(ge=0)] = 0
    """What saves may write within 24 hours, such as 50GiB; 0 is no limit.

    Writing wears out flash. When less than half is left, the proxy skips saves that spare few
    seconds of evaluation for their bytes. A restart does not reset the count.
    """
    shared_store: SharedStoreText = ""
    """Where states are shared with other machines: s3://bucket/prefix or file:///path.

    Or a mapping: url, key_file (states are sealed with the key in that file, the same on all
    machines), upload_bytes_per_day, upload_bytes_per_second, and capacity (bytes of all states there).
    Credentials and the endpoint come from the environment, such as AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and AWS_REGION. See docs/many-machines.md.
    """
    idle_save_seconds: Annotated[float, Meta(gt=0)] = 10.0
    """A slot idle for this long is saved.

    Unless a file already covers what the slot holds.
    """
    ahead_seconds: Seconds = 20.0
    """How long the beginning of a next prompt may be evaluated while nothing runs; 0: never.

    If a template drops the reasoning of a turn, the next message then waits less.
    """
    upstream_wait_seconds: Seconds = 60.0
    """How long a request waits for a llama-server that is away or loading.

    At most 1,024 requests for each URL of upstream run or wait at once. After this time a request is
    answered 503 with Retry-After. When llama-server has been unreachable for this long (at first: since
    the proxy's start), requests fail at once. Set more than a large model takes to load.
    """
    drain_seconds: Seconds = 30.0
    """How long running requests may go on at shutdown; those that have not ended then end in an error.

    Then the slots are saved, which may take as long again.
    """
    share_between_api_keys: bool | None = None
    """Let clients with different API keys reuse each other's prefixes.

    Unset: they share if llama-server asks for no key. If llama-server asks for keys, or if this is
    false, they share nothing; llama-server then needs --cache-ram 0 too. See docs/security.md.
    """
    stabilizers: Switches = "safe"
    """Which rewrites of requests are on, so that the beginning of prompts does not change.

    Such as `safe, sticky_date, -keep_tool_order`; see docs/stabilizers.md.
    """
    context_overflow: Literal["pass", "stable"] = "pass"
    """A conversation that outgrows the context: pass it to llama-server, or cut it (stable).

    pass: llama-server refuses the request, and a client that can compact its conversation does.
    stable: the proxy leaves out the oldest turns, many at once; see docs/context-overflow.md.
    """
    aliases: Aliases = ""
    """Names of models that clients send, and llama-server's names for them.

    Such as `claude-opus-4-6 = qwen`. The proxy passes on any other name unchanged.
    """
    explain_keep: Literal["none", "tokens", "text"] = "text"
    """What is kept of prompts to explain misses: none, tokens or text.

    Prompts are kept in memory only, and shown on the admin listener only; see docs/misses.md.
    """
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level logged: debug, info, warning or error.

    Prompt text is never logged.
    """
    log_format: Literal["console", "json"] = "console"
    """Form of the log lines: console or json.

    Console is for people, json for machines.
    """


NAMES = Settings.__struct_fields__
SCHEMA: dict[str, dict[str, Any]] = msgspec.json.schema(Settings)["$defs"]["Settings"]["properties"]
"""The JSON Schema of each setting; `description` is its first sentence, `more` the others."""

for _name, (_description, *_more) in docstrings_of_fields(Settings).items():
    SCHEMA[_name] |= {"description": _description, "more": " ".join(_more)}

_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most"}
_KINDS = {"boolean": "true or false", "number": "number", "string": "text", "null": "null"}


# The meaning of the values of single settings.


def is_size(name: str) -> bool:
    """Return whether a setting is in bytes: its name says so, as names say all units."""
    return "bytes" in name.split("_")


def parse_size(text: str) -> int:
    """Return a size such as 20GiB, 20GB or 500 in bytes; raises ValueError."""
    if (found := re.fullmatch(_SIZE, text.strip())) is None:
        raise ValueError(text)
    number, prefix, binary, unit = found.groups()
    base = 1000 if unit and not binary else 1024
    return int(float(number) * base ** " kmgt".index(prefix.lower() or " "))


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def parse_list(values: str) -> list[str]:
    """Return the values of a setting that has several, separated by commas."""
    return [value.strip() for value in values.split(",") if value.strip()]


def parse_pairs(values: str) -> dict[str, str]:
    """Return the names and values of a setting in the form `name = value, ...`."""
    pairs = (pair.partition("=") for pair in parse_list(values))
    return {name.strip(): value.strip() for name, _, value in pairs}


def upstream_urls(settings: Settings) -> list[str]:
    """Return the base URLs of `upstream`; raises SettingsError for the proxy's own and for doubles.

    An address of the proxy under another name shows when a request comes back (`web/clients.py`).
    """

    def plain(place: str) -> str:
        return place.replace("localhost:", "127.0.0.1:")

    own = {plain(reachable(getattr(settings, name))): name for name in ("listen", "admin")}
    urls = [url.rstrip("/") for url in parse_list(settings.upstream)]
    if len(set(map(plain, urls))) < len(urls):
        # Each would take the other's requests for drift, and nothing would stay cached.
        raise SettingsError("upstream: one address is there twice: give that of each llama-server")
    for url in urls:
        if name := own.get(plain(url.partition("://")[2].partition("/")[0])):
            says = f"upstream: {url} is the proxy's own `{name}`: give llama-server's address"
            raise SettingsError(f"{says} (`run`: another --port)")
    return urls


def parse_shared_store(text: str) -> tuple[str, str, SharedLimits]:
    """Return the URL in `shared_store`, its key file, and its limits.

    The URL is empty if the setting is not set, the file if states are not sealed.
    """
    told = parse_pairs(text) if "=" in text else {"url": text.strip()}
    sizes = {name: parse_size(told[name]) for name in _SHARED_SIZES if name in told}
    return told["url"], told.get("key_file", ""), SharedLimits(**sizes)


def reachable(address: str, machine: str = "127.0.0.1") -> str:
    """Return the address that reaches a listener at HOST:PORT on *machine*, by default on this one."""
    host, _, port = address.rpartition(":")
    return f"{machine}:{port}" if host in ("", "0.0.0.0", "[::]") else address


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a listener at *host*."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def admin_token_file(settings: Settings) -> Path:
    """Return the file of the admin listener's token: the one of the settings, or one beside the states."""
    file = settings.admin_token_file or Path(settings.slot_save_path, ADMIN_TOKEN)
    return Path(os.path.expanduser(file))


def read_admin_token(settings: Settings) -> str | None:
    """Return the admin listener's token, None if there is none beside the states.

    Raises SettingsError if the file cannot be read, or one that was given does not hold one token.
    """
    path = admin_token_file(settings)
    try:
        token = path.read_text(encoding="ascii", errors="ignore").strip()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not settings.admin_token_file:
            return None
        raise SettingsError(f"admin_token_file: {in_words(error)}") from error
    if settings.admin_token_file and len(token.split()) != 1:
        raise SettingsError(f"admin_token_file: {path} must hold the token, and nothing else")
    return token or None


def token_to_show(settings: Settings) -> str | None:
    """Return the token to show to a proxy's admin listener, None if there is none.

    A token that lies beside the states is shown only to a listener of this machine. A user who may not read
    it shows none: most such listeners ask for none. Raises SettingsError as `read_admin_token`.
    """
    is_here = is_loopback(split_address(reachable(settings.admin))[0])
    may_show = is_here and os.access(admin_token_file(settings), os.R_OK)
    return read_admin_token(settings) if settings.admin_token_file or may_show else None


def written(name: str, value: Any) -> str:
    """Return a setting's value as people write it."""
    if value in (None, "") or isinstance(value, bool):
        return msgspec.json.encode(value).decode()
    if is_size(name) and value:
        units = [u for u, n in UNITS.items() if value % n == 0 and value < 10_000 * n]
        unit = units[-1] if units else ""
        return f"{value // UNITS.get(unit, 1)}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def kinds_of(name: str) -> list[str]:
    """Return the types that a setting's value may have, in the words of JSON Schema."""
    return [kind.get("type", "string") for kind in SCHEMA[name].get("anyOf", [SCHEMA[name]])]


def allowed(name: str) -> str:
    """Return in words what a setting may be."""
    said = SCHEMA[name]
    if "enum" in said:
        words = " or ".join(f"`{value}`" for value in said["enum"])
    elif is_size(name):
        words = "bytes or a size such as 5GiB"
    else:
        words = said.get("title") or " or ".join(_KINDS[kind] for kind in kinds_of(name))
    bounds = [f"{_BOUNDS[key]} {written(name, said[key])}" for key in _BOUNDS if key in said]
    return ", ".join([words, *bounds])


_OF_KUBERNETES = re.compile(r"\w+_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP)|PORT=\w+://)")
"""Variables that Kubernetes sets for each Service, also for one that is called llama-prefix-cache."""

# The sources of values: flags beat the environment (LLAMA_PREFIX_CACHE_*), the environment beats the YAML
# file, and the file beats the defaults.


def read_sources(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> dict[str, dict[str, Any]]:
    """Return the values that each source sets, the strongest source last; raises SettingsError."""
    sources: dict[str, dict[str, Any]] = {
        str(file): _read_file(file) if file else {},
        "environment": _read_environment(environment),
        "command line": {name: value for name, value in flags.items() if value is not None},
    }
    for source, values in sources.items():
        # Each source is checked by itself, so that the error names the source of the value.
        _convert({"slot_save_path": ".", **values}, source)
    return sources


def merge_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> dict[str, Any]:
    """Return the values of all sources together; raises SettingsError."""
    sources = read_sources(flags, environment, file).values()
    return {name: value for values in sources for name, value in values.items()}


def default_directory() -> Path:
    """Return the directory in which `run` keeps states if no setting names one; raises SettingsError."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise SettingsError("this user has no home: set HOME, or give --slot-save-path")
    return Path(cache, "llama-prefix-cache").absolute()


NO_DIRECTORY = (
    "slot_save_path is missing: give the directory that llama-server has as --slot-save-path, or start"
    " llama-server by `run`"
)


def complete_settings(merged: dict[str, Any], *, needs_directory: bool = True) -> Settings:
    """Return the settings with their defaults; raises SettingsError if a needed directory is missing."""
    if "slot_save_path" not in merged:
        raise SettingsError(NO_DIRECTORY)
    settings = _convert(merged, "settings")
    if needs_directory and settings.listen == settings.admin and split_address(settings.listen)[1]:
        raise SettingsError(f"listen and admin are both {settings.listen}: give one another port")
    # Absolute, because llama-server may run elsewhere. Path's own expanduser raises RuntimeError.
    path = Path(os.path.expanduser(settings.slot_save_path)).absolute()
    try:
        if needs_directory and not path.is_dir():
            mended = "give one" if path.exists() else "create it first"
            raise SettingsError(f"slot_save_path: {path} is not a directory; {mended}")
    except OSError as error:
        raise SettingsError(f"slot_save_path: {in_words(error)}") from error
    return msgspec.structs.replace(settings, slot_save_path=str(path))


def _read_file(file: Path) -> dict[str, Any]:
    """Return the `name: value` lines of a YAML file; raises SettingsError."""
    try:
        content = yaml.safe_load(text := file.read_bytes())
    except OSError as error:
        raise SettingsError(in_words(error)) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # A colon or quote that lacks is noticed a line later.
        place = "context" if str(error).startswith("while scanning a ") else "problem"
        mark = getattr(error, f"{place}_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        how = "in UTF-8, without tabs; a value with `: `, or that begins with a sign, needs quotes"
        raise SettingsError(f"{file}{line}: expected `name: value` lines, {how}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise SettingsError(f"{file}: expected `name: value` lines")
    node = yaml.compose(text, yaml.SafeLoader)
    names = [key.value for key, _ in node.value] if node else []
    if twice := sorted({name for name in names if names.count(name) > 1}):  # the last would win
        raise SettingsError(f"{file}: it sets more than once: {', '.join(twice)}")
    return content


def _read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what variables set, without line ends (CRLF); raises SettingsError for one of no setting."""
    keys = {ENVIRONMENT_PREFIX + name.upper(): name for name in NAMES}
    ours = {k: v for k, v in environment.items() if not _OF_KUBERNETES.match(f"{k}={v}")}
    others = [k for k in ours if k.startswith(ENVIRONMENT_PREFIX) and k not in keys]
    if unknown := [key for key in others if key != ENVIRONMENT_PREFIX + "CONFIG"]:
        raise SettingsError(f"environment: {_no_setting(unknown, list(keys))}")
    return {name: ours[key].strip() for key, name in keys.items() if key in ours}


def _convert(values: dict[str, Any], source: str) -> Settings:
    plain = {name: _plain(source, name, value) for name, value in values.items()}
    try:
        return msgspec.convert(plain, Settings, strict=False)
    except msgspec.ValidationError as error:
        if unknown := [name for name in values if name not in NAMES]:
            raise SettingsError(f"{source}: {_no_setting(unknown, NAMES)}") from error
        name = str(error).partition(" - at `$.")[2].rstrip("`")
        given = values[name] if is_size(name) else plain[name]
        raise SettingsError(f"{source}: {_complaint(name, given)}") from error


def _plain(source: str, name: str, value: Any) -> Any:
    """Return a value in its plain form: 20GiB in bytes, a list with commas; anything else as it is."""
    if name not in NAMES:
        return value
    if kinds_of(name) == ["string"] and isinstance(value, list | dict):
        pairs = list(value.items() if isinstance(value, dict) else ((each,) for each in value))
        if all(type(part) in (str, int, float) for pair in pairs for part in pair):
            return ", ".join(" = ".join(map(str, pair)) for pair in pairs)
    if name in ("listen", "admin") and isinstance(value, str):
        return value.removeprefix("http://").rstrip("/")
    if not is_size(name) or not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise SettingsError(f"{source}: {_complaint(name, value)}") from error


def _complaint(name: str, value: Any) -> str:
    """Return the message that refuses a value, and names what is allowed."""
    if name == "stabilizers" and (wrong := unknown_words(str(value))):
        return f"{wrong[0]} is no stabilizer{_meant(wrong[0], WORDS)}: docs/stabilizers.md has all"
    said = "a value without quotes" if name.endswith("_key") else f"`{written('', value)}`"
    return f"{said} is not allowed, at `{name}`. Allowed: {allowed(name)}. {SCHEMA[name]['description']}"


def _no_setting(unknown: Sequence[str], names: Sequence[str]) -> str:
    said = "; ".join(f"{name} is no setting{_meant(name, names)}" for name in unknown)
    return f"{said}: `llama-prefix-cache serve --help` lists them, CHANGELOG.md those that are gone"


def _meant(name: str, names: Sequence[str]) -> str:
    return f", perhaps {' or '.join(near)}" if (near := get_close_matches(name, names, 2)) else ""
