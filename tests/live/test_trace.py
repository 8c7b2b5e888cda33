"""Traces without texts, and reports of a machine, on a real llama-server."""

import json
from itertools import chain
from pathlib import Path

from tests.lab.conversation import agent_requests, system
from tests.live.conftest import ONE_KIND, StartRig
from tests.live.test_commands import asked

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
    assert report["model"]["name"] == "hybrid-tiny.gguf"
    assert str(tmp_path) not in file.read_text() and "/" not in str(report["flags"])
