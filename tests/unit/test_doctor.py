"""doctor's judgement: from facts to severity, words and cure. No real server."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from proxy.cli.command import console, in_lines
from proxy.cli.look import json_report, report
from proxy.core.conditions import DegradationKind
from proxy.core.model import KnownNamespace, Rule, RuleKind
from proxy.doctor.findings import (
    Finding,
    HostFacts,
    LlamaServerFacts,
    Setup,
    Severity,
    exit_status,
    findings_of,
    summary,
)
from proxy.health import Degradation
from proxy.llama.files import Section
from proxy.settings import Settings
from proxy.store.known_models import Owner
from tests.unit.builders import ANY_PREFIX, END_ONLY, RESTORE_POINTS

MIB, GIB = 1 << 20, 1 << 30
OWN_UID = 1000
ATTENTION, RECURRENT = (Section(kind, 1, False, 1, (), ()) for kind in ("attention", "recurrent"))

SETTINGS = Settings(
    slot_save_path="/states",
    max_store_bytes=20 * GIB,
    admin="127.0.0.1:8082",
    idle_save_seconds=10.0,
)
HEALTHY = LlamaServerFacts(
    url="http://127.0.0.1:8080",
    build="b11669",
    model="/models/a.gguf",
    n_slots=2,
    n_ctx=32768,
    n_empty=2,
    probe_mode=0o644,
    probe_owner_uid=OWN_UID,
    layout=(4, (ATTENTION,)),
    rule=ANY_PREFIX,
    state_bytes=40 * MIB,
    save_seconds=0.11,
    restore_seconds=0.05,
    evaluate_seconds=20.0,
)
UNTOUCHED = LlamaServerFacts(
    url=HEALTHY.url, build=HEALTHY.build, model=HEALTHY.model, n_slots=2, n_ctx=32768
)
DIRECTORY = Setup(
    settings=SETTINGS, own_uid=OWN_UID, mode=0o700, owner_uid=OWN_UID, free_bytes=100 * GIB
)
SLIDING = (ATTENTION, ATTENTION)
LIMIT, BLOCKER = Severity.LIMIT, Severity.BLOCKER


def server(**changes: Any) -> LlamaServerFacts:
    return replace(HEALTHY, **changes)


def directory(facts: LlamaServerFacts = HEALTHY, **changes: Any) -> Setup:
    return alone(facts, **changes)


def ran_into(kind: DegradationKind, detail: str = "", **changes: Any) -> LlamaServerFacts:
    """Return the facts of a healthy server but for one degradation."""
    return server(**changes, degradations=(Degradation(kind, detail, since=0.0),))


def memory(
    rule: Rule, *, version: int = 4, sections: tuple[Section, ...] = (ATTENTION,)
) -> LlamaServerFacts:
    may_have_window = len(sections) > 1
    return server(layout=(version, sections), rule=rule, may_have_window=may_have_window)


def stored(n_checkpoints: int, **changes: Any) -> Setup:
    """Return the setup of a directory with so many checkpoints."""
    return alone(server(**changes), n_checkpoints=n_checkpoints, used_bytes=GIB)


def proxy(health: dict[str, Any] | None = None) -> Setup:
    return alone(UNTOUCHED, lock="another one uses /states", health=health)


def forwarding(**reason: str) -> dict[str, Any]:
    return {"state": "forwarding", "reasons": [reason] if reason else []}


def alone(facts: LlamaServerFacts | Setup, **changes: Any) -> Setup:
    """Return the setup of one llama-server at an address of its own."""
    if isinstance(facts, Setup):
        return facts
    return replace(DIRECTORY, llama_servers=[facts], **changes)


def problems(facts: LlamaServerFacts | Setup) -> list[Finding]:
    return [finding for finding in findings_of(alone(facts)) if finding.severity is not Severity.OK]


@pytest.mark.parametrize(
    "setup",
    [
        alone(server(state_bytes=2 * MIB), free_bytes=20 * MIB, reserve_bytes=MIB),
        replace(stored(7, state_bytes=GIB), free_bytes=0),
        replace(proxy(forwarding()), free_bytes=0, used_bytes=GIB),
    ],
)
def test_disk_with_room_for_a_measured_state_or_in_place_of_stored_ones_is_no_problem(
    setup: Setup,
) -> None:
    assert "disk space" not in [finding.topic for finding in problems(setup)]


@pytest.mark.parametrize(("free_bytes", "is_told"), [(19 * GIB, True), (40 * GIB, False)])
def test_disk_that_is_smaller_than_the_budget_is_told(free_bytes: int, is_told: bool) -> None:
    texts = [
        f.text for f in findings_of(directory(free_bytes=free_bytes)) if f.topic == "disk space"
    ]
    assert ["not 20.0 GiB (max_store_bytes)" in text for text in texts] == [is_told]


def test_healthy_facts_give_no_problem_and_every_topic_once() -> None:
    findings = findings_of(alone(HEALTHY))
    assert problems(HEALTHY) == []
    assert [f.topic for f in findings] == [
        *("llama-server", "slots", "RAM cache", "slot files"),
        *("memory rule", "cost", "checkpoints", "directory", "permissions", "disk space"),
    ]
    assert exit_status(findings) == 0
    assert summary(alone(HEALTHY)) == "Caching will work."


@pytest.mark.parametrize(
    ("facts", "severity", "topic", "said", "cure"),
    [
        (
            ran_into(DegradationKind.UNREACHABLE, "cannot connect"),
            *(BLOCKER, "llama-server unreachable", "(cannot connect)", "--upstream URL"),
        ),
        (
            ran_into(DegradationKind.LOADING),
            *(LIMIT, "llama-server is loading", "still loading", "/health answers 200"),
        ),
        (
            ran_into(DegradationKind.NO_SLOT_SAVE_PATH),
            *(BLOCKER, "no slot save path", "without", "Here: --slot-save-path /states; and -np N"),
        ),
        (
            ran_into(DegradationKind.NO_SLOT_SAVE_PATH, host="router", name="full"),
            *(BLOCKER, "no slot save path", "without", "the command line of the router"),
        ),
        (
            ran_into(DegradationKind.OTHER_DIRECTORY),
            *(BLOCKER, "another slot save path", "not into", "with --slot-save-path /states"),
        ),
        (
            ran_into(DegradationKind.FILES_UNREADABLE),
            *(BLOCKER, "files unreadable", "may not read", "uid 1000 have mode 644; chgrp GROUP"),
        ),
        (
            ran_into(DegradationKind.IDLE_SLOTS_CLEARED),
            *(
                LIMIT,
                "idle slots are cleared",
                "one at a time",
                "Here: -np 2 --cache-ram 0. Each slot then",
            ),
        ),
        (
            ran_into(DegradationKind.ATTACH_FAILED, "500"),
            *(LIMIT, "attaching failed", "(500)", "while nobody else uses llama-server"),
        ),
        (
            ran_into(DegradationKind.RULE_IS_NOTHING),
            *(BLOCKER, "nothing can be restored", "reuses nothing", "--swa-full (it takes more"),
        ),
        (server(is_asleep=True), LIMIT, "llama-server", "asleep", "--sleep-idle-seconds"),
        (server(mixes_up_slots=True), LIMIT, "several slots", "are wrong", "--no-repack"),
        (server(has_ram_cache=True), LIMIT, "RAM cache", "is on", "--cache-ram 0"),
        (
            memory(END_ONLY, version=3, sections=(ATTENTION, RECURRENT)),
            *(LIMIT, "memory rule", "End only", "llama.cpp 0.7.0 or later"),
        ),
        (
            memory(END_ONLY, sections=(RECURRENT,)),
            *(LIMIT, "memory rule", "End only", "without --ctx-checkpoints 0"),
        ),
        (
            memory(END_ONLY, version=3, sections=SLIDING),
            *(LIMIT, "memory rule", "End only", "or with --swa-full"),
        ),
        (
            server(layout=(5, (ATTENTION,))),
            *(LIMIT, "slot files", "Version 5", "newer llama-prefix-cache"),
        ),
        (server(save_seconds=109.0), *(LIMIT, "cost", "stops all slots for 109 s", "faster disk")),
        (stored(3), *(LIMIT, "checkpoints", "they are of another model", "rm --everything")),
        (stored(3), *(LIMIT, "checkpoints", "another cache layout", "-np, -kvu, -fa")),
        (
            directory(index_problem="it cannot be read"),
            *(BLOCKER, "store not open", "it cannot be read", "as its owner"),
        ),
        (
            directory(scratch_problem="/tmp has no room"),
            *(LIMIT, "temporary files", "/tmp has no room: no probe", "TMPDIR=DIR"),
        ),
        (
            directory(UNTOUCHED, problem="Permission denied"),
            *(BLOCKER, "directory", "uid 1000 cannot use /states", "chown -R USER /states"),
        ),
        (  # nobody knows then whether a proxy uses it
            directory(UNTOUCHED, problem="Permission denied", lock="no access to the lock"),
            *(BLOCKER, "directory", "uid 1000 cannot use /states", "chown -R USER /states"),
        ),
        (
            ran_into(DegradationKind.ATTACH_FAILED, "500", probe_owner_uid=None),
            *(BLOCKER, "attaching failed", "(500)", "chmod 2770 /states"),
        ),
        (
            directory(mode=0o755),
            *(
                LIMIT,
                "directory is open to others",
                "/states has mode 755",
                "chmod 700 it, or 2770",
            ),
        ),
        (directory(free_bytes=0), *(BLOCKER, "disk space", "0 bytes free", "another disk")),
        (directory(free_bytes=MIB), *(LIMIT, "disk space", "1.0 MiB free", "another disk")),
        (
            server(failures=["the cost of a state could not be examined: 500"]),
            *(LIMIT, "probe", "could not be examined", "nobody else uses"),
        ),
        (
            proxy(),
            LIMIT,
            "running proxy",
            "No proxy tells its health at 127.0.0.1:8082",
            "--admin HOST:PORT",
        ),
        (
            proxy(forwarding(kind="no slot save path", reason="No path.", cure="Give one.")),
            *(BLOCKER, "running proxy", "No path.", "Give one. For the exact step, stop the proxy"),
        ),
        (
            proxy(forwarding(kind="attaching", reason="It attaches.", cure="None needed.")),
            *(LIMIT, "running proxy", "forwarding. It attaches.", "None needed"),
        ),
    ],
)
def test_problem_is_named_with_its_cure(
    facts: LlamaServerFacts | Setup, severity: Severity, topic: str, said: str, cure: str
) -> None:
    (finding,) = problems(facts)
    assert (finding.severity, finding.topic) == (severity, topic)
    assert said in finding.text
    assert ".state" not in finding.cure  # an index is made anew from the states, they from nothing
    assert cure in finding.cure
    assert exit_status(findings_of(alone(facts))) == severity


def test_worst_finding_decides() -> None:
    facts = ran_into(DegradationKind.RULE_IS_NOTHING, has_ram_cache=True)
    assert exit_status(findings_of(alone(facts))) == 2
    assert summary(alone(facts)) == "Caching will not work."


def test_without_an_empty_slot_nothing_good_is_promised() -> None:
    facts = replace(UNTOUCHED, n_empty=0, n_held=1, n_busy=1)
    (finding,) = problems(facts)
    assert "0 empty, 1 holding work, 1 busy" in finding.text
    assert "/slots/N?action=erase" in finding.cure
    assert exit_status(findings_of(alone(facts))) == 1
    assert "not everything" in summary(alone(facts))


def test_proxy_that_caches_is_proof_enough() -> None:
    setup = proxy({"state": "caching", "reasons": [], "rule": "restore points"})
    assert problems(setup) == []
    assert summary(setup) == "Caching will work."


def test_directory_that_a_proxy_reads_but_cannot_write_is_a_limit() -> None:
    reason = {"kind": "directory is read-only", "reason": "It cannot be written.", "cure": "chown"}
    setup = proxy({"state": "degraded", "reasons": [reason]})
    (finding,) = problems(replace(setup, problem="permission denied"))
    assert (finding.severity, finding.topic) == (LIMIT, "running proxy")


def test_own_checkpoints_beside_foreign_ones_are_no_problem() -> None:
    setup = stored(5, n_usable=2, usable_bytes=MIB)
    assert problems(setup) == []
    assert "5 in all (1.0 GiB); 2 (1.0 MiB) fit" in text_of(setup, "checkpoints")


def test_two_users_who_share_a_group_are_no_problem() -> None:
    assert problems(directory(server(probe_owner_uid=7), mode=0o2770)) == []


def test_root_is_told_that_its_rights_prove_little() -> None:
    assert "run doctor as the user who runs the proxy" in text_of(
        directory(own_uid=0), "permissions"
    )


def test_cost_of_a_usual_state_is_told() -> None:
    text = text_of(HEALTHY, "cost")
    assert "A state of 10,000 tokens takes at most 40.0 MiB" in text
    assert "stops all slots for 0.11 s" in text
    assert "instead of 20.0 s of evaluation" in text


def test_shortest_state_of_a_rule_is_told() -> None:
    facts = memory(Rule(RuleKind.RESTORE_POINTS, 2200), sections=SLIDING)
    assert "under 2,200 tokens" in text_of(facts, "memory rule")
    assert "under" not in text_of(memory(RESTORE_POINTS), "memory rule")


def test_batches_that_a_sliding_window_needs_are_told() -> None:
    said = "if -b is larger than -ub, some answers are wrong"
    assert said in text_of(memory(RESTORE_POINTS, sections=SLIDING), "slot files")
    assert "-ub" not in text_of(memory(RESTORE_POINTS), "slot files")


def text_of(facts: LlamaServerFacts | Setup, topic: str) -> str:
    (text,) = [finding.text for finding in findings_of(alone(facts)) if finding.topic == topic]
    return text


def test_report_begins_with_the_verdict_and_is_plain_in_a_pipe() -> None:
    lines = in_lines(report(alone(server(has_ram_cache=True))), console()).splitlines()
    assert lines[0] == "Caching will work, with limits."
    assert any(
        line.lstrip().startswith("-> Start llama-server with --cache-ram 0") for line in lines
    )
    assert not [line for line in lines if "\x1b" in line or line != line.rstrip()]


def test_report_is_coloured_on_a_terminal() -> None:
    shown = Console(force_terminal=True, width=60, highlight=False, color_system="standard")
    assert "\x1b[" in in_lines(report(alone(HEALTHY)), shown)


def test_json_report_says_the_same() -> None:
    content = msgspec.json.decode(
        msgspec.json.encode(json_report(alone(server(has_ram_cache=True))))
    )
    (problem,) = [f for f in content["findings"] if f["severity"] != "ok"]
    assert (content["exit_status"], problem["severity"]) == (1, "limit")
    assert problem["cure"].startswith("Start llama-server with --cache-ram 0")
    (facts,) = content["facts"]["llama_servers"]
    assert content["facts"]["settings"]["upstream_api_key"] is None
    assert facts["rule"]["kind"] == "any prefix"


HYBRID, FULL = "/models/hybrid", "full"


def at_host(kind: str = "router", name: str = FULL, **changes: Any) -> LlamaServerFacts:
    return server(name=name, host=kind, **changes)


def hosted(*servers: LlamaServerFacts, **changes: Any) -> Setup:
    """Return the setup of a host with a loaded model full, and one that is not."""
    models = (FULL, "hybrid")
    host = replace(HostFacts(url=HEALTHY.url, kind="router", models=models), **changes)
    return replace(DIRECTORY, n_checkpoints=3, llama_servers=list(servers), hosts=[host])


def test_host_is_approved_with_what_was_examined_and_says_whom_findings_are_about() -> None:
    setup = hosted(at_host())
    findings = findings_of(setup)
    assert problems(setup) == [] and summary(setup) == "Caching will work."
    (models,) = [f.text for f in findings if f.topic == "models"]
    assert "2 models; examined: full. Not examined: hybrid" in models
    (store,) = [f.text for f in findings if f.topic == "checkpoints"]
    assert "3 in all" in store and "0 (0 bytes) fit" in store
    about = [f.about for f in findings]
    assert list(dict.fromkeys(about)) == ["router at 127.0.0.1:8080", "full (router)", ""]
    loaded = hosted(at_host(), loaded=FULL)
    assert "full was loaded for this, and stays." in text_of_all(loaded)
    text = in_lines(report(setup), console())
    assert "\nfull (router)\nok" in text and "\nall\nok" in text


def test_report_has_nothing_of_a_llama_server_that_a_terminal_obeys() -> None:
    setup = hosted(at_host())
    setup.hosts = [replace(setup.hosts[0], problem="no\x1b]0;title\x07")]
    setup.llama_servers = [replace(each, name="\x1b[31m") for each in setup.llama_servers]
    assert "\x1b" not in in_lines(report(setup), console())


def test_model_that_one_of_two_hosts_lacks_is_no_problem() -> None:
    setup = hosted(at_host())
    lacks = HostFacts(url="http://other", kind="router", models=("x",), problem="There is no full")
    setup.hosts.append(lacks)
    assert problems(setup) == [] and summary(setup) == "Caching will work."
    assert [each.topic for each in problems(replace(setup, hosts=[lacks]))] == ["models"]
    away = replace(lacks, models=(), problem="it does not answer")
    assert problems(replace(setup, hosts=[*setup.hosts[:1], away]))


def text_of_all(setup: Setup) -> str:
    return "\n".join(finding.text for finding in findings_of(setup))


@pytest.mark.parametrize(
    ("setup", "severity", "topic", "said", "cure"),
    [
        (hosted(), LIMIT, "models", "none is loaded", "doctor --model NAME, of full, hybrid"),
        (
            hosted(problem="full could not be loaded", models=()),
            *(BLOCKER, "models", "not be loaded", "log"),
        ),
        (hosted(problem="no model b"), BLOCKER, "models", "no model b", "these: full, hybrid"),
    ],
)
def test_problem_of_a_host_is_named_with_its_cure(
    setup: Setup, severity: Severity, topic: str, said: str, cure: str
) -> None:
    found = [f for f in problems(setup) if f.topic == topic]
    assert len(found) == 1, problems(setup)
    assert found[0].severity is severity and said in found[0].text and cure in found[0].cure


def test_slot_of_a_hosted_model_is_emptied_at_the_hosts_address() -> None:
    busy = replace(at_host("llama-swap", HYBRID), n_empty=0, n_held=2)
    (finding,) = [f for f in problems(hosted(busy, kind="llama-swap")) if f.topic == "slots"]
    assert f"/upstream/{HYBRID}/slots/N?action=erase'" in finding.cure


def owner(static: str = "a1b2", log_probability: float = -0.5) -> Owner:
    return Owner(static, KnownNamespace(b"id", [(7, log_probability)]), b"")


def pair(**changes: Any) -> Setup:
    """Return the setup of two llama-servers at addresses of their own, the second one changed."""
    first, second = (server(name=name, owner=owner()) for name in ("a", "b"))
    return replace(DIRECTORY, llama_servers=[first, replace(second, **changes)])


@pytest.mark.parametrize(
    ("setup", "severity", "said"),
    [
        (pair(owner=owner("c3d4"), model="/models/b.gguf"), BLOCKER, "and /models/b.gguf in slots"),
        (pair(owner=owner("c3d4")), LIMIT, "a and b cannot continue"),
        (pair(owner=owner(log_probability=-0.7)), LIMIT, "a and b cannot continue"),
        (pair(n_ctx=4096), LIMIT, "and 4,096 tokens"),
    ],
)
def test_llama_servers_that_share_no_states_are_named(
    setup: Setup, severity: Severity, said: str
) -> None:
    (finding,) = problems(setup)
    assert (finding.severity, finding.topic) == (severity, "sharing")
    assert said in finding.text and "-ctk" in finding.cure and "a proxy for each" in finding.cure


def test_llama_servers_that_share_states_are_approved() -> None:
    setup = pair()
    assert problems(setup) == []
    assert [f.text for f in findings_of(setup) if f.topic == "sharing"] == [
        "A state of any of them can be continued by the others: a, b."
    ]
    first, second = setup.llama_servers
    unknown = replace(setup, llama_servers=[first, replace(second, layout=None, owner=None)])
    assert not [f for f in findings_of(unknown) if f.topic == "sharing"]
    two_models = hosted(at_host(), at_host(name="b", n_ctx=1))
    assert not [f for f in findings_of(two_models) if f.topic == "sharing"]
