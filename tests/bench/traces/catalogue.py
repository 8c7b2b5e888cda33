"""The traces by name."""

from collections.abc import Callable

from tests.bench.traces.agents import agent, fresh, grown, interleaved, reasoning, restart
from tests.bench.traces.clients import claude_code, opencode
from tests.bench.traces.crowds import mixed, subagents, titles
from tests.bench.traces.trace import Trace
from tests.bench.traces.turns import branch, edits, memory_store, short

TRACES: dict[str, Callable[[], Trace]] = {
    "agent": agent,
    "interleaved": interleaved,
    "grown": grown,
    "subagents": subagents,
    "restart": restart,
    "fresh": fresh,
    "reasoning": reasoning,
    "memory-store": memory_store,
    "short": short,
    "branch": branch,
    "edits": edits,
    "titles": titles,
    "mixed": mixed,
    "claude-code": claude_code,
    "opencode": opencode,
}
