"""One survey: every llama-server that `upstream` names is found and examined, one after the other.

While a proxy uses the directory nothing is tried out and no model loaded: the proxy is asked instead. At a
host of models only the one that was asked for by name is loaded, for another one may have to go for it.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from proxy.doctor.examination import Note, Subject, examine_server
from proxy.doctor.facts import HostFacts, LlamaServerFacts, ProxyFacts, ServerFacts, Survey
from proxy.doctor.probes import examine_directory
from proxy.errors import IndexDamaged, StoreFault, StoreLocked, UpstreamFault, UpstreamRefused
from proxy.llama.client import LlamaServer
from proxy.llama.hosts import (
    HostedFlags,
    ModelHost,
    Models,
    load_and_listen,
    recognise,
)
from proxy.settings import reachable
from proxy.store.directory import keep_proxies_out
from proxy.store.index import IndexContent, read_index

_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Reached:
    """The llama-servers to examine at an address, and the host if there is one."""

    upstreams: tuple[LlamaServer, ...]
    host: HostFacts | None = None


async def survey(subject: Subject) -> Survey:
    """Return all facts; raises nothing that a person could mend."""
    try:
        with keep_proxies_out(subject.directory):
            return await _survey(subject, may_probe=True)
    except StoreLocked as lock:
        session = subject.roots[0].session
        health = await _health(session, subject.admin)
        proxy = ProxyFacts(admin=subject.admin, lock=str(lock), health=health)
    return replace(await _survey(subject, may_probe=False), proxy=proxy)


async def _survey(subject: Subject, *, may_probe: bool) -> Survey:
    subject.note("asking llama-server what it is")
    reached = [
        await reach(root, subject.asked_for, may_load=may_probe, note=subject.note)
        for root in subject.roots
    ]
    directory = examine_directory(subject.directory, subject.limits, subject.free_bytes)
    index = None
    if may_probe and not directory.problem:
        try:
            index = read_index(subject.directory)
            directory = replace(directory, used_bytes=sum(c.size_bytes for c in index.checkpoints))
        except StoreFault as fault:
            index, directory = (
                IndexContent(),
                replace(
                    directory,
                    index_problem=str(fault),
                    is_index_damaged=isinstance(fault, IndexDamaged),
                ),
            )
    return Survey(
        directory=directory,
        llama_servers=tuple([facts async for facts in _examine(reached, subject, index)]),
        hosts=tuple(each.host for each in reached if each.host is not None),
        idle_save_seconds=subject.idle_save_seconds,
        asked_for=subject.asked_for,
    )


async def _examine(
    reached: Sequence[Reached], subject: Subject, index: IndexContent | None
) -> AsyncIterator[LlamaServerFacts]:
    for each in reached:
        for upstream in each.upstreams:
            is_one_of_several = len(reached) > 1 or each.host is not None
            server = ServerFacts(
                url=upstream.target.base_url,
                name=upstream.target.name if is_one_of_several else "",
                host=each.host.kind if each.host else "",
            )
            try:
                yield await examine_server(upstream, server, subject, index)
            except (StoreFault, OSError) as fault:
                yield LlamaServerFacts(
                    server=server, failures=(f"no scratch store could be opened: {fault}",)
                )


async def _health(session: aiohttp.ClientSession, admin: str) -> dict[str, Any] | None:
    """Return what a proxy says of itself at *admin* (HOST:PORT), None if none answers there."""
    url, limit = f"http://{reachable(admin)}/health", aiohttp.ClientTimeout(total=_SECONDS)
    try:
        async with session.get(url, timeout=limit) as reply:
            health = msgspec.json.decode(await reply.read(), type=dict[str, Any])
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return None
    return health if {"state", "reasons"} <= health.keys() else None


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
        models = await host.models()
        flags = {each.model: each for each in await host.flags()}
    except UpstreamFault as fault:
        return Reached((), replace(facts, problem=str(fault)))
    hosted = tuple(flags.get(model, HostedFlags(model)) for model in sorted(models.known))
    wanted = models.loaded & {facts.asked_for} if asked_for else models.loaded
    upstreams = tuple(root.at(host.target(model)) for model in sorted(wanted))
    return Reached(upstreams, replace(facts, models=hosted))


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
