"""Speculative decoding beside saved states: a restored conversation drafts as before, and answers alike."""

import pytest

from proxy.doctor.examination import examine
from proxy.doctor.findings import findings_of
from proxy.llama.files import StateFile, read_state_file
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.models import least_model
from tests.lab.rig import Rig
from tests.live.conftest import StartRig

REQUESTS = agent_requests(2, 1, header=[system(100)])
TOOLS = tools(2, 40)
DRAFT = str(least_model("full"))
DRAFTING = {
    "mtp": ("--spec-type", "draft-mtp"),
    "model": ("--spec-type", "draft-simple", "-md", DRAFT),
}
MIN_DRAFT_BYTES_PER_TOKEN = 100
"""Without a draft state each token of the state's context still takes a byte or less."""

drafting = pytest.mark.parametrize("flags", DRAFTING.values(), ids=DRAFTING)


async def answered(rig: Rig, i: int) -> tuple[str, int]:
    """Return what the answer to a request says, and how many tokens were drafted for it."""
    reply = await rig.chat(REQUESTS[i], tools=TOOLS, max_tokens=24, temperature=0)
    await rig.settled()
    message = reply["choices"][0]["message"]
    said = f"{message.get('reasoning_content')} {message['content']}"
    return said, reply["timings"].get("draft_n", 0)


def newest(rig: Rig) -> StateFile:
    """Return the state that was saved last."""
    assert rig.running.store is not None
    newest = max(rig.running.store, key=lambda checkpoint: checkpoint.created_at)
    return read_state_file(rig.running.store.files.path(newest.file_name))


@drafting
async def test_restored_conversation_drafts_and_answers_as_without_the_proxy(
    start_rig: StartRig, flags: tuple[str, ...]
) -> None:
    async with start_rig("hybrid_mtp") as plain:
        expected = [(await answered(plain, i))[0] for i in range(2)]
    async with start_rig("hybrid_mtp", extra_args=flags) as rig:
        first, n_drafted = await answered(rig, 0)
        assert n_drafted
        await rig.restart()
        await rig.stop_proxy()
        found = findings_of(await examine(rig.settings))
        assert any("the draft state of speculative decoding" in finding.text for finding in found)
        await rig.start_proxy()
        second, n_drafted = await answered(rig, 1)
        assert n_drafted
        assert rig.sample("restores_total", result="done") == 1
        assert [first, second] == expected


@drafting
async def test_state_without_a_draft_state_is_not_continued_where_there_is_drafting(
    start_rig: StartRig, flags: tuple[str, ...]
) -> None:
    """llama-server restores such a state, and every state that is saved after it lacks the draft too."""
    async with start_rig("hybrid_mtp") as rig:
        await answered(rig, 0)
        await rig.restart()
        assert newest(rig).draft_bytes == 0
    async with start_rig("hybrid_mtp", extra_args=flags) as rig:
        await answered(rig, 1)
        assert rig.sample("restores_total", result="done") == 0
        await rig.restart()
        state = newest(rig)
        assert state.draft_bytes > MIN_DRAFT_BYTES_PER_TOKEN * len(state.tokens)
    async with start_rig("hybrid_mtp") as rig:
        await answered(rig, 1)
        assert rig.sample("restores_total", result="done") == 1
