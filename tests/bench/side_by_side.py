"""The proxy beside what a user would pick instead, on one machine and the same traces.

llama-server with its RAM cache at three sizes, slot files saved by hand, hearth (PyPI hearth-llm; it drives
one slot), and the proxy. Wrong answers are those that differ from the first of them, which evaluates every
prompt that its slot does not hold: what the others with a RAM cache have of them is rounding.

python -m tests.bench.side_by_side [--trace NAME ...] [--kind KIND ...] [--contender NAME ...]
                                    [--times N] [--document]
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import quantiles
from urllib.parse import urlsplit

from tests.bench.aiperf import PROGRAM
from tests.bench.document import add_page_arguments, prove
from tests.bench.interrupts import run_to_the_end
from tests.bench.processes import (
    POLL_SECONDS,
    READY_SECONDS,
    ProxyError,
    ProxyProcess,
    Setup,
    Stack,
)
from tests.bench.progress import tell
from tests.bench.section import Section, spread
from tests.bench.slot_files import SlotFilesPlayer
from tests.bench.traces.catalogue import TRACES
from tests.bench.traces.chat import ChatFailed
from tests.bench.traces.play import Player
from tests.bench.traces.trace import Trace
from tests.lab.models import MEMORIES
from tests.lab.server import LlamaServerError, request

CHOSEN = ("agent", "branch", "interleaved", "mixed")
KINDS = ("full", "hybrid")
HEARTH = PROGRAM.with_name("hearth")
RAM_MIB = (0, 8, 8192)
"""None, some conversations of a tiny model, and llama-server's own default."""
BY_HAND, PEER, PROXY = "slot files by hand", "hearth", "proxy"
FAILURES = (ChatFailed, ProxyError, LlamaServerError, ExceptionGroup, OSError)
CONTENDERS = (*(f"RAM cache {mib} MiB" for mib in RAM_MIB), BY_HAND, PEER, PROXY)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one contender needed for one trace; `seconds` is the time in which clients ran."""

    n_evaluated: int
    seconds: float
    n_written_bytes: int
    first_token_seconds: list[float]
    answers: dict[str, str]

    def quantiles(self) -> tuple[float, float]:
        """Return the median and the 95th percentile of the seconds to the first token."""
        cut = quantiles(self.first_token_seconds, n=20, method="inclusive")
        return cut[9], cut[18]

    def n_wrong(self, reference: "Outcome") -> int:
        """Return how many answers differ from the reference's."""
        return sum(self.answers[label] != text for label, text in reference.answers.items())


class Hearth(ProxyProcess):
    """hearth in the proxy's place; it saves before it takes the next request."""

    def __init__(self, stack: Stack, log_path: Path) -> None:
        super().__init__(stack.server.base_url, stack.slots, log_path)
        listen = urlsplit(self.base_url)
        self._command = [str(HEARTH), "serve", "--upstream", stack.server.base_url]
        self._command += ["--cache-dir", str(stack.slots), "--port", str(listen.port)]

    async def ready(self) -> None:
        """Wait until it passes on what it is asked."""
        async with asyncio.timeout(READY_SECONDS):
            while not await asyncio.to_thread(_answers, self.base_url):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)

    async def settled(self) -> None:
        pass


def _answers(base_url: str) -> bool:
    try:
        return request(base_url, "GET", "/health", timeout_seconds=5.0)[0] == 200
    except OSError:
        return False


async def play(contender: str, trace: Trace, kind: str, leftovers: ExitStack) -> Outcome:
    """Play a trace on processes of its own; raises ChatFailed, ProxyError, LlamaServerError."""
    n_slots = 1 if contender == PEER else trace.slots[0]
    ram_mib = contender.split()[2] if contender.startswith("RAM") else "0"
    setup = Setup(
        n_slots=n_slots,
        n_ctx=n_slots * trace.n_ctx,
        n_threads=1,
        server_arguments=("--cache-ram", ram_mib),
    )
    stack = Stack(kind, "tiny", leftovers, has_proxy=contender == PROXY, setup=setup)
    if contender == PEER:
        stack.proxy = Hearth(stack, stack.slots.with_name("hearth.log"))
        leftovers.callback(stack.proxy.kill)
    player = SlotFilesPlayer(stack) if contender == BY_HAND else Player(stack)
    await stack.start()
    played = await player.play(trace)
    await asyncio.to_thread(stack.server.stop)
    replies = {sent.request.label: sent.reply for sent in played.sent if sent.reply}
    return Outcome(
        played.n_evaluated,
        played.seconds,
        played.n_written_bytes,
        [reply.first_token_seconds for reply in replies.values()],
        {label: reply.text for label, reply in replies.items()},
    )


async def compare(
    section: Section, name: str, kind: str, arguments: argparse.Namespace, leftovers: ExitStack
) -> None:
    """Add the rows of one trace; by turns, so that the machine's moods hit all alike."""
    trace = TRACES[name]()
    found: dict[str, list[Outcome]] = {contender: [] for contender in arguments.contender}
    failed: dict[str, str] = {}
    for time, contender in product(range(arguments.times), found):
        tell(f"{name}, {kind}, {contender}, {time + 1} of {arguments.times}")
        try:
            found[contender].append(await play(contender, trace, kind, leftovers))
        except FAILURES as failure:
            failed[contender] = str(failure).splitlines()[0][:80]
    reference = next((outcomes[0] for outcomes in found.values() if outcomes), None)
    for contender, outcomes in found.items():
        if contender in failed or reference is None:
            section.add(kind, name, contender, failed[contender], *"-----", is_met=False)
        else:
            section.add(kind, name, contender, *_cells(outcomes, reference), is_met=None)


def _cells(outcomes: list[Outcome], reference: Outcome) -> Iterator[str]:
    """Yield what a row says of several runs."""
    p50s, p95s = zip(*(outcome.quantiles() for outcome in outcomes), strict=True)
    yield spread([outcome.n_evaluated for outcome in outcomes])
    yield from (spread([1000 * seconds for seconds in each]) for each in (p50s, p95s))
    yield spread([outcome.seconds for outcome in outcomes], ".1f")
    yield spread([outcome.n_written_bytes / 1e6 for outcome in outcomes], ",.1f")
    n_wrong = sum(outcome.n_wrong(reference) for outcome in outcomes)
    yield f"{n_wrong} of {len(outcomes) * len(reference.answers)}"


def _times(n_times: int) -> str:
    return "one run" if n_times == 1 else f"{n_times} runs: median (range)"


async def run(arguments: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure, print and document; return 1 if a contender failed."""
    section = Section(
        f"Side by side: tiny models, {_times(arguments.times)}",
        "",
        (
            *("memory", "trace", "", "tokens evaluated", "first token p50, ms", "p95, ms"),
            *("wall, s", "MB written", "answers differ"),
        ),
        n_keys=3,
    )
    for kind, name in product(arguments.kind, arguments.trace):
        await compare(section, name, kind, arguments, leftovers)
        prove(arguments, "side by side", [section])
    print(section.markdown(), flush=True)
    return 1 if section.n_missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the proxy with what else there is.")
    parser.add_argument("--trace", nargs="+", choices=tuple(TRACES), default=CHOSEN)
    parser.add_argument("--kind", nargs="+", choices=MEMORIES, default=KINDS)
    add_page_arguments(parser)
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument(
        "--times", type=int, default=1, help="of each; medians and ranges are shown"
    )
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments, leftovers))


if __name__ == "__main__":
    sys.exit(main())
