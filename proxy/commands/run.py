"""`llama-prefix-cache run`: starts llama-server itself and serves in front of it."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from proxy.addresses import split_address
from proxy.app import run_proxy
from proxy.commands.options import (
    EXIT_CUT_SHORT,
    EXIT_LLAMA_SERVER_DIED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    fail,
    setting_options,
)
from proxy.commands.stopping import Stopping
from proxy.config import Settings
from proxy.core.launch import Given, Launch, Wanted, plan_launch
from proxy.core.presets import Presets, given_to_all, heed_presets
from proxy.errors import LlamaServerDied, SettingsError, StoreLocked
from proxy.loading import complete_settings, merge_settings
from proxy.log import configure_logging, get_logger
from proxy.run.build import find_free_port, read_help, require_free_port, split_command
from proxy.run.supervisor import Supervisor
from proxy.upstream.flags import Option, known_names, parse_help, read_given, variables_of
from proxy.upstream.llama_server import LlamaServer, new_session
from proxy.upstream.presets import read_presets
from proxy.upstream.target import Target

_DIRECTORY_HELP = (
    "Where saved states are kept; llama-server gets the same. "
    "[its --slot-save-path, or ~/.cache/llama-prefix-cache]"
)


_PRESETS = "--models-preset"
_LEARNED = ("upstream", "context_checkpoints")
"""Settings that follow from llama-server's own flags."""


@click.command(context_settings={"allow_interspersed_args": False})
@setting_options(without=_LEARNED, descriptions={"slot_save_path": _DIRECTORY_HELP})
@click.option("--restart", is_flag=True, help="Start llama-server again when it dies.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(config: Path | None, restart: bool, command: tuple[str, ...], **flags: Any) -> None:
    """Start llama-server and serve in front of it.

    \b
    llama-prefix-cache run -- llama-server -m model.gguf -c 65536
    llama-prefix-cache run -- llama-server --models-dir ~/models -c 65536     several models (a router)

    COMMAND gets what it lacks for its slots to be saved: --slot-save-path, a free --port, -np 1,
    --cache-ram 0, --ctx-checkpoints 8 and --metrics, as far as the build knows them. What you give
    yourself is kept; if it cannot be, that is said and nothing is started.

    With -np 1 a conversation has the whole context (-c) and requests run one after another; -np N serves
    N at once, each with an Nth of the context.

    On SIGTERM, SIGINT or SIGHUP, running requests are finished, slots are saved and llama-server is
    stopped; a second signal hurries. Exit status: 0 after a signal, 2 for a conflict or a wrong setting,
    69 if a port or the directory is taken, 70 if llama-server died, 130 if a second signal cut it short.
    """
    try:
        program, arguments = split_command(command)
        merged = merge_settings(flags, os.environ, config)
        launch = _plan(program, arguments, merged)
        if launch.conflicts:
            fail(
                "\n  ".join(["llama-server cannot be run like this:", *launch.conflicts]),
                EXIT_USAGE,
            )
        settings = _settings(merged, launch)
    except SettingsError as error:
        fail(error, EXIT_USAGE)
    configure_logging(settings.log_level, settings.log_format)
    _tell(launch, merged)
    try:
        asyncio.run(
            _run_until_told([*program, *arguments, *launch.added], settings, launch, restart)
        )
    except LlamaServerDied as error:
        fail(error, EXIT_LLAMA_SERVER_DIED)
    except (StoreLocked, OSError) as error:
        fail(error, EXIT_UNAVAILABLE)
    except asyncio.CancelledError:
        fail("stopped before everything was saved", EXIT_CUT_SHORT)


def _plan(program: Sequence[str], arguments: Sequence[str], merged: dict[str, Any]) -> Launch:
    options = parse_help(read_help(program))
    given = read_given(options, arguments, os.environ)
    presets = _presets(given, options)
    own_path = merged.get("slot_save_path")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    wanted = Wanted(
        slot_save_path=str(Path(own_path).expanduser().absolute()) if own_path else None,
        default_slot_save_path=str(Path(cache, "llama-prefix-cache").absolute()),
        free_port=find_free_port("127.0.0.1"),
        working_directory=str(Path.cwd()),
    )
    launch = plan_launch(given_to_all(given, presets), known_names(options), wanted)
    if _PRESETS in given:
        heed_presets(launch, given, presets, variables_of(options), wanted.working_directory)
    return launch


def _presets(given: Mapping[str, Given], options: Sequence[Option]) -> Presets:
    """Return what --models-preset says of a router's models; llama-server complains if it is not there."""
    if _PRESETS not in given:
        return {}
    try:
        return read_presets(Path(given[_PRESETS].value).read_text(), options)
    except (OSError, UnicodeDecodeError):
        return {}


def _settings(merged: dict[str, Any], launch: Launch) -> Settings:
    """Return the settings that fit a launch; makes the directory if it is not there."""
    directory = Path(launch.slot_save_path)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{directory}: {error.strerror}") from error
    values = {
        **merged,
        "slot_save_path": str(directory),
        "upstream": launch.upstream,
        "context_checkpoints": launch.n_context_checkpoints,
    }
    if values.get("upstream_api_key") is None:
        values["upstream_api_key"] = launch.api_key or _first_key(launch.api_key_file)
    settings = complete_settings(values)
    if launch.port in {split_address(address)[1] for address in (settings.listen, settings.admin)}:
        raise SettingsError(
            f"llama-server's --port {launch.port} is the proxy's own: choose another"
        )
    return settings


def _first_key(file: str | None) -> str | None:
    """Return the first key of llama-server's --api-key-file: one on each line, # begins a comment."""
    if file is None:
        return None
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-key-file {file}: {error}") from error
    return next((line for line in lines if line and not line.startswith("#")), None)


def _tell(launch: Launch, merged: dict[str, Any]) -> None:
    log = get_logger("run")
    variables = [f"{name}={value}" for name, value in launch.environment.items()]
    log.info("llama-server gets these flags too", added=" ".join([*launch.added, *variables]))
    for name in _LEARNED:
        if name in merged:
            log.warning(f"{name} is ignored: it follows from llama-server's own flags")
    for note in launch.notes:
        log.info(note)
    for warning in launch.warnings:
        log.warning(warning)


async def _run_until_told(
    command: Sequence[str], settings: Settings, launch: Launch, restarts: bool
) -> None:
    """Run llama-server and the proxy until told to stop; raises LlamaServerDied and what run_proxy does."""
    stopping = Stopping()
    log = get_logger("main")
    require_free_port(launch.host, launch.port)
    async with new_session() as client:
        upstream = LlamaServer(client, Target(settings.upstream), settings.upstream_api_key)
        supervisor = Supervisor(command, launch.environment, upstream.is_ready, restarts=restarts)
        running: asyncio.Task[None] | None = None
        try:
            # The proxy listens before llama-server is started, so that a taken port costs nothing.
            async with run_proxy(settings, is_llama_server_coming=True):
                log.info(
                    "serving",
                    listen=settings.listen,
                    admin=settings.admin,
                    upstream=settings.upstream,
                )
                running = asyncio.ensure_future(supervisor.run())
                await _first_of(running, stopping)
                if stopping.told.is_set():
                    log.info("finishing requests and saving slots")
        finally:
            if running is not None:
                await _stop(running)
    log.info("stopped")


async def _first_of(running: "asyncio.Task[None]", stopping: Stopping) -> None:
    told = asyncio.ensure_future(stopping.told.wait())
    try:
        await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()


async def _stop(running: "asyncio.Task[None]") -> None:
    """Stop llama-server; raises LlamaServerDied if it had ended by itself."""
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.result()
