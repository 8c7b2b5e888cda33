"""`llama-prefix-cache serve`, `run` and `warm`."""

import asyncio
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from proxy import settings as configuration
from proxy.cli import command
from proxy.core.launch import (
    Launch,
    keep_slots_apart,
    known_names,
    let_presets_win,
    narrow_batches,
    parse_help,
    plan_launch,
    read_given,
)
from proxy.core.rates import seconds_in_words, size_in_words
from proxy.errors import SettingsError, in_words
from proxy.llama.files import RECURRENT_KEY, WINDOW_KEY, has_key
from proxy.log import configure_logging, get_logger
from proxy.run import process
from proxy.settings import NAMES, SCHEMA, Settings, reachable

if TYPE_CHECKING:
    from proxy.app import Running

_MOST_FILES = 10240
"""macOS allows no more (OPEN_MAX)."""

# `llama-prefix-cache serve`: serves in front of a llama-server that it did not start.


@click.command()
@command.setting_options()
def serve(config: Path | None, **flags: Any) -> None:
    """Serve in front of a llama-server that runs already.

    \b
    llama-server -m model.gguf -c 65536 -np 1 --cache-ram 0 -b 512 \\
        --slot-save-path ~/slots --port 8080
    llama-prefix-cache serve --upstream http://127.0.0.1:8080 --slot-save-path ~/slots
    """
    _serve(command.settings_of(flags, config))


RunServer = Callable[[process.IsReady, str], Coroutine[Any, Any, str]]
"""Runs llama-server, logs the given text once it is ready, and returns how llama-server ended by itself."""


def _serve(
    settings: Settings, run_server: RunServer | None = None, launch: Launch | None = None
) -> str | None:
    """Serve until a signal, or until llama-server ends by itself; return how llama-server ended."""
    # All of the proxy: other commands start sooner without it.
    import uvloop

    from proxy.llama.connection import EventLoop

    allow_files()
    try:
        with configure_logging(settings.log_level, settings.log_format):
            serving = _serve_until_stopped(settings, run_server, launch)
            return uvloop.run(serving, loop_factory=EventLoop)
    except OSError as error:
        for flag, address in (("--listen", settings.listen), ("--admin", settings.admin)):
            if error.filename == address:
                error.filename = None
                why = f"cannot listen on {address}: {in_words(error)}: give another {flag}"
                command.fail(why, command.Exit.UNAVAILABLE)
        command.fail(error, command.Exit.UNAVAILABLE)
    except asyncio.CancelledError:
        command.fail("stopped early: a request or a save was cut short", command.Exit.CUT_SHORT)


def allow_files() -> None:
    """Let this process open as many files as its user may: macOS begins with 256, a request takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve_until_stopped(
    settings: Settings, run_server: RunServer | None, launch: Launch | None
) -> str | None:
    """Run the proxy as `_serve` says; raises as run_proxy does."""
    from proxy.app import run_proxy

    stopping, log = stop_on_signals(), get_logger("main")
    running: asyncio.Task[str] | None = None
    try:
        # The proxy listens before llama-server is started, so that a taken port costs nothing.
        async with run_proxy(settings, launch=launch) as proxy:
            of = {name: getattr(settings, name) for name in ("listen", "admin", "upstream")}
            listeners = _listeners(settings, proxy)
            says = f"serving {settings.upstream}: {listeners}"
            log.info("serving", **of, says="" if run_server else says)
            awaited: set[asyncio.Task[Any]] = {asyncio.ensure_future(stopping.wait())}
            if run_server is not None:

                async def is_ready() -> bool:
                    return await proxy.pool.are_met() and not stopping.is_set()

                running = asyncio.ensure_future(run_server(is_ready, f"ready: {listeners}"))
                awaited.add(running)
            try:
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if not stopping.is_set() or (task := asyncio.current_task()) is None:
                    raise
                task.cancel()  # two signals at once: the second one cuts the next wait short
            if stopping.is_set():
                n_requests = len(proxy.shared.journal.in_flight)
                first = [f"finishing requests ({n_requests})"] * bool(n_requests)
                steps = first + ["saving slots"] * any(p.is_caching for p in proxy.pool.processes)
                at_most = f": at most {settings.drain_seconds:g} s" + " each" * (len(steps) > 1)
                hint = f"{at_most}; Ctrl-C again waits no longer" if steps else "stopping"
                says = ", then ".join(steps) + hint
                log.info("finishing requests", n_requests=n_requests, says=says)
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
    if running is not None and not running.cancelled():
        return running.result()
    log.info("stopped", says="stopped")
    return None


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGINT, SIGTERM or SIGHUP sets.

    Each further SIGINT or SIGTERM cancels the task that called this: the current wait is cut short, and the
    next step of the shutdown begins. A further SIGHUP does nothing: a terminal that is closed sends two.
    """
    stopping, task, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()

    def stop() -> None:
        if not stopping.is_set():
            stopping.set()
        elif task is not None:
            get_logger("main").warning("another signal: not waiting any longer")
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # An ignored SIGHUP comes from nohup and stays so; SIGINT is ignored after a shell's "&".
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stopping.set if number == signal.SIGHUP else stop)
    return stopping


def _listeners(settings: Settings, proxy: "Running") -> str:
    """Return what `run` and `serve` say once they listen: the addresses, with the ports really bound."""
    bound = (settings.listen, proxy.port), (settings.admin, proxy.admin_port)
    clients, page = (f"{reachable(a).rpartition(':')[0]}:{port}" for a, port in bound)
    where = "" if settings.admin == SCHEMA["admin"]["default"] else f" --admin {shlex.quote(page)}"
    return (
        f"clients http://{clients}/v1 (Anthropic: http://{clients}), live page http://{page}\n{'':10}"
        f"connect OpenCode, Claude Code and others: llama-prefix-cache connect opencode{where}"
    )


# `llama-prefix-cache run`: starts llama-server itself and serves in front of it.

_ONLY_TELL = {"-h", "--help", "--usage", "--version", "--list-devices"}
"""With one of these, llama-server prints and ends."""


@click.command(context_settings={"allow_interspersed_args": False})
@command.setting_options(*(name for name in NAMES if name != "upstream"))
@click.option("--restart", is_flag=True, help="Start llama-server again when it dies.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND")
def run(config: Path | None, restart: bool, words: tuple[str, ...], **flags: Any) -> None:
    """Start llama-server and serve in front of it.

    \b
    llama-prefix-cache run -- llama-server -m model.gguf -c 65536
    llama-prefix-cache run -- llama-server -hf USER/MODEL -c 65536
    llama-prefix-cache run -- llama-server --models-dir ~/models -c 65536     several models (a router)

    `run` adds the flags that COMMAND lacks and its build knows: --slot-save-path, a free --port, -np 1,
    --cache-ram 0, --no-radix-cache, --ctx-checkpoints 16 and --metrics. A model that may have a sliding
    window gets -b as small as -ub. A recurrent model with -np N on a CPU with AMX gets --no-repack. Your
    own flags are kept. If one of them makes caching impossible, `run` names that flag and starts nothing.

    States are kept in --slot-save-path, llama-server's or this command's; without either, in
    ~/.cache/llama-prefix-cache.

    With -np 1 a conversation has the whole context (-c) and requests run one after another; -np N serves
    N at once, each with an Nth of the context.

    On SIGTERM, SIGINT or SIGHUP, running requests are finished, slots are saved and llama-server is
    stopped; a second SIGTERM or SIGINT hurries. Exit status: 0 after a signal, 2 for a conflict or a wrong
    setting, 69 if a port or the directory is taken, 70 if llama-server died, 130 if a second signal cut it
    short.
    """
    try:
        program, arguments = process.split_command(words)
        merged = configuration.merge_settings(flags, os.environ, config)
        launch = _plan(program, arguments, merged)
        if _ONLY_TELL & {*arguments}:
            sys.exit(subprocess.call(words))
        if launch.conflicts:
            told = ["llama-server cannot be run like this:", *launch.conflicts]
            command.fail("\n  ".join(told), command.Exit.USAGE)
        settings = _settings(merged, launch)
        process.free_port(launch.host, launch.port)
    except OSError as error:
        command.fail(error, command.Exit.UNAVAILABLE)

    async def run_server(is_ready: process.IsReady, says_ready: str) -> str:
        _tell(launch)
        return await process.keep_running(
            [*program, *arguments, *launch.added],
            launch.environment,
            is_ready,
            restarts=restart,
            is_shown=settings.log_level == "debug",
            says_ready=says_ready,
        )

    if end := _serve(settings, run_server, launch):
        # A wrapper's container may have the file, and a model that is loaded needs none.
        if (path := launch.model_path) and "failed to open" in end and not Path(path).exists():
            end = f"there is no model file {path}"
        command.fail(end, command.Exit.LLAMA_SERVER_DIED)


def _tell(launch: Launch) -> None:
    """Log the command that is started, and its problems."""
    log = get_logger("run")
    variables = [f"{name}={value}" for name, value in launch.environment.items()]
    added = " ".join([*launch.added, *variables])
    says = f"starting llama-server: {launch.says}; added: {added}"
    log.info("llama-server gets these flags too", added=added, says=says)
    for warning in launch.warnings:
        log.warning(warning)


def _plan(program: Sequence[str], arguments: Sequence[str], merged: dict[str, Any]) -> Launch:
    options = parse_help(text := process.read_help(program))
    known, given = known_names(options), read_given(options, arguments, os.environ)
    own_path = merged.get("slot_save_path")
    needs_default = not own_path and "--slot-save-path" not in given
    launch = plan_launch(
        given,
        known,
        own_path=os.path.abspath(os.path.expanduser(own_path)) if own_path else None,
        default_path=str(configuration.default_directory()) if needs_default else "",
        free_port=process.free_port("127.0.0.1"),
        working_directory=str(Path.cwd()),
    )
    ours = {f"--{name.replace('_', '-')}" for name in (*NAMES, "config", "restart")} - known
    flags = [argument.partition("=")[0] for argument in arguments if options]
    launch.conflicts += [f"{f} is for the proxy: put it before `--`" for f in flags if f in ours]
    # The flags that `run` adds behind it would be taken for its value.
    empty = {option.written for option in given.values() if not option.value}
    launch.conflicts += [f"{last} needs a value" for last in flags[-1:] if last in empty]
    if not options:  # such as for an environment variable that it cannot read
        said = next(filter(None, map(str.strip, text.splitlines())), "nothing")
        launch.conflicts.append(f"its --help says: {said}")
    models = [Path(launch.model_path)] if os.path.exists(launch.model_path) else []
    if not models and {"--hf-repo", "--model-url", "--docker-repo"} & given.keys():
        launch.model_path = ""  # where llama-server puts what it downloads
        repository = given["--hf-repo"].value if "--hf-repo" in given else ""
        models = process.downloaded(repository)
    # A model that is not here, a router's, or one that is not downloaded yet, may have a window.
    if not models or any(has_key(model, WINDOW_KEY) for model in models):
        presets = Path(given["--models-preset"].value) if "--models-preset" in given else None
        named = presets.read_text(errors="replace") if presets and presets.is_file() else ""
        narrow_batches(launch, given, known, named)
    if process.has_amx() and any(has_key(model, RECURRENT_KEY) for model in models):
        keep_slots_apart(launch, given, known)
    if "--models-preset" in given:
        variables = {n: o.environment for o in options if o.environment for n in o.names}
        let_presets_win(launch, variables)
    return launch


def _settings(merged: dict[str, Any], launch: Launch) -> Settings:
    """Return the settings that fit a launch; create the directory if it does not exist."""
    directory = Path(launch.slot_save_path)
    api_key = merged.get("upstream_api_key")
    api_key = launch.api_key if api_key is None else api_key
    try:
        if not directory.exists():  # if it is a file, the settings refuse it
            directory.mkdir(mode=0o700, parents=True)
        if launch.api_key_file and api_key is None:
            # One key on each line; # begins a comment.
            lines = Path(launch.api_key_file).read_text(errors="replace").splitlines()
            api_key = next((line for line in lines if line and not line.startswith("#")), None)
    except OSError as error:
        raise SettingsError(in_words(error)) from error
    own = {"upstream": launch.upstream, "upstream_api_key": api_key}
    return configuration.complete_settings({**merged, "slot_save_path": str(directory), **own})


# `llama-prefix-cache warm`: a header is evaluated and kept before the first user needs it.


@click.command()
@click.argument("file", type=click.File("rb"), required=False)
@click.option("--from-request", "request_id", metavar="ID|last", help="In place of FILE.")
@click.option("--whole", is_flag=True, help="The whole prompt, not only tools and system prompt.")
@click.option("--api-key", envvar="LLAMA_API_KEY", help="The clients' key: states belong to a key.")
@click.option("--pin", is_flag=True, help="Keep it whatever the budget says.")
@command.with_proxy
def warm(
    proxy: command.RunningProxy,
    file: Any,
    request_id: str | None,
    whole: bool,
    api_key: str | None,
    pin: bool,
) -> None:
    """Evaluate and keep a header for its first user.

    \b
    llama-prefix-cache warm first-request.json
    llama-prefix-cache warm --pin --whole first-request.json
    jq '.body' captured.json | llama-prefix-cache warm -
    llama-prefix-cache warm --from-request last

    FILE is a request's body as JSON, as a client sends it to any of the cached APIs. The state of its tools
    and system prompt is kept, with --whole also that of its messages. The proxy must be running. Before a
    router or llama-swap the body names a model, and that model is loaded.

    --from-request needs no body: the proxy remembers the tokens of its last requests, unless explain_keep
    is none. ID is the one in the request's log line. The state is kept for the API key that sent the
    request.
    """
    if (file is None) == (request_id is None):
        raise click.UsageError("give either FILE or --from-request")
    query = {"whole": str(whole)} | ({"request": request_id} if request_id else {})
    headers = {"X-Api-Key": api_key} if api_key else {}
    body = file.read() if file else b""
    last: dict[str, Any] = {}
    with command.progress("evaluating", None) as update:
        for last in proxy.lines("/warm", query=query, body=body, headers=headers):
            if "n_done" in last:
                update(completed=last["n_done"], total=last["n_tokens"])
    if "warmed" not in last:
        command.fail(last.get("error", "the proxy went away"))
    warmed = last["warmed"]
    if pin:
        proxy.pin(warmed["id"], is_pinned=True)
        warmed["is_pinned"] = True
    took = f"evaluated in {seconds_in_words(warmed['seconds'])}"
    how = "stored already" if warmed["was_kept"] else took
    kept = "kept until the room is needed; --pin keeps them for good"
    stays = "and pinned" if warmed["is_pinned"] else kept
    command.answer(
        warmed,
        f"{warmed['n_usable']:,} of {warmed['n_prompt_tokens']:,} tokens: {how}, {stays} "
        f"({warmed['id'][:8]}, {size_in_words(warmed['size_bytes'])})",
    )
