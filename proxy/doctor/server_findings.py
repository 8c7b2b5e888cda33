"""What there is to say of llama-server itself: pure, facts in and findings out."""

from collections.abc import Iterator

from proxy.doctor.directory_findings import USUAL_TOKENS
from proxy.doctor.facts import (
    BehaviourFacts,
    Contact,
    CostFacts,
    Facts,
    ProxyFacts,
    ServerFacts,
    SlotFacts,
)
from proxy.doctor.verdict import Finding, blocker, limit, ok
from proxy.doctor.words import counted, seconds, size

SERVER, SLOTS, IDLE_SLOTS = "llama-server", "slots", "idle slots"
RAM_CACHE, SIMILARITY, PROXY = "RAM cache", "similarity", "running proxy"


_START = {
    "router": "Start the router",
    "llama-swap": "In llama-swap's configuration, have its cmd start it",
}
"""Where the flags of a host's model come from."""


def contact_finding(server: ServerFacts) -> Finding:
    """Return whether there is a llama-server to talk to, and why not."""
    match server.contact:
        case Contact.ANSWERS:
            return ok(SERVER, f"{server.build or 'unknown build'} serves {server.model}.")
        case Contact.UNREACHABLE:
            return blocker(
                SERVER,
                f"Nothing answers at {server.url}: {server.detail}.",
                "Start llama-server, or give its address with --upstream URL.",
            )
        case Contact.LOADING:
            return blocker(
                SERVER,
                "It is still loading its model.",
                f"Run doctor again when {server.url}/health answers 200.",
            )
        case Contact.KEY_MISSING | Contact.KEY_WRONG as contact:
            is_missing = contact is Contact.KEY_MISSING
            return blocker(
                SERVER,
                f"It wants an API key, and {'none was given' if is_missing else 'refused this one'}.",
                "Give llama-server's --api-key with --upstream-api-key KEY"
                " (or LLAMA_PREFIX_CACHE_UPSTREAM_API_KEY), to doctor and to serve.",
            )
        case Contact.NOT_LLAMA_SERVER:
            return blocker(
                SERVER,
                f"What answers at {server.url} is not a llama-server: {server.detail}.",
                "Give llama-server's own address with --upstream URL; if it runs with --api-prefix,"
                " the prefix belongs to the URL.",
            )
        case Contact.NO_SLOTS:
            return blocker(
                SERVER,
                f"What answers at {server.url} has no slots, and does not say that it is a router.",
                "Give the address of a llama-server that runs one model (-m FILE) with --upstream URL, or"
                " that of a router of llama.cpp 0.7.0 or later.",
            )


def ability_findings(server: ServerFacts, directory: str) -> Iterator[Finding]:
    """Yield what llama-server cannot do, or does, that stands in the way of caching."""
    if server.has_slot_save_path is False:
        yield blocker(
            SERVER,
            "It was started without --slot-save-path, so no slot can be saved.",
            f"{_START.get(server.host, 'Start llama-server')} with --slot-save-path {directory}",
        )
    elif server.has_slot_save_path is None:
        yield blocker(
            SERVER,
            f"It does not take orders for its slots: {server.detail}.",
            "Give llama-server's own address with --upstream URL, not that of a proxy before it.",
        )
    if not server.is_restart_visible:
        yield blocker(
            SERVER,
            "A restart of it cannot be told, so what its slots hold would be guesswork.",
            "Unset LLAMA_MEDIA_MARKER for llama-server, or start it with --metrics",
        )
    if server.is_asleep:
        yield limit(
            SERVER,
            "It was asleep: whenever it falls asleep, its slots lose what they hold.",
            "Start llama-server without --sleep-idle-seconds",
        )


def slots_finding(server: ServerFacts, slots: SlotFacts | None) -> Finding:
    """Return how many slots there are, and whether one was free for the probes."""
    there_are = f"{counted(server.n_slots, 'slot')} of {server.n_ctx:,} tokens"
    if slots is None:
        return ok(SLOTS, f"{there_are}.")
    found = f"{slots.n_empty} empty, {slots.n_held} holding work, {slots.n_busy} busy"
    if slots.n_empty:
        return ok(SLOTS, f"{there_are}: {found}.")
    return limit(
        SLOTS,
        f"{there_are}: {found}. The probes need an empty one and none was emptied, so what a"
        " restored state is good for here was not examined.",
        "Run doctor when llama-server has just started, or empty a slot N whose work you can spare:"
        f" {_erase_command(server)}",
    )


def _erase_command(server: ServerFacts) -> str:
    path, body = "", ""
    match server.host:
        case "router":
            body = f""" -d '{{"model": "{server.name}"}}'"""
        case "llama-swap":
            path = f"/upstream/{server.name}"
    return f"curl -X POST '{server.url}{path}/slots/N?action=erase'{body}"


def behaviour_findings(
    server: ServerFacts, behaviour: BehaviourFacts, cost: CostFacts | None
) -> Iterator[Finding]:
    """Yield what llama-server does to slots behind the proxy's back."""
    yield _idle_slots_finding(server, behaviour, cost)
    yield _ram_cache_finding(behaviour)
    yield _similarity_finding(server, behaviour)


def _idle_slots_finding(
    server: ServerFacts, behaviour: BehaviourFacts, cost: CostFacts | None
) -> Finding:
    if behaviour.keeps_idle_slots is False:
        return limit(
            IDLE_SLOTS,
            "They are cleared as soon as another slot runs. So requests start one at a time, and each"
            f" change of conversation costs a save and a restore{_change_cost(cost)}, as with one slot.",
            "Start llama-server with an explicit number of slots and without its RAM cache:"
            f" -np {server.n_slots} --cache-ram 0 (or --no-cache-idle-slots)",
        )
    if behaviour.keeps_idle_slots:
        return ok(IDLE_SLOTS, "They keep what they hold while another slot runs.")
    if server.n_slots == 1:
        return ok(IDLE_SLOTS, "There is one slot, so none is idle while another one runs.")
    return ok(IDLE_SLOTS, "Could not be told whether they keep what they hold: one slot was empty.")


def _change_cost(cost: CostFacts | None) -> str:
    if cost is None:
        return ""
    size_bytes = cost.state_bytes(USUAL_TOKENS)
    change_seconds = size_bytes / cost.save_bytes_per_second
    change_seconds += size_bytes / cost.restore_bytes_per_second
    return f" ({seconds(change_seconds)} for {USUAL_TOKENS:,} tokens)"


def _ram_cache_finding(behaviour: BehaviourFacts) -> Finding:
    if behaviour.has_ram_cache:
        return limit(
            RAM_CACHE,
            "It is on: llama-server swaps prompts in slots by itself, and clients with different API"
            " keys share it.",
            "Start llama-server with --cache-ram 0",
        )
    if behaviour.has_ram_cache is False:
        return ok(RAM_CACHE, "It is off (--cache-ram 0).")
    return ok(RAM_CACHE, "Could not be told; llama-server should run with --cache-ram 0.")


def _similarity_finding(server: ServerFacts, behaviour: BehaviourFacts) -> Finding:
    if behaviour.prefers_similar_slot is False:
        return limit(
            SIMILARITY,
            "Off: requests that cannot name a slot (/v1/messages) do not find the one that holds"
            " their prefix.",
            "Start llama-server without -sps 0 (--slot-prompt-similarity; the default is 0.1)",
        )
    if behaviour.prefers_similar_slot:
        return ok(
            SIMILARITY, "On: requests that cannot name a slot find the one with their prefix."
        )
    if server.n_slots == 1:
        return ok(SIMILARITY, "There is one slot, so there is nothing to choose.")
    return ok(SIMILARITY, "Could not be told without touching slots in use; -sps must not be 0.")


def proxy_finding(proxy: ProxyFacts) -> Finding:
    """Return what a proxy that uses the directory says of itself."""
    if not proxy.answers:
        return limit(
            PROXY,
            f"One uses the directory ({proxy.lock}), but none answers at {proxy.admin}. Its slots"
            " were left alone.",
            "Give that proxy's own --admin HOST:PORT, or stop it and run doctor again.",
        )
    if proxy.is_caching:
        return ok(
            PROXY,
            f"It caches; memory rule: {proxy.rule}. {_written(proxy)} Its slots were left alone. To"
            " examine them too, stop it and run doctor again.",
        )
    if proxy.reasons:
        return blocker(
            PROXY,
            f"It only forwards: {'; '.join(proxy.reasons)}.",
            "Mend that; for the exact step, stop the proxy and run doctor again.",
        )
    return limit(
        PROXY,
        "It does not cache yet: it has not attached to llama-server, or its self-test is running.",
        f"Look again in a minute: curl http://{proxy.admin}/health",
    )


def _written(proxy: ProxyFacts) -> str:
    budget = f" of {size(proxy.max_write_bytes_per_day)}" if proxy.max_write_bytes_per_day else ""
    return f"Written within 24 hours: {size(proxy.written_last_day_bytes)}{budget}."


def failure_findings(facts: Facts) -> Iterator[Finding]:
    """Yield the probes that did not come to their end."""
    for failure in facts.failures:
        yield limit("probe", f"{failure}.", "Run doctor again while nobody else uses llama-server.")
