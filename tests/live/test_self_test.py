"""The rule on a real llama-server: what the first files tell of it, and what the self-test measures."""

from dataclasses import replace

import pytest

from proxy.core.model import CANARY_TOKENS, FAR_TOKENS, NEAR_TOKENS, Rule, RuleKind
from proxy.servers.attach import measure_rule
from proxy.serving.process import RULE, Process
from tests.lab.architectures import SLIDING_WINDOW
from tests.lab.conversation import prose
from tests.lab.older_builds import strip_context_checkpoints
from tests.lab.older_server import BUILDS, OLDEST, binary_of
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import KINDS, StartRig, in_long

JUNE, SEPTEMBER = BUILDS[1:]
MOST_TOKENS = 256
"""Of first contact, the canary included."""
MOST_MEASURED_TOKENS = 8_000
ANY_PREFIX = Rule(RuleKind.ANY_PREFIX)
POINTS = Rule(RuleKind.RESTORE_POINTS)
END_ONLY = Rule(RuleKind.END_ONLY)
WINDOW = 2200  # the shortest measured length beyond the model's window
SWA_POINTS, SWA_END = Rule(RuleKind.RESTORE_POINTS, WINDOW), Rule(RuleKind.END_ONLY, WINDOW)
LONGER_THAN_A_WINDOW = 1000
"""Words of three tokens; llama-server keeps a batch of 2048 tokens behind the 512 of the window."""
CASES = {
    "full": (None, (), ANY_PREFIX),
    "swa": (None, (), SWA_POINTS),
    "recurrent": (None, (), POINTS),
    "hybrid": (None, (), POINTS),
    "hybrid_no_mrope": (None, (), POINTS),
    "compressed": (None, (), POINTS),
    "swa, --swa-full": (None, ("--swa-full",), END_ONLY),
    "swa, without": (None, ("--ctx-checkpoints", "0"), SWA_END),
    "recurrent, without": (None, ("--ctx-checkpoints", "0"), END_ONLY),
    "hybrid, without": (None, ("--ctx-checkpoints", "0"), END_ONLY),
    "full, April": (OLDEST, (), ANY_PREFIX),
    "swa, April": (OLDEST, (), END_ONLY),  # it saves more than a window
    "recurrent, April": (OLDEST, (), END_ONLY),
    "hybrid, April": (OLDEST, (), END_ONLY),
    "full, June": (JUNE, (), ANY_PREFIX),
    "swa, June": (JUNE, (), SWA_END),
    "swa, June, --swa-full": (JUNE, ("--swa-full",), END_ONLY),
    "hybrid, June": (JUNE, (), END_ONLY),  # that build does not load the recurrent one
    "full, September": (SEPTEMBER, (), ANY_PREFIX),
    "swa, September": (SEPTEMBER, (), SWA_END),
    "recurrent, September": (SEPTEMBER, (), END_ONLY),
    "hybrid, September": (SEPTEMBER, (), END_ONLY),
}
assert set(KINDS) <= set(CASES)
IN_SHORT = {"swa, April", "hybrid, June", "swa, September"}
"""Of the older builds no other case runs but in the long tests."""
SHORT = [
    case
    for case, (build, *_) in CASES.items()
    if case != "compressed" and (build is None or case in IN_SHORT)
]


def process_of(rig: Rig) -> Process:
    process = rig.running.server.process
    assert process is not None
    return process


async def measure(rig: Rig) -> Rule:
    """Return the rule as the self-test measures it; the process goes by that rule then."""
    process = process_of(rig)
    slot_id = next(iter(process.slots)).id
    lease = process.queue.try_lease(slot_id)
    assert lease is not None
    with lease:
        await measure_rule(process, slot_id)
    return process.rule


@pytest.mark.parametrize("case", [*SHORT, *in_long(*(case for case in CASES if case not in SHORT))])
async def test_rule_that_the_first_files_tell_is_the_measured_one(
    start_rig: StartRig, case: str
) -> None:
    build, flags, rule = CASES[case]
    binary = binary_of(build) if build else None
    stride = FAR_TOKENS if build in (OLDEST, JUNE) else NEAR_TOKENS
    rule, any_prefix = (replace(each, stride_tokens=stride) for each in (rule, ANY_PREFIX))
    options = {"extra_args": flags, "binary": binary, "n_slots": 1}
    async with start_rig(case.partition(",")[0], **options) as rig:
        assert await rig.evaluated() <= MOST_TOKENS
        assert process_of(rig).rule in (rule, any_prefix)
        await rig.chat([{"role": "user", "content": prose(1, LONGER_THAN_A_WINDOW)}])
        await rig.settled()
        # The file of a prompt that is longer than the window shows the window's size.
        shown = replace(rule, end_holds_from=SLIDING_WINDOW + 1) if rule.needs_repair else rule
        assert process_of(rig).rule == shown
        before = await rig.evaluated()
        assert await measure(rig) == rule
        assert await rig.evaluated() - before <= MOST_MEASURED_TOKENS
        await rig.restart()
        assert process_of(rig).rule == rule
        assert await rig.evaluated() <= len(CANARY_TOKENS)


@pytest.mark.parametrize(
    "case",
    ["swa, --swa-full", *in_long("swa", "swa, without", "swa, June", "swa, June, --swa-full")],
)
async def test_self_test_measures_a_full_window_in_a_small_context(
    start_rig: StartRig, case: str
) -> None:
    build, flags, rule = CASES[case]
    rule = replace(rule, stride_tokens=FAR_TOKENS if build == JUNE else NEAR_TOKENS)
    binary = binary_of(build) if build else None
    options = {"extra_args": flags, "binary": binary, "n_slots": 1}
    async with start_rig("swa", n_ctx=4096, **options) as rig:
        assert await measure(rig) == rule


@pytest.mark.parametrize("kind", ["swa", "recurrent", "hybrid"])
async def test_rule_of_files_without_context_checkpoints_is_the_measured_one(
    start_rig: StartRig, kind: str
) -> None:
    rule = SWA_END if kind == "swa" else END_ONLY
    async with start_rig(kind, rewrite=strip_context_checkpoints) as rig:
        assert process_of(rig).rule == rule
        assert await measure(rig) == rule


async def test_first_contact_is_over_before_the_first_request(start_rig: StartRig) -> None:
    async with start_rig("hybrid") as rig:
        assert await rig.evaluated() == len(CANARY_TOKENS)
        header = {"role": "system", "content": prose(1, 500)}
        await rig.chat([header, {"role": "user", "content": prose(2, 300)}])
        await rig.restart()
        await rig.chat([header, {"role": "user", "content": "another task"}])
        assert await rig.evaluated() <= len(CANARY_TOKENS) + 64


async def test_rule_that_restores_contradict_is_measured(start_rig: StartRig) -> None:
    # A sliding-window state shorter than the window is not continued at its end: this rule is wrong.
    wrong, right = Rule(RuleKind.ANY_PREFIX), CASES["swa"][2]
    async with start_rig("swa", n_slots=1) as rig:
        assert rig.running.store is not None
        process = process_of(rig)
        await process.store.put_value(process.name_here(RULE), wrong)
        process.rule = wrong
        for times, name in ((1, "first"), (1, "second"), (2, "first"), (2, "second")):
            await rig.settled()
            text = f"{name} {prose(len(name), 60)}" + " and so on" * times
            await rig.post("/completion", {"prompt": text, "n_predict": 1, "temperature": 0})
        await until(lambda: process.rule != wrong)  # the next look finds out
        assert process.rule == right
        await rig.restart()
        assert process_of(rig).rule == right
