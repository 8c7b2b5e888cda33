"""Sparse attention (GLM-5, DeepSeek V3.2): its index has a cache of its own, which is no sliding window."""

import asyncio
import random
from typing import Any

from structlog.testing import capture_logs

from proxy.core.model import RuleKind
from tests.live.conftest import StartRig
from tests.live.test_window_repair import LOGPROB_BAR, distance

COMPLETION = "/completion"


def tokens(seed: int, n_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(100, 3000), k=n_tokens)


async def test_index_of_sparse_attention_stays_beside_its_tokens(start_rig: StartRig) -> None:
    """With --kv-unified the cells of a slot are out of order once another slot has left a hole."""
    more: dict[str, Any] = {
        "prompt": tokens(1, 520),
        "n_predict": 4,
        "temperature": 0,
        "n_probs": 10,
    }
    extra_args = ("--kv-unified", "--cache-ram", "0")
    with capture_logs() as logged:
        async with start_rig("sparse", extra_args=extra_args, n_ctx=4096) as rig:

            async def ask_directly(path: str, body: dict[str, Any]) -> dict[str, Any]:
                status, reply = await asyncio.to_thread(rig.server.request, "POST", path, body)
                assert status == 200, reply
                return dict(reply)

            await rig.post(COMPLETION, {"prompt": tokens(2, 100), "n_predict": 0})
            await rig.post(COMPLETION, {"prompt": more["prompt"][:200], "n_predict": 0})
            held = [slot.n_held for slot in rig.running.pool.processes[0].slots]
            await ask_directly(f"/slots/{held.index(100)}?action=erase", {})
            await rig.post(COMPLETION, {"prompt": more["prompt"][:500], "n_predict": 0})
            assert rig.running.pool.processes[0].rule.kind is RuleKind.ANY_PREFIX
            await rig.stop_proxy()
            live = await ask_directly(COMPLETION, more | {"id_slot": held.index(200)})
            await asyncio.to_thread(rig.server.stop)
            await asyncio.to_thread(rig.server.start)
            await rig.start_proxy()
            restored = await rig.post(COMPLETION, more)
    for reply in (live, restored):
        assert reply["timings"]["cache_n"] == 500
    assert distance(restored, live) <= LOGPROB_BAR
    assert not [event for event in logged if "window" in str(event)]
