"""What a power cut leaves of a directory: what was not synced may be there, in part or not at all.

A recorder notes each change of a directory, and each sync. A change of a file is noted block by block, a
change of a name as one step; fsync of a file makes its content durable, fsync of a folder its names. From
its first notes follow all directories that a power cut at that moment may leave: what is durable is there,
of the rest any part.

The writes of LMDB cannot be seen from Python. As `strace` shows, a commit writes its pages, syncs the file,
and writes 120 bytes of one of the first two pages, through a descriptor that syncs; what a commit has
changed is noted in this order.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Literal
from unittest.mock import patch

from proxy.errors import IndexDamaged
from proxy.store import index

BLOCK_BYTES = 4096
_N_META_PAGES = 2
Cut = Literal["nothing", "names", "any part", "everything"]
CUTS: tuple[Cut, ...] = ("nothing", "names", "any part", "everything")
"""What is left of all that was not synced; with *names* the files are there, but empty."""


@dataclass(frozen=True)
class Written:
    """A file has this content now; whether it is durable another note says."""

    file: int
    content: bytes


@dataclass(frozen=True)
class Named:
    """Paths name other files now, or none, in one step; folders have numbers below 0."""

    files: Mapping[str, int | None]


@dataclass(frozen=True)
class Synced:
    """A file's content is durable, or the names in a folder."""

    file: int | None = None
    folder: str | None = None


Note = Written | Named | Synced


@dataclass
class Recorder:
    """Notes what happens in one directory while it is `recording`."""

    root: Path
    notes: list[Note] = field(default_factory=list)
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    _held: list[int] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _contents: dict[int, bytes] = field(default_factory=dict)
    _stamps: dict[int, tuple[int, int]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def recording(self) -> Iterator[None]:
        changing = ("rename", "replace", "unlink", "remove", "mkdir", "rmdir")
        patches: list[AbstractContextManager[Any]] = [
            patch.object(os, name, self._between(getattr(os, name))) for name in changing
        ]
        patches += [
            patch.object(os, "fsync", self._syncing(os.fsync)),
            patch.object(index.Index, "_writing", self._committing(index.Index._writing)),
            patch.object(index, "_copy_apart", self._copying(copy_forked)),
        ]
        try:
            for each in patches:
                each.__enter__()
            yield
            self.look()
        finally:
            for each in patches:
                each.__exit__(None, None, None)
            for descriptor in self._held:
                os.close(descriptor)
            self._held.clear()

    def look(self) -> None:
        """Note what has changed since the last look."""
        with self._lock:
            old, new = self._names, dict(self._walk(self.root, ""))
            changed = sorted(p for p in {*old, *new} if old.get(p) != new.get(p))
            moved = {old[p] for p in changed if p in old} & {new[p] for p in changed if p in new}
            step = {p: new.get(p) for p in changed if {old.get(p), new.get(p)} & moved}
            steps = [{p: new.get(p)} for p in changed if p not in step]
            self.notes += [Named(each) for each in (*steps, step) if each]
            self._names, names = new, new
            for path, file in names.items():
                if file in self._contents and (content := self._changed(path, file)) is not None:
                    self._contents[file] = content
                    self.notes.append(Written(file, content))

    def _walk(self, folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == "lock.mdb":
                    continue  # a memory map of this boot's processes
                path, is_folder = prefix + entry.name, entry.is_dir(follow_symlinks=False)
                status = entry.stat(follow_symlinks=False)
                key = (status.st_dev, status.st_ino)
                if key not in self._numbers:
                    # Held open, so that no other file gets its number.
                    self._held.append(os.open(entry.path, os.O_RDONLY))
                    number = 1 + len(self._numbers)
                    self._numbers[key] = -number if is_folder else number
                    if not is_folder:
                        self._contents[number] = b""
                yield path, self._numbers[key]
                if is_folder:
                    yield from self._walk(Path(entry.path), path + "/")

    def _changed(self, path: str, file: int) -> bytes | None:
        status = (self.root / path).stat()
        stamp = status.st_size, status.st_mtime_ns
        if self._stamps.get(file) == stamp:
            return None
        self._stamps[file] = stamp
        content = (self.root / path).read_bytes()
        return content if content != self._contents[file] else None

    def _between(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **named: Any) -> Any:
            self.look()
            try:
                return step(*arguments, **named)
            finally:
                self.look()

        return stepped

    def _syncing(self, sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def synced(opened: Any) -> None:
            sync(opened)
            with self._lock:
                self.look()
                status = os.fstat(opened if isinstance(opened, int) else opened.fileno())
                number = self._numbers.get((status.st_dev, status.st_ino))
                if number is not None and not S_ISDIR(status.st_mode):
                    self.notes.append(Synced(file=number))
                elif S_ISDIR(status.st_mode):
                    folders = {f: p + "/" for p, f in self._names.items()}
                    self.notes.append(Synced(folder="" if number is None else folders[number]))

        return synced

    def _committing(self, writing: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def committed(this: index.Index) -> Iterator[Any]:
            with writing(this) as transaction:
                with self._lock:
                    self.look()
                yield transaction
            with self._lock:
                self._note_commit()

        return committed

    def _note_commit(self) -> None:
        file = self._names.get("index/data.mdb")
        if file is None:
            return
        old, n_meta = self._contents[file], _N_META_PAGES * BLOCK_BYTES
        self._stamps.pop(file, None)  # a map of the file is written without a new time
        content = self._changed("index/data.mdb", file)
        if content is not None:
            pages = (old[:n_meta] if len(old) >= n_meta else content[:n_meta]) + content[n_meta:]
            self.notes += [Written(file, pages), Synced(file), Written(file, content), Synced(file)]
            self._contents[file] = content

    def _copying(self, copy: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def copied(path: Path, target: Path) -> None:
            copy(path, target)
            with self._lock:
                self.look()
                file = self._names[str(target.relative_to(self.root))]
                self.notes.append(Synced(file))

        return copied


def copy_forked(path: Path, copy: Path) -> None:
    """Copy an index as the index does, in a fork: that takes 5 ms instead of 150."""
    copy.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        status = 1
        try:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                index.copy_entries(str(path / "data.mdb"), str(copy))
            status = 0
        except SystemExit as error:
            status = int(str(error.code))
        finally:
            os._exit(status)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise IndexDamaged(path, f"copying it ends with status {status}")


def leave(notes: list[Note], target: Path, cut: Cut, chance: random.Random) -> None:
    """Make the directory that a power cut after these notes may leave."""
    durable: dict[int, bytes] = {}
    contents: dict[int, bytes] = {}
    for note in notes:
        if isinstance(note, Written):
            contents[note.file] = note.content
        elif isinstance(note, Synced) and note.file is not None:
            durable[note.file] = contents.get(note.file, b"")
    target.mkdir(mode=0o700, parents=True)
    for path, file in sorted(_names_left(notes, cut, chance).items()):
        place = target / path
        if file is None or not place.parent.is_dir():
            continue
        if file < 0:
            place.mkdir(mode=0o700)
            continue
        old, new = durable.get(file, b""), contents.get(file, b"")
        left = {"nothing": old, "names": old, "everything": new}.get(cut)
        place.write_bytes(_any_part(old, new, chance) if left is None else left)
        place.chmod(0o600)


def _names_left(notes: list[Note], cut: Cut, chance: random.Random) -> dict[str, int | None]:
    names: dict[str, int | None] = {}
    pending: list[Mapping[str, int | None]] = []
    for note in notes:
        if isinstance(note, Named):
            pending.append(note.files)
        elif isinstance(note, Synced) and note.folder is not None:
            pending = _sync_names(names, pending, note.folder)
    for step in pending:
        if cut in ("names", "everything") or (cut == "any part" and chance.random() < 0.5):
            names |= step
    return names


def _sync_names(
    names: dict[str, int | None], pending: list[Mapping[str, int | None]], folder: str
) -> list[Mapping[str, int | None]]:
    """Make the names in a folder durable; return what is still pending."""
    left = []
    for step in pending:
        if any(path.rpartition("/")[0] == folder.rstrip("/") for path in step):
            names |= step
        else:
            left.append(step)
    return left


def _any_part(old: bytes, new: bytes, chance: random.Random) -> bytes:
    """Return a content of which each block is the old or the new one, and the end may not be there yet."""
    size = chance.choice((len(old), len(new), chance.randint(*sorted((len(old), len(new))))))
    blocks = []
    for start in range(0, size, BLOCK_BYTES):
        block = chance.choice((old, new))[start : start + BLOCK_BYTES]
        blocks.append(block.ljust(min(BLOCK_BYTES, size - start), b"\0")[: size - start])
    return b"".join(blocks)
