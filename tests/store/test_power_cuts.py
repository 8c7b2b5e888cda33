"""After a power cut at any moment the store opens, has all that it promised, and serves nothing wrong."""

import asyncio
import random
from pathlib import Path

import pytest

from proxy.store import index
from tests.lab.power_cuts import CUTS, Cut, copy_forked
from tests.store.power_story import Story

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
