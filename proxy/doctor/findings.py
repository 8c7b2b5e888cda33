"""The facts of an examination, and the findings that doctor makes of them.

Owns: the types of the facts, which the examination fills in; the findings; and the verdict. Pure. None in
a fact always means "not known" or "not examined", never "no". A condition that keeps the proxy from caching
is reported in the words of `core.conditions`, with its cure.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from proxy.core.conditions import PASSING, DegradationKind, State
from proxy.core.model import Rule, RuleKind
from proxy.core.rates import seconds_in_words, size_in_words
from proxy.llama.files import SUPPORTED_VERSIONS, Section
from proxy.settings import Settings
from proxy.store.files import is_private
from proxy.store.known_models import Owner

if TYPE_CHECKING:
    from proxy.health import Degradation

USUAL_TOKENS = 10_000


@dataclass(slots=True, kw_only=True)
class LlamaServerFacts:
    """One llama-server: what it says of itself, and the results of its attach and of the probes.

    `name` is its model if it belongs to a host of models, or its address if there are several; `host` is
    the kind of that host. `n_ctx` is the context of one slot in tokens. `probe_mode` and `probe_owner_uid`
    are the mode and the owner of the files that it saves. `owner` is the model and tenant that its states
    belong to. `state_bytes` is the largest size of a state of USUAL_TOKENS, 0 if that was not measured; the
    seconds are those of its save, of its restore, and of evaluating its tokens. The `usable` checkpoints in
    the directory are of the model that runs now.
    """

    url: str
    name: str = ""
    host: str = ""
    build: str = ""
    model: str = ""
    n_slots: int = 0
    n_ctx: int = 0
    is_asleep: bool = False
    degradations: "tuple[Degradation, ...]" = ()
    """The degradations of its attach, as /health would show them."""
    failures: list[str] = field(default_factory=list)
    """The probes that failed, and why."""
    n_empty: int | None = None
    n_held: int = 0
    n_busy: int = 0
    probe_mode: int = 0
    probe_owner_uid: int | None = None
    layout: tuple[int, tuple[Section, ...] | None] | None = None
    """Slot file version and memory sections of its states; the sections are None if not understood."""
    may_have_window: bool = False
    has_drafting: bool = False
    """Whether its states hold the draft state of speculative decoding."""
    owner: Owner | None = None
    rule: Rule | None = None
    state_bytes: int = 0
    save_seconds: float = 0.0
    restore_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    n_usable: int = 0
    usable_bytes: int = 0
    has_ram_cache: bool = False
    mixes_up_slots: bool = False
    """Whether a prompt was answered otherwise while another slot generated."""


@dataclass(slots=True, kw_only=True)
class HostFacts:
    """A host of models: llama-server's router, or llama-swap.

    `models` are the names of all models, none if they could not be learned. `loaded` is the model that the
    examination loaded.
    """

    url: str
    kind: str
    models: tuple[str, ...] = ()
    loaded: str = ""
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class Setup:
    """All facts: about the directory, a proxy that uses it, and the llama-servers and hosts of `upstream`.

    A llama-server has an address of its own, or is a loaded model of a host. `problem` says why this
    process cannot use the directory, `index_problem` why the index in it cannot be read, and
    `scratch_problem` why no temporary copy of it can be made, so that nothing is examined. `lock` is not
    empty if a proxy uses the directory; `health` is what that proxy answers at `settings.admin`, or a proxy
    with another directory if none was given; None if no proxy answers there. The settings are without the
    API key.
    """

    settings: Settings
    own_uid: int
    mode: int = 0
    owner_uid: int = 0
    free_bytes: int | None = None
    reserve_bytes: int = 0
    problem: str = ""
    index_problem: str = ""
    is_index_damaged: bool = False
    scratch_problem: str = ""
    n_checkpoints: int = 0
    used_bytes: int = 0
    lock: str = ""
    health: dict[str, Any] | None = None
    hosts: list[HostFacts] = field(default_factory=list)
    llama_servers: list[LlamaServerFacts] = field(default_factory=list)

    @property
    def is_proxy_caching(self) -> bool:
        return self.health is not None and self.health["state"] != State.FORWARDING


# From the facts to findings.

LONGEST_STALL_SECONDS = 10.0
"""A save that stalls every slot for longer is reported as a limit."""
LEAST_FREE_BYTES = 64 << 20
"""The free space for a state whose size was not measured."""
_N_NAMED = 8

_K = DegradationKind
_RULES = {
    RuleKind.ANY_PREFIX: "Any prefix: any leading part of a saved state can be reused.",
    RuleKind.RESTORE_POINTS: "Restore points: a saved state can be continued at its end and at the context"
    " checkpoints in its file.",
    RuleKind.END_ONLY: "End only: a saved state can be continued at its very end and nowhere before, so"
    " prompts that were rewritten near their end start over.",
}
_AGAIN = "Run doctor again while nobody else uses llama-server."
"""The cure if other requests may have disturbed the examination."""


class Severity(IntEnum):
    """How bad a finding is; the worst one is the exit status."""

    OK = 0
    LIMIT = 1
    BLOCKER = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one topic: its severity, a text, and the flag or step that mends it.

    `about` names the llama-server, model or host, if there are several.
    """

    severity: Severity
    topic: str
    text: str
    cure: str = ""
    about: str = ""


ok = partial(Finding, Severity.OK)
limit = partial(Finding, Severity.LIMIT)
blocker = partial(Finding, Severity.BLOCKER)


def fine_unless(is_limit: bool, topic: str, text: str, cure: str) -> Finding:
    """Return a limit with its cure if *is_limit*, else a good finding."""
    return limit(topic, text, cure) if is_limit else ok(topic, text)


def degradation(kind: DegradationKind, detail: str, here: str = "") -> Finding:
    """Return the finding of a degradation, in the proxy's words; *here* is its cure on this server."""
    text = f"{kind.reason} ({detail})" if detail else kind.reason
    cure = f"{kind.cure} Here: {here}" if here else kind.cure
    may_pass = kind in PASSING or here == _AGAIN
    is_blocker = kind.leads_to is State.FORWARDING and not may_pass
    return (blocker if is_blocker else limit)(kind.value, text, cure)


def findings_of(setup: Setup) -> list[Finding]:
    """Return all findings; the ones about all llama-servers come last."""
    findings = []
    for host in setup.hosts:
        about = f"{host.kind} at {host.url.partition('://')[2]}"
        findings.append(replace(_host_finding(host, setup), about=about))
    for facts in setup.llama_servers:
        about = f"{facts.name} ({facts.host})" if facts.host else facts.name
        findings += [replace(each, about=about) for each in _server_findings(facts, setup)]
    return [*findings, *_sharing_findings(setup), *_directory_findings(setup)]


def exit_status(findings: Iterable[Finding]) -> Severity:
    """Return 0 if caching will work, 1 if it will with limits, 2 if it will not."""
    return max((finding.severity for finding in findings), default=Severity.OK)


def summary(setup: Setup) -> str:
    """Return the verdict in a sentence; it is good only if every deciding fact is known."""
    rules = [facts.rule for facts in setup.llama_servers]
    is_complete = setup.is_proxy_caching or (bool(rules) and None not in rules)
    worst = exit_status(findings_of(setup))
    if worst is Severity.BLOCKER:
        return "Caching will not work."
    if not is_complete:
        return "Nothing speaks against caching so far, but not everything could be examined."
    return "Caching will work, with limits." if worst else "Caching will work."


# One llama-server.


def _server_findings(facts: LlamaServerFacts, setup: Setup) -> Iterator[Finding]:
    """Yield the obstacles to caching at a llama-server, and the other findings about it."""
    path = setup.settings.slot_save_path
    is_silent = not facts.n_slots and _K.SILENT in [each.kind for each in facts.degradations]
    for each in facts.degradations:
        if is_silent and each.kind is _K.ATTACHING:
            continue  # it has not answered at all
        if facts.n_empty == 0 and each.kind in (_K.EVERY_SLOT_BUSY, _K.ATTACH_FAILED):
            continue  # the finding of the slots says it
        kind = _K.UNREACHABLE if is_silent and each.kind is _K.SILENT else each.kind
        yield degradation(kind, each.detail, _cures_here(facts, path).get(each.kind, ""))
    if facts.n_slots:
        yield ok("llama-server", f"{facts.build or 'unknown build'} serves {facts.model}.")
        yield _slots_finding(facts)
    if facts.mixes_up_slots:
        text = "While another slot runs, the answers of a slot are wrong, and so are its states."
        cure = "Start llama-server with --no-repack (a CPU with AMX needs that), or with -np 1"
        cure += "; then remove the wrong states: llama-prefix-cache rm --everything"
        yield limit("several slots", text, cure)
    if facts.is_asleep:
        text = "It was asleep: whenever it falls asleep, its slots lose what they hold."
        yield limit("llama-server", text, "Start llama-server without --sleep-idle-seconds")
    if facts.layout is not None:
        yield _ram_cache_finding(facts)
        yield from _memory_findings(facts, *facts.layout)
        yield _checkpoints_finding(facts, setup)
        yield ok("directory", f"A slot saved by llama-server appears in {path} and can be removed.")
    for failure in facts.failures:
        yield limit("probe", f"{failure}.", _AGAIN)


def _cures_here(facts: LlamaServerFacts, path: str) -> dict[DegradationKind, str]:
    """Return the parts of cures that depend on this server and this directory."""
    places = {"router": ", on the command line of the router", "llama-swap": ", in the model's cmd"}
    files = f"files of uid {facts.probe_owner_uid} have mode {facts.probe_mode:o}"
    can_save = (
        f"Let both users write there: {_share(path)}. See that the disk is local and not full, the"
        " directory not sticky, and llama-server of build 0.5 or later."
    )
    return {
        _K.LOADING: f"run doctor again when {facts.url}/health answers 200.",
        _K.NO_SLOT_SAVE_PATH: f"--slot-save-path {path}{places.get(facts.host, '')}; and -np N"
        " --cache-ram 0, if these are missing",
        _K.OTHER_DIRECTORY: f"start llama-server with --slot-save-path {path}",
        _K.FILES_UNREADABLE: f"{files}; {_share(path)}. Start llama-server with umask 007.",
        _K.IDLE_SLOTS_CLEARED: f"-np {facts.n_slots} --cache-ram 0. Each slot then has -c divided by"
        f" {facts.n_slots}: give a larger -c, or fewer slots",
        _K.ATTACH_FAILED: can_save if facts.probe_owner_uid is None else _AGAIN,
    }


def _slots_finding(facts: LlamaServerFacts) -> Finding:
    """Return how many slots there are, and whether one was free for the probes."""
    text = f"{facts.n_slots} slot{'s' * (facts.n_slots != 1)} of {facts.n_ctx:,} tokens"
    if facts.n_empty is None:
        return ok("slots", f"{text}.")
    text += f": {facts.n_empty} empty, {facts.n_held} holding work, {facts.n_busy} busy."
    if facts.n_empty:
        return ok("slots", text)
    path = f"/upstream/{facts.name}" if facts.host == "llama-swap" else ""
    body = f""" -d '{{"model": "{facts.name}"}}'""" if facts.host == "router" else ""
    return limit(
        "slots",
        f"{text} Probes need an empty slot, and none was emptied: restores were not examined.",
        "Run doctor when llama-server has just started, or empty a slot N whose work you can spare:"
        f" curl -X POST '{facts.url}{path}/slots/N?action=erase'{body}",
    )


def _ram_cache_finding(facts: LlamaServerFacts) -> Finding:
    """Return whether llama-server moves prompts between slots behind the proxy's back."""
    if not facts.has_ram_cache:
        return ok("RAM cache", "A prompt that was displaced was not brought back.")
    text = "It is on: llama-server swaps prompts in slots, for clients of any API key."
    cure = "Start llama-server with --cache-ram 0, without --cache-disk and --radix-cache"
    return limit("RAM cache", text, cure)


def _memory_findings(
    facts: LlamaServerFacts, version: int, layout: Sequence[Section] | None
) -> Iterator[Finding]:
    """Yield the form of a state file, its rule, and its cost."""
    if version in SUPPORTED_VERSIONS:
        kinds = " + ".join(section.kind for section in layout or ())
        drafts = " Saved with the draft state of speculative decoding." * facts.has_drafting
        batches = " A sliding window: if -b is larger than -ub, some answers are wrong."
        batches *= facts.may_have_window
        memory = kinds or "of a kind that is not known"
        yield ok("slot files", f"Version {version}; memory: {memory}.{drafts}{batches}")
    else:
        text = f"Version {version} is not known here: states are restored at their end only."
        cure = "Use a newer llama-prefix-cache, or llama.cpp 0.7.0 (version 4)."
        yield limit("slot files", text, cure)
    if facts.rule is not None and facts.rule.can_restore:  # else the attach says why
        text = _RULES[facts.rule.kind]
        if n_least := facts.rule.end_holds_from:
            text += f" A state under {n_least:,} tokens cannot be continued at its end."
        cure = "Use llama.cpp 0.7.0 or later, without --ctx-checkpoints 0"
        cure += "; or with --swa-full" * facts.may_have_window
        yield fine_unless(facts.rule.is_end_only, "memory rule", text, cure)
    if facts.state_bytes:
        text = (
            f"A state of {USUAL_TOKENS:,} tokens takes at most {size_in_words(facts.state_bytes)}. Saving"
            f" it stops all slots for {seconds_in_words(facts.save_seconds)}; restoring takes"
            f" {seconds_in_words(facts.restore_seconds)} instead of"
            f" {seconds_in_words(facts.evaluate_seconds)} of evaluation."
        )
        cure = "Put the directory of --slot-save-path on a faster disk."
        yield fine_unless(facts.save_seconds > LONGEST_STALL_SECONDS, "cost", text, cure)


def _checkpoints_finding(facts: LlamaServerFacts, setup: Setup) -> Finding:
    """Return how many checkpoints the directory has, and how many of them are usable."""
    have = f"{setup.n_checkpoints:,} in all ({size_in_words(setup.used_bytes)})"
    if facts.n_usable or facts.host or not setup.n_checkpoints:
        usable = f"{facts.n_usable} ({size_in_words(facts.usable_bytes)})"
        return ok("checkpoints", f"{have}; {usable} fit the model that runs now.")
    return limit(
        "checkpoints",
        f"{have}; none fits: they are of another model, another cache layout or other adapters. They take"
        " up the budget until newer checkpoints push them out.",
        "Start llama-server as it was started then (-m, -np, -kvu, -fa, -ctk, -ctv, --lora, build), or give"
        " each model a --slot-save-path of its own; to delete them: llama-prefix-cache rm --everything"
        f" --slot-save-path {setup.settings.slot_save_path}",
    )


# The directory, and a proxy that uses it: the same for all llama-servers.


def _share(path: str) -> str:
    """Return the command that lets two users share a directory."""
    return f"chgrp GROUP {path} && chmod 2770 {path}, with both users in GROUP"


def _directory_findings(setup: Setup) -> Iterator[Finding]:
    path = setup.settings.slot_save_path
    if setup.health or (setup.lock and not setup.problem):
        yield _proxy_finding(setup)
    if setup.problem and not setup.is_proxy_caching:  # a proxy reads what it cannot write
        text = f"uid {setup.own_uid} cannot use {path}: {setup.problem}."
        cure = f"Give it to the proxy's user: chown -R USER {path}. For two users: {_share(path)}."
        yield blocker("directory", text, cure)
    if setup.is_index_damaged:
        cure = f"llama-prefix-cache check --fix --slot-save-path {path}; or start the proxy"
        yield limit("checkpoints", f"{setup.index_problem}.", cure)
    elif setup.index_problem:
        yield degradation(_K.STORE_NOT_OPEN, setup.index_problem, "run both as its owner")
    if setup.scratch_problem:
        cure = "Free some space there, or give doctor another place: TMPDIR=DIR."
        yield limit("temporary files", f"{setup.scratch_problem}: no probe was made.", cure)
    if setup.mode:
        yield _permission_finding(setup)
    if setup.free_bytes is not None:
        yield _space_finding(setup, setup.free_bytes)


def _permission_finding(setup: Setup) -> Finding:
    """Return who else has access to the directory."""
    if not is_private(setup.mode):
        path = setup.settings.slot_save_path
        return degradation(_K.DIRECTORY_IS_OPEN, f"{path} has mode {setup.mode:o}")
    as_root = " Checked as root, who may do anything: run doctor as the user who runs the proxy."
    text = f"Mode {setup.mode:o}, uid {setup.owner_uid}."
    return ok("permissions", text if setup.own_uid else text + as_root)


def _space_finding(setup: Setup, free_bytes: int) -> Finding:
    """Return whether another state fits on the disk, if stored states are deleted for it."""
    needed = max((f.state_bytes for f in setup.llama_servers), default=0) or LEAST_FREE_BYTES
    usable = free_bytes + setup.used_bytes - setup.reserve_bytes
    text = f"{size_in_words(free_bytes)} free, {size_in_words(setup.used_bytes)} in states; a state may"
    text += f" need {size_in_words(needed)}, {size_in_words(setup.reserve_bytes)} are left free."
    if usable < needed:
        cure = "Free some space, or use another disk."
        return (limit if usable > 0 else blocker)("disk space", text, cure)
    if usable < (budget := setup.settings.max_store_bytes):
        text += f" The budget is what the disk has, not {size_in_words(budget)} (max_store_bytes)."
    return ok("disk space", text)


def _proxy_finding(setup: Setup) -> Finding:
    """Return the state that a proxy on the directory reports."""
    topic = "running proxy"
    if setup.health is None:
        text = f"No proxy tells its health at {setup.settings.admin}; {setup.lock}."
        cure = "Give its --admin HOST:PORT, and --admin-token-file FILE if it asks for a token; or stop it."
        return limit(topic, text, cure)
    # Doctor reports the directory's permissions itself.
    reasons = [r for r in setup.health["reasons"] if r["kind"] != _K.DIRECTORY_IS_OPEN]
    says = " ".join([f"It is {setup.health['state']}.", *(each["reason"] for each in reasons)])
    if not reasons:
        return ok(topic, f"{says} Its slots were left alone.")
    cures = " ".join(each["cure"] for each in reasons)
    cure = f"{cures} For the exact step, stop the proxy and run doctor again."
    will_pass = all(each["kind"] in PASSING for each in reasons)
    return (limit if setup.is_proxy_caching or will_pass else blocker)(topic, says, cure)


# Hosts of models, and whether several llama-servers with one model can share states.


def _host_finding(host: HostFacts, setup: Setup) -> Finding:
    """Return the models of a host, and which of them were examined."""
    if host.problem and host.models and not all(each.problem for each in setup.hosts):
        return ok("models", f"{host.problem} here, but elsewhere.")
    if host.problem:
        log = f"See what the log of the {host.kind} says of it."
        cure = f"Give --model one of these: {_listed(host.models)}." if host.models else log
        return blocker("models", f"{host.problem}.", cure)
    there_are = f"A {host.kind} with {len(host.models)} model{'s' * (len(host.models) != 1)}"
    ours = (f for f in setup.llama_servers if (f.url, f.host) == (host.url, host.kind))
    examined = {facts.name for facts in ours}
    others = _listed(set(host.models) - examined)
    if examined:
        loaded = f" {host.loaded} was loaded for this, and stays." if host.loaded else ""
        rest = f" Not examined: {others} (--model NAME)." if others else ""
        return ok("models", f"{there_are}; examined: {_listed(examined)}.{loaded}{rest}")
    text = f"{there_are}; none is loaded, so none was examined. doctor loads none by itself."
    cure = f"Let it load and examine one: doctor --model NAME, of {others or 'none yet'}."
    return limit("models", text, cure)


def _listed(names: Iterable[str]) -> str:
    named = sorted(names)
    more = f" and {len(named) - _N_NAMED} more" if len(named) > _N_NAMED else ""
    return ", ".join(named[:_N_NAMED]) + more


def _sharing_findings(setup: Setup) -> Iterator[Finding]:
    """Yield whether all llama-servers with one model can continue each other's states.

    All llama-servers at addresses of their own should have one model; at hosts, those with the same name.
    """

    def model(facts: LlamaServerFacts) -> str:
        return facts.name if facts.host else ""

    for _, group in groupby(sorted(setup.llama_servers, key=model), key=model):
        first, *others = group
        found = [finding for other in others if (finding := _between(first, other))]
        yield from found
        if others and not found and all(facts.layout for facts in (first, *others)):
            names = ", ".join(facts.name for facts in (first, *others))
            yield ok("sharing", f"A state of any of them can be continued by the others: {names}.")


def _between(left: LlamaServerFacts, right: LlamaServerFacts) -> Finding | None:
    """Return what keeps two llama-servers from continuing each other's states; None if nothing does."""
    a, b = left.owner, right.owner
    if a is None or b is None or (a.has_same_model(b) and left.n_ctx == right.n_ctx):
        return None
    text = (
        f"{left.name} and {right.name} cannot continue all states of each other: they serve {left.model}"
        f" and {right.model} in slots of {left.n_ctx:,} and {right.n_ctx:,} tokens."
    )
    cure = (
        "Start both with the same model, --lora, -c, -np, -fa, -ctk, -ctv, -kvu, --swa-full and --rope-*,"
        " from the same build; for several models use a router, llama-swap, or a proxy for each."
    )
    are_models_different = left.model.rpartition("/")[2] != right.model.rpartition("/")[2]
    return (blocker if are_models_different else limit)("sharing", text, cure)
