"""From a survey to its findings: hosts, each llama-server, and what is the same for all of them.

Pure. What is about the directory or about a running proxy belongs into `_of_all`.
"""

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from proxy.core.conditions import DegradationKind
from proxy.core.model import is_same_canary
from proxy.doctor.facts import (
    USUAL_TOKENS,
    DirectoryFacts,
    HostFacts,
    LlamaServerFacts,
    ProxyFacts,
    StateFacts,
    Survey,
)
from proxy.doctor.findings import (
    CHECKPOINTS,
    DIRECTORY,
    Finding,
    blocker,
    counted,
    degradation_finding,
    how_to_empty,
    limit,
    ok,
    server_findings,
    share,
    size,
)

_K = DegradationKind
PERMISSIONS, SPACE = "permissions", "disk space"
MODELS, SAVE_PATH, IDLE = "models", "slot-save-path", "idle models"
LOADING, REQUESTS, SHARING, PROXY = "loading", "requests", "sharing", "running proxy"
SWAP_CONCURRENCY = 10
"""llama-swap's concurrencyLimit for a model that says nothing of it; what is above it is told 429."""
LEAST_FREE_BYTES = 64 << 20
"""What must be free where the size of a state is not known."""
_N_NAMED = 8
_PASSING = {_K.ATTACHING, _K.LOADING, _K.SELF_TEST_PENDING}
"""They end by themselves, so they are nothing to mend."""


def findings_of(survey: Survey) -> list[Finding]:
    """Return everything that is to be said of *survey*; what is about all comes last."""
    findings = [*_asked_for_findings(survey)]
    for host in survey.hosts:
        findings += _about(host.name, _host_findings(host, survey))
    for facts in survey.llama_servers:
        host_name = f" ({facts.server.host})" if facts.server.host else ""
        about = "" if survey.is_single else f"{facts.server.name}{host_name}"
        findings += _about(about, server_findings(facts, survey.directory))
    return [*findings, *_sharing_findings(survey), *_of_all(survey)]


def is_complete(survey: Survey) -> bool:
    """Return whether what decides was looked at, by doctor itself or by a proxy that caches."""
    if survey.proxy is not None and survey.proxy.is_caching:
        return True
    rules = [facts.memory.rule if facts.memory else None for facts in survey.llama_servers]
    return bool(rules) and None not in rules


def _about(name: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    return (replace(finding, about=name) for finding in findings)


def _of_all(survey: Survey) -> Iterator[Finding]:
    """Yield what is the same whichever llama-server is looked at."""
    directory = survey.directory
    if survey.proxy is not None:
        yield _proxy_finding(survey.proxy)
    if directory.problem:
        yield blocker(
            DIRECTORY,
            f"uid {directory.own_uid} cannot use {directory.path}: {directory.problem}.",
            f"Give it to the user who runs llama-server and the proxy: chown USER {directory.path}."
            f" For two users: {share(directory.path)}",
        )
    if directory.index_problem:
        yield _index_finding(directory)
    if directory.mode:
        yield _permission_finding(survey)
    if directory.free_bytes is not None:
        yield _space_finding(survey, directory, directory.free_bytes)


def _index_finding(directory: DirectoryFacts) -> Finding:
    """Return what is wrong with the index; the proxy itself mends a damaged one."""
    if directory.is_index_damaged:
        return limit(
            CHECKPOINTS,
            f"{directory.index_problem}.",
            f"llama-prefix-cache check --fix --slot-save-path {directory.path}; or start the proxy, which"
            " does the same.",
        )
    return degradation_finding(
        _K.STORE_NOT_OPEN,
        directory.index_problem,
        "run doctor and the proxy as the user who made it; or start afresh:"
        f" {how_to_empty(directory.path)}",
    )


def _permission_finding(survey: Survey) -> Finding:
    """Return who else can get at the directory."""
    directory = survey.directory
    mode, own_uid = directory.mode, directory.own_uid
    savers = (facts.probe_save.owner_uid for facts in survey.llama_servers if facts.probe_save)
    is_for_two = own_uid != 0 and any(uid not in (None, own_uid) for uid in savers)
    if not directory.is_private:
        here = f"chmod {'2770' if is_for_two or mode & 0o2000 else '700'} {directory.path}"
        seen = f"{directory.path} has mode {mode:o}"
        return degradation_finding(_K.DIRECTORY_IS_OPEN, seen, here)
    as_root = " Checked as root, who may do anything: run doctor as the user who runs the proxy."
    text = f"Mode {mode:o}, uid {directory.owner_uid}."
    return ok(PERMISSIONS, text + ("" if own_uid else as_root))


def _space_finding(survey: Survey, directory: DirectoryFacts, free_bytes: int) -> Finding:
    """Return how many states fit on the disk, and whether the budget does."""
    sizes = (facts.cost.largest_bytes for facts in survey.llama_servers if facts.cost)
    state_bytes = max(sizes, default=LEAST_FREE_BYTES)
    budget_left = max(0, directory.budget_bytes - directory.used_bytes)
    usable = free_bytes - directory.min_free_bytes
    if usable < state_bytes:
        return blocker(
            SPACE,
            f"The disk is nearly full: {size(free_bytes)} free; a state of {USUAL_TOKENS:,} tokens may"
            f" need {size(state_bytes)}, and {size(directory.min_free_bytes)} are left free"
            " (--min-free-bytes).",
            f"Free some space, or use another disk: a new --slot-save-path for llama-server and here"
            f" (now {directory.path}).",
        )
    if usable < budget_left:
        can_have = (directory.used_bytes + usable * 9 // 10) >> 20
        return limit(
            SPACE,
            f"{size(free_bytes)} free, but --max-store-bytes allows {size(budget_left)} more: the disk"
            " would fill up first.",
            f"Give serve --max-store-bytes {can_have}MiB, or free some space.",
        )
    return ok(SPACE, f"{size(free_bytes)} free; the budget allows {size(budget_left)} more.")


def _proxy_finding(proxy: ProxyFacts) -> Finding:
    """Return what a proxy that uses the directory says of itself."""
    if (health := proxy.health) is None:
        return limit(
            PROXY,
            f"One uses the directory ({proxy.lock}), but none answers at {proxy.admin}. Its slots"
            " were left alone.",
            "Give that proxy's own --admin HOST:PORT, or stop it and run doctor again.",
        )
    if proxy.is_caching:
        writes = health.get("writes", {})
        n_bytes, budget = writes.get("bytes_last_day", 0), writes.get("max_bytes_per_day", 0)
        written = size(n_bytes) + (f" of {size(budget)}" if budget else "")
        told = (
            f"It caches; memory rule: {proxy.rule}. Written within 24 hours: {written}. Its slots were"
            " left alone. To examine them too, stop it and run doctor again."
        )
        # Who may read the directory is looked at here, too.
        reasons = [r for r in health["reasons"] if r["kind"] != _K.DIRECTORY_IS_OPEN]
        if not reasons:
            return ok(PROXY, told)
        says = "; ".join(reason["reason"] for reason in reasons)
        return limit(PROXY, f"{told} It says: {says}", f"See `cure` at http://{proxy.admin}/health")
    reasons = [reason for reason in health["reasons"] if reason["kind"] not in _PASSING]
    if reasons:
        return blocker(
            PROXY,
            f"It only forwards: {' '.join(reason['reason'] for reason in reasons)}",
            f"{' '.join(reason['cure'] for reason in reasons)} For the exact step, stop the proxy and run"
            " doctor again.",
        )
    return limit(
        PROXY,
        "It does not cache yet: it has not attached to llama-server, or its self-test is running.",
        f"Look again in a minute: curl http://{proxy.admin}/health",
    )


def _asked_for_findings(survey: Survey) -> Iterator[Finding]:
    """Yield what is wrong with a model that was asked for by name."""
    name = survey.asked_for
    if not name or any(host.asked_for or host.problem for host in survey.hosts):
        return
    if not survey.hosts:
        yield limit(
            MODELS,
            f"--model {name} says nothing to a llama-server of one model: it takes any name.",
            "Leave it out, or give the address of a router or of llama-swap with --upstream URL.",
        )
        return
    known = sorted({flags.model for host in survey.hosts for flags in host.models})
    yield blocker(
        MODELS, f"There is no model {name}.", f"Give --model one of these: {_listed(known)}."
    )


def _host_findings(host: HostFacts, survey: Survey) -> Iterator[Finding]:
    """Yield which models there are, which were looked at, and what their flags say."""
    servers = (facts for facts in survey.llama_servers if facts.server.url == host.url)
    examined = {facts.server.name: facts for facts in servers if facts.server.host == host.kind}
    if host.problem:
        yield blocker(
            MODELS, f"{host.problem}.", f"See what the log of the {host.kind} says of it."
        )
    elif host.asked_for or not survey.asked_for:
        yield _models_finding(host, examined)
    if host.tells_all_flags:
        yield from _save_path_findings(host, examined, survey.directory.path)
    yield from _idle_findings(host, survey.idle_save_seconds)
    if host.tells_of_loading:
        yield limit(
            LOADING,
            "While a model is loaded, llama-swap writes about it into the reasoning of the answer. Clients"
            " send that back as the model's, which never wrote it, so that no state fits beyond it.",
            "sendLoadingState: false in llama-swap's configuration",
        )
    if host.kind == "llama-swap":
        yield from _requests_findings(examined)


def _listed(names: Iterable[str]) -> str:
    named = list(names)
    more = f" and {len(named) - _N_NAMED} more" if len(named) > _N_NAMED else ""
    return ", ".join(named[:_N_NAMED]) + more


def _models_finding(host: HostFacts, examined: dict[str, LlamaServerFacts]) -> Finding:
    there_are = f"A {host.kind} with {counted(len(host.models), 'model')}"
    if host.n_at_most is not None and host.n_at_most < len(host.models):
        there_are += f", of which {host.n_at_most} at once"
    others = [flags.model for flags in host.models if flags.model not in examined]
    if examined:
        gone = f"; {_listed(host.unloaded)} had to go for it" if host.unloaded else ""
        loaded = f" {host.loaded} was loaded for this, and stays{gone}." if host.loaded else ""
        rest = f" Not examined: {_listed(others)} (--model NAME)." if others else ""
        return ok(MODELS, f"{there_are}; examined: {_listed(examined)}.{loaded}{rest}")
    if host.asked_for:
        return limit(
            MODELS,
            f"{there_are}. {host.asked_for} is not loaded, and is not while a proxy decides over that.",
            "Stop the proxy and run doctor again, or ask the proxy something of that model.",
        )
    return limit(
        MODELS,
        f"{there_are}; none is loaded, so none was examined. doctor loads none by itself.",
        f"Let it load and examine one: doctor --model NAME, of {_listed(others) or 'none yet'}.",
    )


def _save_path_findings(
    host: HostFacts, examined: dict[str, LlamaServerFacts], directory: str
) -> Iterator[Finding]:
    """Yield what the flags of models that were not examined say of where they save."""
    ours, is_handed_on = {posixpath.normpath(directory)}, False
    for flags in host.models:
        facts = examined.get(flags.model)
        if facts and flags.slot_save_path is None:
            # Environment variables are handed on to all models, and are not told.
            is_handed_on |= bool(facts.server.has_slot_save_path)
        elif facts and facts.probe_save and not facts.probe_save.problem:
            # It was seen to save into our directory, whatever it calls that.
            ours.add(posixpath.normpath(flags.slot_save_path or ""))
    others = {f.model: f.slot_save_path for f in host.models if f.model not in examined}
    none = [model for model, path in others.items() if path is None]
    if none and not is_handed_on:
        yield limit(
            SAVE_PATH,
            f"Without --slot-save-path, as far as their flags say: {_listed(none)}.",
            f"Start the {host.kind} itself with --slot-save-path {directory}: it hands it on to all.",
        )
    elsewhere = {
        m: path for m, path in others.items() if path and posixpath.normpath(path) not in ours
    }
    if elsewhere:
        named = _listed(f"{model} ({path})" for model, path in elsewhere.items())
        yield limit(
            SAVE_PATH,
            f"With another --slot-save-path than {directory}: {named}.",
            "Give all models the same: on the command line of the router it beats the presets.",
        )


def _idle_findings(host: HostFacts, idle_save_seconds: float) -> Iterator[Finding]:
    """Yield the models whose slots are gone, idle, before the proxy saves them."""
    for flags in host.models:
        for idle_seconds, what, cure in (
            (flags.unload_seconds, "is unloaded", "its ttl in llama-swap's configuration"),
            (flags.sleep_seconds, "falls asleep", "its --sleep-idle-seconds"),
        ):
            if 0 < idle_seconds <= idle_save_seconds:
                yield limit(
                    IDLE,
                    f"{flags.model} {what} when it was idle for {idle_seconds:g} s, and its slots are"
                    f" saved after {idle_save_seconds:g} s (--idle-save-seconds): too late.",
                    f"Raise {cure}, or give serve --idle-save-seconds {max(1, idle_seconds // 4):g}",
                )


def _requests_findings(examined: dict[str, LlamaServerFacts]) -> Iterator[Finding]:
    """Yield the models whose slots are more than llama-swap lets requests through, unless told."""
    for name, facts in examined.items():
        n_slots = facts.server.n_slots
        if n_slots >= SWAP_CONCURRENCY:
            yield limit(
                REQUESTS,
                f"{name} has {n_slots} slots. Unless its concurrencyLimit says otherwise, which cannot"
                f" be seen from here, llama-swap refuses more than {SWAP_CONCURRENCY} requests at once"
                " (429), the proxy's own among them.",
                f"concurrencyLimit: {4 * n_slots} for {name} in llama-swap's configuration",
            )


def _sharing_findings(survey: Survey) -> Iterator[Finding]:
    """Yield whether all llama-servers with one model can continue each other's states.

    Those at addresses of their own should have the same; those of hosts if they have the same name.
    """

    def model(facts: LlamaServerFacts) -> str:
        return facts.server.name if facts.server.host else ""

    for _, group in groupby(sorted(survey.llama_servers, key=model), key=model):
        first, *others = group
        found = [finding for other in others for finding in _between(first, other)]
        yield from found
        if others and not found and all(facts.states for facts in (first, *others)):
            names = ", ".join(facts.server.name for facts in (first, *others))
            yield ok(SHARING, f"A state of any of them can be continued by the others: {names}.")


def _between(left: LlamaServerFacts, right: LlamaServerFacts) -> Iterator[Finding]:
    names = f"{left.server.name} and {right.server.name}"
    if left.states is not None and right.states is not None:
        yield from _difference(names, left, right, left.states, right.states)
    sizes = (left.server.n_ctx, right.server.n_ctx)
    if 0 not in sizes and sizes[0] != sizes[1]:
        yield limit(
            SHARING,
            f"A slot of {names} has {sizes[0]:,} and {sizes[1]:,} tokens: clients can rely on the"
            " smaller only.",
            "Start both with the same -c and -np",
        )


def _difference(
    names: str,
    left: LlamaServerFacts,
    right: LlamaServerFacts,
    ours: StateFacts,
    theirs: StateFacts,
) -> Iterator[Finding]:
    """Yield the first thing that keeps two llama-servers from continuing each other's states."""
    a, b = ours.identity, theirs.identity
    is_same_answer = is_same_canary(ours.canary, theirs.canary)
    # A model file that cannot be read is named by its path.
    is_same_model = a.model == b.model or (is_same_answer and " " in a.model + b.model)
    numbers = [(each.n_vocab, each.n_params, each.size_bytes) for each in (a, b)]
    if not is_same_model or numbers[0] != numbers[1]:
        yield blocker(
            SHARING,
            f"{names} serve different models ({left.server.model} and {right.server.model}), but"
            " requests go to either.",
            "Start all llama-servers of one upstream with the same model; for several models use"
            " llama-server's router or llama-swap, or a proxy for each.",
        )
        return
    for is_same, why, cure in (
        (a.adapters == b.adapters, "have different adapters", "--lora"),
        (
            a.model == b.model,
            "have their model under paths that differ and cannot be read here",
            "-m",
        ),
        (
            ours.layout == theirs.layout,
            "keep their states in different forms",
            "-fa, -ctk, -ctv, -kvu and --swa-full, from the same build",
        ),
        (
            is_same_answer,
            "have the same model, but predict differently with it",
            "--rope-* flags and --override-kv",
        ),
    ):
        if not is_same:
            text = f"{names} {why}: neither can continue a state of the other."
            yield limit(SHARING, text, f"Start both with the same {cure}")
            return
