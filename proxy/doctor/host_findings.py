"""What there is to say of a host of models: pure, facts in and findings out."""

import posixpath
from collections.abc import Iterator

from proxy.doctor.facts import Facts
from proxy.doctor.survey_facts import HostedFacts, HostFacts, Survey
from proxy.doctor.verdict import Finding, blocker, limit, ok
from proxy.doctor.words import counted

MODELS, SAVE_PATH, IDLE = "models", "slot-save-path", "idle models"
LOADING, REQUESTS = "loading", "requests"
SWAP_CONCURRENCY = 10
"""llama-swap's concurrencyLimit for a model that says nothing of it; what is above it is told 429."""
_N_NAMED = 8


def asked_for_findings(survey: Survey) -> Iterator[Finding]:
    """Yield what is wrong with a model that was asked for by name."""
    name = survey.settings.asked_for
    if not name or any(host.asked_for or host.problem for host in survey.hosts):
        return
    if not survey.hosts:
        yield limit(
            MODELS,
            f"--model {name} says nothing to a llama-server of one model: it takes any name.",
            "Leave it out, or give the address of a router or of llama-swap with --upstream URL.",
        )
        return
    known = sorted({model.name for host in survey.hosts for model in host.models})
    yield blocker(
        MODELS, f"There is no model {name}.", f"Give --model one of these: {_listed(known)}."
    )


def host_findings(host: HostFacts, survey: Survey) -> Iterator[Finding]:
    """Yield which models there are, which were looked at, and what their flags say."""
    if host.problem:
        yield blocker(
            MODELS, f"{host.problem}.", f"See what the log of the {host.kind} says of it."
        )
    elif host.asked_for or not survey.settings.asked_for:
        yield _models_finding(host, survey)
    yield from _save_path_findings(host, survey)
    yield from _idle_findings(host, survey.settings.idle_save_seconds)
    if host.tells_of_loading:
        yield limit(
            LOADING,
            "While a model is loaded, llama-swap writes about it into the reasoning of the answer. Clients"
            " send that back as the model's, which never wrote it, so that no state fits beyond it.",
            "sendLoadingState: false in llama-swap's configuration",
        )
    if host.kind == "llama-swap":
        yield from _requests_findings(_examined(host, survey))


def _listed(names: list[str]) -> str:
    more = len(names) - _N_NAMED
    return ", ".join(names[:_N_NAMED]) + (f" and {more} more" if more > 0 else "")


def _examined(host: HostFacts, survey: Survey) -> list[Facts]:
    return [
        f for f in survey.llama_servers if (f.server.url, f.server.host) == (host.url, host.kind)
    ]


def _models_finding(host: HostFacts, survey: Survey) -> Finding:
    there_are = f"A {host.kind} with {counted(len(host.models), 'model')}"
    if host.n_at_most is not None and host.n_at_most < len(host.models):
        there_are += f", of which {host.n_at_most} at once"
    names = [facts.server.name for facts in _examined(host, survey)]
    others = [model.name for model in host.models if model.name not in names]
    if names:
        return ok(MODELS, f"{there_are}; examined: {_listed(names)}.{_loaded(host)}{_rest(others)}")
    if host.asked_for:
        return limit(
            MODELS,
            f"{there_are}. {host.asked_for} is not loaded, and is not while a proxy decides over that.",
            "Stop the proxy and run doctor again, or ask the proxy something of that model.",
        )
    return limit(
        MODELS,
        f"{there_are}; none is loaded, so none was examined. doctor loads none by itself.",
        f"Let it load and examine one: doctor --model NAME, of {_listed(others)}."
        if others
        else "Give it models.",
    )


def _loaded(host: HostFacts) -> str:
    if not host.loaded:
        return ""
    gone = f"; {_listed(list(host.unloaded))} had to go for it" if host.unloaded else ""
    return f" {host.loaded} was loaded for this, and stays{gone}."


def _rest(names: list[str]) -> str:
    return f" Not examined: {_listed(names)} (--model NAME)." if names else ""


def _save_path_findings(host: HostFacts, survey: Survey) -> Iterator[Finding]:
    """Yield what the flags of models that were not examined say of where they save."""
    examined = {facts.server.name: facts for facts in _examined(host, survey)}
    others = [model for model in host.models if model.name not in examined]
    if not host.tells_all_flags or not others:
        return
    directory = survey.directory.path
    none = [model.name for model in others if model.slot_save_path is None]
    # Environment variables are handed on to all models, and are not told.
    if none and not any(_saves_unsaid(model, examined) for model in host.models):
        yield limit(
            SAVE_PATH,
            f"Without --slot-save-path, as far as their flags say: {_listed(none)}.",
            f"Start the {host.kind} itself with --slot-save-path {directory}: it hands it on to all.",
        )
    known = {_normal(directory)}
    known |= {_normal(m.slot_save_path) for m in host.models if _is_sound(m, examined)}
    elsewhere = [m for m in others if m.slot_save_path and _normal(m.slot_save_path) not in known]
    if elsewhere:
        named = _listed([f"{model.name} ({model.slot_save_path})" for model in elsewhere])
        yield limit(
            SAVE_PATH,
            f"With another --slot-save-path than {directory}: {named}.",
            "Give all models the same: on the command line of the router it beats the presets.",
        )


def _normal(path: str | None) -> str:
    return posixpath.normpath(path or "")


def _is_sound(model: HostedFacts, examined: dict[str, Facts]) -> bool:
    """Return whether a model was seen to save into our directory, whatever it calls it."""
    facts = examined.get(model.name)
    return facts is not None and facts.probe_save is not None and facts.probe_save.is_whole


def _saves_unsaid(model: HostedFacts, examined: dict[str, Facts]) -> bool:
    facts = examined.get(model.name)
    saves = facts is not None and facts.server.has_slot_save_path is True
    return saves and model.slot_save_path is None


def _idle_findings(host: HostFacts, idle_save_seconds: float) -> Iterator[Finding]:
    """Yield the models whose slots are gone, idle, before the proxy saves them."""
    for model in host.models:
        for idle_seconds, what, cure in (
            (model.unload_seconds, "is unloaded", "its ttl in llama-swap's configuration"),
            (model.sleep_seconds, "falls asleep", "its --sleep-idle-seconds"),
        ):
            if 0 < idle_seconds <= idle_save_seconds:
                yield limit(
                    IDLE,
                    f"{model.name} {what} when it was idle for {idle_seconds:g} s, and its slots are saved"
                    f" after {idle_save_seconds:g} s (--idle-save-seconds): too late.",
                    f"Raise {cure}, or give serve --idle-save-seconds {max(1, idle_seconds // 4):g}",
                )


def _requests_findings(examined: list[Facts]) -> Iterator[Finding]:
    """Yield the models whose slots are more than llama-swap lets requests through, unless told."""
    for facts in examined:
        n_slots = facts.server.n_slots
        if n_slots >= SWAP_CONCURRENCY:
            yield limit(
                REQUESTS,
                f"{facts.server.name} has {n_slots} slots. Unless its concurrencyLimit says otherwise,"
                f" which cannot be seen from here, llama-swap refuses more than {SWAP_CONCURRENCY}"
                " requests at once (429), the proxy's own among them.",
                f"concurrencyLimit: {4 * n_slots} for {facts.server.name} in llama-swap's configuration",
            )
