"""The self-test on a real llama-server: what it learns, what it costs, and what makes it run again."""

import asyncio

import pytest

from proxy.core.model import CANARY_TOKENS, Rule, RuleKind
from proxy.core.rule import SelfTestResult
from proxy.serving.process import SELF_TEST, Process
from proxy.serving.saver import keep_as_saved
from tests.lab.conversation import prose
from tests.lab.older_builds import strip_context_checkpoints
from tests.lab.older_server import OLDEST, binary_of
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import KINDS, StartRig

MOST_TOKENS = 10_000
POINTS = Rule(RuleKind.RESTORE_POINTS)
END_ONLY = Rule(RuleKind.END_ONLY)
WINDOW = 2200  # the shortest probed length beyond the tiny model's window
CASES = {
    "full": (keep_as_saved, Rule(RuleKind.ANY_PREFIX)),
    "swa": (keep_as_saved, Rule(RuleKind.RESTORE_POINTS, WINDOW)),
    "recurrent": (keep_as_saved, POINTS),
    "hybrid": (keep_as_saved, POINTS),
    "hybrid_no_mrope": (keep_as_saved, POINTS),
    "swa, older": (strip_context_checkpoints, Rule(RuleKind.END_ONLY, WINDOW)),
    "recurrent, older": (strip_context_checkpoints, END_ONLY),
    "hybrid, older": (strip_context_checkpoints, END_ONLY),
}
assert set(KINDS) <= set(CASES)


def attachment_of(rig: Rig) -> Process:
    process = rig.running.server.process
    assert process is not None
    return process


@pytest.mark.parametrize("case", CASES)
async def test_rule_is_learned_once_for_little(start_rig: StartRig, case: str) -> None:
    rewrite, rule = CASES[case]
    async with start_rig(case.partition(",")[0], rewrite=rewrite, is_new=True) as rig:
        assert attachment_of(rig).self_test == SelfTestResult(rule, True, True)
        assert await rig.evaluated() <= MOST_TOKENS + len(CANARY_TOKENS)
        await rig.restart()
        assert attachment_of(rig).rule == rule
        assert await rig.evaluated() == len(CANARY_TOKENS)


@pytest.mark.parametrize("kind", ["swa", "hybrid"])
async def test_only_slot_is_enough_to_learn_the_rule(start_rig: StartRig, kind: str) -> None:
    async with start_rig(kind, n_slots=1, is_new=True) as rig:
        assert attachment_of(rig).self_test == SelfTestResult(CASES[kind][1])
        assert await rig.evaluated() <= MOST_TOKENS + len(CANARY_TOKENS)


async def test_rule_that_restores_contradict_is_learned_again(start_rig: StartRig) -> None:
    # A sliding-window state shorter than the window is not continued at its end: this rule is wrong.
    wrong, right = Rule(RuleKind.RESTORE_POINTS, 0), CASES["swa"][1]
    async with start_rig("swa", n_slots=1) as rig:
        assert rig.running.store is not None
        process = attachment_of(rig)
        await process.remember(SELF_TEST, SelfTestResult(wrong))
        process.rule = wrong
        for times, name in ((1, "first"), (1, "second"), (2, "first"), (2, "second")):
            await rig.settled()
            text = f"{name} {prose(len(name), 60)}" + " and so on" * times
            await rig.post("/completion", {"prompt": text, "n_predict": 1, "temperature": 0})
        await until(lambda: process.rule != wrong)  # the next look finds out
        assert process.rule == right
        await rig.restart()
        assert attachment_of(rig).rule == right


@pytest.mark.parametrize("n_slots", [1, 2])
@pytest.mark.parametrize("build", [None, OLDEST])
async def test_session_that_begins_before_the_rule_is_known_leaves_its_header(
    start_rig: StartRig, n_slots: int, build: str | None
) -> None:
    """On the oldest build a context checkpoint in a slot is in no file: the header needs its own."""
    binary = binary_of(build) if build else None
    header = {"role": "system", "content": prose(1, 500)}

    async def begin_session(rig: Rig, text: str) -> None:
        await rig.chat([header, {"role": "user", "content": text}])

    options = {"n_slots": n_slots, "n_ctx": 8192 * n_slots, "binary": binary, "settles": False}
    async with start_rig("hybrid", **options) as rig:
        first = asyncio.ensure_future(begin_session(rig, prose(2, 300)))
        await until(lambda: rig.running.server.process)
        assert not attachment_of(rig).rule.is_known
        await first
        await rig.settled()
        assert attachment_of(rig).rule.is_known
        await rig.restart()
        await begin_session(rig, "another task")
        assert await rig.evaluated() <= len(CANARY_TOKENS) + 64
