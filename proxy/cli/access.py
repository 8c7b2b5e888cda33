"""Finds the checkpoints that a few hex digits or a model's name stand for."""

import functools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import click
import msgspec

from proxy.cli.common import (
    EXIT_FAILED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    Admin,
    Command,
    config_option,
    fail,
    json_option,
)
from proxy.errors import IndexDamaged, SettingsError, StoreFault, StoreLocked
from proxy.explain.views import Deleted, ListedCheckpoint, Selection, list_checkpoint, select
from proxy.settings import Settings, merge_settings, reachable
from proxy.store.directory import StoreDirectory
from proxy.store.known_models import model_names
from proxy.store.offline import open_offline

# Finds the checkpoints that a few hex digits or a model's name stand for.


MIN_DIGITS = 4


class NotNamed(Exception):
    """Nothing, or more than one thing, is called so; the message says which."""


def named(text: str, checkpoints: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Return the checkpoints that *text* names: the beginning of an id, an id from /tree, or a model.

    Raises NotNamed.
    """
    of_model = [checkpoint for checkpoint in checkpoints if checkpoint.model == text]
    if "/" in text:
        found = {text: [c for c in checkpoints if f"{c.parent}/".startswith(f"{text}/")]}
    else:
        found = {}
        for checkpoint in checkpoints:
            for node_id in _nodes_of(checkpoint):
                if node_id.rpartition("/")[2].startswith(text.lower()):
                    found.setdefault(node_id, []).append(checkpoint)
    found = {node_id: below for node_id, below in found.items() if below}
    if of_model:
        if any(below != of_model for below in found.values()):
            raise NotNamed(f"{text!r} is a model's name and begins ids, too: give more digits")
        return of_model
    if len(text) < MIN_DIGITS:
        raise NotNamed(f"{text!r} is too short: give {MIN_DIGITS} digits of an id at least")
    if not found:
        raise NotNamed(f"no model is called {text!r}, and no id begins so: see ls")
    if len(found) > 1:
        raise NotNamed(f"{len(found)} ids begin with {text!r}: give more digits")
    return next(iter(found.values()))


def _nodes_of(checkpoint: ListedCheckpoint) -> Iterator[str]:
    """Yield the ids of a checkpoint and of all nodes above it; id 0 names what is not known."""
    yield checkpoint.id
    parts = checkpoint.parent.split("/")
    for n_parts in range(1, len(parts) + 1):
        if n_parts == 1 or int(parts[n_parts - 1], 16):
            yield "/".join(parts[:n_parts])


# The store that a command works on: that of a running proxy, or a directory that no proxy uses.


_DEFAULT_ADMIN = {f.name: f.default for f in msgspec.structs.fields(Settings)}["admin"]


class Access(Protocol):
    """What commands do to a store, wherever it is."""

    def checkpoints(self) -> list[ListedCheckpoint]: ...

    def pin(self, checkpoint: ListedCheckpoint, *, is_pinned: bool) -> None: ...

    def delete(self, checkpoint: ListedCheckpoint, *, with_pinned: bool) -> Deleted:
        """Delete one checkpoint; it may have been pinned, used or deleted since it was listed."""

    def purge(self, selection: Selection, *, is_dry_run: bool) -> Deleted: ...


class _Listing(msgspec.Struct):
    checkpoints: list[ListedCheckpoint]


class OfRunningProxy:
    """The store of a proxy that runs."""

    def __init__(self, admin: Admin) -> None:
        self.admin = admin

    def checkpoints(self) -> list[ListedCheckpoint]:
        return self.admin.ask("GET", "/checkpoints", _Listing).checkpoints

    def pin(self, checkpoint: ListedCheckpoint, *, is_pinned: bool) -> None:
        self.admin.raw("PUT" if is_pinned else "DELETE", f"/checkpoints/{checkpoint.id}/pin")

    def delete(self, checkpoint: ListedCheckpoint, *, with_pinned: bool) -> Deleted:
        path, query = f"/checkpoints/{checkpoint.id}", {"pinned": str(with_pinned)}
        status, body = self.admin.try_raw("DELETE", path, query, refusals=(404, 409))
        return Deleted(0, 0) if status == 404 else self.admin.decode(body, Deleted)

    def purge(self, selection: Selection, *, is_dry_run: bool) -> Deleted:
        query = {
            "under": str(selection.node),
            "unused_seconds": str(round(selection.unused_seconds)),
            "pinned": str(selection.with_pinned),
            "dry_run": str(is_dry_run),
            "all": "true",
        }
        return self.admin.ask("DELETE", "/checkpoints", Deleted, query)


class OfDirectory:
    """The store of a directory that no proxy uses."""

    def __init__(self, store: StoreDirectory) -> None:
        self._store = store

    def checkpoints(self) -> list[ListedCheckpoint]:
        names = model_names(self._store.index)
        return [list_checkpoint(checkpoint, names) for checkpoint in self._store.checkpoints()]

    def pin(self, checkpoint: ListedCheckpoint, *, is_pinned: bool) -> None:
        self._store.pin(self._store.get(checkpoint.id), is_pinned=is_pinned)

    def delete(self, checkpoint: ListedCheckpoint, *, with_pinned: bool) -> Deleted:
        self._store.remove(self._store.get(checkpoint.id))
        return Deleted(1, checkpoint.size_bytes)

    def purge(self, selection: Selection, *, is_dry_run: bool) -> Deleted:
        selected, n_pinned = select(selection, self._store.checkpoints(), time.time())
        for checkpoint in () if is_dry_run else selected:
            self._store.remove(checkpoint)
        n_bytes = sum(c.size_bytes for c in selected)
        return Deleted(len(selected), n_bytes, n_pinned, is_dry_run=is_dry_run)


def with_store(command: Command) -> Command:
    """Give a command a store as its first argument, and the options that say which."""

    @admin_option
    @click.option(
        "--slot-save-path",
        type=click.Path(path_type=Path),
        help="Work on this directory itself, while no proxy uses it.",
    )
    @config_option
    @json_option
    @functools.wraps(command)
    def run(
        admin: str | None, slot_save_path: Path | None, config: Path | None, **arguments: Any
    ) -> None:
        if slot_save_path is None:
            command(OfRunningProxy(find_admin(admin, config)), **arguments)
            return
        if admin is not None:
            fail("--admin and --slot-save-path are two stores: give one", EXIT_USAGE)
        with directory_of(slot_save_path) as store:
            command(OfDirectory(store), **arguments)

    return run


def find_admin(admin: str | None, config: Path | None) -> Admin:
    """Return the admin listener of --admin, LLAMA_PREFIX_CACHE_ADMIN, the file or the default."""
    given = {"admin": admin.removeprefix("http://").rstrip("/") if admin else None}
    try:
        merged = merge_settings(given, os.environ, config)
    except SettingsError as error:
        fail(error, EXIT_USAGE)
    return Admin(f"http://{reachable(merged.get('admin', _DEFAULT_ADMIN))}")


def find_directory(slot_save_path: Path | None, config: Path | None) -> Path:
    """Return the directory of --slot-save-path, the environment or the file; exits without one."""
    try:
        merged = merge_settings({}, os.environ, config)
    except SettingsError as error:
        fail(error, EXIT_USAGE)
    path = slot_save_path or merged.get("slot_save_path")
    if path is None:
        fail("give --slot-save-path, the directory of the store", EXIT_USAGE)
    return Path(path).expanduser()


@contextmanager
def directory_of(
    path: Path, *, may_be_new: bool = False, mends_index: bool = False
) -> Iterator[StoreDirectory]:
    """Yield the store of a directory; exits with a plain word if it, or the work on it, fails."""
    with ExitStack() as opened:
        try:
            directory = path.expanduser()
            store = opened.enter_context(
                open_offline(directory, may_be_new=may_be_new, mends_index=mends_index)
            )
        except StoreLocked:
            fail(
                f"a proxy uses {path}: stop it first, or leave --slot-save-path out where the command can "
                "ask it (--admin)",
                EXIT_UNAVAILABLE,
            )
        except IndexDamaged as damage:
            fail(damage, EXIT_FAILED)
        except (StoreFault, OSError) as fault:
            fail(fault, EXIT_UNAVAILABLE)
        try:
            yield store
        except (StoreFault, OSError) as fault:
            fail(fault, EXIT_FAILED)


def directory_option(command: Command) -> Command:
    return click.option(
        "--slot-save-path", type=click.Path(path_type=Path), help="Directory of the store."
    )(command)


def admin_option(command: Command) -> Command:
    return click.option(
        "--admin",
        metavar="URL",
        help=f"Admin listener of the running proxy. [http://{_DEFAULT_ADMIN}]",
    )(command)
