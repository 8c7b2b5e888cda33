"""Finds the llama-servers behind an address: one, or the models that a host has loaded.

Loads no model but the one that was asked for by name, for another one may have to go for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from proxy.doctor.survey_facts import HostedFacts, HostFacts
from proxy.errors import UpstreamFault, UpstreamRefused
from proxy.upstream.hosted_flags import HostedFlags, hosted_flags
from proxy.upstream.hosts.model_host import ModelHost, Models
from proxy.upstream.hosts.recognising import recognise
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.loading_state import load_and_listen

Note = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Reached:
    """The llama-servers to examine at an address, and the host if there is one."""

    upstreams: tuple[LlamaServer, ...]
    host: HostFacts | None = None


async def reach(root: LlamaServer, asked_for: str, *, may_load: bool, note: Note) -> Reached:
    """Return what is at an address; of a host the loaded models, or only the one *asked_for*.

    That one is loaded if it *may* be; *note* is told so. Raises nothing.
    """
    host = await recognise(root)
    if host is None:
        return Reached((root,))
    facts = HostFacts(
        url=root.target.base_url, kind=host.kind, tells_all_flags=host.kind == "router"
    )
    try:
        before = await host.models()
        if asked_for and may_load:
            note(f"having {asked_for} loaded, if it is not")
        name = await _named(host, before, asked_for, may_load=may_load)
        facts = replace(facts, n_at_most=before.n_at_most, asked_for=name)
        if name and may_load and name not in before.loaded:
            facts = await _load(root, host, before, facts)
        return await _with_models(root, host, facts, is_one_asked_for=bool(asked_for))
    except UpstreamFault as fault:
        return Reached((), replace(facts, problem=str(fault)))


async def _named(host: ModelHost, models: Models, name: str, *, may_load: bool) -> str:
    """Return the model that is called *name*, empty if there is none."""
    found = models.named(name)
    if found is None and name and host.hides_names:
        if not may_load:
            return name  # to ask whether it is one would load it
        try:
            found = await host.resolve(name)
        except UpstreamRefused:
            found = None
    return found or ""


async def _load(root: LlamaServer, host: ModelHost, before: Models, facts: HostFacts) -> HostFacts:
    name = facts.asked_for
    try:
        if name in (await host.models()).loaded:
            pass  # by having been asked what it is called
        elif host.kind == "llama-swap":
            facts = replace(facts, tells_of_loading=await load_and_listen(root, name))
        else:
            await host.load(name)
    except UpstreamRefused as refusal:
        return replace(facts, problem=f"{name} could not be loaded ({refusal})")
    after = await host.models()
    return replace(facts, loaded=name, unloaded=tuple(sorted(before.loaded - after.loaded)))


async def _with_models(
    root: LlamaServer, host: ModelHost, facts: HostFacts, *, is_one_asked_for: bool
) -> Reached:
    models = await host.models()
    flags = {each.model: each for each in await hosted_flags(host)}
    hosted = (_hosted(name, models, flags.get(name)) for name in sorted(models.known))
    wanted = models.loaded & {facts.asked_for} if is_one_asked_for else models.loaded
    upstreams = tuple(root.at(host.target(name)) for name in sorted(wanted))
    return Reached(upstreams, replace(facts, models=tuple(hosted)))


def _hosted(name: str, models: Models, flags: HostedFlags | None) -> HostedFacts:
    flags = flags or HostedFlags(name)
    return HostedFacts(
        name=name,
        is_loaded=name in models.loaded,
        slot_save_path=flags.slot_save_path,
        unload_seconds=flags.unload_seconds,
        sleep_seconds=flags.sleep_seconds,
    )
