"""What stabilizers take and give.

A body is what a JSON object was decoded to, with its keys in the order received. Stabilizers never
change one in place: they return a new one that shares what is untouched, or none at all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from proxy.stabilize.memory import Lesson, Memory
from proxy.stabilize.names import Name

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
class Facts:
    """What is known about the server and the sender, beside the body."""

    accepts_late_system: bool | None = None
    """Whether the template renders system messages in mid-conversation; None if unknown."""
    reasoning_marks: Marks | None = None
    """Set where the template drops old reasoning and it may be kept as text."""
    session: str = ""
    """The client's own name for the session, if it sent one."""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
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
class Known:
    """What the stabilizers that need earlier requests may look up."""

    memory: Memory
    identity: Identity
    tenant: str


@dataclass(frozen=True, slots=True)
class FromBody:
    """A stabilizer that looks at nothing but the request and the facts."""

    name: Name
    forms: frozenset[Form]
    rewrite: Callable[[Form, Json, Facts], Rewrite | None]


@dataclass(frozen=True, slots=True)
class FromMemory:
    """A stabilizer that looks at earlier requests; `learn` says what later ones need of this one."""

    name: Name
    forms: frozenset[Form]
    rewrite: Callable[[Form, Json, Known], Rewrite | None]
    learn: Callable[[Form, Json, Known], list[Lesson]]


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
