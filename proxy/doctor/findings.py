"""What there is to say of one llama-server and its states: pure, facts in and findings out.

Owns: what a finding is, and what all findings together come to. What keeps the proxy itself from caching is
said in the words of `core.degradation`, with its cure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from proxy.core.conditions import DegradationKind, State
from proxy.core.model import RuleKind
from proxy.core.slots import MAX_CONTEXT_CHECKPOINTS
from proxy.doctor.facts import (
    USUAL_TOKENS,
    BehaviourFacts,
    CostFacts,
    DirectoryFacts,
    LlamaServerFacts,
    MemoryFacts,
    ServerFacts,
    SlotFacts,
    StoreFacts,
)

SERVER, SLOTS, IDLE_SLOTS, RAM_CACHE = "llama-server", "slots", "idle slots", "RAM cache"
SIMILARITY, SLOT_FILES, RULE, COST = "similarity", "slot files", "memory rule", "cost"
CHECKPOINTS, DIRECTORY, PROBE = "checkpoints", "directory", "probe"

LONGEST_STALL_SECONDS = 10.0
"""A save that stops every slot for longer is called a limit."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

_K = DegradationKind
_MAY_BE_A_DISTURBANCE = {_K.ATTACH_FAILED, _K.SELF_TEST_FAILED}
_RULES = {
    RuleKind.ANY_PREFIX: "Any prefix: any leading part of a saved state can be reused.",
    RuleKind.RESTORE_POINTS: "Restore points: a saved state can be continued at its end and at the context"
    " checkpoints in its file.",
    RuleKind.END_ONLY: "End only: a saved state can be continued at its very end and nowhere before, so"
    " prompts that were rewritten near their end start over.",
}
_OF_SAVES = (_K.NO_SLOT_SAVE_PATH, _K.OTHER_DIRECTORY, _K.FILES_UNREADABLE)


class Severity(IntEnum):
    """How bad a finding is; the worst one is the exit status."""

    OK = 0
    LIMIT = 1
    BLOCKER = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it is, what that means, and the flag or step that mends it.

    `about` says which llama-server, model or host it is about, where there are several.
    """

    topic: str
    severity: Severity
    text: str
    cure: str = ""
    about: str = ""


def ok(topic: str, text: str) -> Finding:
    return Finding(topic, Severity.OK, text)


def limit(topic: str, text: str, cure: str) -> Finding:
    return Finding(topic, Severity.LIMIT, text, cure)


def blocker(topic: str, text: str, cure: str) -> Finding:
    return Finding(topic, Severity.BLOCKER, text, cure)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 0 if caching will work, 1 if it will with limits, 2 if it will not."""
    return int(max((finding.severity for finding in findings), default=Severity.OK))


def summary(findings: Iterable[Finding], *, is_complete: bool) -> str:
    """Return the verdict in a sentence; without *is_complete* no good one is given."""
    match exit_status(findings):
        case Severity.BLOCKER:
            return "Caching will not work."
        case _ if not is_complete:
            return "Nothing speaks against caching so far, but not everything could be examined."
        case Severity.LIMIT:
            return "Caching will work, with limits."
        case _:
            return "Caching will work."


def degradation_finding(kind: DegradationKind, detail: str, here: str) -> Finding:
    """Return what the proxy would say of a degradation, by its name; *here* is its cure on this server."""
    find = limit
    if kind.leads_to is State.FORWARDING and kind not in _MAY_BE_A_DISTURBANCE:
        find = blocker
    text = f"{kind.reason} ({detail})" if detail else kind.reason
    return find(kind.value, text, f"{kind.cure} Here: {here}" if here else kind.cure)


def server_findings(facts: LlamaServerFacts, directory: DirectoryFacts) -> Iterator[Finding]:
    """Yield all that is to be said of one llama-server, what keeps it from caching first."""
    server = facts.server
    for each in facts.degradations:
        yield degradation_finding(each.kind, each.detail, _here(each.kind, facts, directory))
    if server.n_slots:
        yield ok(SERVER, f"{server.build or 'unknown build'} serves {server.model}.")
        yield _slots_finding(server, facts.slots)
    if server.is_asleep:
        yield limit(
            SERVER,
            "It was asleep: whenever it falls asleep, its slots lose what they hold.",
            "Start llama-server without --sleep-idle-seconds",
        )
    if facts.behaviour is not None:
        yield from _behaviour_findings(facts.behaviour, server.n_slots)
    if facts.memory is not None:
        yield from _memory_findings(facts.memory)
    if facts.cost is not None:
        yield _cost_finding(facts.cost)
    if facts.store is not None:
        yield from _store_findings(facts.store, directory.path, has_others=bool(server.host))
    if not directory.problem:
        yield from _save_findings(facts, directory)
    for failure in facts.failures:
        yield limit(PROBE, f"{failure}.", "Run doctor again while nobody else uses llama-server.")


def share(path: str) -> str:
    """Return what lets two users share a directory."""
    return f"chgrp GROUP {path} && chmod 2770 {path}, with both users in GROUP."


def _here(kind: DegradationKind, facts: LlamaServerFacts, directory: DirectoryFacts) -> str:
    """Return what of a cure depends on this server and this directory, empty if nothing does."""
    path, server, saved = directory.path, facts.server, facts.probe_save
    match kind:
        case _K.LOADING:
            return f"run doctor again when {server.url}/health answers 200."
        case _K.NO_SLOT_SAVE_PATH:
            places = {
                "router": ", on the command line of the router",
                "llama-swap": ", in its cmd in llama-swap's configuration",
            }
            return f"--slot-save-path {path}{places.get(server.host, '')}"
        case _K.OTHER_DIRECTORY:
            probe = f" Remove the probe {saved.name} where llama-server writes." if saved else ""
            return f"start llama-server with --slot-save-path {path}.{probe}"
        case _K.FILES_UNREADABLE:
            files = f"files of uid {saved.owner_uid} have mode {saved.mode:o}; " if saved else ""
            return f"{files}{share(path)} Start llama-server with umask 007."
        case _K.IDLE_SLOTS_CLEARED:
            return f"-np {server.n_slots} --cache-ram 0"
        case _K.ATTACH_FAILED | _K.SELF_TEST_FAILED:
            return "run doctor again while nobody else uses llama-server."
        case _:
            return ""


def _slots_finding(server: ServerFacts, slots: SlotFacts | None) -> Finding:
    """Return how many slots there are, and whether one was free for the probes."""
    there_are = f"{counted(server.n_slots, 'slot')} of {server.n_ctx:,} tokens"
    if slots is None:
        return ok(SLOTS, f"{there_are}.")
    found = f"{slots.n_empty} empty, {slots.n_held} holding work, {slots.n_busy} busy"
    if slots.n_empty:
        return ok(SLOTS, f"{there_are}: {found}.")
    path = f"/upstream/{server.name}" if server.host == "llama-swap" else ""
    body = f""" -d '{{"model": "{server.name}"}}'""" if server.host == "router" else ""
    return limit(
        SLOTS,
        f"{there_are}: {found}. The probes need an empty one and none was emptied, so what a"
        " restored state is good for here was not examined.",
        "Run doctor when llama-server has just started, or empty a slot N whose work you can spare:"
        f" curl -X POST '{server.url}{path}/slots/N?action=erase'{body}",
    )


def _behaviour_findings(behaviour: BehaviourFacts, n_slots: int) -> Iterator[Finding]:
    """Yield what llama-server does to slots behind the proxy's back."""
    unknown = "Could not be told: too few slots are empty."
    if n_slots == 1:
        unknown = "There is one slot, so there is nothing to see."
    keeps, similar = behaviour.keeps_idle_slots, behaviour.prefers_similar_slot
    if keeps is not False:  # else the attach says so
        yield ok(
            IDLE_SLOTS, "They keep what they hold while another slot runs." if keeps else unknown
        )
    if behaviour.has_ram_cache:
        yield limit(
            RAM_CACHE,
            "It is on: llama-server swaps prompts in slots by itself, and clients with different API"
            " keys share it.",
            "Start llama-server with --cache-ram 0",
        )
    elif behaviour.has_ram_cache is None:
        yield ok(RAM_CACHE, "Could not be told; llama-server should run with --cache-ram 0.")
    else:
        yield ok(RAM_CACHE, "It is off (--cache-ram 0).")
    if similar is False:
        yield limit(
            SIMILARITY,
            "Off: requests that cannot name a slot (/v1/messages) do not find the one that holds"
            " their prefix.",
            "Start llama-server without -sps 0 (--slot-prompt-similarity; the default is 0.1)",
        )
    else:
        text = "On: requests that cannot name a slot find the one with their prefix."
        yield ok(SIMILARITY, text if similar else unknown)


def _memory_findings(memory: MemoryFacts) -> Iterator[Finding]:
    """Yield what a state file is and what it is good for."""
    if memory.is_version_supported:
        kinds = " + ".join(memory.sections) or "of a kind that is not known"
        yield ok(SLOT_FILES, f"Version {memory.file_version}; memory: {kinds}.")
    else:
        yield limit(
            SLOT_FILES,
            f"Version {memory.file_version} is not known here: states are restored at their end only.",
            "Use a newer llama-prefix-cache, or llama.cpp 0.7.0 (version 4).",
        )
    if memory.rule is None or not memory.rule.can_restore:
        return  # the attach says why
    text, n_least = _RULES[memory.rule.kind], memory.rule.end_holds_from
    if n_least:
        text += f" A state under {n_least:,} tokens cannot be continued at its end."
    if memory.rule.kind is RuleKind.END_ONLY:
        # Models with a sliding window have two attention caches.
        other = "; or with --swa-full" if memory.sections.count("attention") >= 2 else ""
        cure = "Use llama.cpp 0.7.0 or later, without --ctx-checkpoints 0"
        yield limit(RULE, text, cure + other)
    else:
        yield ok(RULE, text)


def _cost_finding(cost: CostFacts) -> Finding:
    """Return what a usual state costs on disk, and in seconds for everybody."""
    most = ""
    if cost.largest_bytes > cost.state_bytes:
        n_points = MAX_CONTEXT_CHECKPOINTS
        most = f", up to {size(cost.largest_bytes)} with {n_points} context checkpoints"
    text = (
        f"A state takes {size(cost.state_bytes)} for {USUAL_TOKENS:,} tokens{most}. Saving it stops all"
        f" slots for {seconds(cost.save_seconds)}; restoring takes {seconds(cost.restore_seconds)} instead"
        f" of {seconds(cost.evaluate_seconds)} of evaluation."
    )
    if cost.save_seconds <= LONGEST_STALL_SECONDS:
        return ok(COST, text)
    return limit(COST, text, "Put the directory of --slot-save-path on a faster disk.")


def how_to_empty(path: str) -> str:
    return f"stop the proxy and delete {path}/index and {path}/lpc-*.state"


def _store_findings(store: StoreFacts, path: str, *, has_others: bool) -> Iterator[Finding]:
    yield _store_finding(store, path, has_others=has_others)
    if store.quarantined:
        yield degradation_finding(DegradationKind.STATE_ENDED_SERVER, store.quarantined, "")


def _store_finding(store: StoreFacts, path: str, *, has_others: bool) -> Finding:
    """Return whose checkpoints lie in the directory; *has_others* if other models use it too."""
    have = f"{counted(store.n_checkpoints, 'checkpoint')} ({size(store.size_bytes)})"
    if store.n_usable or not store.n_checkpoints:
        fit = f"{store.n_usable} ({size(store.usable_bytes)}) fit the model that runs now"
        return ok(CHECKPOINTS, f"{have}; {fit}." if store.n_usable else "None yet.")
    if store.knows_model_otherwise:
        return limit(
            CHECKPOINTS,
            f"{have}, none of which fits: the model is known, but with another cache layout or other"
            " adapters.",
            "Start llama-server as it was started then (-np, -kvu, -fa, --cache-type-k, --cache-type-v,"
            " --lora, build); or leave them, they go when space is needed.",
        )
    if has_others:
        return ok(CHECKPOINTS, f"{have}, none of this model yet.")
    return limit(
        CHECKPOINTS,
        f"{have}, all of another model than the one that runs now: they cannot serve it, and they"
        " take up the budget until newer ones push them out.",
        "Start llama-server with the model they were made by, or give each model a --slot-save-path"
        f" of its own; to be rid of them, {how_to_empty(path)}",
    )


def _save_findings(facts: LlamaServerFacts, directory: DirectoryFacts) -> Iterator[Finding]:
    """Yield whether llama-server and this process can use each other's files."""
    path, saved = directory.path, facts.probe_save
    if saved is not None and not saved.problem:
        yield ok(DIRECTORY, f"A slot saved by llama-server appears in {path} and can be removed.")
    elif saved is not None and not any(each.kind in _OF_SAVES for each in facts.degradations):
        yield blocker(
            DIRECTORY,
            f"A slot that llama-server saves into {path} is of no use: {saved.problem}.",
            f"Let both users write there: {share(path)} See that the disk is not full and the directory not"
            " sticky, and use a local disk and a llama-server of build 0.5 or later.",
        )


def size(n_bytes: float) -> str:
    """Return a number of bytes as 1.5 GiB."""
    unit = 0
    while n_bytes >= 1024 and unit < len(_UNITS) - 1:
        n_bytes, unit = n_bytes / 1024, unit + 1
    return (
        f"{n_bytes:.1f} {_UNITS[unit]}"
        if unit and n_bytes < 10
        else f"{n_bytes:.0f} {_UNITS[unit]}"
    )


def seconds(value: float) -> str:
    """Return a duration as 0.05 s, 1.2 s or 340 s."""
    if value < 0.01:
        return "less than 0.01 s"
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def counted(n: int, noun: str) -> str:
    """Return "1 slot" or "2 slots"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
