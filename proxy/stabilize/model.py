"""What stabilizers are called, take, give and remember."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import xxhash

# The names of the stabilizers: what settings, metrics and logs call them, and which are on by default.
#
# Each name comes with the reason for the stabilizer, in one line. Imports nothing of the project, so that
# the settings can check names.


class Name(StrEnum):
    """The stabilizers; `safe` are those that do not change what the model is told in substance."""

    DROP_BILLING_HEADER = "drop_billing_header"
    DROP_CACHE_CONTROL = "drop_cache_control"
    TOOL_REFERENCE_TEXT = "tool_reference_text"
    TOOL_RESULTS_FIRST = "tool_results_first"
    HOIST_SYSTEM_MESSAGE = "hoist_system_message"
    FOLD_SYSTEM_MESSAGES = "fold_system_messages"
    RESTORE_TOOL_ARGUMENTS = "restore_tool_arguments"
    KEEP_TOOL_ORDER = "keep_tool_order"
    GLUE_TEXT_TO_RESULTS = "glue_text_to_results"
    STICKY_TOOL_TEXT = "sticky_tool_text"
    STICKY_DATE = "sticky_date"
    STICKY_REMINDERS = "sticky_reminders"
    INLINE_REASONING = "inline_reasoning"


REASONS = {
    Name.DROP_BILLING_HEADER: (
        "Its digits change with every session, some with every request, at the top of the prompt."
    ),
    Name.DROP_CACHE_CONTROL: (
        "Marks for another server's cache; they move with every request and mean nothing here."
    ),
    Name.TOOL_REFERENCE_TEXT: (
        "llama-server drops tool_reference blocks, so the model is never told what was loaded."
    ),
    Name.TOOL_RESULTS_FIRST: (
        "llama-server renders text beside tool results before them; the client wrote it after them."
    ),
    Name.HOIST_SYSTEM_MESSAGE: (
        "A long constant system message behind the first user text cannot be shared by sessions."
    ),
    Name.FOLD_SYSTEM_MESSAGES: (
        "Many templates refuse system messages in the middle of a conversation."
    ),
    Name.RESTORE_TOOL_ARGUMENTS: (
        "Clients send tool calls back with other keys, order or numbers than the model wrote."
    ),
    Name.KEEP_TOOL_ORDER: (
        "A tool loaded later is inserted in the middle of the list; at the end it costs nothing."
    ),
    Name.GLUE_TEXT_TO_RESULTS: (
        "Text beside tool results begins a new turn, for which many templates drop old reasoning."
    ),
    Name.STICKY_TOOL_TEXT: (
        "Modes such as plan and build change a tool's description in mid-conversation."
    ),
    Name.STICKY_DATE: (
        "A date or time in the system prompt changes, and the whole prompt with it."
    ),
    Name.STICKY_REMINDERS: (
        "Reminders move from the old user message to the newest, which changes the old one."
    ),
    Name.INLINE_REASONING: (
        "Many templates drop old reasoning at each new user message, and with it the prefix."
    ),
}

SAFE = frozenset(
    {
        Name.DROP_BILLING_HEADER,
        Name.DROP_CACHE_CONTROL,
        Name.TOOL_REFERENCE_TEXT,
        Name.TOOL_RESULTS_FIRST,
        Name.HOIST_SYSTEM_MESSAGE,
        Name.FOLD_SYSTEM_MESSAGES,
        Name.RESTORE_TOOL_ARGUMENTS,
        Name.KEEP_TOOL_ORDER,
    }
)

_WORDS = "|".join(("safe", "all", "none", *Name))
SWITCHES_PATTERN = rf"^\s*({_WORDS})(\s*,\s*-?({_WORDS}))*\s*$"
"""What `parse_switches` reads."""


def parse_switches(text: str) -> frozenset[Name]:
    """Return which stabilizers are on: words separated by commas, read from left to right.

    `safe`, `all` and `none` stand for sets; a minus before a word takes it out again.
    """
    sets = {"safe": SAFE, "all": frozenset(Name), "none": frozenset[Name]()}
    switched_on = frozenset[Name]()
    for word in text.split(","):
        bare = word.strip()
        meant = bare.removeprefix("-")
        names = sets[meant] if meant in sets else frozenset({Name(meant)})
        switched_on = switched_on - names if bare.startswith("-") else switched_on | names
    return switched_on


# What stabilizers remember of earlier requests and answers, within a number of bytes.
#
# Owns: what is forgotten first. Looking something up changes nothing; learning does, and what was learned
# longest ago goes first. Values are kept encoded, so that nobody can change them afterwards.


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


# What stabilizers take and give.
#
# A body is what a JSON object was decoded to, with its keys in the order received. Stabilizers never
# change one in place: they return a new one that shares what is untouched, or none at all.


Json = dict[str, Any]


class Form(StrEnum):
    """The API whose form a body has."""

    ANTHROPIC = "anthropic"
    CHAT = "chat"
    RESPONSES = "responses"


class UnknownShape(Exception):
    """Part of a body is not as the API describes it; the message says where, never what it holds."""


@dataclass(frozen=True, slots=True)
class Marks:
    """How a template writes the reasoning of an answer: what stands before and behind it.

    Templates that set tool calls off by a line break only behind text need another end before calls.
    """

    begin: str
    end: str
    end_before_calls: str
    strips: bool = False
    """Whether the template strips white space around the reasoning."""
    writes_empty: bool = False
    """Whether both stand before an answer without reasoning, too, as long as its turn is running."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known about the server and the sender, beside the body."""

    accepts_late_system: bool | None = None
    """Whether the template renders system messages in mid-conversation; None if unknown."""
    reasoning_marks: Marks | None = None
    """Set where the template drops old reasoning and it may be kept as text."""
    session: str = ""
    """The client's own name for the session, if it sent one."""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Which earlier requests a request belongs with, as keys into the memory."""

    conversation: str
    header: str
    begins: bool
    """Whether this is the first request of its conversation: nothing has been answered in it."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One place that was changed; None stands for something that is not there."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A changed body and where it was changed."""

    body: Json
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the stabilizers that need earlier requests may look up."""

    memory: Memory
    identity: RequestIdentity
    tenant: str


@dataclass(frozen=True, slots=True)
class FromBody:
    """A stabilizer that looks at nothing but the request and the facts."""

    name: Name
    forms: frozenset[Form]
    rewrite: Callable[[Form, Json, RequestFacts], Rewrite | None]


@dataclass(frozen=True, slots=True)
class FromMemory:
    """A stabilizer that looks at earlier requests; `learn` says what later ones need of this one."""

    name: Name
    forms: frozenset[Form]
    rewrite: Callable[[Form, Json, Remembered], Rewrite | None]
    learn: Callable[[Form, Json, Remembered], list[Lesson]]


@dataclass(frozen=True, slots=True)
class Change:
    """One place that a stabilizer changed. Before and after may hold prompt text of any length."""

    stabilizer: Name
    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """A stabilizer that left the request alone because of what it met; holds no prompt text."""

    stabilizer: Name
    reason: str


@dataclass(frozen=True, slots=True)
class Stabilized:
    """A request as it should be sent; `body` is the very object given if nothing was changed.

    Give `lessons` to `Memory.learn` if the request is one that others will follow, once it is sent.
    """

    body: Json
    changes: tuple[Change, ...] = ()
    failures: tuple[Failure, ...] = ()
    lessons: tuple[Lesson, ...] = ()
