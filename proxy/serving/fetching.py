"""A request asks the shared store before it waits for a slot.

A state that is fetched is an ordinary checkpoint afterwards, so that the plan is made as ever. A transfer
that would take longer than evaluating is given up as soon as that shows.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from proxy.core.eviction import Removal, superseded
from proxy.core.model import Checkpoint, Prompt
from proxy.core.plan import Situation, as_loaded, promising
from proxy.core.rates import seconds_in_words
from proxy.core.sharing import Fetch, best_fetch, seconds_without
from proxy.serving.planning import loaded, situation
from proxy.serving.process import Process
from proxy.serving.request import NO_READ, Request

if TYPE_CHECKING:
    from proxy.shared.tier import Tier

_LOOK_SHARE, _MOST_LOOK_SECONDS = 0.05, 0.5
"""A request waits for a listing no longer than for this share of what it would take without."""
_MAX_TRIES = 2


async def fetch_first(tier: "Tier", process: Process, request: Request) -> bool:
    """Fetch what gets a request answered sooner, note in words what came of it; return if it waited."""
    prompt, began = request.prompt, time.monotonic()
    if not prompt or request.extends or NO_READ in request.wishes:
        return False
    with process.faults.suppressed("share"):
        if process.rule.can_restore and not tier.downloads.is_off:
            request.shared = await _fetch(process, tier, prompt, request.arrived_at)
    request.fetch_seconds = time.monotonic() - began
    return bool(request.shared)


async def _fetch(process: Process, tier: "Tier", prompt: Prompt, since: float) -> str:
    told = ""
    for _ in range(_MAX_TRIES):
        fetch = await _newest(process, tier, prompt, since)
        if fetch is None:
            return told
        checkpoint = fetch.candidate.checkpoint
        size = f"{checkpoint.size_bytes / 1e6:,.1f} MB"
        if not fetch.is_worth_it:
            process.metrics.shared_fetches.labels("dearer").inc()
            rest = f"{size} would take {seconds_in_words(fetch.seconds)}"
            return f"not fetched: evaluating is cheaper ({rest})"
        fetched = await tier.downloads.fetch(checkpoint, fetch.limit_seconds)
        if fetched is not None:
            process.tasks.start(_remove_superseded(process, fetched))
            return f"fetched {size}"
        told = f"not fetched: {size} would not come in {seconds_in_words(fetch.limit_seconds)}"
        if checkpoint.id in tier.remote.known:
            break  # it was too slow, or failed: a state that is gone has mostly made way for a newer one
        since = time.monotonic()
    return told


async def _newest(process: Process, tier: "Tier", prompt: Prompt, since: float) -> Fetch | None:
    """Return the best state to fetch, after a listing if what is still to evaluate is worth that."""
    now = situation(process, prompt)
    _, seconds = seconds_without(prompt, now)
    if seconds <= tier.downloads.entering.call.seconds:
        return None  # as most requests of a conversation that stays
    fetch = _best(process, tier, prompt, now)
    if fetch is not None and fetch.is_worth_it:
        seconds += fetch.seconds - fetch.limit_seconds
    most_seconds = min(_LOOK_SHARE * seconds, _MOST_LOOK_SECONDS)
    look = tier.look_since(prompt.namespace, since, most_seconds)
    if look is not None and not look.done():
        await asyncio.wait([look], timeout=most_seconds)
        fetch = _best(process, tier, prompt, situation(process, prompt))
    return fetch


def _best(process: Process, tier: "Tier", prompt: Prompt, now: Situation) -> Fetch | None:
    found = loaded(process, tier.remote.find(prompt.namespace, prompt.tokens))
    remote, _ = promising(now.rule, found, prompt.n_tokens)
    return best_fetch(prompt, now, remote, tier.remote.link, tier.downloads.entering)


async def _remove_superseded(process: Process, fetched: Checkpoint) -> None:
    """Remove what a fetched state makes needless here."""
    with process.faults.suppressed("share"):
        if (tokens := process.store.index.tokens(fetched.id)) is not None:
            relatives = await asyncio.to_thread(list, process.store.find(fetched.namespace, tokens))
            newer = as_loaded(fetched, process.n_loaded_points)
            for older in superseded(process.rule, newer, relatives):
                await process.store.remove(older, Removal.SUPERSEDED)
