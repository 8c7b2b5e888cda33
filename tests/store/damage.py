"""Damaged copies of an index: cut, with flipped bits in each kind of page, with bytes that are no UTF-8."""

import random
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from proxy.store.index import Index

PAGE = 4096
KINDS = {1: "branch", 2: "leaf", 4: "overflow", 8: "meta", 0x22: "leaf"}


def kinds_of_pages(data: bytes) -> dict[int, str]:
    """Return what each page says it is; a page that is no longer used may say anything, or nothing."""
    flags = {n: struct.unpack_from("=H", data, n * PAGE + 10)[0] for n in range(len(data) // PAGE)}
    return {number: KINDS.get(flag, "content") for number, flag in flags.items()}


def truncated(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield an index cut at each page."""
    for number in range(len(data) // PAGE):
        yield f"cut before page {number}", data[: number * PAGE]


def flipped(data: bytes, n_times: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield an index with one flipped bit, by turns in each kind of page, every other time in its head."""
    chance = random.Random(seed)
    kinds = kinds_of_pages(data)
    for turn in range(n_times):
        kind = sorted(set(kinds.values()))[turn % len(set(kinds.values()))]
        number = chance.choice([n for n, k in kinds.items() if k == kind])
        within = chance.randrange(160 if turn % 2 else PAGE)
        offset = number * PAGE + within
        changed = bytearray(data)
        changed[offset] ^= 1 << chance.randrange(8)
        yield f"a bit of {kind} page {number}, byte {within}", bytes(changed)


def scribbled(data: bytes, n_times: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield an index in which bytes that are no UTF-8 lie over others."""
    chance = random.Random(seed)
    for _ in range(n_times):
        offset = chance.randrange(2 * PAGE, len(data) - 32)
        changed = bytearray(data)
        changed[offset : offset + 32] = b"\xff\xfe\xc0" * 11
        yield f"bytes at {offset}", bytes(changed[: len(data)])


def put_unreadable(directory: Path) -> None:
    """Enter a value whose name is no UTF-8, one whose content is not, and a record that is none."""
    index = Index(directory / "index")
    with index._writing() as transaction:
        transaction.put(b"namespaces \xff\xfe", b"\x01", db=index._values)
        transaction.put(b"tenants \xc0", b"\xa3\xff\xfe\xfd", db=index._values)
        transaction.put(b"rates of a model", b"\xa3\xff\xfe\xfd", db=index._values)
    index.close()


def put_bad_record(directory: Path) -> None:
    index = Index(directory / "index")
    with index._writing() as transaction:
        (key, _) = next(iter(transaction.cursor(index._checkpoints)))
        transaction.put(key, b"\x81\xa2\xff\xfe\x01", db=index._checkpoints)
    index.close()


def put_bad_summary(directory: Path, offset: int) -> None:
    """Change a byte of the first summary: what is needed of all records at once."""
    index = Index(directory / "index")
    with index._writing() as transaction:
        (key, summary) = next(iter(transaction.cursor(index._summaries)))
        changed = bytearray(summary)
        changed[offset] ^= 0x40
        transaction.put(key, bytes(changed), db=index._summaries)
    index.close()


def leave_unsealed(directory: Path) -> None:
    """Make it look as after kill -9: without the checksum of a close."""
    with suppress(FileNotFoundError):
        (directory / "index" / "data.xxh3").unlink()
