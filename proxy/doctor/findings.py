"""From facts to findings, in the order in which a person wants to read them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from proxy.doctor.cache_findings import cache_findings
from proxy.doctor.directory_findings import place_findings, use_findings
from proxy.doctor.facts import BehaviourFacts, Contact, Facts
from proxy.doctor.host_findings import asked_for_findings, host_findings
from proxy.doctor.server_findings import (
    ability_findings,
    behaviour_findings,
    contact_finding,
    failure_findings,
    proxy_finding,
    slots_finding,
)
from proxy.doctor.sharing_findings import sharing_findings
from proxy.doctor.survey_facts import Survey
from proxy.doctor.verdict import Finding


def findings_of(survey: Survey) -> list[Finding]:
    """Return everything that is to be said of *survey*; what is about all comes last."""
    of_servers = _of_several(survey)
    if survey.is_single:
        of_servers = _of_server(survey.llama_servers[0])
    return [*asked_for_findings(survey), *of_servers, *_of_all(survey)]


def is_complete(survey: Survey) -> bool:
    """Return whether what decides was looked at, by doctor itself or by a proxy that caches."""
    if survey.proxy is not None and survey.proxy.is_caching:
        return True
    rules = [facts.memory.rule if facts.memory else None for facts in survey.llama_servers]
    return bool(rules) and None not in rules


def _of_several(survey: Survey) -> Iterator[Finding]:
    for host in survey.hosts:
        yield from _about(host.name, host_findings(host, survey))
    for facts in survey.llama_servers:
        host_name = f" ({facts.server.host})" if facts.server.host else ""
        yield from _about(f"{facts.server.name}{host_name}", _of_server(facts))
    yield from sharing_findings(survey)


def _about(name: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    return (replace(finding, about=name) for finding in findings)


def _of_server(facts: Facts) -> Iterator[Finding]:
    yield contact_finding(facts.server)
    if facts.server.contact is Contact.ANSWERS:
        yield from ability_findings(facts.server, facts.directory.path)
        yield slots_finding(facts.server, facts.slots)
    if facts.behaviour != BehaviourFacts() or facts.memory is not None:
        yield from behaviour_findings(facts.server, facts.behaviour, facts.cost)
    yield from cache_findings(facts)
    if not facts.directory.problem:
        yield from use_findings(facts.directory, facts.probe_save)
    yield from failure_findings(facts)


def _of_all(survey: Survey) -> Iterator[Finding]:
    """Yield what is the same whichever llama-server is looked at; each thing once."""
    directory, servers = survey.directory, survey.llama_servers
    if survey.proxy is not None:
        yield proxy_finding(survey.proxy)
    if directory.problem:
        yield from use_findings(directory, None)
    seen = (place_findings(f.directory, f.probe_save, f.cost) for f in servers)
    found = [finding for findings in seen for finding in findings]
    yield from _worst_of_each(found or place_findings(directory, None, None))


def _worst_of_each(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each topic, the worst."""
    worst: dict[str, Finding] = {}
    for finding in findings:
        if finding.topic not in worst or finding.severity > worst[finding.topic].severity:
            worst[finding.topic] = finding
    return list(worst.values())
