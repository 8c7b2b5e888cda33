"""What stabilizers remember of earlier requests and answers, within a number of bytes.

Owns: what is forgotten first. Looking something up changes nothing; learning does, and what was
learned longest ago goes first. Values are kept encoded, so that nobody can change them afterwards.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

_OVERHEAD_BYTES = 200
"""Two Python objects, and an entry in a dictionary."""
_MAX_VARIANTS = 8


@dataclass(frozen=True, slots=True)
class Lesson:
    """One thing to remember: it replaces what is known under its key."""

    key: str
    value: Any


def key_of(kind: str, *parts: str) -> str:
    """Return a key for the memory; parts are told apart whatever they hold."""
    return kind + "/" + xxhash.xxh3_128(msgspec.json.encode(parts)).hexdigest()


class Memory:
    """A bounded map of what was learned."""

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._values: OrderedDict[str, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> Any:
        """Return what is known under a key, or None."""
        encoded = self._values.get(key)
        return None if encoded is None else msgspec.json.decode(encoded)

    def learn(self, lessons: Iterable[Lesson]) -> None:
        """Remember these things, and that they were needed just now."""
        for lesson in lessons:
            self._put(lesson.key, msgspec.json.encode(lesson.value))

    def remember_call(
        self, call_id: str, name: str, raw_arguments: str, *, tenant: str = ""
    ) -> None:
        """Remember a tool call as the model made it; *raw_arguments* is the JSON text of its arguments.

        Some templates count their calls from zero in every conversation, so that one id can stand for
        several calls; the last few are kept.
        """
        calls: list[list[str]] = self.get(call_key(call_id, tenant)) or []
        call = [name, raw_arguments]
        others = [known for known in calls if known != call]
        self.learn([Lesson(call_key(call_id, tenant), [*others[1 - _MAX_VARIANTS :], call])])

    def calls(self, call_id: str, *, tenant: str = "") -> list[tuple[str, str]]:
        """Return name and raw arguments of the calls that were made under an id."""
        known: list[list[str]] = self.get(call_key(call_id, tenant)) or []
        return [(name, raw_arguments) for name, raw_arguments in known]

    def to_bytes(self) -> bytes:
        """Return everything, to be kept over a restart of the proxy. It holds prompt text."""
        return msgspec.msgpack.encode(list(self._values.items()))

    @classmethod
    def from_bytes(cls, data: bytes, max_bytes: int = 32 << 20) -> "Memory":
        """Return the memory that `to_bytes` wrote; raises msgspec.DecodeError."""
        memory = cls(max_bytes)
        for key, encoded in msgspec.msgpack.decode(data, type=list[tuple[str, bytes]]):
            memory._put(key, encoded)
        return memory

    def _put(self, key: str, encoded: bytes) -> None:
        self._forget(key)
        size_bytes = _size_bytes(key, encoded)
        if size_bytes > self._max_bytes:
            return
        self._values[key] = encoded
        self.size_bytes += size_bytes
        while self.size_bytes > self._max_bytes:
            self._forget(next(iter(self._values)))

    def _forget(self, key: str) -> None:
        encoded = self._values.pop(key, None)
        if encoded is not None:
            self.size_bytes -= _size_bytes(key, encoded)


def call_key(call_id: str, tenant: str) -> str:
    return key_of("call", tenant, call_id)


def _size_bytes(key: str, encoded: bytes) -> int:
    return len(key) + len(encoded) + _OVERHEAD_BYTES
