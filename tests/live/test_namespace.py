"""A state is restored only into the model and cache it came from; another world shares nothing."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from structlog.testing import capture_logs

from proxy.llama.files import fingerprint_model
from tests.lab.conversation import agent_requests, answer, prose, system, tools, user
from tests.lab.models import least_model
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import StartRig, in_long

MESSAGES = agent_requests(1, 1, header=[system(200)])
TOOLS = tools(1)
SLACK_TOKENS = 32

FOREIGN: dict[str, dict[str, Any]] = {
    "KV types": {"extra_args": ("-ctk", "f32", "-ctv", "f32")},
    "slots": {"n_slots": 3, "n_ctx": 3 * 32768},
    "unified cache": {"extra_args": ("-kvu",)},
    "flash attention": {"extra_args": ("-fa", "off")},
    "rope scale": {"extra_args": ("--rope-freq-scale", "0.5")},
}


async def reused(rig: Rig) -> tuple[int, int]:
    """Return how many tokens of the conversation's next request were reused, and its length."""
    reply = await rig.chat(MESSAGES[1], tools=TOOLS)
    await rig.settled()
    return reply["timings"]["cache_n"], reply["usage"]["prompt_tokens"]


async def fill(rig: Rig) -> None:
    await rig.chat(MESSAGES[0], tools=TOOLS)
    await rig.settled()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("full", "KV types"), ("full", "rope scale"), ("hybrid", "slots")),
        *in_long(("full", "unified cache"), ("hybrid", "KV types"), ("hybrid", "flash attention")),
    ],
)
async def test_state_of_another_cache_is_not_restored(
    start_rig: StartRig, kind: str, change: str
) -> None:
    async with start_rig(kind) as rig:
        await fill(rig)
        _, n_prompt = await reused(rig)
    with capture_logs() as log:
        async with start_rig(kind, **FOREIGN[change]) as rig:
            assert await rig.evaluated() < 20_000
            n_reused, _ = await reused(rig)
            assert n_reused < SLACK_TOKENS or n_reused == n_stopped(rig)
            assert restores(rig) == 0
    # Where states look alike, only the canary tells them apart.
    assert any("other numbers" in line["event"] for line in log) == (change == "rope scale")
    async with start_rig(kind) as rig:
        n_reused, _ = await reused(rig)
        assert n_reused > n_prompt - SLACK_TOKENS


def n_stopped(rig: Rig) -> int:
    """Return where a stop on the request's way makes llama-server report its own tokens as reused."""
    table = rig.running.server.process.queue.table  # type: ignore[union-attr]
    return max(getattr(slot.content, "last_cut", 0) for slot in table)


def restores(rig: Rig) -> float:
    return rig.sample("restores_total", result="done")


async def test_changed_context_size_keeps_what_fits(start_rig: StartRig) -> None:
    async with start_rig("hybrid", n_ctx=65536) as rig:
        await fill(rig)
    for n_ctx in (16384, 131072):
        async with start_rig("hybrid", n_ctx=n_ctx) as rig:
            n_reused, n_prompt = await reused(rig)
            assert n_reused > n_prompt / 2
            assert restores(rig) == 1


async def test_state_larger_than_the_context_is_not_restored(start_rig: StartRig) -> None:
    async with start_rig("full", n_ctx=65536) as rig:
        await rig.post(
            "/completion", {"prompt": [300 + i % 999 for i in range(2500)], "n_predict": 0}
        )
    async with start_rig("full", n_ctx=4096) as rig:
        prompt = [300 + i % 999 for i in range(1500)]
        reply = await rig.post("/completion", {"prompt": prompt, "n_predict": 2})
        assert reply["timings"]["cache_n"] == 0
        assert restores(rig) == 0


def with_damaged_output(model: bytes) -> bytes:
    """Return a model whose output matrix is zeroed from its middle on, beyond the sampled bytes."""
    reader = gguf.GGUFReader(least_model("full"))
    output = next(t for t in reader.tensors if t.name in ("output.weight", "token_embd.weight"))
    middle = int(output.data_offset + output.n_bytes // 2)
    return model[:middle] + bytes(output.n_bytes // 2) + model[middle + output.n_bytes // 2 :]


async def test_other_weights_under_the_same_path_share_nothing(
    start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "full-least.gguf"
    original = least_model("full").read_bytes()
    model.write_bytes(original)
    monkeypatch.setattr("tests.lab.models.DEFAULT_MODEL_FOLDER", tmp_path)
    async with start_rig("full") as rig:
        await fill(rig)
    fingerprint = fingerprint_model(model)
    model.write_bytes(with_damaged_output(original))
    assert fingerprint_model(model) == fingerprint  # only the canary sees it
    async with start_rig("full") as rig:
        n_reused, _ = await reused(rig)
        assert n_reused < SLACK_TOKENS or n_reused == n_stopped(rig)
        assert restores(rig) == 0


def write_adapter(path: Path) -> None:
    """Write a LoRA adapter for the full-attention model."""
    reader = gguf.GGUFReader(least_model("full"))
    query = next(t for t in reader.tensors if t.name == "blk.0.attn_q.weight")
    n_in, n_out = (int(n) for n in query.shape)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    noise = np.random.default_rng(5)
    a = noise.normal(size=(4, n_in)).astype(np.float32)
    b = noise.normal(size=(n_out, 4)).astype(np.float32)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", a)
    writer.add_tensor("blk.0.attn_q.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


async def test_lora_adapter_is_a_world_of_its_own(start_rig: StartRig, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.gguf"
    write_adapter(adapter)
    async with start_rig("full") as rig:
        await fill(rig)
        _, n_prompt = await reused(rig)
    async with start_rig("full", extra_args=("--lora", str(adapter))) as rig:
        n_reused, _ = await reused(rig)
        assert n_reused < SLACK_TOKENS or n_reused == n_stopped(rig)
    async with start_rig("full") as rig:
        n_reused, _ = await reused(rig)
        assert n_reused > n_prompt - SLACK_TOKENS


async def is_evaluated_whole(rig: Rig) -> bool:
    """Return whether nothing of the conversation's next request is reused."""
    before = await rig.evaluated()
    _, n_prompt = await reused(rig)
    return await rig.evaluated() - before >= n_prompt


async def test_state_of_an_adapter_is_not_taken_for_one_of_the_model(
    start_rig: StartRig, tmp_path: Path
) -> None:
    """Nothing in a slot tells which adapters evaluated it: neither its tokens nor GET /slots."""
    write_adapter(adapter := tmp_path / "adapter.gguf")
    scales = [{"id": 0, "scale": 0.5}]
    async with start_rig("full", extra_args=("--lora", str(adapter))) as rig:
        await rig.chat(MESSAGES[0], tools=TOOLS, lora=scales)
        await rig.restart(server=False)
        assert await is_evaluated_whole(rig)
        (before,) = rig.running.pool.processes
        assert rig.server.request("POST", "/lora-adapters", scales)[0] == 200
        await until(lambda: before not in (found := rig.running.pool.processes) and found)
        await rig.settled()
        assert await is_evaluated_whole(rig)


async def test_conversation_with_an_adapter_goes_on_in_its_slot_as_without_the_proxy(
    start_rig: StartRig, tmp_path: Path
) -> None:
    write_adapter(adapter := tmp_path / "adapter.gguf")
    adapted = {"tools": TOOLS, "lora": [{"id": 0, "scale": 0.5}]}
    async with start_rig("full", extra_args=("--lora", str(adapter))) as rig:
        await rig.chat(MESSAGES[0], **adapted)
        reply = await rig.chat(MESSAGES[1], **adapted)
        n_kept = (await rig.chat(MESSAGES[0], **adapted))["timings"]["cache_n"]
        assert reply["timings"]["cache_n"] > n_kept - SLACK_TOKENS > 500
        assert await is_evaluated_whole(rig)


async def test_conversations_with_one_adapter_take_turns_in_a_slot_for_each(
    start_rig: StartRig, tmp_path: Path
) -> None:
    """Their prompts are not read, so that only their messages tell which slot holds which of them."""
    write_adapter(adapter := tmp_path / "adapter.gguf")
    adapted = {"lora": [{"id": 0, "scale": 0.5}]}
    talks = [[system(200, 1), user(number, 200)] for number in (1, 2)]
    async with start_rig("full", n_slots=3, extra_args=("--lora", str(adapter))) as rig:
        for turn in range(3):
            for talk in talks:
                reply = await rig.chat(talk, **adapted)
                timings = reply["timings"]
                assert not turn or timings["cache_n"] > 3 * timings["prompt_n"]
                talk += [answer(turn), user(turn, 5)]


async def test_shifted_state_does_not_outlive_the_proxy(start_rig: StartRig) -> None:
    """A shifted state is only approximately right, and its tokens do not tell that it was shifted."""
    begin, middle, end = prose(1, 9), prose(2, 300), prose(3, 300)
    fields = {"n_predict": 1, "n_cache_reuse": 64}
    async with start_rig("full", n_slots=1) as rig:
        await rig.post("/completion", {"prompt": f"{begin} {middle} {end}", **fields})
        shifted = {"prompt": f"{begin} {end}", **fields}
        assert (await rig.post("/completion", shifted))["timings"]["cache_n"] > 500
        await rig.restart(server=False)
        exact = await rig.post("/completion", {**shifted, "n_cache_reuse": 0})
        assert exact["timings"]["cache_n"] < SLACK_TOKENS


async def test_editor_keeps_the_servers_cache_reuse(start_rig: StartRig) -> None:
    """An editor sends the end of a file, which begins elsewhere at each line: only shifts spare that."""
    ids = ("pre", "suf", "mid")
    fim = ",".join(f"tokenizer.ggml.fim_{n}_token_id=int:{300 + i}" for i, n in enumerate(ids))
    begin, middle, end = prose(1, 9), prose(2, 300), prose(3, 300)
    asked = {"input_suffix": "return", "n_predict": 1}
    arguments = ("--cache-reuse", "64", "--override-kv", fim, "-b", "1024")
    async with start_rig("full", n_slots=1, extra_args=arguments) as rig:
        await rig.post("/infill", {**asked, "input_prefix": f"{begin} {middle} {end}"})
        reply = await rig.post("/infill", {**asked, "input_prefix": f"{begin} {end}"})
        assert reply["timings"]["cache_n"] > 500
        assert await is_evaluated_whole(rig)
