"""What operators see of a real llama-server: health, metrics, and when the first token comes."""

from typing import Any

from proxy.llama.answers import AnswerReader
from tests.lab.conversation import agent_requests, system, tools
from tests.live.conftest import StartRig

MESSAGES = agent_requests(2, 1, header=[system(150)])
TOOLS = tools(2)


async def test_first_token_is_not_taken_for_a_report_of_progress(start_rig: StartRig) -> None:
    """Progress comes while the prompt is evaluated, in events that open the assistant's message too."""
    async with start_rig("full", extra_args=("-b", "512")) as rig:
        body: dict[str, Any] = {"stream": True, "return_progress": True, "max_tokens": 4}
        body["messages"] = [{"role": "user", "content": "word " * 1500}]
        reader, n_events = AnswerReader("text/event-stream"), 0
        async with rig.client.post(rig.base_url + "/v1/chat/completions", json=body) as reply:
            async for line in reply.content:
                n_events += line.startswith(b"data:") and not reader.has_token
                reader.feed(line)
                if reader.has_token and n_events:
                    assert b"prompt_progress" not in line
                    break
            await reply.read()
        assert n_events > 2
        await rig.settled()
        outcomes = ("hit", "partial", "miss")
        counts = [rig.sample("first_token_seconds_count", outcome=o) for o in outcomes]
        assert sum(counts) == 1


async def test_restored_conversation_is_seen_in_metrics_and_health(start_rig: StartRig) -> None:
    async with start_rig("hybrid") as rig:
        await rig.chat(MESSAGES[0], tools=TOOLS)
        await rig.settled()
        assert rig.sample("saved_bytes_total") == rig.sample("checkpoint_bytes") > 0
        await rig.restart()
        reply = await rig.chat(MESSAGES[1], tools=TOOLS)
        assert rig.sample("restored_tokens_total") == reply["timings"]["cache_n"] > 0
        assert rig.sample("restored_bytes_total") > 0
        assert rig.sample("evaluation_seconds_total") > 0
        assert rig.sample("disk_free_bytes") > 0
        assert rig.sample("rule", rule="restore points") == 1
        assert (await rig.health())["state"] == "caching"
        assert (await rig.health())["reasons"] == []


async def test_rates_are_learned_shown_and_remembered(start_rig: StartRig) -> None:
    async with start_rig("full") as rig:
        await rig.chat(MESSAGES[0], tools=TOOLS)
        await rig.settled()
        assert rig.sample("evaluation_tokens_per_second", up_to="1024") > 0
        assert (
            rig.sample("evaluation_tokens_per_second", up_to="none") == 0
        )  # nothing was that long
        assert rig.sample("save_bytes_per_second") > 0
        before = rig.running.server.process
        await rig.restart()
        after = rig.running.server.process
        assert before is not None and after is not None and before is not after
        # First contact saves a probe, which may already have taught more of saving.
        assert after.rates.tokens == before.rates.tokens
        await rig.chat(MESSAGES[1], tools=TOOLS)
        assert rig.sample("restore_bytes_per_second", file="cold") > 0
        assert rig.sample("restore_bytes_per_second", file="warm") == 0
