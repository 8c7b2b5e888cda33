"""The entry point: a request's body as it should be sent, so that its prompt keeps its prefix.

Pure: the same request with the same memory, facts and switches gives the same result, and giving the
result again changes nothing. Nothing is raised: what a stabilizer does not know it leaves alone.
"""

from collections.abc import Collection

from proxy.stabilize import (
    arguments,
    billing,
    cache_control,
    dates,
    reasoning,
    reminders,
    system_messages,
    tool_references,
    tool_results,
    tools,
)
from proxy.stabilize.identity import identify
from proxy.stabilize.memory import Lesson, Memory
from proxy.stabilize.model import (
    Change,
    Facts,
    Failure,
    Form,
    FromBody,
    FromMemory,
    Json,
    Known,
    Rewrite,
    Stabilized,
    UnknownShape,
)
from proxy.stabilize.names import Name

STABILIZERS: tuple[FromBody | FromMemory, ...] = (
    billing.STABILIZER,
    cache_control.STABILIZER,
    tool_references.STABILIZER,
    tool_results.GLUE,
    tool_results.RESULTS_FIRST,
    system_messages.HOIST,
    system_messages.FOLD,
    arguments.STABILIZER,
    tools.ORDER,
    tools.TEXT,
    dates.STABILIZER,
    reminders.STABILIZER,
    reasoning.STABILIZER,
)
"""In the order in which they are applied.

How a conversation is recognised depends on what those before the first from memory change, and must
not depend on what the others do. Reasoning comes last because its messages no longer look Anthropic.
"""

NO_FACTS = Facts()


def stabilize(
    form: Form,
    body: Json,
    memory: Memory,
    switches: Collection[Name],
    facts: Facts = NO_FACTS,
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

    def __init__(self, form: Form, body: Json, memory: Memory, facts: Facts) -> None:
        self.body = body
        self.changes: list[Change] = []
        self.failures: list[Failure] = []
        self._form = form
        self._memory = memory
        self._facts = facts
        self._known: Known | None = None

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
            self._known = Known(self._memory, identity, self._facts.tenant)
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
