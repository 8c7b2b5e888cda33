"""Whether LMDB can work on an index file: LMDB believes every byte, and a damaged page ends the process.

Owns: the layout of LMDB's pages (mdb.c of LMDB 0.9, 64-bit) as far as a check needs it, and the checksum
that lies beside the file between a close and the next write. Nothing here maps the file.
"""

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

_PAGE = struct.Struct("=QHHHH")
"""Number, key size (of pages of values only), flags, and the free space between lower and upper."""
_META = struct.Struct("=II16x")
_TREE = struct.Struct("=IHHQQQQQ")
_META_END = struct.Struct("=QQ")
_NODE = struct.Struct("=HHHH")
_U64 = struct.Struct("=Q")
_U32 = struct.Struct("=I")
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE, _DIRTY, _VALUES, _INSIDE = 1, 2, 4, 8, 0x10, 0x20, 0x40
_IS_BIG, _IS_TREE, _HAS_DUPLICATES = 1, 2, 4
_INTEGER_KEYS, _DUPLICATES, _FIXED_DUPLICATES = 0x08, 0x04, 0x10
_NO_PAGE = (1 << 64) - 1
_MAX_DEPTH = 32
_VALUE_BYTES = 8
"""Of the only duplicates that an index has: the ids of checkpoints."""
_READ_BYTES = 4 << 20


class _Flaw(Exception):
    """The file is not what LMDB writes; the message says where."""


class _OtherVersion(Exception):
    """The pages have another layout than the one known here; LMDB itself knows whether it reads them."""


def flaw_of(path: Path) -> str:
    """Return why LMDB cannot work on the file *path*, nothing if it can; raises OSError.

    A file that was sealed must have its checksum, and of every other one all pages that lead anywhere are
    looked at. Not for a file that is being written.
    """
    try:
        with path.open("rb") as file:
            return _flaw_of(file.fileno(), path)
    except FileNotFoundError:
        return ""


def _flaw_of(descriptor: int, path: Path) -> str:
    try:
        size_bytes = os.fstat(descriptor).st_size
        if not size_bytes:
            return ""  # LMDB makes a new one of it
        pages = _Pages(descriptor, size_bytes)
        sealed = _read_seal(path)
        if sealed is None or sealed[0] < pages.transaction:
            pages.check()
        elif sealed[0] > pages.transaction:
            return "it is older than when it was closed"
        elif sealed[1] != _digest(descriptor):
            return "its content is not what was written"
    except _OtherVersion:
        return ""
    except (_Flaw, struct.error) as flaw:
        return str(flaw)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return ""


def seal(path: Path) -> None:
    """Put a checksum beside a file that was closed; raises OSError."""
    with path.open("rb") as file, suppress(_Flaw, _OtherVersion, struct.error):
        pages = _Pages(file.fileno(), os.fstat(file.fileno()).st_size)
        new = _seal_of(path).with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(f"{pages.transaction} {_digest(file.fileno())}\n")
        new.replace(_seal_of(path))


def unseal(path: Path) -> None:
    """Take the checksum away: the file is about to be written. Raises OSError."""
    _seal_of(path).unlink(missing_ok=True)


def is_sealed(path: Path) -> bool:
    return _seal_of(path).exists()


def _seal_of(path: Path) -> Path:
    return path.with_suffix(".xxh3")


def _read_seal(path: Path) -> tuple[int, str] | None:
    try:
        transaction, digest = _seal_of(path).read_text().split()
        return int(transaction), digest
    except (OSError, ValueError):
        return None


def _digest(descriptor: int) -> str:
    digest, offset = xxhash.xxh3_128(), 0
    while chunk := os.pread(descriptor, _READ_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Tree:
    """What LMDB keeps of a database (MDB_db), in its order."""

    value_bytes: int
    flags: int
    depth: int
    n_branches: int
    n_leaves: int
    n_overflows: int
    n_entries: int
    root: int


@dataclass(slots=True)
class _Counted:
    n_branches: int = 0
    n_leaves: int = 0
    n_overflows: int = 0
    n_entries: int = 0


class _Pages:
    """The pages of one file; `transaction` is the number of the last one that was committed."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self._size_bytes = size_bytes
        self._page_bytes = 512
        (self._page_bytes,) = _U32.unpack_from(self._read(0), _PAGE.size + _META.size)
        if self._page_bytes.bit_count() != 1 or not 512 <= self._page_bytes <= 0x8000:
            raise _Flaw(f"a page has {self._page_bytes} bytes")
        metas = (self._read_meta(number) for number in (0, 1))
        self.transaction, self._last, self._free, self._main = max(metas, key=lambda meta: meta[0])
        self._seen = bytearray(size_bytes // self._page_bytes)

    def _read_meta(self, number: int) -> tuple[int, int, _Tree, _Tree]:
        page = self._read(number)
        magic, version = _META.unpack_from(page, _PAGE.size)
        if magic != _MAGIC or not _PAGE.unpack_from(page)[2] & _META_PAGE:
            raise _Flaw(f"page {number} does not say what it is")
        if version != _DATA_VERSION:
            raise _OtherVersion
        offset = _PAGE.size + _META.size
        free, main = (_Tree(*_TREE.unpack_from(page, offset + i * _TREE.size)) for i in (0, 1))
        last, transaction = _META_END.unpack_from(page, offset + 2 * _TREE.size)
        return transaction, last, free, main

    def _read(self, number: int) -> bytes:
        page = os.pread(self._descriptor, self._page_bytes, number * self._page_bytes)
        if len(page) < self._page_bytes:
            raise _Flaw(f"it ends before page {number}")
        return page

    def _take(self, number: int, n_pages: int = 1, *, must_exist: bool = True) -> None:
        """Note that pages are in use, or free: each is one of both, once."""
        end = number + n_pages
        if number < 2 or end > self._last + 1:
            raise _Flaw(f"page {number} cannot be")
        if end > len(self._seen):
            if must_exist:
                raise _Flaw(f"it ends before page {end - 1}")
            return  # given back before it was ever written
        if any(self._seen[number:end]):
            raise _Flaw(f"page {number} is used twice")
        self._seen[number:end] = b"\1" * n_pages

    def check(self) -> None:
        """Raise _Flaw if LMDB could fail at what the last transaction left, at reading or at writing."""
        # LMDB maps as many pages as it believes to have; the last ones may never have been written.
        if not 1 <= self._last <= 2 * len(self._seen) + 1024:
            raise _Flaw("a meta page says what cannot be")
        if self._free.flags != _INTEGER_KEYS or self._main.flags:
            raise _Flaw("a meta page says what cannot be")
        self._check_tree(self._main)
        self._check_tree(self._free)

    def _check_tree(self, tree: _Tree) -> None:
        found = _Counted()
        if (tree.root == _NO_PAGE) != (tree.depth == 0) or tree.depth > _MAX_DEPTH:
            raise _Flaw("a tree has no root")
        pending = [] if tree.root == _NO_PAGE else [(tree.root, 1)]
        while pending:
            number, depth = pending.pop()
            self._take(number)
            page = self._read(number)
            own_number, value_bytes, flags, lower, upper = _PAGE.unpack_from(page)
            if own_number != number or not _PAGE.size <= lower <= upper <= len(page) or lower % 2:
                raise _Flaw(f"page {number} is not that page")
            n_keys = (lower - _PAGE.size) // 2
            if flags == _BRANCH and depth < tree.depth and n_keys > 1:
                found.n_branches += 1
                pending += [(child, depth + 1) for child in self._children(page, n_keys, upper)]
                continue
            if depth != tree.depth or not n_keys:
                raise _Flaw(f"page {number} is not where it belongs")
            found.n_leaves += 1
            if flags == _LEAF | _VALUES and tree.flags == _FIXED_DUPLICATES:
                _check_values(n_keys, value_bytes, upper - lower, len(page))
                found.n_entries += n_keys
            elif flags == _LEAF and tree.flags != _FIXED_DUPLICATES:
                self._check_leaf(tree, page, n_keys, upper, found)
            else:
                raise _Flaw(f"page {number} is of another kind")
        said = (tree.n_branches, tree.n_leaves, tree.n_overflows, tree.n_entries)
        if said != (found.n_branches, found.n_leaves, found.n_overflows, found.n_entries):
            raise _Flaw("a tree has not as many entries as it says")

    def _children(self, page: bytes, n_keys: int, upper: int) -> list[int]:
        children, used = [], 0
        for offset in _offsets(page, n_keys, upper):
            low, middle, high, key_bytes = _NODE.unpack_from(page, offset)
            children.append(low | middle << 16 | high << 32)
            used += (_NODE.size + key_bytes + 1) & ~1
        _require_full(page, upper, used)
        return children

    def _check_leaf(
        self, tree: _Tree, page: bytes, n_keys: int, upper: int, found: _Counted
    ) -> None:
        used, page_bytes, plain_entries = 0, len(page), 0
        for offset in _offsets(page, n_keys, upper):
            low, high, flags, key_bytes = _NODE.unpack_from(page, offset)
            n_bytes = low | high << 16
            begin = offset + _NODE.size + key_bytes
            end = begin + (8 if flags & _IS_BIG else n_bytes)
            if end > page_bytes:
                raise _Flaw("an entry is outside its page")
            used += (end - offset + 1) & ~1
            if not flags and tree is not self._free:
                plain_entries += 1
                continue
            self._check_entry(tree, flags, page[begin:end], n_bytes, found)
        found.n_entries += plain_entries
        _require_full(page, upper, used)

    def _check_entry(
        self, tree: _Tree, flags: int, data: bytes, n_bytes: int, found: _Counted
    ) -> None:
        """Look at an entry that leads to other pages, or has several values."""
        if flags == _IS_BIG and not tree.flags & _DUPLICATES:
            (number,) = _U64.unpack(data)
            found.n_entries += 1
            n_pages = self._check_overflow(number, n_bytes)
            found.n_overflows += n_pages
            if tree is self._free:
                bytes_read = n_pages * self._page_bytes
                offset = number * self._page_bytes
                chain = os.pread(self._descriptor, bytes_read, offset)
                self._check_free(chain[_PAGE.size : _PAGE.size + n_bytes])
        elif tree is self._free and not flags:
            found.n_entries += 1
            self._check_free(data)
        elif flags == _IS_TREE and tree is self._main:
            found.n_entries += 1
            named = _Tree(*_TREE.unpack(data))
            if named.flags not in (0, _DUPLICATES | _FIXED_DUPLICATES):
                raise _Flaw("a database is of another kind")
            self._check_tree(named)
        elif flags == _IS_TREE | _HAS_DUPLICATES and tree.flags & _DUPLICATES:
            duplicates = _Tree(*_TREE.unpack(data))
            if (duplicates.flags, duplicates.value_bytes) != (_FIXED_DUPLICATES, _VALUE_BYTES):
                raise _Flaw("values are of another kind")
            self._check_tree(duplicates)
            found.n_entries += duplicates.n_entries
        elif flags == _HAS_DUPLICATES and tree.flags & _DUPLICATES:
            _, value_bytes, kind, lower, upper = _PAGE.unpack_from(data)
            n_values = (lower - _PAGE.size) // 2
            if kind & ~_DIRTY != _LEAF | _VALUES | _INSIDE or lower % 2 or n_values < 1:
                raise _Flaw("values are of another kind")
            _check_values(n_values, value_bytes, upper - lower, n_bytes)
            found.n_entries += n_values
        else:
            raise _Flaw("an entry is of another kind")

    def _check_overflow(self, number: int, n_bytes: int) -> int:
        self._take(number)
        own_number, _, flags = _PAGE.unpack_from(page := self._read(number))[:3]
        n_pages = int(_U32.unpack_from(page, 12)[0])
        if (own_number, flags) != (number, _OVERFLOW):
            raise _Flaw(f"page {number} is not that page")
        if n_pages * self._page_bytes < _PAGE.size + n_bytes:
            raise _Flaw(f"page {number} says what cannot be")
        if n_pages > 1:
            self._take(number + 1, n_pages - 1)
        return n_pages

    def _check_free(self, data: bytes) -> None:
        (n_pages,) = _U64.unpack_from(data)
        if 8 * (n_pages + 1) > len(data):
            raise _Flaw("a list of free pages is cut")
        for number in struct.unpack_from(f"={n_pages}Q", data, 8):
            self._take(number, must_exist=False)


def _offsets(page: bytes, n_keys: int, upper: int) -> tuple[int, ...]:
    """Return where the entries of a page begin."""
    offsets = struct.unpack_from(f"={n_keys}H", page, _PAGE.size)
    if min(offsets) < upper or len(set(offsets)) < n_keys:
        raise _Flaw("entries lie over each other")
    return offsets


def _require_full(page: bytes, upper: int, used: int) -> None:
    if used != len(page) - upper:
        raise _Flaw("entries lie over each other")


def _check_values(n_values: int, value_bytes: int, free_bytes: int, size_bytes: int) -> None:
    """Look at a page of values without keys."""
    is_full = _PAGE.size + n_values * _VALUE_BYTES + free_bytes == size_bytes
    if value_bytes != _VALUE_BYTES or not is_full:
        raise _Flaw("values lie over each other")
