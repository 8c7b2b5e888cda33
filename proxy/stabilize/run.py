"""A request's body as it should be sent, so that its prompt keeps its prefix.

`stabilize` is pure: the same request with the same memory, facts and switches gives the same result, and
giving the result again changes nothing. Nothing is raised: what a stabilizer does not know it leaves alone.
"""

from collections.abc import Callable, Collection

from proxy.core.messages import CONVERSATIONS, Route
from proxy.stabilize import drops, sticky
from proxy.stabilize.model import Draft, Json, Memory, Name, RequestFacts, Stabilized, UnknownShape

STABILIZERS: dict[Name, Callable[[Draft], None]] = {
    Name.DROP_BILLING_HEADER: drops.drop_billing_header,
    Name.DROP_CACHE_CONTROL: drops.drop_cache_control,
    Name.TOOL_REFERENCE_TEXT: drops.tool_reference_text,
    Name.GLUE_TEXT_TO_RESULTS: drops.glue_text_to_results,
    Name.TOOL_RESULTS_FIRST: drops.tool_results_first,
    Name.HOIST_SYSTEM_MESSAGE: drops.hoist_system_message,
    Name.FOLD_SYSTEM_MESSAGES: drops.fold_system_messages,
    Name.RESTORE_TOOL_ARGUMENTS: sticky.restore_tool_arguments,
    Name.KEEP_TOOL_ORDER: sticky.keep_tool_order,
    Name.STICKY_TOOL_TEXT: sticky.sticky_tool_text,
    Name.STICKY_DATE: sticky.sticky_date,
    Name.STICKY_REMINDERS: sticky.sticky_reminders,
    Name.INLINE_REASONING: drops.inline_reasoning,
}
"""In the order in which they are applied.

How a conversation is recognised depends on what those before the sticky ones change, and must not depend
on what the others do. Reasoning comes last because its messages no longer look Anthropic.
"""
_ROUTES: dict[Name, Collection[Route]] = {
    Name.DROP_CACHE_CONTROL: (Route.MESSAGES, Route.CHAT),
    Name.TOOL_REFERENCE_TEXT: (Route.MESSAGES,),
    Name.GLUE_TEXT_TO_RESULTS: (Route.MESSAGES,),
    Name.TOOL_RESULTS_FIRST: (Route.MESSAGES,),
    Name.INLINE_REASONING: (Route.MESSAGES, Route.CHAT),
}
"""The routes of the stabilizers that are not for every route."""
NO_FACTS = RequestFacts()


def stabilize(
    route: Route,
    body: Json,
    memory: Memory,
    switches: Collection[Name],
    facts: RequestFacts = NO_FACTS,
) -> Stabilized:
    """Return the body with the stabilizers of *switches* applied, and which of them changed it."""
    draft = Draft(route, body, memory, facts)
    changed_by: list[Name] = []
    failures: list[tuple[Name, str]] = []
    for name, apply in STABILIZERS.items():
        if name not in switches or route not in _ROUTES.get(name, CONVERSATIONS):
            continue
        before, lessons = draft.body, dict(draft.lessons)
        try:
            apply(draft)
        except Exception as error:
            draft.body, draft.lessons = before, lessons
            # Other errors' messages may quote the prompt.
            is_ours = isinstance(error, UnknownShape)
            failures.append((name, str(error) if is_ours else type(error).__name__))
        else:
            if draft.body is not before:
                changed_by.append(name)
    return Stabilized(draft.body, tuple(changed_by), tuple(failures), draft.lessons)
