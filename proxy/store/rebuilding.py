"""The record beside each state, and the index made anew from states and records."""

import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import msgspec
import xxhash

from proxy.core.model import Checkpoint
from proxy.core.tokens import PrefixHash, TokenIds, hash_prefixes
from proxy.errors import IndexDamaged, StateFileMalformed
from proxy.llama.state_file import read_state_file
from proxy.store.files import StateFiles, is_state_name
from proxy.store.index import Index
from proxy.store.known_models import Owner, introduce, owners

# The small file beside each state: the checkpoint's record, and whose state it is.
#
# With it the index can be made anew from the states, in any directory; without it nobody knows which
# model and tenant a state belongs to. Its beginning is a checksum of the rest.


_DIGEST_BYTES = 16


class Sidecar(msgspec.Struct, frozen=True):
    """What lies beside a state; times and counts in the record are as old as the file."""

    checkpoint: Checkpoint
    owner: Owner | None


def write_sidecar(index: Index, files: StateFiles, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's record beside its state, durable with the directory; raises OSError."""
    _write(files, checkpoint, dict(owners(index)).get(checkpoint.namespace))


def write_missing_sidecars(
    index: Index, files: StateFiles, checkpoints: Iterable[Checkpoint]
) -> None:
    """Put records beside states that have none: older versions did not write them. Raises OSError."""
    there, known = set(files.names()), dict(owners(index))
    for checkpoint in checkpoints:
        name = checkpoint.file_name
        if name in there and files.sidecar_name(name) not in there:
            _write(files, checkpoint, known.get(checkpoint.namespace))


def _write(files: StateFiles, checkpoint: Checkpoint, owner: Owner | None) -> None:
    record = msgspec.msgpack.encode(Sidecar(checkpoint, owner))
    data = xxhash.xxh3_128_digest(record) + record
    files.write_whole(files.sidecar_name(checkpoint.file_name), data)


def read_sidecar(files: StateFiles, name: str) -> Sidecar | None:
    """Return what lies beside the state *name*, None if it is gone or damaged; raises OSError."""
    try:
        data = files.path(files.sidecar_name(name)).read_bytes()
        digest, record = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if digest != xxhash.xxh3_128_digest(record):
            return None
        sidecar = msgspec.msgpack.decode(record, type=Sidecar)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return sidecar if sidecar.checkpoint.file_name == name else None


# Makes an index anew from the states themselves: their tokens, and the records beside them.
#
# Only what was counted and measured is lost: when a checkpoint was last used, and how often; with an
# index that was put aside also rates and self-tests. What cannot be entered is told, and deleted at the
# end.


BATCH = 16
"""So many states are entered in one transaction; saves wait for one at most."""
_DAMAGED = "index.damaged-"

Entry = tuple[Checkpoint, TokenIds, Sequence[PrefixHash]]


class Lost(StrEnum):
    """Why a state cannot be entered again."""

    NO_RECORD = "the record beside a state is gone or damaged"
    NO_MODEL = "it is not known which model a state is of"
    NOT_AS_SAVED = "a state is not what its record says"
    UNREADABLE = "a state cannot be read"


@dataclass
class Rebuild:
    """A rebuild under way: what was wrong, what is still to be entered, what became of the rest."""

    reason: str
    pending: list[Checkpoint] = field(default_factory=list)
    n_entered: int = 0
    lost: dict[str, Lost] = field(default_factory=dict)
    """By file name."""

    @property
    def words(self) -> str:
        """What was wrong and what became of the states, for a log line."""
        counts = {kind: list(self.lost.values()).count(kind) for kind in Lost}
        told = [f"{n_states} ({kind})" for kind, n_states in counts.items() if n_states]
        lost = f"; lost: {', '.join(told)}" if told else "; no state is lost"
        return f"{self.reason}; {self.n_entered} entered again{lost}"


def open_or_renew(path: Path, files: StateFiles) -> Index:
    """Open the index in the directory *path*; a damaged one makes room for one that is to be rebuilt.

    Raises StoreFault if neither works.
    """
    try:
        index = Index(path)
    except IndexDamaged as damage:
        _put_aside(path)
        index = Index(path)
        index.begin_rebuild(damage.flaw)
    if flaw := index.inconsistency():
        write_missing_sidecars(index, files, index.all())
        index.begin_rebuild(flaw)
    return index


def _put_aside(path: Path) -> None:
    """Keep the newest damaged index for whoever wants to look at it."""
    earlier = list(path.parent.glob(_DAMAGED + "*"))
    path.rename(path.with_name(f"{_DAMAGED}{time.time_ns() // 1_000_000}"))
    for directory in earlier:
        shutil.rmtree(directory, ignore_errors=True)


def plan(index: Index, files: StateFiles, reason: str, names: Iterable[str]) -> Rebuild:
    """Read the records beside the states *names*, and enter their models and tenants.

    Whose tokens a slot holds can be wrong before all tenants are known, so nothing is served until then.
    """
    rebuild = Rebuild(reason)
    for name in names:
        try:
            sidecar = read_sidecar(files, name)
        except OSError:
            rebuild.lost[name] = Lost.UNREADABLE
            continue
        if sidecar is None:
            rebuild.lost[name] = Lost.NO_RECORD
        elif sidecar.owner is None:
            rebuild.lost[name] = Lost.NO_MODEL
        else:
            namespace = introduce(index, sidecar.owner)
            rebuild.pending.append(replace(sidecar.checkpoint, namespace=namespace))
    return rebuild


def enter_batch(index: Index, files: StateFiles, rebuild: Rebuild) -> list[Entry]:
    """Enter some of what is pending in one transaction; return what was entered."""
    batch, entries = rebuild.pending[-BATCH:], list[Entry]()
    for checkpoint in batch:
        found = _read(files, checkpoint)
        if isinstance(found, Lost):
            rebuild.lost[checkpoint.file_name] = found
        else:
            entries.append((checkpoint, found, hash_prefixes(checkpoint.namespace, found)))
    index.put_all(entries)
    rebuild.n_entered += len(entries)
    del rebuild.pending[-len(batch) :]
    return entries


def _read(files: StateFiles, checkpoint: Checkpoint) -> TokenIds | Lost:
    try:
        state = read_state_file(files.path(checkpoint.file_name))
    except StateFileMalformed:
        return Lost.NOT_AS_SAVED
    except OSError:
        return Lost.UNREADABLE
    is_same = (state.size_bytes, len(state.tokens)) == (checkpoint.size_bytes, checkpoint.n_tokens)
    return state.tokens if is_same else Lost.NOT_AS_SAVED


def finish(index: Index, files: StateFiles, rebuild: Rebuild) -> None:
    """Delete what could not be entered; while a state cannot be read it is tried again at each opening."""
    for name, why in rebuild.lost.items():
        if why is not Lost.UNREADABLE:
            with suppress(OSError):
                files.remove(name)
    if Lost.UNREADABLE not in rebuild.lost.values():
        index.end_rebuild()


def rebuild_at_once(index: Index, files: StateFiles) -> Rebuild | None:
    """Do a whole rebuild if one is due; raises StoreFault or OSError."""
    reason = index.rebuild_reason
    if reason is None:
        return None
    named = {checkpoint.file_name for checkpoint in index.all()}
    rebuild = plan(index, files, reason, states_without_entry(files, named))
    while rebuild.pending:
        enter_batch(index, files, rebuild)
    finish(index, files, rebuild)
    return rebuild


def states_without_entry(files: StateFiles, named: set[str]) -> list[str]:
    """Return the states that are not among the *named* ones."""
    return [name for name in files.names() if is_state_name(name) and name not in named]
