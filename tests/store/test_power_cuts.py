"""After a power cut at any moment the store opens, has all that it promised, and serves nothing wrong."""

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from proxy.core.model import tenant_namespace
from proxy.store import index
from proxy.store.known_models import introduce_model
from proxy.store.store import CheckpointStore
from tests.lab.power_cuts import CUTS, Cut, Recorder, copy_forked, leave
from tests.store.conftest import new_state, opened, run_of
from tests.store.power_story import LIMITS, Story, abandon
from tests.unit.state_files import attention, state_file, words

N_STEPS = 10
STRIDE = 4
"""Every so many notes the power is cut; `python -m tests.bench.power_cuts` cuts it at each of them."""


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("seed", [2, pytest.param(1, marks=pytest.mark.long)])
def test_power_cut_at_any_moment_loses_nothing_that_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: Cut, seed: int
) -> None:
    monkeypatch.setattr(index, "_copy_apart", copy_forked)
    story = Story(tmp_path / "recorded", random.Random(seed))
    asyncio.run(story.play(N_STEPS))
    assert len(story.notes) > 60
    for n_notes in range(0, len(story.notes) + 1, STRIDE):
        assert story.wrongs(n_notes, cut, tmp_path / "left") == [], n_notes


async def test_pin_outlives_a_power_cut_and_then_the_loss_of_the_index(tmp_path: Path) -> None:
    """As an index is made anew for another format."""
    directory, left, tokens = tmp_path / "recorded", tmp_path / "left", run_of(600)
    directory.mkdir(mode=0o700)
    recorder = Recorder(directory)
    with recorder.recording():
        store = CheckpointStore(directory, LIMITS)
        model = introduce_model(store.index, "static", [(5, -0.5)], "coder")
        content = state_file(words(tokens), attention(len(tokens)))
        namespace = tenant_namespace(model, b"")
        new = new_state(store, tokens, content=content, namespace=namespace)
        pinned = await store.commit(*new)
        await store.pin(pinned.id, is_pinned=True)
        abandon(store)
    leave(recorder.notes, left, "nothing", random.Random(1))
    shutil.rmtree(left / "index")
    with opened(left) as store:
        assert [(c.id, c.is_pinned) for c in store] == [(pinned.id, True)]
