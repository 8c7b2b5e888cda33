"""Thinning and grafting on a real llama-server: what is kept is used, and answers like a cold run."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.core.model import FULL_WINDOW_TOKENS, Prompt, Rule, RuleKind
from proxy.core.slots import Content, Empty, after_evaluation, as_saved
from proxy.core.tokens import token_ids
from proxy.llama.files import read_state_file
from tests.lab.models import least_model
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer
from tests.lab.waiting import until
from tests.live.conftest import StartRig, in_long
from tests.live.test_window_repair import LOGPROB_BAR, Bench, distance, n_reused, prompt
from tests.unit.builders import NAMESPACE
from tests.unit.state_files import select_points

N_KEPT_BY_SERVER = 4
OTHER_SHAPES = {
    "swa": ("swa", ("-ctk", "f32")),
    "recurrent": ("hybrid", ()),
    "hybrid": ("recurrent", ()),
    "hybrid_no_mrope": ("hybrid", ()),
    "compressed": ("hybrid", ()),
}
"""For each kind a model and flags that give the same restore points, but of another shape."""
EXACT = {"compressed": ("-fa", "off")}
"""Without AVX-512 flash attention rounds compressed cells of a restored file otherwise, by up to 0.019."""
LENGTHS = (900, 1500, 2100, 2700)
END = 3000


@pytest.fixture(
    scope="module", params=["swa", "hybrid", *in_long("compressed", "recurrent", "hybrid_no_mrope")]
)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    directory = tmp_path_factory.mktemp("slots")
    model = least_model(request.param)
    exact = EXACT.get(request.param, ())
    server = LlamaServer(model, directory, n_slots=2, n_ctx=16384, extra_args=exact)
    server.start()
    try:
        yield Bench(server, directory)
    finally:
        server.stop()


@pytest.fixture
def forgetful(bench: Bench, tmp_path: Path) -> Iterator[Bench]:
    """The same model on a server that keeps few context checkpoints."""
    model = bench.server.model
    few = ("--ctx-checkpoints", str(N_KEPT_BY_SERVER), *EXACT.get(kind_of(bench), ()))
    server = LlamaServer(model, tmp_path, n_slots=2, n_ctx=16384, extra_args=few)
    server.start()
    try:
        yield Bench(server, tmp_path)
    finally:
        server.stop()


def grown(bench: Bench, *lengths: int, name: str, slot: int = 0) -> Path:
    """Return the file of a slot in which a prompt has grown to these lengths, one after the other."""
    bench.post(f"/slots/{slot}?action=erase", {})
    for n_tokens in lengths:
        bench.complete(prompt(n_tokens), n_predict=0, id_slot=slot)
    bench.post(f"/slots/{slot}?action=save", {"filename": name})
    return bench.directory / name


def kind_of(bench: Bench) -> str:
    return bench.server.model.stem.split("-")[0]


def rule_of(bench: Bench) -> Rule:
    is_windowed = kind_of(bench) == "swa"
    return Rule(RuleKind.RESTORE_POINTS, FULL_WINDOW_TOKENS if is_windowed else 0)


def end_of(bench: Bench) -> int:
    """Return a length by which llama-server has nothing left of the first tokens but context checkpoints.

    Behind a sliding window it keeps a batch of 2,048 tokens.
    """
    return END if kind_of(bench) == "swa" else 1500


def diverging_at(n_tokens: int) -> list[int]:
    return [*prompt(n_tokens), *range(50, 90)]


def require_continued_at(bench: Bench, file: Path, point: int, tokens: list[int]) -> None:
    """Check that a restored file is continued at a restore point, and answers like a cold run."""
    warm = bench.restored(file.name, tokens)
    cold = bench.cold(tokens)
    assert n_reused(warm) == point
    assert n_reused(cold) == 0
    assert warm["content"] == cold["content"]
    assert distance(warm, cold) <= LOGPROB_BAR


def test_thinned_file_is_continued_at_each_point_kept_and_at_its_end(bench: Bench) -> None:
    whole = grown(bench, *LENGTHS, END, name="whole")
    state = read_state_file(whole)
    early, late = (max(p for p in state.restore_points if p < n) for n in (900, 2100))
    thin = whole.with_name("thin")
    shutil.copyfile(whole, thin)
    assert select_points(thin, {early, late}, {}) == {early, late}
    assert thin.stat().st_size == state.state_end + 12 + sum(
        c.size_bytes for c in state.context_checkpoints if c.restore_point in {early, late}
    )
    require_continued_at(bench, thin, late, diverging_at(late + 7))
    require_continued_at(bench, thin, late, diverging_at(2690))
    require_continued_at(bench, thin, early, diverging_at(late - 100))
    require_continued_at(bench, thin, 0, diverging_at(early - 100))
    require_continued_at(bench, thin, END, prompt(END + 300))


def test_file_without_any_context_checkpoint_is_continued_at_its_end_only(bench: Bench) -> None:
    file = grown(bench, *LENGTHS, END, name="bare")
    assert select_points(file, (), {}) == set()
    assert file.stat().st_size == read_state_file(file).state_end
    require_continued_at(bench, file, END, prompt(END + 300))
    require_continued_at(bench, file, 0, diverging_at(2000))


@pytest.mark.parametrize(
    "bench",
    ["swa", "hybrid", "compressed", *in_long("recurrent", "hybrid_no_mrope")],
    indirect=True,
    scope="module",
)
@pytest.mark.parametrize("slot", [1, *in_long(0)], ids=["other slot", "same slot"])
def test_dropped_point_is_grafted_from_an_older_file(forgetful: Bench, slot: int) -> None:
    older = grown(forgetful, 900, name="older", slot=slot)
    point = max(read_state_file(older).restore_points)
    end = end_of(forgetful)
    newer = grown(forgetful, 900, *range(1000, end, 100), end, name="newer")
    own = read_state_file(newer).restore_points
    assert len(own) <= N_KEPT_BY_SERVER
    assert point not in own
    tokens = diverging_at(point + 3)
    require_continued_at(forgetful, newer, max(p for p in own if p < point), tokens)
    assert select_points(newer, own[-1:], {point: older}) == {point, own[-1]}
    require_continued_at(forgetful, newer, point, tokens)
    require_continued_at(forgetful, newer, own[-1], diverging_at(own[-1] + 2))
    require_continued_at(forgetful, newer, end, prompt(end + 300))


def test_slot_has_the_points_that_are_predicted(forgetful: Bench) -> None:
    """A prompt goes on, in large and small steps, and then others leave it."""
    forgetful.post("/slots/0?action=erase", {})
    held: Content = Empty()
    grown = [prompt(n) for n in (900, 1500, 2100, 2200, 2300, 2900, 3000)]
    for tokens in (*grown, diverging_at(1700), prompt(2500)):
        evaluated = Prompt(token_ids(tokens), NAMESPACE)
        n_here = n_reused(forgetful.complete(tokens, n_predict=0))
        rule, n_kept = rule_of(forgetful), N_KEPT_BY_SERVER
        held = after_evaluation(held, evaluated, rule, n_reused=n_here, n_kept=n_kept)
        forgetful.post("/slots/0?action=save", {"filename": "now"})
        saved = read_state_file(forgetful.directory / "now").restore_points
        assert saved == pytest.approx(held.possible_points, abs=1)
        assert saved[-1] == pytest.approx(held.restore_points[-1], abs=1)


def test_points_are_counted_where_a_prompt_comes_again_or_leaves_a_restored_state(
    bench: Bench,
) -> None:
    bench.post("/slots/0?action=erase", {})
    held: Content = Empty()
    leaving = [[*prompt(n - 3), *range(50, 200)] for n in (1500, 2100)]
    for tokens in (prompt(1500), prompt(1500), leaving[0], prompt(2100), leaving[1], leaving[1]):
        evaluated = Prompt(token_ids(tokens), NAMESPACE)
        n_here = n_reused(bench.complete(tokens, n_predict=0, id_slot=0))
        held = after_evaluation(held, evaluated, rule_of(bench), n_reused=n_here)
        bench.post("/slots/0?action=save", {"filename": "now"})
        saved = read_state_file(bench.directory / "now").restore_points
        assert saved == pytest.approx(sorted(held.possible_points), abs=1)
        bench.post("/slots/0?action=erase", {})
        bench.post("/slots/0?action=restore", {"filename": "now"})
        held = as_saved(held, NAMESPACE, evaluated.tokens, saved)


def test_graft_stays_in_the_slot_and_is_saved_again(forgetful: Bench) -> None:
    """So a file carries it on for as long as llama-server has room for it in its list."""
    older = grown(forgetful, 900, name="older")
    point = max(read_state_file(older).restore_points)
    end = end_of(forgetful)
    newer = grown(forgetful, 900, *range(1000, end, 100), end, name="newer")
    select_points(newer, (), {point: older})
    forgetful.restored(newer.name, prompt(end + 300))
    forgetful.post("/slots/0?action=save", {"filename": "next"})
    next_file = newer.with_name("next")
    assert point in read_state_file(next_file).restore_points
    require_continued_at(forgetful, next_file, point, diverging_at(point + 3))


def test_donor_that_does_not_fit_is_left_out_and_the_file_still_restores(
    bench: Bench, tmp_path: Path
) -> None:
    older = grown(bench, 900, name="older")
    point = max(read_state_file(older).restore_points)
    newer = grown(bench, *range(1500, END + 1, 300), name="newer")
    last = max(read_state_file(newer).restore_points)
    cut = tmp_path / "cut"
    cut.write_bytes(older.read_bytes()[:-1])
    other = of_another_shape(bench, tmp_path)
    assert point in read_state_file(other).restore_points
    for donor in (cut, other, tmp_path / "gone"):
        assert select_points(newer, {last}, {point: donor}) == {last}
        require_continued_at(bench, newer, last, diverging_at(last + 2))
    assert select_points(newer, {last}, {point: older}) == {point, last}
    require_continued_at(bench, newer, point, diverging_at(point + 3))


def of_another_shape(bench: Bench, directory: Path) -> Path:
    """Return a file of the same tokens as "older", from another model or with another cache type."""
    kind, flags = OTHER_SHAPES[kind_of(bench)]
    model = least_model(kind)
    with LlamaServer(model, directory, n_ctx=16384, extra_args=flags) as server:
        return grown(Bench(server, directory), 900, name="other")


def words(seed: int, n_tokens: int) -> list[int]:
    """Return tokens that begin with others for each seed."""
    return [50 + seed + (i * (31 + 2 * seed) + i // 30) % 800 for i in range(n_tokens)]


BEGINS_ALIKE = [words(1, 5), words(2, 551), words(2, 1) + words(3, 250)]
"""The first leaves a context checkpoint of one token, and shares no token with the others."""


@pytest.mark.parametrize("kind", ["swa", *in_long("recurrent", "hybrid")])
@pytest.mark.parametrize("is_looked_up", [True, False])
async def test_no_answer_is_made_from_a_context_checkpoint_of_another_first_token(
    start_rig: StartRig, kind: str, *, is_looked_up: bool
) -> None:
    """llama-server keeps one too many: docs/upstream/stale_context_checkpoint.py."""
    async with start_rig(kind, n_slots=1, n_ctx=8192) as rig:
        body = {"n_predict": 1, "temperature": 0, "n_probs": 10}
        for tokens in BEGINS_ALIKE:
            fields = {"cache_prompt": is_looked_up or tokens is not BEGINS_ALIKE[0]}
            warm = await rig.post("/completion", body | {"prompt": tokens} | fields)
            await rig.settled()
        cold = await rig.post("/completion", body | {"prompt": tokens, "cache_prompt": False})
        assert distance(warm, cold) <= LOGPROB_BAR


def n_generated(rig: Rig) -> int:
    _, (slot,) = rig.server.request("GET", "/slots")
    return sum(each["n_decoded"] for each in slot.get("next_token", []))


async def test_state_of_a_client_that_left_is_kept_though_a_point_just_below_is_reused(
    start_rig: StartRig,
) -> None:
    """Of a window's two points that are near, llama-server takes the one that it made last."""
    body = {"n_predict": 8, "temperature": 0, "ignore_eos": True}
    first, others = prompt(1500), list(range(50, 200))
    async with start_rig("swa", n_slots=1, n_ctx=16384) as rig:
        await rig.post("/completion", body | {"prompt": first})
        await rig.settled()
        await rig.restart()
        # Of an answer that is no stream only a save tells how far it came, and the file keeps all points.
        running = asyncio.ensure_future(
            rig.post("/completion", body | {"prompt": first + others, "n_predict": 4000})
        )
        await until(lambda: n_generated(rig) > 0)
        running.cancel()
        await rig.settled()
        await rig.restart()
        tokens = first + others[:20] + others[:60]
        reply = await rig.post("/completion", body | {"prompt": tokens})
        await rig.settled()
        assert reply["timings"]["cache_n"] == len(first) - 6
        assert rig.sample("restore_ineffective_total") == 0
        await rig.reasons_are()
