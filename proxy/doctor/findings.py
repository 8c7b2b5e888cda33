"""From facts to findings, in the order in which a person wants to read them."""

from collections.abc import Iterator

from proxy.doctor.cache_findings import cache_findings
from proxy.doctor.directory_findings import directory_findings
from proxy.doctor.facts import BehaviourFacts, Contact, Facts
from proxy.doctor.server_findings import (
    ability_findings,
    behaviour_findings,
    contact_finding,
    failure_findings,
    proxy_finding,
    slots_finding,
)
from proxy.doctor.verdict import Finding


def findings_of(facts: Facts) -> list[Finding]:
    """Return everything that is to be said of *facts*."""
    return list(_findings(facts))


def is_complete(facts: Facts) -> bool:
    """Return whether what decides was looked at, by doctor itself or by a proxy that caches."""
    has_rule = facts.memory is not None and facts.memory.rule is not None
    return has_rule or (facts.proxy is not None and facts.proxy.is_caching)


def _findings(facts: Facts) -> Iterator[Finding]:
    yield contact_finding(facts.server)
    if facts.server.contact is Contact.ANSWERS:
        yield from ability_findings(facts.server, facts.directory.path)
        yield slots_finding(facts.server, facts.slots)
    if facts.proxy is not None:
        yield proxy_finding(facts.proxy)
    if facts.behaviour != BehaviourFacts() or facts.memory is not None:
        yield from behaviour_findings(facts.server, facts.behaviour, facts.cost)
    yield from cache_findings(facts)
    yield from directory_findings(facts)
    yield from failure_findings(facts)
