"""The self-test on a real llama-server: what it learns, what it costs, and what makes it run again."""

import asyncio

import pytest

from proxy.core.model import Rule, RuleKind
from proxy.core.namespace import CANARY_TOKENS
from proxy.core.probes import SelfTestResult
from proxy.driver.contact.attachment import Attachment
from proxy.driver.contact.memory import remember_self_test
from proxy.driver.saving.saver import keep_as_saved
from tests.lab.conversation import prose
from tests.lab.older_builds import strip_context_checkpoints
from tests.lab.rig import SETTLE_SECONDS, Rig
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


def attachment_of(rig: Rig) -> Attachment:
    session = rig.running.lifecycle.current
    assert session is not None
    return session.attachment


@pytest.mark.parametrize("case", CASES)
async def test_rule_is_learned_once_for_little(start_rig: StartRig, case: str) -> None:
    rewrite, rule = CASES[case]
    async with start_rig(case.partition(",")[0], rewrite=rewrite) as rig:
        assert attachment_of(rig).self_test == SelfTestResult(rule, True, True)
        assert await rig.evaluated() <= MOST_TOKENS + len(CANARY_TOKENS)
        await rig.restart()
        assert attachment_of(rig).rule == rule
        assert await rig.evaluated() == len(CANARY_TOKENS)


@pytest.mark.parametrize("kind", ["swa", "hybrid"])
async def test_only_slot_is_enough_to_learn_the_rule(start_rig: StartRig, kind: str) -> None:
    async with start_rig(kind, n_slots=1) as rig:
        assert attachment_of(rig).self_test == SelfTestResult(CASES[kind][1])
        assert await rig.evaluated() <= MOST_TOKENS + len(CANARY_TOKENS)


async def test_rule_that_restores_contradict_is_learned_again(start_rig: StartRig) -> None:
    # A sliding-window state shorter than the window is not continued at its end: this rule is wrong.
    wrong, right = Rule(RuleKind.RESTORE_POINTS, 0), CASES["swa"][1]
    async with start_rig("swa", n_slots=1) as rig:
        assert rig.running.store is not None
        attachment = attachment_of(rig)
        await remember_self_test(rig.running.store, attachment, SelfTestResult(wrong))
        attachment.rule = wrong
        for times, name in ((1, "first"), (1, "second"), (2, "first"), (2, "second")):
            await rig.settled()
            text = f"{name} {prose(len(name), 60)}" + " and so on" * times
            await rig.post("/completion", {"prompt": text, "n_predict": 1, "temperature": 0})
        async with asyncio.timeout(SETTLE_SECONDS):
            while attachment.rule == wrong:  # noqa: ASYNC110 - the next look finds out
                await asyncio.sleep(0.05)
        assert attachment.rule == right
        await rig.restart()
        assert attachment_of(rig).rule == right
