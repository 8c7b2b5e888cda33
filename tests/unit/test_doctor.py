"""doctor's judgement: from facts to severity, words and cure. No server, no directory."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from proxy.cli.common import console
from proxy.cli.doctor import json_report, report
from proxy.core.conditions import DegradationKind
from proxy.core.model import Rule, RuleKind
from proxy.doctor.facts import (
    BehaviourFacts,
    CostFacts,
    DirectoryFacts,
    HostFacts,
    LlamaServerFacts,
    MemoryFacts,
    ProbeSaveFacts,
    ProxyFacts,
    ServerFacts,
    SlotFacts,
    StateFacts,
    StoreFacts,
    Survey,
)
from proxy.doctor.findings import Finding, Severity, counted, exit_status, seconds, size, summary
from proxy.doctor.survey_findings import findings_of, is_complete
from proxy.health import Degradation
from proxy.llama.hosts import HostedFlags
from proxy.servers.attach import ModelIdentity
from tests.unit.builders import ANY_PREFIX, END_ONLY, RESTORE_POINTS

MIB, GIB = 1 << 20, 1 << 30
OWN_UID = 1000

SERVER = ServerFacts(
    url="http://127.0.0.1:8080",
    build="b11669",
    model="/models/a.gguf",
    n_slots=2,
    n_ctx=32768,
    has_slot_save_path=True,
)
DIRECTORY = DirectoryFacts(
    path="/states",
    mode=0o700,
    owner_uid=OWN_UID,
    own_uid=OWN_UID,
    free_bytes=100 * GIB,
    budget_bytes=20 * GIB,
)
SAVED = ProbeSaveFacts(name="lpc-1.saving", mode=0o644, owner_uid=OWN_UID)
MEMORY = MemoryFacts(
    file_version=4, is_version_supported=True, sections=("attention",), rule=ANY_PREFIX
)
COST = CostFacts(
    state_bytes=40 * MIB,
    largest_bytes=104 * MIB,
    save_seconds=0.11,
    restore_seconds=0.05,
    evaluate_seconds=20.0,
)
BEHAVIOUR = BehaviourFacts(keeps_idle_slots=True, prefers_similar_slot=True, has_ram_cache=False)
HEALTHY = LlamaServerFacts(
    server=SERVER,
    slots=SlotFacts(n_empty=2, n_held=0, n_busy=0),
    probe_save=SAVED,
    store=StoreFacts(),
    behaviour=BEHAVIOUR,
    memory=MEMORY,
    cost=COST,
)
SLIDING = ("attention", "attention")
LIMIT, BLOCKER = Severity.LIMIT, Severity.BLOCKER


def server(**changes: Any) -> LlamaServerFacts:
    return replace(HEALTHY, server=replace(SERVER, **changes))


def directory(facts: LlamaServerFacts = HEALTHY, **changes: Any) -> Survey:
    return alone(facts, directory=replace(DIRECTORY, **changes))


def ran_into(kind: DegradationKind, detail: str = "", **changes: Any) -> LlamaServerFacts:
    """Return the facts of a healthy server but for one degradation."""
    changed = replace(SERVER, **changes)
    return replace(HEALTHY, server=changed, degradations=(Degradation(kind, detail, since=0.0),))


def saved(**changes: Any) -> LlamaServerFacts:
    return replace(HEALTHY, probe_save=replace(SAVED, **changes))


def memory(
    rule: Rule, *, version: int = 4, sections: tuple[str, ...] = ("attention",)
) -> LlamaServerFacts:
    found = replace(MEMORY, file_version=version, sections=sections, rule=rule)
    return replace(HEALTHY, memory=found)


def behaviour(**changes: Any) -> LlamaServerFacts:
    return replace(HEALTHY, behaviour=replace(BEHAVIOUR, **changes))


def proxy(health: dict[str, Any] | None = None) -> Survey:
    found = ProxyFacts(admin="127.0.0.1:8082", lock="another one uses /states", health=health)
    return alone(LlamaServerFacts(server=SERVER), proxy=found)


def forwarding(**reason: str) -> dict[str, Any]:
    return {"state": "forwarding", "reasons": [reason] if reason else []}


def alone(facts: LlamaServerFacts | Survey, **changes: Any) -> Survey:
    """Return the survey of one llama-server at an address of its own."""
    if isinstance(facts, Survey):
        return facts
    return replace(Survey(directory=DIRECTORY, llama_servers=(facts,)), **changes)


def problems(facts: LlamaServerFacts | Survey) -> list[Finding]:
    return [finding for finding in findings_of(alone(facts)) if finding.severity is not Severity.OK]


def test_healthy_facts_give_no_problem_and_every_topic_once() -> None:
    findings = findings_of(alone(HEALTHY))
    assert problems(HEALTHY) == []
    assert [f.topic for f in findings] == [
        *("llama-server", "slots", "idle slots", "RAM cache", "similarity", "slot files"),
        *("memory rule", "cost", "checkpoints", "directory", "permissions", "disk space"),
    ]
    assert exit_status(findings) == 0
    assert summary(findings, is_complete=is_complete(alone(HEALTHY))) == "Caching will work."


@pytest.mark.parametrize(
    ("facts", "severity", "topic", "said", "cure"),
    [
        (
            ran_into(DegradationKind.UNREACHABLE, "cannot connect"),
            *(BLOCKER, "llama-server unreachable", "(cannot connect)", "--upstream URL"),
        ),
        (
            ran_into(DegradationKind.LOADING),
            *(BLOCKER, "llama-server is loading", "still loading", "/health answers 200"),
        ),
        (
            ran_into(DegradationKind.NO_SLOT_SAVE_PATH),
            *(BLOCKER, "no slot save path", "without", "Here: --slot-save-path /states"),
        ),
        (
            ran_into(DegradationKind.NO_SLOT_SAVE_PATH, host="router", name="full"),
            *(BLOCKER, "no slot save path", "without", "the command line of the router"),
        ),
        (
            ran_into(DegradationKind.OTHER_DIRECTORY),
            *(BLOCKER, "another slot save path", "not into", "Remove the probe lpc-1.saving"),
        ),
        (
            ran_into(DegradationKind.FILES_UNREADABLE),
            *(BLOCKER, "files unreadable", "may not read", "uid 1000 have mode 644; chgrp GROUP"),
        ),
        (
            ran_into(DegradationKind.IDLE_SLOTS_CLEARED),
            *(LIMIT, "idle slots are cleared", "one at a time", "Here: -np 2 --cache-ram 0"),
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
        (behaviour(has_ram_cache=True), LIMIT, "RAM cache", "is on", "--cache-ram 0"),
        (behaviour(prefers_similar_slot=False), LIMIT, "similarity", "Off", "without -sps 0"),
        (
            memory(END_ONLY, version=3, sections=("attention", "recurrent")),
            *(LIMIT, "memory rule", "End only", "llama.cpp 0.7.0 or later"),
        ),
        (
            memory(END_ONLY, sections=("recurrent",)),
            *(LIMIT, "memory rule", "End only", "without --ctx-checkpoints 0"),
        ),
        (
            memory(END_ONLY, version=3, sections=SLIDING),
            *(LIMIT, "memory rule", "End only", "or with --swa-full"),
        ),
        (
            replace(HEALTHY, memory=replace(MEMORY, file_version=5, is_version_supported=False)),
            *(LIMIT, "slot files", "Version 5", "newer llama-prefix-cache"),
        ),
        (
            replace(HEALTHY, cost=replace(COST, save_seconds=109.0)),
            *(LIMIT, "cost", "stops all slots for 109 s", "faster disk"),
        ),
        (
            replace(HEALTHY, store=StoreFacts(n_checkpoints=3, size_bytes=GIB)),
            *(LIMIT, "checkpoints", "all of another model", "delete /states/index"),
        ),
        (
            replace(HEALTHY, store=StoreFacts(n_checkpoints=3, knows_model_otherwise=True)),
            *(LIMIT, "checkpoints", "another cache layout", "-np, -kvu, -fa"),
        ),
        (
            directory(index_problem="it cannot be read"),
            *(BLOCKER, "store not open", "it cannot be read", "as the user who made it"),
        ),
        (
            replace(HEALTHY, store=StoreFacts(quarantined="checkpoint 00ab of 9 tokens")),
            *(LIMIT, "a state ended llama-server", "(checkpoint 00ab of 9 tokens)", "rm ID"),
        ),
        (
            directory(replace(HEALTHY, probe_save=None), problem="Permission denied"),
            *(BLOCKER, "directory", "uid 1000 cannot use /states", "chown USER /states"),
        ),
        (
            saved(problem="llama-server answered 500"),
            *(BLOCKER, "directory", "of no use: llama-server answered 500", "chmod 2770 /states"),
        ),
        (
            directory(mode=0o755, is_private=False),
            *(LIMIT, "directory is open to others", "Other users", "Here: chmod 700 /states"),
        ),
        (
            directory(mode=0o2775, is_private=False),
            *(LIMIT, "directory is open to others", "mode 2775", "Here: chmod 2770 /states"),
        ),
        (
            directory(saved(owner_uid=7), mode=0o770, is_private=False),
            *(LIMIT, "directory is open to others", "mode 770", "Here: chmod 2770 /states"),
        ),
        (
            directory(free_bytes=MIB),
            *(BLOCKER, "disk space", "nearly full: 1.0 MiB free", "another disk"),
        ),
        (
            directory(free_bytes=10 * GIB, used_bytes=5 * GIB),
            *(LIMIT, "disk space", "10 GiB free", "--max-store-bytes 14336MiB"),
        ),
        (
            replace(HEALTHY, failures=("the cost of a state could not be examined: 500",)),
            *(LIMIT, "probe", "could not be examined", "nobody else uses"),
        ),
        (proxy(), LIMIT, "running proxy", "none answers at 127.0.0.1:8082", "--admin HOST:PORT"),
        (
            proxy(forwarding(kind="no slot save path", reason="No path.", cure="Give one.")),
            *(BLOCKER, "running proxy", "No path.", "Give one. For the exact step, stop the proxy"),
        ),
        (
            proxy(forwarding(kind="attaching", reason="It attaches.", cure="None needed.")),
            *(LIMIT, "running proxy", "does not cache yet", "/health"),
        ),
    ],
)
def test_problem_is_named_with_its_cure(
    facts: LlamaServerFacts | Survey, severity: Severity, topic: str, said: str, cure: str
) -> None:
    (finding,) = problems(facts)
    assert (finding.severity, finding.topic) == (severity, topic)
    assert said in finding.text
    assert cure in finding.cure
    assert exit_status(findings_of(alone(facts))) == severity


def test_worst_finding_decides() -> None:
    facts = replace(
        ran_into(DegradationKind.RULE_IS_NOTHING), behaviour=replace(BEHAVIOUR, has_ram_cache=True)
    )
    assert exit_status(findings_of(alone(facts))) == 2
    assert summary(findings_of(alone(facts)), is_complete=True) == "Caching will not work."


def test_without_an_empty_slot_nothing_good_is_promised() -> None:
    facts = LlamaServerFacts(server=SERVER, slots=SlotFacts(n_empty=0, n_held=1, n_busy=1))
    (finding,) = problems(facts)
    assert "0 empty, 1 holding work, 1 busy" in finding.text
    assert "/slots/N?action=erase" in finding.cure
    assert exit_status(findings_of(alone(facts))) == 1
    assert "not everything" in summary(
        findings_of(alone(facts)), is_complete=is_complete(alone(facts))
    )


def test_proxy_that_caches_is_proof_enough() -> None:
    writes = {"bytes_last_day": 3 << 30, "max_bytes_per_day": 50 << 30}
    survey = proxy({"state": "caching", "reasons": [], "rule": "restore points", "writes": writes})
    assert problems(survey) == []
    assert is_complete(survey)
    (finding,) = [f for f in findings_of(survey) if f.topic == "running proxy"]
    assert "restore points" in finding.text
    assert "3.0 GiB of 50 GiB" in finding.text


@pytest.mark.parametrize("n_slots", [1, 2])
def test_what_could_not_be_told_is_said_and_no_problem(n_slots: int) -> None:
    facts = replace(server(n_slots=n_slots), behaviour=BehaviourFacts())
    told = {f.topic: f.text for f in findings_of(alone(facts))}
    assert problems(facts) == []
    assert "Could not be told" in told["RAM cache"]
    for topic in ("similarity", "idle slots"):
        assert ("one slot" in told[topic]) == (n_slots == 1)
        assert ("Could not be told" in told[topic]) == (n_slots == 2)


def test_own_checkpoints_beside_foreign_ones_are_no_problem() -> None:
    store = StoreFacts(n_checkpoints=5, size_bytes=GIB, n_usable=2, usable_bytes=MIB)
    facts = replace(HEALTHY, store=store)
    assert problems(facts) == []
    assert "5 checkpoints (1.0 GiB); 2 (1.0 MiB) fit" in text_of(facts, "checkpoints")


def test_two_users_who_share_a_group_are_no_problem() -> None:
    assert problems(directory(saved(owner_uid=7), mode=0o2770)) == []


def test_root_is_told_that_its_rights_prove_little() -> None:
    assert "run doctor as the user who runs the proxy" in text_of(
        directory(own_uid=0), "permissions"
    )


def test_cost_is_told_with_and_without_context_checkpoints() -> None:
    text = text_of(HEALTHY, "cost")
    assert "40 MiB for 10,000 tokens, up to 104 MiB with 32 context checkpoints" in text
    assert "stops all slots for 0.11 s" in text
    assert "instead of 20 s of evaluation" in text


def test_shortest_state_of_a_rule_is_told() -> None:
    facts = memory(Rule(RuleKind.RESTORE_POINTS, 2200), sections=SLIDING)
    assert "under 2,200 tokens" in text_of(facts, "memory rule")
    assert "under" not in text_of(memory(RESTORE_POINTS), "memory rule")


def text_of(facts: LlamaServerFacts | Survey, topic: str) -> str:
    (text,) = [finding.text for finding in findings_of(alone(facts)) if finding.topic == topic]
    return text


def test_report_begins_with_the_verdict_and_is_plain_in_a_pipe() -> None:
    lines = report(alone(behaviour(has_ram_cache=True)), console()).splitlines()
    assert lines[0] == "Caching will work, with limits."
    assert any(
        line.lstrip().startswith("-> Start llama-server with --cache-ram 0") for line in lines
    )
    assert not [line for line in lines if "\x1b" in line or line != line.rstrip()]


def test_report_is_coloured_on_a_terminal() -> None:
    shown = Console(force_terminal=True, width=60, highlight=False, color_system="standard")
    assert "\x1b[" in report(alone(HEALTHY), shown)


def test_json_report_says_the_same() -> None:
    content = msgspec.json.decode(
        msgspec.json.encode(json_report(alone(behaviour(has_ram_cache=True))))
    )
    (problem,) = [f for f in content["findings"] if f["severity"] != "ok"]
    assert (content["exit_status"], problem["severity"]) == (1, "limit")
    assert problem["cure"] == "Start llama-server with --cache-ram 0"
    (facts,) = content["facts"]["llama_servers"]
    assert facts["memory"]["rule"]["kind"] == "any prefix"


def test_numbers_are_told_in_plain_words() -> None:
    assert [size(n) for n in (12, 1536, 20 * MIB, 3 * GIB)] == [
        *("12 bytes", "1.5 KiB", "20 MiB", "3.0 GiB")
    ]
    assert [seconds(s) for s in (0.001, 0.25, 3.14159, 340.2)] == [
        *("less than 0.01 s", "0.25 s", "3.1 s", "340 s")
    ]
    assert [counted(n, "slot") for n in (1, 2)] == ["1 slot", "2 slots"]


IDENTITY = ModelIdentity(
    model="a1b2", n_vocab=4096, n_params=1, size_bytes=2, modalities={}, adapters=()
)
STATES = StateFacts(identity=IDENTITY, layout="f16", canary=((7, -0.5),))
HYBRID, FULL = "/models/hybrid", "full"


def at_host(kind: str = "router", name: str = FULL, **changes: Any) -> LlamaServerFacts:
    found = replace(SERVER, name=name, host=kind, **changes)
    return replace(HEALTHY, server=found, store=StoreFacts(n_checkpoints=3, size_bytes=GIB))


def hosted(
    *servers: LlamaServerFacts, asked_for: str = "", idle: float = 10.0, **changes: Any
) -> Survey:
    """Return the survey of a host with a loaded model full, and one that is not."""
    models = (
        HostedFlags(FULL, slot_save_path="/states/"),
        HostedFlags("hybrid", slot_save_path="/states"),
    )
    host = HostFacts(
        url=SERVER.url, kind="router", n_at_most=1, tells_all_flags=True, models=models
    )
    host = replace(host, **changes)
    return Survey(
        directory=DIRECTORY,
        llama_servers=servers,
        hosts=(host,),
        idle_save_seconds=idle,
        asked_for=asked_for,
    )


def test_host_is_approved_with_what_was_examined_and_says_whom_findings_are_about() -> None:
    survey = hosted(at_host())
    findings = findings_of(survey)
    assert problems(survey) == [] and is_complete(survey)
    (models,) = [f.text for f in findings if f.topic == "models"]
    assert "2 models, of which 1 at once; examined: full. Not examined: hybrid" in models
    (store,) = [f.text for f in findings if f.topic == "checkpoints"]
    assert "none of this model yet" in store
    about = [f.about for f in findings]
    assert list(dict.fromkeys(about)) == ["router at 127.0.0.1:8080", "full (router)", ""]
    loaded = hosted(at_host(), loaded=FULL, unloaded=("hybrid",))
    assert "full was loaded for this, and stays; hybrid had to go" in text_of_all(loaded)
    text = report(survey, console())
    assert "\nfull (router)\nok" in text and "\nall\nok" in text


def text_of_all(survey: Survey) -> str:
    return "\n".join(finding.text for finding in findings_of(survey))


def flags(*models: HostedFlags) -> tuple[HostedFlags, ...]:
    return (HostedFlags(FULL, slot_save_path="/states"), *models)


@pytest.mark.parametrize(
    ("survey", "severity", "topic", "said", "cure"),
    [
        (hosted(), LIMIT, "models", "none is loaded", "doctor --model NAME, of full, hybrid"),
        (hosted(problem="full could not be loaded"), BLOCKER, "models", "not be loaded", "log"),
        (hosted(asked_for="b"), BLOCKER, "models", "There is no model b", "these: full, hybrid"),
        (
            alone(HEALTHY, asked_for="b"),
            *(LIMIT, "models", "takes any name", "Leave it out"),
        ),
        (
            replace(hosted(asked_for="b"), hosts=(replace(hosted().hosts[0], asked_for="b"),)),
            *(LIMIT, "models", "while a proxy decides", "Stop the proxy"),
        ),
        (
            hosted(at_host(), models=flags(HostedFlags("b"))),
            *(
                LIMIT,
                "slot-save-path",
                "their flags say: b.",
                "router itself with --slot-save-path",
            ),
        ),
        (
            hosted(at_host(), models=flags(HostedFlags("b", slot_save_path="/x"))),
            *(LIMIT, "slot-save-path", "b (/x)", "the command line of the router"),
        ),
        (
            hosted(at_host(), models=flags(HostedFlags("b", sleep_seconds=9))),
            *(LIMIT, "idle models", "b falls asleep", "--idle-save-seconds 2"),
        ),
        (
            hosted(
                at_host("llama-swap", n_slots=10),
                kind="llama-swap",
                tells_all_flags=False,
                models=(HostedFlags(FULL), HostedFlags("b")),
            ),
            *(LIMIT, "requests", "has 10 slots", "concurrencyLimit: 40"),
        ),
    ],
)
def test_problem_of_a_host_is_named_with_its_cure(
    survey: Survey, severity: Severity, topic: str, said: str, cure: str
) -> None:
    found = [f for f in problems(survey) if f.topic == topic]
    assert len(found) == 1, problems(survey)
    assert found[0].severity is severity and said in found[0].text and cure in found[0].cure


def test_what_no_flag_says_but_a_model_does_is_no_problem() -> None:
    """The router hands on environment variables, and containers have other paths."""
    by_variable = hosted(at_host(), models=(HostedFlags(FULL), HostedFlags("b")))
    assert problems(by_variable) == []
    elsewhere = (HostedFlags(name, slot_save_path="/mnt") for name in (FULL, "b"))
    assert problems(hosted(at_host(), models=tuple(elsewhere))) == []
    assert problems(hosted(at_host(), idle=8.0, models=flags(HostedFlags(
        "b", slot_save_path="/states", unload_seconds=9)))) == []  # fmt: skip
    busy = replace(at_host("llama-swap", HYBRID), slots=SlotFacts(n_empty=0, n_held=2, n_busy=0))
    (finding,) = [f for f in problems(hosted(busy, kind="llama-swap")) if f.topic == "slots"]
    assert f"/upstream/{HYBRID}/slots/N?action=erase'" in finding.cure


def pair(**changes: Any) -> Survey:
    """Return the survey of two llama-servers at addresses of their own, the second one changed."""
    server_changes = {k: changes.pop(k) for k in ("n_ctx",) if k in changes}
    names = changes.keys() & set(ModelIdentity.__struct_fields__)
    of_identity = {name: changes.pop(name) for name in names}
    first, second = (
        replace(HEALTHY, server=replace(SERVER, name=name), states=STATES) for name in ("a", "b")
    )
    second = replace(
        second,
        server=replace(second.server, **server_changes),
        states=replace(
            STATES, identity=msgspec.structs.replace(IDENTITY, **of_identity), **changes
        ),
    )
    return Survey(directory=DIRECTORY, llama_servers=(first, second))


@pytest.mark.parametrize(
    ("survey", "severity", "said", "cure"),
    [
        (pair(model="c3d4"), BLOCKER, "a and b serve different models", "the same model"),
        (pair(n_params=7), BLOCKER, "different models", "a proxy for each"),
        (pair(adapters=((0, "x", 1.0),)), LIMIT, "different adapters", "--lora"),
        (
            pair(model="/b.gguf 2"),
            *(LIMIT, "under paths that differ", "the same -m"),
        ),
        (pair(layout="q8"), LIMIT, "in different forms", "-ctk"),
        (pair(canary=((7, -0.7),)), LIMIT, "predict differently", "--rope-*"),
        (pair(n_ctx=4096), LIMIT, "32,768 and 4,096 tokens", "the same -c"),
    ],
)
def test_llama_servers_that_share_no_states_are_named(
    survey: Survey, severity: Severity, said: str, cure: str
) -> None:
    (finding,) = problems(survey)
    assert (finding.severity, finding.topic) == (severity, "sharing")
    assert said in finding.text and cure in finding.cure


def test_llama_servers_that_share_states_are_approved() -> None:
    survey = pair()
    assert problems(survey) == []
    assert [f.text for f in findings_of(survey) if f.topic == "sharing"] == [
        "A state of any of them can be continued by the others: a, b."
    ]
    unknown = replace(survey, llama_servers=(survey.llama_servers[0], replace(
        survey.llama_servers[1], states=None)))  # fmt: skip
    assert not [f for f in findings_of(unknown) if f.topic == "sharing"]
    two_models = hosted(at_host(), at_host(name="b", n_ctx=1))
    assert not [f for f in findings_of(two_models) if f.topic == "sharing"]
