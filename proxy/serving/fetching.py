"""A request asks the shared store before it waits for a slot.

A state that is fetched is an ordinary checkpoint afterwards, so that the plan is made as ever. A request
never waits longer for the transfer than evaluating would have taken.
"""

from typing import TYPE_CHECKING

from proxy.core.eviction import Removal, superseded
from proxy.core.model import Checkpoint, Prompt
from proxy.core.plan import promising
from proxy.core.rates import seconds_in_words
from proxy.core.sharing import Fetch, best_fetch, seconds_without
from proxy.serving.planning import situation
from proxy.serving.process import Process

if TYPE_CHECKING:
    from proxy.shared.tier import Tier

_LOOK_SHARE = 0.05
"""What others have put there a moment ago is listed for a request if that takes no more than this share of
what the request would take without."""
_MAX_TRIES = 2


async def fetch_first(process: Process, tier: "Tier", prompt: Prompt) -> str:
    """Fetch what gets a prompt answered sooner; return in words what came of it, empty if nothing did."""
    if tier.downloads.is_off or not process.rule.can_restore:
        return ""
    try:
        return await _fetch(process, tier, prompt)
    except Exception as fault:
        process.faults.record("share", fault)
        return ""


async def _fetch(process: Process, tier: "Tier", prompt: Prompt) -> str:
    told = ""
    for _ in range(_MAX_TRIES):
        fetch = await _newest(process, tier, prompt)
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
        told = f"not fetched: {size} did not come in {seconds_in_words(fetch.limit_seconds)}"
        if checkpoint.id in tier.remote.known:
            break  # it was too slow, or failed: a state that is gone has mostly made way for a newer one
    return told


async def _newest(process: Process, tier: "Tier", prompt: Prompt) -> Fetch | None:
    """Return the best state to fetch, after a new listing if what is still to evaluate is worth that."""
    fetch = _best(process, tier, prompt)
    _, seconds = seconds_without(prompt, situation(process, prompt))
    if fetch is not None and fetch.is_worth_it:
        seconds += fetch.seconds - fetch.limit_seconds
    if (look_seconds := _LOOK_SHARE * seconds) >= tier.look_seconds:
        await tier.look_again(prompt.namespace, look_seconds)
        fetch = _best(process, tier, prompt)
    return fetch


def _best(process: Process, tier: "Tier", prompt: Prompt) -> Fetch | None:
    found = tier.remote.find(prompt.namespace, prompt.tokens)
    remote, _ = promising(process.rule, found, prompt.n_tokens)
    return best_fetch(prompt, situation(process, prompt), remote, tier.remote.link)


async def _remove_superseded(process: Process, fetched: Checkpoint) -> None:
    """Remove what a fetched state makes needless here."""
    try:
        if (tokens := process.store.index.tokens(fetched.id)) is not None:
            relatives = process.store.find(fetched.namespace, tokens)
            for older in superseded(process.rule, fetched, relatives):
                await process.store.remove(older, Removal.SUPERSEDED)
    except Exception as fault:
        process.faults.record("share", fault)
