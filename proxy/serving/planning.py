"""What a llama-server process could do for a prompt now: the situation that the plan decides on."""

import time

from proxy.core.conditions import DegradationKind
from proxy.core.model import Candidate, Prompt
from proxy.core.plan import Situation, promising
from proxy.serving.process import Process


def look_up(process: Process, prompt: Prompt) -> tuple[tuple[Candidate, ...], int]:
    """Return the usable checkpoints, and how many tokens the prompt shares with any, usable or not."""
    if not process.rule.can_restore:
        return (), 0
    try:
        stored = process.store.find(prompt.namespace, prompt.tokens)
        found, n_shared = promising(process.rule, stored, prompt.n_tokens)
    except Exception as fault:
        process.faults.record("lookup", fault)
        process.degrade(DegradationKind.LOOKUPS_FAIL, str(fault))
        return (), 0
    process.recover(DegradationKind.LOOKUPS_FAIL)
    return found, n_shared


def situation(process: Process, prompt: Prompt) -> Situation:
    """Return the slots, checkpoints and rates as they are now."""
    candidates, n_shared = look_up(process, prompt)
    return Situation(
        process.rule,
        tuple(process.slots),
        candidates,
        process.rates,
        process.n_ctx,
        n_shared,
        time.monotonic(),
        process.sizes,
        process.queue.expected,
    )
