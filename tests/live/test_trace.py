"""Traces without texts, and reports of a machine, on a real llama-server."""

import asyncio
import json
import signal
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path

import msgspec

from proxy.explain.views import TracedRequest
from tests.lab.conversation import agent_requests, system
from tests.lab.waiting import HANG_SECONDS, until
from tests.live.conftest import ONE_KIND, StartRig
from tests.live.test_commands import asked

_INTERRUPTIBLE = """
import signal
from proxy.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's "&"
main()
"""
HEADER = [system(1500)]
CONVERSATIONS = [agent_requests(2, 2, header=HEADER, seed=1000 * n) for n in range(3)]


@ONE_KIND
async def test_replayed_trace_is_reused_as_its_requests_were(
    start_rig: StartRig, tmp_path: Path, kind: str
) -> None:
    """A trace has no messages: a header behind which nothing can be restored is evaluated once more."""
    file = tmp_path / "trace.jsonl"
    async with start_rig(kind) as rig:
        n_prompt = n_reused = 0
        for messages in chain(*zip(*CONVERSATIONS, strict=True)):
            usage = (await rig.chat(messages))["usage"]
            n_prompt += usage["prompt_tokens"]
            n_reused += usage["prompt_tokens_details"]["cached_tokens"]
        told = await asked("trace", "export", file, "--admin", rig.admin_url)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert sum(row["input_length"] for row in rows) == n_prompt
        assert told == await asked("trace", "show", file)
        numbers = dict.fromkeys(chain.from_iterable(row["hash_ids"] for row in rows))
        assert list(numbers) == list(range(len(numbers)))
        await rig.restart()
        replayed = await asked("trace", "replay", file, rig.base_url, "--speed", 0)
    assert replayed["failed"] == 0
    assert abs(replayed["prompt tokens"] / n_prompt - 1) < 0.05
    assert abs(replayed["share reused"] - n_reused / n_prompt) < 0.06


async def test_ctrl_c_ends_a_replay_that_waits_for_its_next_request(
    start_rig: StartRig, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [TracedRequest(1000 * second, 600, 1, [1, 2]) for second in (0, 3600)]
    file.write_bytes(msgspec.json.Encoder().encode_lines(rows))
    async with start_rig("full") as rig:

        async def are_answered() -> bool:
            async with rig.client.get(rig.admin_url + "/requests") as reply:
                return len((await reply.json())["requests"]) == 2

        words = ("trace", "replay", str(file), rig.base_url)
        replay = await asyncio.create_subprocess_exec(sys.executable, "-c", _INTERRUPTIBLE, *words)
        await until(are_answered)  # one that measures, and the first
        replay.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                assert await replay.wait() == 130
        finally:
            with suppress(ProcessLookupError):
                replay.kill()


async def test_report_has_each_kind_of_request_and_no_path(
    start_rig: StartRig, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    async with start_rig("hybrid") as rig:
        where = ("--admin", rig.admin_url, "--url", rig.base_url)
        figures = await asked("bench", "--report", file, "--tokens", 1024, *where)
    report = json.loads(file.read_text())
    assert figures["failed"] == 0 and len(report["requests"]) == figures["requests"]
    assert {request["chosen"] for request in report["requests"]} == {"nothing", "live", "restore"}
    measured = report["metrics"]
    assert float(measured["save_seconds_sum"]) > 0 and float(measured["restored_bytes_total"]) > 0
    assert any(name.startswith("build_info{version=") for name in measured)
    assert all(float(value) >= 0 for value in measured.values()) and "bucket" not in str(measured)
    assert report["machine"] and report["servers"][0]["build"]
    assert report["model"]["name"] == "hybrid-least.gguf"
    assert str(tmp_path) not in file.read_text() and "/" not in str(report["flags"])
