"""What the proxy saves and adds where evaluation is fast: a model of the size of Qwen3.5 4B, on a GPU.

Each side has a llama-server of its own with one slot: a prompt is evaluated, its conversation goes on hot,
and its next request comes after everything was restarted. Each needs 7.7 GB of GPU memory, and 32 KiB for
each token (128 KiB with full attention). The llama-server with a GPU backend is that in LLAMA_SERVER_BIN.

python -m tests.bench.gpu [--kind hybrid full] [--size 4b] [--tokens N ...] [--times N]
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

from tests.bench.hot import (
    Conversation,
    Hot,
    context_for,
    conversations,
    opening_of,
    play,
    play_pairs,
)
from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.sides import Side, Sides
from tests.lab.models import KINDS, SIZES

TOKENS = (10_000, 32_000, 128_000)
N_TIMES = 10


async def measure_model(
    leftovers: ExitStack, kind: str, size: str, sizes: Sequence[int], n_times: int
) -> Section:
    """Return the table of one model: a row for each prompt length."""
    section = Section(
        f"First token on a GPU ({kind} {size}, hot: medians of {n_times} pairs)",
        "",
        (
            *("prompt", "evaluated whole: alone", "proxy", "hot: alone", "proxy", "proxy / alone"),
            *("restarted, alone: evaluated", "first token", "proxy: evaluated", "first token"),
            *("times sooner", "state", "restored in"),
        ),
    )
    for n_tokens in sizes:
        tell(f"{kind} {size}, {n_tokens:,} tokens")
        async with Sides(leftovers, (kind, size), n_ctx=context_for(n_tokens)) as sides:
            opening = opening_of(sides.alone.stack.server, n_tokens)
            of_side = conversations(sides, opening)
            whole = [await play(side, of_side[side].body()) for side in sides.both]
            hot = await play_pairs(sides, of_side, n_times)
            after = [await _restarted(side, of_side[side]) for side in sides.both]
            states = [path.stat().st_size for path in sides.ours.stack.slots.glob("*")]
        _add(section, whole, hot, after, max(states))
        tell(" | ".join(section.rows[-1]))
    return section


async def _restarted(side: Side, conversation: Conversation) -> Hot:
    await side.stack.restart()
    await side.until_quiet()
    return await play(side, conversation.body())


def _add(
    section: Section,
    whole: list[Hot],
    hot: tuple[list[Hot], list[Hot]],
    after: list[Hot],
    state_bytes: int,
) -> None:
    theirs, through = (median(each.milliseconds for each in side) for side in hot)
    alone, ours = after
    section.add(
        f"{ours.n_prompt:,}",
        *(f"{each.milliseconds / 1000:.2f} s" for each in whole),
        *(f"{theirs:.1f} ms", f"{through:.1f} ms", f"{through / theirs:.2f}"),
        *(f"{alone.reply.timings['prompt_n']:,}", f"{alone.milliseconds / 1000:.2f} s"),
        *(f"{ours.reply.timings['prompt_n']:,}", f"{ours.milliseconds / 1000:.2f} s"),
        f"{alone.milliseconds / ours.milliseconds:.0f}",
        *(f"{state_bytes / 1e9:.2f} GB", f"{ours.line.get('prepared_seconds', 0.0):.2f} s"),
        is_met=None,
    )


async def run(arguments: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure and print."""
    for kind in arguments.kind:
        section = await measure_model(
            leftovers, kind, arguments.size, arguments.tokens, arguments.times
        )
        print(section.markdown() + "\n", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what the proxy saves on a GPU.")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=["hybrid"])
    parser.add_argument("--size", choices=SIZES, default="4b")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(TOKENS), help="prompt lengths"
    )
    parser.add_argument("--times", type=int, default=N_TIMES, help="hot requests of each side")
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments, leftovers))


if __name__ == "__main__":
    sys.exit(main())
