"""What all commands share: options, settings, the access to a running proxy or to a store, and output."""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from enum import IntEnum
from functools import partial, wraps
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar
from urllib.parse import urlencode

import click
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from proxy import settings
from proxy.core.conditions import State
from proxy.core.messages import member, object_in, text_of
from proxy.core.rates import size_in_words
from proxy.errors import CacheFault, SettingsError, StoreLocked, in_words
from proxy.explain.sketch import visible
from proxy.explain.views import OWN_CLIENT, ListedCheckpoint, list_checkpoint
from proxy.settings import SCHEMA, Settings, is_size, kinds_of, reachable, written
from proxy.store.directory import StoreDirectory
from proxy.store.known_models import model_names
from proxy.store.offline import open_offline


class Exit(IntEnum):
    """The exit statuses of all commands; the help of `doctor` and `explain` says more about theirs."""

    FAILED = 1
    """Something that the command needs is missing or broken, or the command was refused."""
    USAGE = 2
    """A setting or a flag is wrong, or two contradict each other."""
    UNAVAILABLE = 69
    """A port or the directory is taken, or no proxy answers (EX_UNAVAILABLE of sysexits.h)."""
    LLAMA_SERVER_DIED = 70
    """The llama-server that `run` started has ended by itself (EX_SOFTWARE)."""
    CUT_SHORT = 130
    """A signal cut the work, or the end of it, short."""


def fail(complaint: object, exit_status: int = Exit.FAILED) -> NoReturn:
    """Say on stderr what is wrong, and exit."""
    said = in_words(complaint) if isinstance(complaint, BaseException) else str(complaint)
    click.echo(f"llama-prefix-cache: {visible_lines(said)}", err=True)
    sys.exit(exit_status)


def visible_lines(said: str) -> str:
    """Return lines without control characters: they may quote text from a request or a file."""
    return "\n".join(map(visible, said.split("\n")))


def agree(question: str) -> None:
    """Ask a question, unless --yes is given; exit if the answer is no, or if there is no terminal."""
    if not (_is_on("yes") or (sys.stdin.isatty() and click.confirm(question, err=True))):
        fail(f"{question} Nothing was done: --yes does it without asking", Exit.USAGE)


def settings_of(
    flags: Mapping[str, Any],
    config: Path | None,
    directory: Literal["given", "known", "made", "any"] = "given",
) -> Settings:
    """Return the settings of flags, environment and file; raises SettingsError or OSError.

    *directory* says what to do if no source names a directory: "given" raises SettingsError; "known" takes
    the default directory of `run` if it exists; "made" creates it; "any" takes it even if it is missing.
    """
    merged = settings.merge_settings(flags, os.environ, config)
    if directory != "given" and "slot_save_path" not in merged:
        default = settings.default_directory()
        if directory == "made":
            default.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory == "any" or default.is_dir():
            merged["slot_save_path"] = str(default)
    return settings.complete_settings(merged, needs_directory=directory != "any")


# The output of commands: tables for people, JSON for programs.


_PIPED_COLUMNS = 80
_AGES = (("d", 86400.0, 2.0), ("h", 3600.0, 1.0), ("min", 60.0, 1.0), ("s", 1.0, 0.0))


def console() -> Console:
    """Return the console for people: the terminal, or lines of a fixed length in a pipe."""
    shown = Console(highlight=False, markup=False, emoji=False)
    if not shown.is_terminal:
        shown.width = _PIPED_COLUMNS
    return shown


def table_of(rows: Iterable[Iterable[str | Text]]) -> Table:
    """Return a table without borders."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(visible_lines(cell) if isinstance(cell, str) else cell for cell in row))
    for column in table.columns:
        column.overflow = "fold"  # a path that is cut is of no use
    return table


def answer(content: object, shown: object) -> None:
    """Print *content* if --json is given, else *shown* for people: lines, or a renderable of rich."""
    if _is_on("json"):
        click.echo(msgspec.json.format(msgspec.json.encode(content)).decode())
    else:
        click.echo(visible_lines(shown) if isinstance(shown, str) else in_lines(shown, console()))


def in_lines(content: object, shown: Console) -> str:
    """Return what the console *shown* prints for a renderable, without trailing spaces."""
    with shown.capture() as captured:
        shown.print(content, soft_wrap=isinstance(content, Text))
    return "\n".join(map(str.rstrip, captured.get().removesuffix("\n").split("\n")))


def checkpoints_in_words(n_checkpoints: int, n_bytes: int) -> str:
    """Return a number of checkpoints and their size, in words."""
    plural = "" if n_checkpoints == 1 else "s"
    return f"{n_checkpoints:,} checkpoint{plural} with {size_in_words(n_bytes)}"


def age_in_words(seconds: float) -> str:
    """Return an age in words, roughly: "5 min ago"."""
    unit, factor, _ = next((a for a in _AGES if seconds >= a[1] * a[2]), _AGES[-1])
    return f"{max(0, seconds) / factor:.0f} {unit} ago"


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Any]:
    """Show on a terminal how much of *total* is done; yields the `update` of rich for this task."""
    shown = Console(stderr=True)
    with Progress(console=shown, disable=not shown.is_terminal, transient=True) as bar:
        yield partial(bar.update, bar.add_task(what, total=total))


class Commands(click.Group):
    """Commands that exit with a plain message if a setting is wrong, or their work on files fails."""

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # not every terminal has the words of prompts
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of the output has closed it: click ends the command
        except (KeyboardInterrupt, click.Abort):
            fail("interrupted", Exit.CUT_SHORT)
        except SettingsError as error:
            fail(error, Exit.USAGE)
        except (CacheFault, OSError) as fault:
            if getattr(fault, "errno", 0) == errno.ENOSPC and sys.stdout:
                # At exit Python would flush the rest again, and exit with 120.
                with suppress(OSError):
                    sys.stdout.close()
            fail(fault, Exit.UNAVAILABLE if isinstance(fault, StoreLocked) else Exit.FAILED)


# Options.


Command = Callable[..., Any]


def setting_options(*names: str) -> Callable[[Command], Command]:
    """Give a command --config, and one option for each setting in *names*, by default for all settings.

    The file may contain other settings too: one file serves all commands.
    """

    def decorate(command: Command) -> Command:
        command = _config_option(command)
        for name in reversed(names or settings.NAMES):
            command = _setting_option(name)(command)
        return command

    return decorate


def _setting_option(name: str) -> Callable[[Command], Command]:
    flag, said = name.replace("_", "-"), SCHEMA[name]["description"]
    if "boolean" in kinds_of(name):
        return click.option(f"--{flag}/--no-{flag}", default=None, help=said)
    metavar = "BYTES" if is_size(name) else name.rpartition("_")[2].upper()
    if default := SCHEMA[name].get("default"):
        said += f" [{written(name, default)}]"
    return click.option(f"--{flag}", metavar=metavar, help=said)


FILE = click.Path(dir_okay=False, path_type=Path)
_config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar=settings.ENVIRONMENT_PREFIX + "CONFIG",
    help="YAML file with settings; flags and LLAMA_PREFIX_CACHE_* beat it.",
)


def _note(context: click.Context, option: click.Parameter, is_on: bool) -> None:
    context.meta[str(option.name)] = is_on


def _is_on(name: str) -> bool:
    """Return whether the command that runs was given a switch; one without that switch was not."""
    return bool(click.get_current_context().meta.get(name))


# Not arguments of the commands: only `answer` and `agree` read these switches.
_switch = partial(click.option, is_flag=True, is_eager=True, expose_value=False, callback=_note)
json_option = _switch("--json", help="Print JSON.")
yes_option = _switch("--yes", "-y", help="Do not ask.")


# The store that a command works on: that of a running proxy, or a directory that no proxy uses.


T = TypeVar("T")
Json = dict[str, Any]
_CONNECT_SECONDS = 5.0


class RunningProxy:
    """The admin listener of a running proxy; each method exits with a plain message if it refuses."""

    n_stay_shared = 0

    def __init__(self, address: str, token: str | None = None, *, is_admin: bool = True) -> None:
        """*address* is HOST:PORT or a URL, *token* the listener's token or llama-server's key, if any.

        If *is_admin* is false, the address is one for clients: of a proxy or of any other server.
        """
        scheme, _, self.address = address.rstrip("/").removesuffix("/v1").rpartition("://")
        self.url, self._is_admin = f"{scheme or 'http'}://{self.address}", is_admin
        self._connection = HTTPSConnection if scheme == "https" else HTTPConnection
        self._headers = {"User-Agent": OWN_CLIENT, "Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def checkpoints(self) -> list[ListedCheckpoint]:
        return self.ask("GET", "/checkpoints", dict[str, list[ListedCheckpoint]])["checkpoints"]

    def overview(self) -> Json:
        """Return what the live page shows: state, llama-servers, store and the sums of today."""
        return self.ask("GET", "/overview", Json)

    @staticmethod
    def why_forwarding(overview: Json) -> str:
        """Return why the proxy only forwards requests, and what helps; empty if it caches."""
        reasons = overview["reasons"] if overview["state"] == State.FORWARDING else ()
        return " ".join(f"{each['reason']} {each['cure']}" for each in reasons)

    def for_clients(self, overview: Json, url: str | None, api_key: str) -> "RunningProxy":
        """Return the listener for clients, by default at the address in the overview.

        Exits if the proxy only forwards, and no llama-server is attached.
        """
        if not overview["servers"] and (why := self.why_forwarding(overview)):
            fail(why, Exit.UNAVAILABLE)
        listen = reachable(overview["listen"], self.address.rpartition(":")[0])
        return RunningProxy(url or listen, api_key, is_admin=False)

    def model_that_runs(self, overview: Json, name: str | None = None) -> tuple[Json, list[Json]]:
        """Return a model that is loaded, and its llama-servers in the overview; exits if none is loaded.

        The model is its entry in /v1/models, or only the *name* if one is given. A router lists all its
        models: to use the first of them could unload the model that runs.
        """
        servers, model = overview["servers"], {"id": name}
        if not name or not servers:
            models = self.ask("GET", "/v1/models", Json)["data"]
            if not servers:
                known = ", ".join(each["id"] for each in models)
                loads = f"`connect ... --model NAME` loads one of {known}"
                none = "there is none: give llama-server -m FILE or --models-dir"
                fail(f"no model is loaded: {loads if known else none}", Exit.UNAVAILABLE)
            names = [each["name"] for each in servers]
            model = next((each for each in models if each["id"] in names), models[0])
        return model, [each for each in servers if each["name"] == model["id"]] or servers

    def pin(self, checkpoint_id: str, *, is_pinned: bool) -> None:
        self.ask("PUT" if is_pinned else "DELETE", f"/checkpoints/{checkpoint_id}/pin", Json)

    def delete(self, checkpoint: ListedCheckpoint, *, with_pinned: bool) -> bool:
        """Delete a checkpoint; return whether it is gone: it may be in use, or pinned meanwhile."""
        path, query = f"/checkpoints/{checkpoint.id}", {"pinned": str(with_pinned)}
        with self._reply("DELETE", path, query=query, refusals=(404, 409)) as reply:
            return reply.status != 409

    def ask(self, method: str, path: str, type_: type[T], **how: Any) -> T:
        """Return the answer to a request; *how* are the other arguments of `_reply`."""
        with self._reply(method, path, **how) as reply:
            return self._decode(reply.read(), type_)

    def text(self, path: str) -> str:
        with self._reply("GET", path) as reply:
            return reply.read().decode()

    def lines(self, path: str, **how: Any) -> Iterator[Json]:
        """Post a request and yield each JSON line of the answer, or each event of a stream."""
        with self._reply("POST", path, **how) as reply:
            for line in reply:
                if line.startswith((b"{", b"data: {")):
                    yield self._decode(line.removeprefix(b"data: "), Json)

    @contextmanager
    def _reply(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        refusals: Sequence[int] = (),
    ) -> Iterator[HTTPResponse]:
        """Yield the answer to a request; exit at an error whose status is not in *refusals*."""
        sent = {**self._headers, **(headers or {})}
        if not all(value.isascii() and value.isprintable() for value in sent.values()):
            fail("the key has characters that HTTP does not carry", Exit.USAGE)
        try:
            # Not urllib, which would use the HTTP proxies that the environment names.
            with closing(self._connection(self.address, timeout=_CONNECT_SECONDS)) as connection:
                connection.connect()
                connection.sock.settimeout(None)
                target = f"{path}?{urlencode(query)}" if query else path
                connection.request(method, target, body, sent)
                reply = connection.getresponse()
                if reply.status not in (200, *refusals):
                    self._fail_refused(reply)
                yield reply
        except (HTTPException, OSError) as error:
            is_path = isinstance(error, InvalidURL)
            why = "only http://HOST:PORT can be asked" if is_path else in_words(error)
            nobody = f"answers at {self.url}: {why}."
            if not self._is_admin:
                fail(f"nothing {nobody} Check the URL, and that the server runs", Exit.UNAVAILABLE)
            fail(
                f"no proxy {nobody} Start it (`run` or `serve`), or give --admin HOST:PORT if its `admin`"
                " is another. Without a proxy, `ls`, `pin`, `unpin` and `rm` take --slot-save-path"
                " DIRECTORY",
                Exit.UNAVAILABLE,
            )

    def _decode(self, body: bytes, type_: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=type_)
        except ValueError:
            self._fail_foreign()

    def _fail_refused(self, reply: HTTPResponse) -> NoReturn:
        """Exit with what an error says."""
        if reply.status == 401 and "WWW-Authenticate" not in reply.headers:
            fail("llama-server refuses this API key: give --api-key KEY", Exit.USAGE)
        if reply.status == 401:
            asks = f"the proxy at {self.address} asks for its admin token"
            usual = f"by default {settings.ADMIN_TOKEN} in its --slot-save-path"
            fail(f"{asks}: give --admin-token-file FILE, {usual}", Exit.USAGE)
        status = Exit.UNAVAILABLE if reply.status == 503 else Exit.FAILED
        fail(_complaint(reply.read()) or self._fail_foreign(), status)

    def _fail_foreign(self) -> NoReturn:
        admin = "the admin listener of llama-prefix-cache"
        what = admin if self._is_admin else "llama-server or a proxy"
        fail(f"what answers at {self.url} is not {what}", Exit.UNAVAILABLE)


def _complaint(body: bytes) -> str:
    """Return the message of an error body, empty if it has none."""
    error = member(object_in(body), "error", "")
    said = text_of(error, "message") if isinstance(error, dict) else str(error)
    # llama-server answers "File Not Found" for an unknown path.
    return said.removeprefix("llama-prefix-cache: ").removeprefix("File Not Found")


class DirectoryStore:
    """The store in a directory that no proxy uses, with the same methods as a running proxy."""

    def __init__(self, store: StoreDirectory) -> None:
        self._store, self.n_stay_shared = store, 0
        # While the directory is locked, no other process writes there.
        self._records = {f"{c.id:016x}": c for c in store.index.all()}

    def checkpoints(self) -> list[ListedCheckpoint]:
        names = model_names(self._store.index)
        return [list_checkpoint(checkpoint, names) for checkpoint in self._records.values()]

    def pin(self, checkpoint_id: str, *, is_pinned: bool) -> None:
        self._store.require_writable()
        record = replace(self._records[checkpoint_id], is_pinned=is_pinned)
        self._store.update([record])
        self._records[checkpoint_id] = record

    def delete(self, checkpoint: ListedCheckpoint, *, with_pinned: bool) -> bool:
        self._store.require_writable()
        record = self._records.pop(checkpoint.id)
        self._store.remove(record)
        self.n_stay_shared += bool(record.shared_id)
        return True


Store = RunningProxy | DirectoryStore


# The options that choose a store.


def with_proxy(command: Command) -> Command:
    """Give a command a running proxy as its first argument, and the options that choose the proxy."""

    @setting_options("admin", "admin_token_file")
    @json_option
    @wraps(command)
    def run(
        admin: str | None,
        admin_token_file: str | None,
        config: Path | None,
        slot_save_path: Path | None = None,
        **arguments: Any,
    ) -> None:
        if slot_save_path is None:
            given = {"admin": admin, "admin_token_file": admin_token_file}
            own = settings_of(given, config, "any")
            command(RunningProxy(reachable(own.admin), settings.token_to_show(own)), **arguments)
        elif admin is not None:
            fail("--admin and --slot-save-path are two stores: give one", Exit.USAGE)
        else:
            with open_offline(Path(os.path.expanduser(slot_save_path))) as store:
                command(DirectoryStore(store), **arguments)

    return run


def with_store(command: Command) -> Command:
    """Give a command a store as its first argument: of a running proxy, or in a directory."""
    option = click.option(
        "--slot-save-path",
        type=click.Path(path_type=Path),
        help="Work on this directory itself, while no proxy uses it.",
    )
    return option(with_proxy(command))


def with_directory(command: Command, unset: Literal["known", "made"] = "known") -> Command:
    """Give a command the settings as its first argument, for the directory in them.

    *unset* says what happens if the settings name no directory, as in `settings_of`.
    """

    @setting_options("slot_save_path")
    @json_option
    @wraps(command)
    def run(slot_save_path: str | None, config: Path | None, **arguments: Any) -> None:
        command(settings_of({"slot_save_path": slot_save_path}, config, unset), **arguments)

    return run


def agree_to_write(context: click.Context, _: click.Parameter, file: Path) -> Path:
    """Ask before a command with `yes_option` replaces a file; exit if the file cannot be written."""
    if context.resilient_parsing:  # the shell completes a command line: nobody can answer
        return file
    if str(file) == "-":
        raise click.BadParameter("it is written to a file, not to the standard output: name a file")
    place = file if os.path.exists(file) else file.parent
    if not os.access(place, os.W_OK):
        fail(f"{place} does not exist, or this user may not write to it")
    if file.is_file():
        agree(f"{file} is there already. Replace it?")
    return file


file_option = partial(
    click.option, required=True, type=FILE, callback=agree_to_write, help="The file to write."
)
