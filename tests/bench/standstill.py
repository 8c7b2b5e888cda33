"""A llama-server that stands still for a minute (SIGSTOP) in the midst of a stream: what clients get.

Two conversations; the second streams its answer when llama-server is stopped, and the first, whose state is
on disk, asks meanwhile. Both answers are held against those without a stop.

python -m tests.bench.standstill [--seconds 60]
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import Any

import aiohttp
import msgspec

from tests.bench.interrupts import run_section
from tests.bench.processes import Setup, Stack
from tests.bench.section import Section
from tests.bench.soak import read_gauges
from tests.lab.conversation import system, user

SILENT = 'degraded{kind="llama-server is silent"}'
LEASED = 'slots{state="leased"}'
N_TOKENS = 400


def conversation(number: int) -> list[dict[str, Any]]:
    return [system(300), user(number, 200)]


async def ask(client: aiohttp.ClientSession, stack: Stack, number: int) -> tuple[str, int]:
    """Return what a conversation is answered, and how many tokens were reused."""
    said = []
    body = {"messages": conversation(number), "max_tokens": N_TOKENS, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "timings_per_token": False}
    n_reused = -1
    async with client.post(stack.base_url + "/v1/chat/completions", json=body) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line[6:])
                said += [each["delta"].get("content") or "" for each in event["choices"]]
                n_reused = event.get("timings", {}).get("cache_n", n_reused)
            elif line.startswith(b"data: [DONE]"):
                return "".join(said), n_reused
    return "no end", n_reused


async def measure(seconds: float, leftovers: ExitStack) -> Section:
    """Return the table."""
    setup = Setup(n_slots=1, n_threads=1, server_arguments=("--cache-ram", "0"))
    stack = Stack("hybrid", "tiny", leftovers, has_proxy=True, setup=setup)
    await stack.start()
    assert stack.proxy is not None
    section = Section(
        f"llama-server stands still for {seconds:.0f} s",
        "both answers as without it, the first conversation's state reused, told, nothing left",
        ("what", "seen"),
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as client:
        answers = [(await ask(client, stack, number))[0] for number in (1, 2)]
        await stack.proxy.settled()
        streaming = asyncio.ensure_future(ask(client, stack, 2))
        while not read_gauges(await stack.proxy.metrics())[LEASED]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(stack.server.pid, signal.SIGSTOP)
        began = time.monotonic()
        asking, told_after = asyncio.ensure_future(ask(client, stack, 1)), None
        while (passed := time.monotonic() - began) < seconds:
            if told_after is None and read_gauges(await stack.proxy.metrics()).get(SILENT):
                told_after = passed
            await asyncio.sleep(0.1)
        n_early = streaming.done() + asking.done()
        os.kill(stack.server.pid, signal.SIGCONT)
        (second, _), (first, n_reused) = await asyncio.gather(streaming, asking)
        await stack.proxy.settled()
        gauges = read_gauges(await stack.proxy.metrics())
    section.add("answers that were there before its end", n_early, is_met=not n_early)
    n_alike = (first == answers[0]) + (second == answers[1])
    section.add("answers as without it", n_alike, is_met=n_alike == 2)
    section.add("tokens reused by the first", n_reused, is_met=n_reused > 300)
    told = f"{told_after:.1f} s" if told_after is not None else "never"
    section.add("told as silent after", told, is_met=told_after is not None)
    n_left = int(gauges[LEASED] + gauges["waiting_requests"] + gauges.get(SILENT, 0))
    section.add("leases, requests and reasons left", n_left, is_met=not n_left)
    return section


def main() -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description="Stop llama-server for a while.")
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    return run_section(lambda leftovers: measure(seconds, leftovers))


if __name__ == "__main__":
    sys.exit(main())
