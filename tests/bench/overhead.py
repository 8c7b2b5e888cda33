"""What the proxy adds to a request that a live slot can serve."""

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from tests.bench.progress import tell
from tests.bench.request_log import RequestLog
from tests.bench.rigs import open_rig
from tests.bench.section import Section
from tests.bench.workload import conversation
from tests.lab.rig import Rig

N_TIMES = 20


async def measure_overhead(leftovers: ExitStack, log: RequestLog) -> Section:
    """Return the table: the same request by turns through the proxy and pinned by hand."""
    tell("overhead")
    body = conversation()[0].body(max_tokens=1)
    async with open_rig("hybrid", leftovers) as rig:
        await rig.post("/v1/chat/completions", body)
        await rig.settled()
        pinned = {**body, "id_slot": log.take().slot, "cache_prompt": True}
        proxied, direct = [], []
        for _ in range(N_TIMES):
            proxied.append(await _milliseconds(rig, rig.base_url, body))
            direct.append(await _milliseconds(rig, rig.server.base_url, pinned))
    section = Section(
        "Overhead on a cached request (hybrid tiny, 10,000-token prompt, live slot)",
        "",
        ("requests", "through the proxy, ms", "pinned directly, ms", "added, ms"),
    )
    ours, theirs = median(proxied), median(direct)
    cells = (N_TIMES, f"{ours:.1f}", f"{theirs:.1f}", f"{ours - theirs:.1f}")
    section.add(*cells, is_met=None)
    return section


async def _milliseconds(rig: Rig, base_url: str, body: dict[str, Any]) -> float:
    began = time.monotonic()
    async with rig.client.post(base_url + "/v1/chat/completions", json=body) as reply:
        await reply.read()
        assert reply.status == 200
    return 1000 * (time.monotonic() - began)
