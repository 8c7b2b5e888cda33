"""The repair of cut windows on a real llama-server.

No build that needs the repair is at hand, and 0.7.0 reads only its own files. But a window is the same
in both versions, so files of 0.7.0 are stripped, repaired and restored there: what a repaired state
answers must be what the unrepaired one answers.
"""

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.core.launch import Launch
from proxy.llama.files import StateFile, read_state_file
from proxy.llama.state_edits import repair_window
from tests.lab.models import least_model
from tests.lab.older_builds import strip_context_checkpoints, to_version_3
from tests.lab.rig import Rig
from tests.lab.server import LlamaServer
from tests.live.conftest import StartRig, in_long

WINDOW = 512
N_MORE = 300
LOGPROB_BAR = 0.012
WRONG_BAR = 0.1
"""Other batches round otherwise, by up to 0.03; a window that lacks cells makes 0.2 to 0.7."""
N_COMPARED = 8
N_SECTIONS = {"full": 1, "swa": 2, "recurrent": 1, "hybrid": 2, "hybrid_no_mrope": 2}
"""How many sections a state of each kind of memory has."""


def prompt(n_tokens: int) -> list[int]:
    return [100 + (i * 37 + i // 50) % 3000 for i in range(n_tokens)]


class Bench:
    """One slot of a llama-server without a proxy."""

    def __init__(self, server: LlamaServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self._cold: dict[tuple[int, ...], dict[str, Any]] = {}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, reply = self.server.request("POST", path, body)
        assert status == 200, reply
        return dict(reply)

    def complete(self, tokens: list[int], **fields: Any) -> dict[str, Any]:
        body = {"prompt": tokens, "n_predict": 8, "temperature": 0, "n_probs": 10, "id_slot": 0}
        return self.post("/completion", body | {"cache_prompt": True} | fields)

    def cold(self, tokens: list[int]) -> dict[str, Any]:
        """Return the answer of an empty slot, which is always the same."""
        if (key := tuple(tokens)) not in self._cold:
            self.post("/slots/0?action=erase", {})
            self._cold[key] = self.complete(tokens, cache_prompt=False)
        return self._cold[key]

    def restored(self, name: str, tokens: list[int]) -> dict[str, Any]:
        self.post("/slots/0?action=erase", {})
        self.post("/slots/0?action=restore", {"filename": name})
        return self.complete(tokens)

    def saved(self, tokens: list[int]) -> Path:
        """Return a file of exactly these tokens, stripped of its context checkpoints."""
        self.post("/slots/0?action=erase", {})
        self.complete(tokens, n_predict=0)
        self.post("/slots/0?action=save", {"filename": "plain"})
        strip_context_checkpoints(self.directory / "plain")
        return self.directory / "plain"

    def repaired(self, plain: Path) -> Path:
        copy = plain.with_name("repaired")
        shutil.copyfile(plain, copy)
        assert repair_window(copy)
        return copy


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory = tmp_path_factory.mktemp("slots")
    model = least_model("swa")
    server = LlamaServer(model, directory, n_slots=2, n_ctx=16384)
    server.start()
    try:
        yield Bench(server, directory)
    finally:
        server.stop()


def distance(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Return the largest difference of the first token's log-probabilities."""
    a, b = (
        {top["id"]: top["logprob"] for top in reply["completion_probabilities"][0]["top_logprobs"]}
        for reply in (left, right)
    )
    common = a.keys() & b.keys()
    assert len(common) >= N_COMPARED
    return max(abs(float(a[token]) - float(b[token])) for token in common)


def n_reused(reply: dict[str, Any]) -> int:
    return int(reply["timings"]["cache_n"])


@pytest.mark.parametrize("n_tokens", [WINDOW + 2, 3000, *in_long(700, 2000)])
def test_repaired_state_continues_at_its_end_with_equal_answers(
    bench: Bench, n_tokens: int
) -> None:
    tokens = prompt(n_tokens + N_MORE)
    plain = bench.saved(tokens[:n_tokens])
    repaired = bench.repaired(plain)
    from_plain = bench.restored(plain.name, tokens)
    from_repaired = bench.restored(repaired.name, tokens)
    cold = bench.cold(tokens)
    assert n_reused(from_repaired) == n_reused(from_plain) == n_tokens
    assert from_repaired["content"] == from_plain["content"]
    assert distance(from_repaired, from_plain) <= LOGPROB_BAR
    assert distance(from_repaired, cold) <= LOGPROB_BAR


def test_repaired_window_reaches_one_position_further_back(bench: Bench) -> None:
    """This is what builds before 0.7.0 ask for; 0.7.0 shows it by going back one token further."""
    tokens = prompt(2000)
    plain = bench.saved(tokens)
    repaired = bench.repaired(plain)
    two_back, three_back = [*tokens[:-2], 7, 8, 9], [*tokens[:-3], 7, 8, 9]
    assert n_reused(bench.restored(plain.name, two_back)) == 0
    assert n_reused(bench.restored(repaired.name, two_back)) == 1998
    assert n_reused(bench.restored(repaired.name, three_back)) == 0


@pytest.mark.parametrize("n_tokens", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_state_hardly_longer_than_the_window_is_left_alone(bench: Bench, n_tokens: int) -> None:
    plain = bench.saved(prompt(n_tokens))
    before = plain.read_bytes()
    assert not repair_window(plain)
    assert plain.read_bytes() == before


def test_window_without_flash_attention_is_repaired_in_every_strip(tmp_path: Path) -> None:
    """Then V is transposed: one strip per embedding value instead of one row per cell."""
    model = least_model("swa")
    server = LlamaServer(model, tmp_path, n_ctx=8192, extra_args=("-fa", "off"))
    server.start()
    try:
        bench, tokens = Bench(server, tmp_path), prompt(900 + N_MORE)
        plain = bench.saved(tokens[:900])
        layout = read_state_file(plain).layout
        assert layout is not None
        assert all(section.is_v_transposed for section in layout)
        from_repaired = bench.restored(bench.repaired(plain).name, tokens)
        assert n_reused(from_repaired) == 900
        assert distance(from_repaired, bench.cold(tokens)) <= LOGPROB_BAR
    finally:
        server.stop()


@pytest.mark.parametrize(
    "kind", ["swa", "hybrid", *in_long("full", "recurrent", "hybrid_no_mrope")]
)
async def test_real_states_as_version_3_are_understood_and_windows_repaired(
    start_rig: StartRig, kind: str
) -> None:
    async with start_rig(kind) as rig:
        path = await save_through(rig, prompt(900))
        four = read_state_file(path)
        to_version_3(path)
        three = read_state_file(path)
        assert (three.version, three.tokens) == (3, four.tokens)
        assert n_cells(three) == n_cells(four)
        assert three.layout is not None
        assert len(three.layout) == N_SECTIONS[kind]
        assert all(section.rotations == () for section in three.layout)
        assert repair_window(path) is (kind == "swa")
        if kind == "swa":
            repaired = read_state_file(path)
            assert n_cells(repaired) == [900, WINDOW]
            assert repaired.layout == three.layout
            assert not repair_window(path)


def n_cells(state: StateFile) -> list[int]:
    return [found.n_cells for found in state.sections or ()]


async def save_through(rig: Rig, tokens: list[int]) -> Path:
    """Have the proxy save a slot with these tokens; return a copy of the file."""
    await rig.post("/completion", {"prompt": tokens, "n_predict": 0})
    await rig.settled()
    assert rig.running.store is not None
    (checkpoint,) = [c for c in rig.running.store if c.n_tokens == len(tokens)]
    source = rig.running.store.files.path(checkpoint.file_name)
    return Path(await asyncio.to_thread(shutil.copyfile, source, source.with_name("copy")))


async def test_conversation_goes_on_from_repaired_files_with_equal_answers(
    start_rig: StartRig,
) -> None:
    def repair(path: Path) -> None:
        strip_context_checkpoints(path)
        repair_window(path)

    async with start_rig("swa", rewrite=repair) as rig:
        health = await rig.health()
        assert health["servers"][0]["rule"] == "end only"
        tokens = prompt(3000)
        await rig.post("/completion", {"prompt": tokens[:2500], "n_predict": 0})
        await rig.restart()
        body = {"prompt": tokens, "n_predict": 8, "temperature": 0, "n_probs": 10}
        before = await rig.evaluated()
        warm = await rig.post("/completion", body)
        assert await rig.evaluated() - before <= 500 + 6
        cold = await rig.post("/completion", body | {"cache_prompt": False})
        assert warm["content"] == cold["content"]
        assert distance(warm, cold) <= LOGPROB_BAR


@pytest.mark.parametrize(
    ("kind", "flash_attention", "lengths"),
    [("swa", "on", (1100, 3100)), ("swa", "off", (1100,)), ("sparse_window", "on", (1100,))],
)
async def test_many_new_tokens_behind_a_restored_window_are_answered_as_alone(
    start_rig: StartRig, directory: Path, kind: str, flash_attention: str, lengths: tuple[int, ...]
) -> None:
    """The cells of a window are put in order before a file is stored (order_windows).

    At these lengths an unordered window shows: at others, such as 1,500 and 2,600, it does by chance not.
    """
    async with start_rig(kind, n_slots=1, extra_args=("-fa", flash_attention)) as rig:
        for n_tokens in lengths:
            tokens = random.Random(n_tokens).choices(range(100, 3000), k=n_tokens + 1300)
            await rig.post("/completion", {"prompt": tokens[: n_tokens // 2], "n_predict": 0})
            await rig.post("/completion", {"prompt": tokens[:n_tokens], "n_predict": 0})
            await rig.restart()
            body = {"prompt": tokens, "n_predict": 8, "temperature": 0, "n_probs": 10}
            warm = await rig.post("/completion", body)
            assert n_reused(warm) >= n_tokens - 8
            alone = Bench(rig.server, directory)
            alone.post("/slots/0?action=erase", {})
            alone.complete(
                tokens[:-4], n_predict=0
            )  # as the proxy does: other batches round otherwise
            cold = alone.complete(tokens)
            assert distance(warm, cold) <= WRONG_BAR


LONGER_THAN_PROBED = ("--override-kv", "gemma3.attention.sliding_window=int:5000")


@pytest.mark.parametrize(
    ("extra_args", "n_tokens"),
    [((), 2300), *in_long((LONGER_THAN_PROBED, 6000))],
    ids=["window is probed", "window is longer than every probe"],
)
async def test_restored_window_is_never_cut_where_the_server_would(
    start_rig: StartRig, directory: Path, extra_args: tuple[str, ...], n_tokens: int
) -> None:
    """With --swa-full llama-server cuts what was restored, although the file has only a window."""
    async with start_rig("swa", n_slots=1, extra_args=("--swa-full", *extra_args)) as rig:
        tokens = prompt(n_tokens)
        await rig.post("/completion", {"prompt": tokens, "n_predict": 0})
        await rig.restart()
        assert (await rig.health())["servers"][0][
            "rule"
        ] == "end only"  # the file has shown the window
        extended = await rig.post("/completion", {"prompt": [*tokens, 5, 6, 7], "n_predict": 0})
        assert n_reused(extended) >= n_tokens - 1
        body: dict[str, Any] = {
            "prompt": [*tokens[:-300], *[7] * 100],
            "n_predict": 8,
            "temperature": 0,
        }
        cut = await rig.post("/completion", body | {"n_probs": 10})
        # The proxy stops shortly before the end, and llama-server rounds a short last batch otherwise.
        alone = Bench(rig.server, directory)
        alone.post("/slots/0?action=erase", {})
        alone.complete(body["prompt"][:-4], n_predict=0)
        cold = alone.complete(body["prompt"])
        assert distance(cut, cold) <= LOGPROB_BAR
        assert cut["content"] == cold["content"]


async def test_rule_is_learned_again_where_a_flag_has_changed_it(start_rig: StartRig) -> None:
    async with start_rig("swa", n_slots=1) as rig:
        assert (await rig.health())["servers"][0]["rule"] == "restore points"
        await rig.stop_proxy()
        await asyncio.to_thread(rig.server.stop)
        rig.server.extra_args = ("--swa-full",)
        # Until a window was cut on saving:
        await asyncio.to_thread(rig.server.start)
        await rig.start_proxy()
        assert (await rig.health())["servers"][0][
            "rule"
        ] == "any prefix"  # until a window was cut on saving


@pytest.mark.parametrize(
    ("kind", "is_narrow", "warns"),
    [("swa", False, True), *in_long(("swa", True, False), ("full", False, False))],
)
async def test_first_contact_tells_that_large_batches_make_wrong_answers(
    start_rig: StartRig, kind: str, is_narrow: bool, warns: bool
) -> None:
    launch = Launch(has_narrow_batches=is_narrow)
    with capture_logs() as log:
        async with start_rig(kind, launch=launch):
            assert any("-b 512" in line["event"] for line in log) == warns
