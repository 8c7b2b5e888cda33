"""What a llama-server process could do for a prompt now: the situation that the plan decides on."""

import time

from proxy.core.conditions import DegradationKind
from proxy.core.model import Candidate, Prompt
from proxy.core.plan import Situation, promising
from proxy.core.residency import Offer, make_offer
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


def offer(process: Process, prompt: Prompt, n_ahead: int) -> Offer:
    """Return what this process could do for a prompt, behind *n_ahead* others; nothing is reserved."""
    n_waiting = process.queue.n_waiting + process.launches.n_waiting
    may_start = not process.launches.is_save_coming
    now = situation(process, prompt)
    return make_offer(prompt, now, n_waiting, n_ahead, may_start=may_start)
