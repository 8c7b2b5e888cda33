"""llama-server's command line: which options a build knows, what a command sets, and what is added to it.

Owns: the layout of --help, how llama-server reads its arguments (common/arg.cpp), the options that are
added so that slots can be cached, and their conflicts with the user's options, which are never overridden.
Builds differ in their options, so only the options in --help are known, and only those are added. Must
never know how a process is started.
"""

import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from proxy.core.cuts import UBATCH_TOKENS

ON, OFF = "on", "off"
_SAVE_PATH = "--slot-save-path"
_NAMES_A_MODEL = re.compile(r"--(model|hf-repo|docker-repo)|.*-default$")
_UBATCHES = re.compile(r"(?m)^[ \t-]*(?:ubatch-size|ub|LLAMA_ARG_UBATCH)\s*=\s*(\d{1,9})\b")
_OWN_CACHES = ("--cache-ram", "--cache-disk", "--radix-cache")

N_CONTEXT_CHECKPOINTS = 16
"""llama-server keeps 32 in each slot by default, and every save writes all of them: 2 to 5 GB on real
hybrid models. With 8, the one at a turn's start is gone after two tool calls, unless each turn is saved."""

MAX_RESTART_DELAY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Given:
    """An option that the user set, as a flag or an environment variable, with its value.

    The value of a switch is ON or OFF.
    """

    written: str
    value: str

    def __str__(self) -> str:
        if self.written.startswith("-"):
            return self.written if self.value in (ON, OFF) else f"{self.written} {self.value}"
        return f"{self.written}={self.value}"


@dataclass(slots=True)
class Launch:
    """The additions to a llama-server command, and the address where llama-server will listen.

    With a conflict nothing may be started. `says` describes the started model in words; `model_path` is its
    file, empty if it is not a file. `api_key` is one of llama-server's API keys, which may be in the file
    `api_key_file` instead. `environment` has additions that must not override a router's presets.
    """

    host: str = "127.0.0.1"
    port: int = 0
    api_prefix: str = ""
    slot_save_path: str = ""
    n_context_checkpoints: int | None = None
    """None if it is not known: `serve` does not see llama-server's command line."""
    has_narrow_batches: bool = False
    """Whether -b is known to be as small as -ub, as a sliding window needs it."""
    has_ram_cache: bool = True
    """Whether llama-server may keep prompts in a cache of its own, for any API key."""
    api_key: str | None = None
    api_key_file: str | None = None
    additions: list[tuple[str, ...]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    says: str = ""
    n_ctx: int = 0
    """The tokens of each slot that -c asks for; 0 without -c."""
    model_path: str = ""
    warnings: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    @property
    def added(self) -> list[str]:
        """The words to add to the command line."""
        return [word for addition in self.additions for word in addition]

    @property
    def upstream(self) -> str:
        """The URL at which the proxy reaches llama-server."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        address = f"[{host}]" if ":" in host else host
        return f"http://{address}:{self.port}{self.api_prefix}"


def plan_launch(
    given: Mapping[str, Given],
    known: Collection[str],
    *,
    own_path: str | None,
    default_path: str,
    free_port: int,
    working_directory: str,
) -> Launch:
    """Return how to start a build that knows the options *known*, of which *given* are set by the user.

    *own_path* is the proxy's own slot_save_path, absolute, if one is set.
    """
    launch = Launch(slot_save_path=own_path or default_path)
    if _SAVE_PATH not in known:
        launch.conflicts.append(
            f"its --help does not name {_SAVE_PATH}: this is not llama-server, or has no slot saves"
        )
    if theirs := given.get(_SAVE_PATH):
        launch.slot_save_path = _absolute(theirs, working_directory)
        if own_path and posixpath.normpath(own_path) != launch.slot_save_path:
            launch.conflicts.append(
                f"llama-server's {theirs} is not the proxy's slot_save_path {own_path}: give only one of "
                "the two"
            )
    else:
        launch.additions.append((_SAVE_PATH, launch.slot_save_path))
    _place_listener(launch, given, free_port)
    if key := given.get("--api-key"):
        launch.api_key = key.value.split(",")[0].strip() or None
    elif file := given.get("--api-key-file"):
        launch.api_key_file = posixpath.join(working_directory, file.value)
    _divide_context(launch, given, known)
    _keep_idle_slots(launch, given, known)
    _limit_checkpoints(launch, given, known)
    launch.has_narrow_batches = _is_narrow(given)
    if "--metrics" not in given or given["--metrics"].value == OFF:
        _add(launch, known, "--metrics")
    if model := given.get("--model"):
        launch.model_path = _absolute(model, working_directory)
    elif "--models-dir" in known and not any(map(_NAMES_A_MODEL.match, given)):
        launch.warnings.append(
            "no model is given (-m FILE): llama-server starts as a router, unless your script gives one"
        )
    launch.says = _in_words(launch, given)
    return launch


def _in_words(launch: Launch, given: Mapping[str, Given]) -> str:
    """Describe the model that is started, and the number and size of its slots; note that size."""
    named = next((given[n].value for n in ("--alias", "--hf-repo") if n in given), "")
    model = posixpath.basename(launch.model_path) or named or "the models that it finds"
    slots, context = given.get("--parallel"), given.get("--ctx-size")
    # Without a number, as in -np -1, llama-server chooses.
    n_slots = _number(slots) if slots else 1
    launch.n_ctx = _number(context) // (1 if _unified_by(given) else max(1, n_slots))
    if of_each := _number(given.get("--kv-unified-per-slot")):
        launch.n_ctx = min(launch.n_ctx or of_each, of_each)
    length = f"{launch.n_ctx:,} tokens" if launch.n_ctx else "the model's whole context"
    return f"{model}, {n_slots or 'some'} slot{'s' * (n_slots != 1)} of {length}"


def _number(option: Given | None) -> int:
    """Return the number that an option begins with, as 64 of 64k; 0 if it is not given, or has none."""
    found = re.match(r"\d+", option.value, re.ASCII) if option else None
    return int(found[0]) if found else 0


def _add(launch: Launch, known: Collection[str], name: str, *values: str) -> bool:
    if name in known:
        launch.additions.append((name, *values))
    return name in known


def _absolute(path: Given, working_directory: str) -> str:
    return posixpath.normpath(posixpath.join(working_directory, path.value))


def _place_listener(launch: Launch, given: Mapping[str, Given], free_port: int) -> None:
    if host := given.get("--host"):
        # Several addresses are separated by commas; some may be UNIX sockets (server-http.cpp).
        reachable = [h.strip() for h in host.value.split(",") if not h.strip().endswith(".sock")]
        if reachable:
            launch.host = reachable[0]
        else:
            launch.conflicts.append(f"{host}: the proxy reaches llama-server over TCP only")
    port = given.get("--port")
    if port is None or port.value == "0":  # 0 asks for any free port
        launch.port = free_port
        launch.additions.append(("--port", str(launch.port)))
    elif port.value.isdecimal():
        launch.port = int(port.value)
    else:
        launch.conflicts.append(f"{port} is not a port")
    for name in ("--ssl-cert-file", "--ssl-key-file"):
        if name in given:
            launch.conflicts.append(
                f"{given[name]}: put TLS in front of the proxy, or use `serve` with an https upstream"
            )
    if "--api-prefix" in given:
        launch.api_prefix = given["--api-prefix"].value.rstrip("/")


def _divide_context(launch: Launch, given: Mapping[str, Given], known: Collection[str]) -> None:
    """Give llama-server a fixed number of slots: one, unless the user sets another number.

    Without -np llama-server has four slots that share one cache, and are emptied for each other once it is
    full. With -np N each slot has an Nth of -c, so any N but 1 would quietly shrink the user's context.
    """
    if "--parallel" not in given:
        _add(launch, known, "-np", "1")
    if unified := _unified_by(given):
        launch.warnings.append(
            f"{unified}: slots share one cache, and are emptied for each other once it is full"
        )


def _unified_by(given: Mapping[str, Given]) -> Given | None:
    """Return the option that makes all slots share one cache; None if there is none."""
    if unified := given.get("--kv-unified"):
        return unified if unified.value == ON else None
    parallel = given.get("--parallel")
    return parallel if parallel and parallel.value.startswith("-") else None


def _keep_idle_slots(launch: Launch, given: Mapping[str, Given], known: Collection[str]) -> None:
    """Let idle slots keep their content.

    With a cache of its own llama-server copies idle slots to it whenever another slot runs, and clears them
    if they share one KV cache (server-context.cpp, --cache-idle-slots). The proxy then works, but slower.
    Some branches have a disk cache, and a radix cache that is on by default, in which --cache-ram 0 only
    means that states go straight to disk.
    """
    if "--cache-ram" not in given:
        _add(launch, known, "--cache-ram", "0")
    if "--radix-cache" not in given:
        _add(launch, known, "--no-radix-cache")
    caches = (flag for name, flag in given.items() if name.startswith(_OWN_CACHES))
    own = [flag for flag in caches if flag.value not in (OFF, "0")]
    launch.has_ram_cache = bool(own)
    if not own:
        return
    launch.warnings.append(
        f"{', '.join(map(str, own))}: llama-server moves prompts between slots and a cache of its own "
        "behind the proxy's back, and for any API key; what that costs is counted as drift, and a disk "
        "cache writes everything twice; --cache-ram 0 alone avoids it"
    )
    if "--cache-idle-slots" not in given:
        _add(launch, known, "--no-cache-idle-slots")


def _limit_checkpoints(launch: Launch, given: Mapping[str, Given], known: Collection[str]) -> None:
    if (chosen := given.get("--ctx-checkpoints")) is None:
        if _add(launch, known, "--ctx-checkpoints", str(N_CONTEXT_CHECKPOINTS)):
            launch.n_context_checkpoints = N_CONTEXT_CHECKPOINTS
        return
    if chosen.value.isdecimal():
        launch.n_context_checkpoints = int(chosen.value)
    if launch.n_context_checkpoints == 0:
        launch.warnings.append(
            f"{chosen}: unless the model has full attention only, nearly every request is evaluated whole;"
            f" {N_CONTEXT_CHECKPOINTS} are enough"
        )


def narrow_batches(
    launch: Launch, given: Mapping[str, Given], known: Collection[str], presets: str = ""
) -> None:
    """Let llama-server evaluate one physical batch at a time, for a model with a sliding window.

    With several, it sometimes drops cells of the window that the first still needs, and answers wrongly
    (docs/upstream/window_purged_too_early.py). A router takes one number for all *presets*: that of the
    widest, because a smaller one would cut the others' physical batches.
    """
    logical = given.get("--batch-size")
    n_physical = max(_physical(given), *map(int, _UBATCHES.findall(presets)), 0)
    if logical is None:
        launch.has_narrow_batches = _add(launch, known, "-b", str(n_physical))
    elif not _is_narrow(given):
        launch.warnings.append(
            f"{logical}: with a sliding window, answers are sometimes wrong unless -b is as small as -ub:"
            f" -b {n_physical}"
        )


def _physical(given: Mapping[str, Given]) -> int:
    """Return how many tokens a physical batch has at most."""
    return _number(given.get("--ubatch-size")) or UBATCH_TOKENS


def _is_narrow(given: Mapping[str, Given]) -> bool:
    return 0 < _number(given.get("--batch-size")) <= _physical(given)


def keep_slots_apart(launch: Launch, given: Mapping[str, Given], known: Collection[str]) -> None:
    """Let llama-server keep several slots off AMX kernels, for a recurrent model on a CPU that has them.

    These kernels take wrong weights for every slot but the first of a batch
    (docs/upstream/prompts_at_once.py). Without them prompts take about twice as long.
    """
    slots, repack = given.get("--parallel"), given.get("--repack")
    if not slots or slots.value == "1":
        return
    if repack is None:
        _add(launch, known, "--no-repack")
    elif repack.value == ON:
        launch.warnings.append(
            f"{repack}: this CPU has AMX, where llama-server mixes up the slots of this model:"
            " --no-repack, or -np 1"
        )


def restart_delay_seconds(n_failures: int) -> float:
    """Return how long to wait before the next start, after *n_failures* in a row."""
    return min(MAX_RESTART_DELAY_SECONDS, 2.0 ** min(10, max(0, n_failures - 1)))


# A router's command line overrides its presets, the flags for single models, and the presets override
# environment variables (server-models.cpp).


def let_presets_win(launch: Launch, variables: Mapping[str, str]) -> None:
    """Turn the additions that have environment variables, as *variables* says, into such variables.

    The directory stays a flag: it is the same for all models.
    """
    launch.has_ram_cache = True  # a preset may turn it on
    for name, *values in launch.additions.copy():
        if name in variables and name not in ("--port", _SAVE_PATH):
            launch.additions.remove((name, *values))
            switched = OFF if name.startswith("--no-") else ON
            launch.environment[variables[name]] = values[0] if values else switched
            launch.has_narrow_batches &= name != "-b"


# What --help and a command say. Arguments that cannot be read are left for llama-server to refuse.


_NAME = r"--?[A-Za-z][\w.-]*"
_NAMES = re.compile(rf"({_NAME}(?:,\s*{_NAME})*)(?:,?\s|$)")
_TWO_VALUES = re.compile(r"[A-Z]+ [A-Z]+")
_ENVIRONMENT = re.compile(r"\(env: (\w+)\)")
_TRUE = frozenset(("on", "enabled", "true", "1"))


@dataclass(frozen=True, slots=True)
class Flag:
    """One option with all its names; a switch takes no value and may have names that turn it off."""

    names: tuple[str, ...]
    n_values: int
    environment: str | None = None

    @property
    def can_be_turned_off(self) -> bool:
        return not self.n_values and any(map(_turns_off, self.names))


def parse_help(text: str) -> list[Flag]:
    """Return the options in the text of --help.

    An option begins at the left edge with its names and a placeholder for its value. Two or more spaces or
    the end of the line separate them from the description, which continues in indented lines.
    """
    options: list[Flag] = []
    for entry in re.split(r"\n(?=\S)", text):
        if names := _NAMES.match(line := entry.partition("\n")[0]):
            value = re.split(r"\s{2,}|^\s", line[names.end() :])[0]
            n_values = 2 if _TWO_VALUES.fullmatch(value) else 1 if value else 0
            found = _ENVIRONMENT.search(entry)
            all_names = tuple(re.findall(_NAME, names[1]))
            options.append(Flag(all_names, n_values, found[1] if found else None))
    return options


def known_names(options: Iterable[Flag]) -> frozenset[str]:
    return frozenset(name for option in options for name in option.names)


def read_given(
    options: Sequence[Flag], arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Given]:
    """Return the options that *arguments*, or else *environment*, set, under every name of each option.

    If an option is given twice, the last one counts. Arguments that are no option are left for llama-server
    to refuse.
    """
    given: dict[str, Given] = {}
    for option in options:
        if found := _from_environment(option, environment):
            given |= dict.fromkeys(option.names, found)
    by_name = {name: option for option in options for name in option.names}
    words = iter(arguments)
    for written in words:
        # llama-server takes --cache_ram for --cache-ram, and no --name=value.
        name = written.replace("_", "-") if written.startswith("--") else written
        if known := by_name.get(name):
            switched = OFF if _turns_off(name) else ON
            values = list(islice(words, known.n_values))
            value = "".join(values[:1]) if known.n_values else switched
            given |= dict.fromkeys(known.names, Given(written, value))
    return given


def _from_environment(option: Flag, environment: Mapping[str, str]) -> Given | None:
    name = option.environment or ""
    negative = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
    if option.can_be_turned_off and negative in environment:
        return Given(negative, OFF)
    if name not in environment:
        return None
    value = environment[name]
    if not option.n_values:
        value = ON if value in _TRUE else OFF
        if value == OFF and not option.can_be_turned_off:
            return None
    return Given(name, value)


def _turns_off(name: str) -> bool:
    return name.startswith(("--no-", "-n"))  # -nr, -nkvo, -no-kvu
