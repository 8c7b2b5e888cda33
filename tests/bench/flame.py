"""Where the proxy's time goes on hot requests: docs/where-time-goes.svg and its table, `make flame`.

py-spy samples the proxy while the slot's conversation goes on. A thread that waits for work is no sample;
py-spy itself cannot tell everywhere that it waits.

python -m tests.bench.flame [--tokens N] [--times N]
"""

import argparse
import asyncio
import html
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from tests.bench.document import document
from tests.bench.hot import N_WARM_UP, Conversation, context_for, opening_of
from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.sides import Side, ask
from tests.lab.server import REPOSITORY

PY_SPY = REPOSITORY / ".lab" / "py-spy" / "bin" / "py-spy"
PAGE = REPOSITORY / "docs" / "where-time-goes.md"
RATE = 500
Stacks = Counter[tuple[str, ...]]
_START_SECONDS = 30.0
_SHOWN_SHARE = 0.03
_LOOP = "Runner.run "
_WAITING = (_LOOP, "_worker ", "Condition.wait ")
"""uvloop itself cannot be told from its wait for sockets."""
_WIDTH, _ROW, _CHARACTER, _LEAST_WIDTH = 1600, 16, 6.7, 0.5
_OTHERS = {
    "aiohttp": "aiohttp: connections, HTTP",
    "asyncio": "asyncio: the event loop",
    "structlog": "structlog: the log line",
    "prometheus_client": "prometheus_client: counts",
}


@asynccontextmanager
async def _recording(pid: int, file: Path) -> AsyncIterator[None]:
    """Have py-spy record a process until the block is left."""
    command = [str(PY_SPY), "record", "--pid", str(pid), "--rate", str(RATE), "--function"]
    command += ["--format", "raw", "--output", str(file)]
    recorder = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert recorder.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            while b"Sampling" not in (line := await recorder.stdout.readline()):
                if not line:
                    raise RuntimeError(f"{PY_SPY.name} ended")
        yield
    finally:
        if recorder.returncode is None:
            recorder.send_signal(signal.SIGINT)
        await recorder.communicate()


def read_stacks(raw: str) -> Stacks:
    """Return the samples of what ran, by stack, the outermost frame first."""
    stacks: Stacks = Counter()
    for line in raw.splitlines():
        stack, _, n_samples = line.rpartition(" ")
        frames = tuple(stack.split(";"))
        if not frames[-1].startswith(_WAITING):
            # What started the loop is the same in all stacks.
            begin = next((i for i, f in enumerate(frames) if f.startswith(_LOOP)), -1)
            stacks[frames[begin + 1 :]] += int(n_samples)
    return stacks


def owners(stacks: Stacks) -> Counter[str]:
    """Return the samples by file of the proxy, each counted for the innermost one in its stack.

    Frames of the libraries count for the file that called them, unless only the event loop did.
    """
    samples: Counter[str] = Counter()
    for frames, n_samples in stacks.items():
        samples[_owner(frames)] += n_samples
    return samples


def draw(stacks: Stacks) -> str:
    """Return the flame graph as SVG: callers stand above what they call."""
    boxes: list[str] = []
    n_rows = _draw_boxes(boxes, stacks, 0, 0.0, _WIDTH / max(1, stacks.total()))
    size = f'width="{_WIDTH}" height="{n_rows * _ROW}" viewBox="0 0 {_WIDTH} {n_rows * _ROW}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11">'
    return "\n".join([head, *boxes, "</svg>"]) + "\n"


def _draw_boxes(boxes: list[str], stacks: Stacks, depth: int, left: float, scale: float) -> int:
    """Draw the frames at *depth* and below from *left* on; return how many rows there are."""
    n_rows = depth
    callees: dict[str, Stacks] = {}
    for frames, n_samples in stacks.items():
        if len(frames) > depth:
            callees.setdefault(frames[depth], Counter())[frames] = n_samples
    for name, inner in sorted(callees.items()):
        width = inner.total() * scale
        if width >= _LEAST_WIDTH:
            told = html.escape(f"{name}: {100 * width / _WIDTH:.1f} %")
            shown = html.escape(name[: int(width / _CHARACTER)]) if width > 4 * _CHARACTER else ""
            fill = "#f4a259" if "(proxy/" in name else "#d9d9d9"
            top = depth * _ROW
            boxes.append(
                f'<g><title>{told}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{_ROW - 1}" fill="{fill}"/><text x="{left + 2:.1f}" y="{top + 12}">{shown}'
                "</text></g>"
            )
            n_rows = max(n_rows, _draw_boxes(boxes, inner, depth + 1, left, scale))
        left += width
    return max(n_rows, depth + 1) if callees else n_rows


def _owner(frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        place = frame.partition("(")[2]
        if place.startswith("proxy/") and not place.startswith(("proxy/cli", "proxy/__")):
            return place.partition(":")[0]
    for frame in reversed(frames):
        place = frame.partition("(")[2]
        for name, told in _OTHERS.items():
            if place.startswith(name):
                return told
    return "Python itself"


async def run(arguments: argparse.Namespace, leftovers: ExitStack) -> int:
    """Record, write the page's picture and table; return the exit status."""
    n_tokens, n_times = arguments.tokens, arguments.times
    n_ctx = context_for(n_tokens)
    side = Side(leftovers, has_proxy=True, n_slots=1, n_ctx=n_ctx, is_pinned=False)
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    await side.stack.start()
    assert side.stack.proxy is not None
    conversation = Conversation(opening_of(side.stack.server, n_tokens))
    await _play(side, conversation, N_WARM_UP)
    tell(f"{n_times} hot requests of {n_tokens:,} tokens")
    await side.until_quiet()
    before = side.cpu()
    await _play(side, conversation, n_times)
    await side.until_quiet()
    microseconds = 1e6 * (side.cpu() - before).proxy / n_times
    tell("recording")
    async with _recording(side.stack.proxy.pid, folder / "raw"):
        await _play(side, conversation, n_times)
    await side.stack.stop()
    stacks = read_stacks((folder / "raw").read_text())
    PAGE.with_suffix(".svg").write_text(draw(stacks))
    section = _table(owners(stacks), microseconds, n_times)
    document("where-time-goes", [section], path=PAGE)
    print(section.markdown())
    return 0


async def _play(side: Side, conversation: Conversation, n_times: int) -> None:
    for _ in range(n_times):
        conversation.go_on(await asyncio.to_thread(ask, side.base_url, conversation.body()))


def _table(samples: Counter[str], microseconds: float, n_times: int) -> Section:
    total = samples.total()
    section = Section(
        f"{microseconds:,.0f} µs of CPU a request, mean of {n_times}", "", ("where", "µs", "share")
    )
    rest = 0
    for owner, n_samples in samples.most_common():
        if n_samples < _SHOWN_SHARE * total:
            rest += n_samples
            continue
        share = n_samples / total
        section.add(owner, f"{share * microseconds:,.0f}", f"{share:.0%}", is_met=None)
    share = rest / total
    section.add("all else", f"{share * microseconds:,.0f}", f"{share:.0%}", is_met=None)
    return section


def main() -> int:
    parser = argparse.ArgumentParser(description="Show where the proxy's time goes.")
    parser.add_argument("--tokens", type=int, default=10000)
    parser.add_argument("--times", type=int, default=100)
    arguments = parser.parse_args()
    if not os.access(PY_SPY, os.X_OK):
        parser.error(f"no {PY_SPY}: run `make flame`")
    return run_to_the_end(lambda leftovers: run(arguments, leftovers))


if __name__ == "__main__":
    sys.exit(main())
