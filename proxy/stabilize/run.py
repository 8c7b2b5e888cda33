"""A request's body as it should be sent, so that its prompt keeps its prefix."""

from collections.abc import Collection
from typing import Any

from proxy.stabilize.drops import (
    BILLING,
    CACHE_CONTROL,
    FOLD,
    GLUE,
    HOIST,
    REASONING,
    REFERENCES,
    RESULTS_FIRST,
)
from proxy.stabilize.messages import is_text, messages_of, system_text, without_reminders
from proxy.stabilize.model import (
    Change,
    Failure,
    Form,
    FromBody,
    FromMemory,
    Json,
    Lesson,
    Memory,
    Name,
    Remembered,
    RequestFacts,
    RequestIdentity,
    Rewrite,
    Stabilized,
    UnknownShape,
    key_of,
)
from proxy.stabilize.sticky import ARGUMENTS, DATES, ORDER, REMINDERS, TEXT, without_dates

# Which conversation a request belongs to, by what stays the same in it.
#
# That is the system prompt without its date, and what the user first wrote, without reminders; the
# client's own name for the session tells apart what begins alike.


_ANSWERS = ("function_call", "reasoning")


def identify(form: Form, body: Json, facts: RequestFacts) -> RequestIdentity:
    """Return which requests this one belongs with; raises UnknownShape."""
    system = without_dates(system_text(form, body))
    first = _first_user_text(form, body)
    return RequestIdentity(
        conversation=key_of("conversation", facts.tenant, facts.session, system, first),
        header=key_of("header", facts.tenant, form, system),
        begins=not any(_is_answer(message) for message in messages_of(form, body)),
    )


def _is_answer(message: Json) -> bool:
    return message.get("role") == "assistant" or message.get("type") in _ANSWERS


def _first_user_text(form: Form, body: Json) -> str:
    if form is Form.RESPONSES and isinstance(body.get("input"), str):
        return without_reminders(body["input"])
    users = (m for m in messages_of(form, body) if m.get("role") == "user")
    content: Any = next(users, {}).get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if is_text(part))
    return without_reminders(content) if isinstance(content, str) else ""


# The entry point: a request's body as it should be sent, so that its prompt keeps its prefix.
#
# Pure: the same request with the same memory, facts and switches gives the same result, and giving the
# result again changes nothing. Nothing is raised: what a stabilizer does not know it leaves alone.


STABILIZERS: tuple[FromBody | FromMemory, ...] = (
    BILLING,
    CACHE_CONTROL,
    REFERENCES,
    GLUE,
    RESULTS_FIRST,
    HOIST,
    FOLD,
    ARGUMENTS,
    ORDER,
    TEXT,
    DATES,
    REMINDERS,
    REASONING,
)
"""In the order in which they are applied.

How a conversation is recognised depends on what those before the first from memory change, and must
not depend on what the others do. Reasoning comes last because its messages no longer look Anthropic.
"""

NO_FACTS = RequestFacts()


def stabilize(
    form: Form,
    body: Json,
    memory: Memory,
    switches: Collection[Name],
    facts: RequestFacts = NO_FACTS,
) -> Stabilized:
    """Return the body with the stabilizers of *switches* applied, and what they changed."""
    draft = _Draft(form, body, memory, facts)
    wanted = [s for s in STABILIZERS if s.name in switches and form in s.forms]
    for stabilizer in wanted:
        draft.apply(stabilizer)
    lessons = draft.lessons(wanted)
    return Stabilized(draft.body, tuple(draft.changes), tuple(draft.failures), tuple(lessons))


class _Draft:
    """A body in the making."""

    def __init__(self, form: Form, body: Json, memory: Memory, facts: RequestFacts) -> None:
        self.body = body
        self.changes: list[Change] = []
        self.failures: list[Failure] = []
        self._form = form
        self._memory = memory
        self._facts = facts
        self._known: Remembered | None = None

    def apply(self, stabilizer: FromBody | FromMemory) -> None:
        try:
            rewrite = self._rewrite(stabilizer)
        except Exception as error:
            self._fail(stabilizer.name, error)
            return
        if rewrite is not None:
            self.body = rewrite.body
            self.changes += [
                Change(stabilizer.name, e.path, e.before, e.after) for e in rewrite.edits
            ]

    def _rewrite(self, stabilizer: FromBody | FromMemory) -> Rewrite | None:
        if isinstance(stabilizer, FromBody):
            return stabilizer.rewrite(self._form, self.body, self._facts)
        if self._known is None:
            identity = identify(self._form, self.body, self._facts)
            self._known = Remembered(self._memory, identity, self._facts.tenant)
        return stabilizer.rewrite(self._form, self.body, self._known)

    def lessons(self, stabilizers: Collection[FromBody | FromMemory]) -> list[Lesson]:
        """Return what later requests need of this one; without those that failed at it."""
        failed = {failure.stabilizer for failure in self.failures}
        lessons: list[Lesson] = []
        for stabilizer in stabilizers:
            if isinstance(stabilizer, FromBody) or stabilizer.name in failed or not self._known:
                continue
            try:
                lessons += stabilizer.learn(self._form, self.body, self._known)
            except Exception as error:
                self._fail(stabilizer.name, error)
        return lessons

    def _fail(self, name: Name, error: Exception) -> None:
        # Other errors' messages may quote the prompt.
        reason = str(error) if isinstance(error, UnknownShape) else type(error).__name__
        self.failures.append(Failure(name, reason))
