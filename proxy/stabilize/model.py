"""The names of the stabilizers, the request that they work on, and their memory.

`Name` has the names of stabilizers in settings, metrics and logs. `Draft` is the request that stabilizers
rewrite. `Memory` keeps the values that stabilizers learned from earlier requests and answers.
"""

import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import xxhash
from cachetools import FIFOCache

from proxy.core.messages import ID, Route, list_of, n_leading_system, text_of, without_reminders
from proxy.errors import UnknownShape


class Name(StrEnum):
    """The stabilizers."""

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
    STICKY_SESSION = "sticky_session"
    STICKY_REMINDERS = "sticky_reminders"
    INLINE_REASONING = "inline_reasoning"


_OPT_IN = (Name.GLUE_TEXT_TO_RESULTS, Name.INLINE_REASONING)
SAFE = frozenset(n for n in Name if n not in _OPT_IN and not n.startswith("sticky_"))
"""The stabilizers that do not change the content that the model is given."""

WORDS = ("safe", "all", "none", *Name)
_WORD = "|".join(WORDS)
SWITCHES = rf"\s*({_WORD})(\s*,\s*-?({_WORD}))*\s*"
"""The texts that `parse_switches` accepts, as a regular expression."""


def unknown_words(text: str) -> list[str]:
    """Return the words of a text that stand for no stabilizers."""
    words = (word.strip().removeprefix("-") for word in text.split(","))
    return [word for word in words if word and word not in WORDS]


def parse_switches(text: str) -> frozenset[Name]:
    """Return the stabilizers that are on, from words separated by commas, read from left to right.

    `safe`, `all` and `none` stand for sets. A minus before a word switches its stabilizers off again.
    """
    sets = {"safe": SAFE, "all": frozenset(Name), "none": frozenset[Name]()}
    switched_on = frozenset[Name]()
    for word in text.split(","):
        bare = word.strip()
        meant = bare.removeprefix("-")
        names = sets[meant] if meant in sets else frozenset({Name(meant)})
        switched_on = switched_on - names if bare.startswith("-") else switched_on | names
    return switched_on


_OVERHEAD_BYTES = 250
"""The key, two Python objects, and an entry in two dictionaries."""
MAX_VARIANTS = 8
_N_SYSTEM_PROMPTS = 64
_MOST_CHARS = 100_000
"""Only so much of the first user message identifies a conversation."""


Call = tuple[str, str]
"""A tool call: its name, and the JSON text of its arguments."""


def key_of(kind: str, *parts: str) -> str:
    """Return a key for the memory; parts with other boundaries give another key."""
    return kind + "/" + xxhash.xxh3_128(msgspec.json.encode(parts)).hexdigest()


def call_key(call_id: str, tenant: str) -> str:
    return key_of("call", tenant, call_id)


class Memory:
    """A map of learned values, within a number of bytes.

    A lookup changes nothing. The value learned longest ago is forgotten first. Values are kept encoded, so
    that they cannot be changed afterwards.
    """

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        self._values = FIFOCache[str, bytes](max_bytes, lambda value: len(value) + _OVERHEAD_BYTES)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> Any:
        """Return the value of a key, or None."""
        encoded = self._values.get(key)
        return None if encoded is None else msgspec.json.decode(encoded)

    def learn(self, lessons: Mapping[str, Any]) -> None:
        """Remember values by their keys, in place of earlier values."""
        for key, value in lessons.items():
            self._put(key, msgspec.json.encode(value))

    def remember_call(self, call_id: str, name: str, raw_arguments: str, tenant: str = "") -> None:
        """Remember a tool call as the model made it; *raw_arguments* is the JSON text of its arguments.

        Some templates number their calls from zero in every conversation, so that several calls can have
        the same id; the last few are kept.
        """
        call = (name, raw_arguments)
        others = [known for known in self.calls(call_id, tenant) if known != call]
        self.learn({call_key(call_id, tenant): [*others[1 - MAX_VARIANTS :], call]})

    def calls(self, call_id: str, tenant: str = "") -> list[Call]:
        """Return the calls with this id."""
        return [(name, raw) for name, raw in self.get(call_key(call_id, tenant)) or ()]

    def to_bytes(self) -> bytes:
        """Return the whole memory, to be kept over a restart of the proxy. The bytes hold prompt text."""
        return msgspec.msgpack.encode(list(self._values.items()))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Memory":
        """Return the memory that `to_bytes` wrote; raises msgspec.DecodeError."""
        memory = cls()
        for key, encoded in msgspec.msgpack.decode(data, type=list[tuple[str, bytes]]):
            memory._put(key, encoded)
        return memory

    def _put(self, key: str, encoded: bytes) -> None:
        self._values.pop(key, None)
        with suppress(ValueError):  # larger than the whole memory
            self._values[key] = encoded


# Bodies. A body is a decoded JSON object, with its keys in the order received. No object is changed in
# place: a changed object is a new one that shares its unchanged parts. An unchanged object stays the same
# object, which is how a change is noticed.


Json = dict[str, Any]


_SYSTEM_FIELDS = {Route.MESSAGES: "system", Route.RESPONSES: "instructions"}
"""The field of the system prompt on routes where it is not the first message."""


def why_failed(error: Exception) -> str:
    """Return a failure in words without prompt text, which the messages of other errors may quote."""
    return str(error) if isinstance(error, UnknownShape) else type(error).__name__


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts that a template writes before and behind the reasoning of an answer.

    Where a template puts a line break before tool calls only behind text, the end before calls differs.
    """

    begin: str
    end: str
    end_before_calls: str
    writes_empty: bool = False
    """Whether an answer without reasoning also has both before it, while its turn is running."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts about the chat template and the client that are not in the body."""

    accepts_late_system: bool | None = None
    """Whether the template renders system messages in mid-conversation; None if unknown."""
    reasoning_marks: Marks | None = None
    """Set if the template drops old reasoning, and the reasoning may be kept as text."""
    session: str = ""
    """The client's own name for the session, if it sent one."""
    tenant: str = ""


def with_list(holder: Json, key: str, items: list[Any]) -> Json:
    """Return an object with another list; the same object if its list has the same items already."""
    old = list_of(holder.get(key))
    is_same = len(old) == len(items) and all(map(operator.is_, old, items))
    return holder if is_same else {**holder, key: items}


def with_items(holder: Json, key: str, change: Callable[[Any], Any]) -> Json:
    """Return an object with each item of a list changed; a field that is no list stays as it is."""
    return with_list(holder, key, [change(item) for item in list_of(holder.get(key))])


def list_name(route: Route) -> str:
    """Return the field that holds the messages."""
    return "input" if route is Route.RESPONSES else "messages"


def messages_of(route: Route, body: Json) -> list[Json]:
    """Return the messages, or the items of a Responses body; raises UnknownShape."""
    messages = body.get(list_name(route), [])
    if route is Route.RESPONSES and isinstance(messages, str):
        return []
    return _objects(messages, list_name(route))


def is_text(part: Any) -> bool:
    is_kind = text_of(part, "type") in ("text", "input_text", "output_text")
    return is_kind and isinstance(part.get("text"), str)


def plain_text(content: Any, between: str = "\n") -> str | None:
    """Return the text of a message's content, or None if the content has more than text.

    The texts of a list are joined with the characters *between*.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(map(is_text, content)):
        return between.join(part["text"] for part in content)
    return None


def is_of_model(message: Json) -> bool:
    """Return whether the model wrote a message, or an item of a Responses body."""
    is_item = message.get("type") in ("reasoning", "function_call")
    return is_item or message.get("role") == "assistant"


_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_DAY_OF_WEEK = r"(?:Mon|Tue|Tues|Wed|Wednes|Thu|Thur|Thurs|Fri|Sat|Satur|Sun)(?:day)?"
_CALENDAR = (
    rf"(?:{_DAY_OF_WEEK},? )?(?:\d{{4}}[-/]\d\d?[-/]\d\d?|\d\d?[./]\d\d?[./]\d{{4}}"
    rf"|{_DAY} {_MONTH},? \d{{4}}|{_MONTH} {_DAY},? \d{{4}})"
)
_CLOCK = (
    r"\d\d?:\d\d(?::\d\d)?(?:[.,]\d+)?(?: ?[AP]\.?M\b\.?)?"
    r"(?: ?(?:Z\b|UTC\b|GMT\b|[+-]\d\d:?\d\d\b))?"
)
_BEHIND = rf"(?: \(\d\))?(?:(?:T|,? (?:at |[—–-] )?){_CLOCK})?"
_MOMENT = rf"(?:{_CALENDAR}{_BEHIND}|{_CLOCK}(?:,? (?:on )?{_CALENDAR})?)(?: \({_DAY_OF_WEEK}\))?"
DATE = re.compile(
    r"(?P<words>(?:Today(?:'s|’s) date|Current date(?: (?:and|&) time)?|Today|Conversation started)"
    r"(?: is)?:? |<current_(?:date|time)>"
    # Any sentence may begin like this: only a whole date or time may follow.
    r"|\b(?:It is(?: now| currently)?|Now|Date|Time|UTC|(?:The )?current time|The time)(?: is)?:?\s"
    rf"(?={_MOMENT}))"
    rf"(?P<date>{_MOMENT}|[^\n]{{0,30}}?\b\d{{4}}\b(?:[-/]\d\d?[-/]\d\d?)?{_BEHIND})",
    re.IGNORECASE,
)
COUNT = re.compile(r"(?<![A-Za-z0-9])\d+(?:[.,]\d+)*(?![A-Za-z0-9])")


class Draft:
    """A request that is being rewritten: stabilizers read and set `body`, and add to `lessons`."""

    def __init__(self, route: Route, body: Json, memory: Memory, facts: RequestFacts) -> None:
        """Raises UnknownShape if the messages, or the tools, are no list of objects."""
        messages_of(route, body)
        _objects(body.get("tools") or [], "tools")
        self.route = route
        self.body = body
        self.memory = memory
        self.facts = facts
        self.lessons: dict[str, Any] = {}
        self.list_name = list_name(route)
        self.system_field = _SYSTEM_FIELDS.get(route)

    @property
    def messages(self) -> list[Json]:
        """The messages, or the items of a Responses body."""
        return list_of(self.body.get(self.list_name))

    @messages.setter
    def messages(self, messages: list[Json]) -> None:
        self.body = with_list(self.body, self.list_name, messages)

    def rewrite_system(self, rewrite: Callable[[str], str]) -> None:
        """Rewrite every text of the system prompt; a text in a list is removed if it becomes empty."""
        if self.system_field in self.body:
            self.body = _with_texts(self.body, self.system_field, rewrite)
        leading = self.messages[: n_leading_system(self.messages)]
        rewritten = [_with_texts(message, "content", rewrite) for message in leading]
        self.messages = rewritten + self.messages[len(leading) :]

    def rewrite_first_users(self, rewrite: Callable[[str], str]) -> None:
        """Rewrite every text of the user messages before the first answer."""
        messages, n = self.messages, self._n_first
        first = [
            _with_texts(m, "content", rewrite) if m.get("role") == "user" else m
            for m in messages[:n]
        ]
        self.messages = first + messages[n:]

    # A conversation is identified by its system prompt without changing parts (dates, names of sessions,
    # counts), by the first text that the user wrote, without dates (agents may put their surroundings into
    # a message before it), and by the client's own name for the session. The key is made when a stabilizer
    # first needs it: what later stabilizers change makes no difference to it.

    @cached_property
    def _conversation(self) -> str:
        leading = self.messages[: n_leading_system(self.messages)]
        parts = [self.body.get(self.system_field or ""), *(m.get("content") for m in leading)]
        system = _what_lasts("\n".join(filter(None, map(_text_in, parts))))
        own = _without_dates(self._first_user_text()[:_MOST_CHARS])
        return key_of("conversation", self.facts.tenant, self.facts.session, system, own)

    @property
    def _n_first(self) -> int:
        """How many messages stand before the first answer."""
        messages = self.messages
        return next((i for i, m in enumerate(messages) if is_of_model(m)), len(messages))

    def key(self, kind: str, *parts: str) -> str:
        """Return a memory key of this conversation only."""
        return key_of(kind, self._conversation, *parts)

    def recall(self, key: str) -> Any:
        """Return the value of a key; None if there is none, or no answer in the conversation yet."""
        return self.memory.get(key) if self._n_first < len(self.messages) else None

    def _first_user_text(self) -> str:
        said = self.body.get(self.list_name)
        users = (m.get("content") for m in self.messages if m.get("role") == "user")
        texts = map(_text_in, [said] if isinstance(said, str) else users)
        # A first message without text counts as well: a later message must not change the key.
        return next((own for text in texts if (own := without_reminders(text)) or not text), "")


def _text_in(content: Any) -> str:
    """Return the text of a content, whatever else the content has."""
    only_text = content if isinstance(content, str) else [*filter(is_text, list_of(content))]
    return plain_text(only_text) or ""


@lru_cache(_N_SYSTEM_PROMPTS)
def _what_lasts(text: str) -> str:
    """Return a system prompt without its changing parts; cached, as a long one takes milliseconds."""
    return COUNT.sub("", ID.sub("", DATE.sub(r"\g<words>", text)))


@lru_cache(_N_SYSTEM_PROMPTS)
def _without_dates(text: str) -> str:
    """Return a text without its dates; cached, as every request of a conversation asks it anew."""
    return DATE.sub(r"\g<words>", text)


def _objects(value: Any, name: str) -> list[Json]:
    if not isinstance(value, list):
        raise UnknownShape(f"{name} is not a list")
    if not set(map(type, value)) <= {dict}:
        raise UnknownShape(f"{name} has an item that is not an object")
    return value


def _with_texts(holder: Json, key: str, rewrite: Callable[[str], str]) -> Json:
    """Return an object with its text, or each text of a list, rewritten; the same object if none did."""
    content = holder.get(key)
    if isinstance(content, str):
        text = rewrite(content)
        return holder if text == content else {**holder, key: text}
    parts = [_with_texts(p, "text", rewrite) if is_text(p) else p for p in list_of(content)]
    pairs = zip(parts, list_of(content), strict=True)
    return with_list(holder, key, [new for new, old in pairs if new is old or new["text"]])
