"""What chunks that state files share would save: bytes kept and bytes written.

A session of an agent on one slot, saved after each request, and another one with the same header. Every
file that was committed is cut in three ways: every 64 KiB of the file; every 256 tokens of each attention
tensor, with the rest every 64 KiB; where the content says so, 16 KiB on average. "Written" counts all files
of the session, "kept" those that are left at its end; a chunk counts once. What llama-server itself writes
stays as it is: the whole file each time.

python -m tests.bench.chunks
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash

from proxy.llama.files import read_state_file
from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.workload import conversation, second_conversation
from tests.lab.models import build_model
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

MODELS = (("full", "small"), ("hybrid", "small"), ("hybrid", "heavy"))
FIXED_BYTES, TOKENS_AT_ONCE = 64 << 10, 256
_TENSOR_HEAD_BYTES = 12
WINDOW_BYTES, MEAN_BYTES, LEAST_BYTES, MOST_BYTES = 48, 16 << 10, 4 << 10, 64 << 10

Cut = Callable[[Path], list[int]]


def at_fixed_places(path: Path) -> list[int]:
    """Return where a file is cut, its ends included: every FIXED_BYTES."""
    n_bytes = path.stat().st_size
    return [*range(0, n_bytes, FIXED_BYTES), n_bytes]


def at_positions(path: Path) -> list[int]:
    """Cut every attention tensor by tokens, and what is no attention tensor at fixed places of its part."""
    state = read_state_file(path)
    begins = {0, state.state_end, state.size_bytes, *(c.offset for c in state.context_checkpoints)}
    for section in state.sections or ():
        cells_end = section.offset + section.n_cells * section.cell_bytes
        begins |= {section.offset, cells_end}
        if section.cell_bytes:
            begin = cells_end + (16 if state.version >= 4 else 8)
            # With flash attention, the rows of V are cells, too.
            for _, row_bytes in section.section.rows:
                begin += _TENSOR_HEAD_BYTES
                end = begin + section.n_cells * row_bytes
                begins |= {*range(begin, end, TOKENS_AT_ONCE * row_bytes), end}
                begin = end
    cuts = [p for b, e in pairwise(sorted(begins)) for p in range(b, e, FIXED_BYTES)]
    return [*cuts, state.size_bytes]


def at_content(path: Path) -> list[int]:
    """Cut where the last WINDOW_BYTES add up to a number that only one in MEAN_BYTES does."""
    values = np.random.default_rng(1).integers(0, 1 << 60, 256, np.uint64)
    sums = np.cumsum(values[np.fromfile(path, np.uint8)], dtype=np.uint64)
    mixed = (sums[WINDOW_BYTES:] - sums[:-WINDOW_BYTES]) * np.uint64(0x9E3779B97F4A7C15)
    marks = np.flatnonzero((mixed >> np.uint64(40)) % np.uint64(MEAN_BYTES) == 0) + WINDOW_BYTES + 1
    cuts, n_bytes = [0], path.stat().st_size
    for mark in (*map(int, marks), n_bytes):
        while mark - cuts[-1] > MOST_BYTES:
            cuts.append(cuts[-1] + MOST_BYTES)
        if mark - cuts[-1] >= LEAST_BYTES or mark == n_bytes:
            cuts.append(mark)
    return cuts


WAYS: dict[str, Cut] = {
    "every 64 KiB": at_fixed_places,
    "by position": at_positions,
    "by content": at_content,
}


def chunks_of(path: Path, cut: Cut) -> Iterator[tuple[bytes, int]]:
    """Yield the digest and the length of each chunk of a file."""
    data = memoryview(path.read_bytes())
    for begin, end in pairwise(cut(path)):
        yield xxhash.xxh3_128_digest(data[begin:end]), end - begin


def unique_bytes(files: list[Path], cut: Cut) -> int:
    """Return how many bytes the chunks of all files have, each counted once."""
    return sum({digest: n for file in files for digest, n in chunks_of(file, cut)}.values())


async def save_session(kind: str, size: str, leftovers: ExitStack) -> tuple[list[Path], list[Path]]:
    """Return all files that a session left one after the other, and those left at its end."""
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    slots, kept = folder / "slots", folder / "kept"
    for each in (slots, kept):
        each.mkdir(mode=0o700)
    model = build_model(kind, size, DEFAULT_MODEL_FOLDER)
    server = LlamaServer(model, slots, n_slots=1, n_ctx=16384, log_path=folder / "log")
    leftovers.callback(server.kill)
    files: dict[str, Path] = {}
    async with Rig(server, slots) as rig:
        for request in (*conversation(), second_conversation()):
            await rig.post("/v1/chat/completions", request.body(max_tokens=8))
            await rig.settled()
            await asyncio.to_thread(_keep, slots, kept, files)
    return list(files.values()), [file for name, file in files.items() if (slots / name).exists()]


def _keep(slots: Path, kept: Path, files: dict[str, Path]) -> None:
    for path in sorted(slots.glob("*.state"), key=lambda p: p.stat().st_mtime):
        if path.name not in files:
            files[path.name] = kept / path.name
            os.link(path, files[path.name])


def assembling_seconds(file: Path, cut: Cut) -> float:
    """Return how long it takes to put a file together again from chunks in the page cache."""
    data, cuts = memoryview(file.read_bytes()), cut(file)
    began = time.perf_counter()
    with file.with_suffix(".again").open("wb") as again:
        for begin, end in pairwise(cuts):
            again.write(data[begin:end])
    return time.perf_counter() - began


async def measure_chunks(leftovers: ExitStack) -> Section:
    """Return the table."""
    section = Section(
        "What chunks of state files would save",
        "",
        (
            *("model", "chunks", "files", "written by llama-server", "written as chunks"),
            *("kept as files", "kept as chunks", "file put together again"),
        ),
    )
    for kind, size in MODELS:
        tell(f"chunks: {kind} {size}")
        files, left = await save_session(kind, size, leftovers)
        n_written, n_kept = (sum(f.stat().st_size for f in each) for each in (files, left))
        for way, cut in WAYS.items():
            chunked, n_left = unique_bytes(files, cut), unique_bytes(left, cut)
            section.add(
                *(f"{kind} {size}", way, f"{len(files)}, {len(left)} kept"),
                *(f"{n_written / 1e6:.0f} MB", f"{chunked / 1e6:.0f} MB"),
                *(f"{n_kept / 1e6:.0f} MB", f"{n_left / 1e6:.0f} MB"),
                f"{1000 * assembling_seconds(files[-1], cut):.0f} ms",
                is_met=None,
            )
    return section


def main() -> int:
    """Measure and print."""
    argparse.ArgumentParser(
        description="Measure what chunks of state files would save."
    ).parse_args()

    async def program(leftovers: ExitStack) -> int:
        section = await measure_chunks(leftovers)
        print(section.markdown(), flush=True)
        return 0

    return run_to_the_end(program)


if __name__ == "__main__":
    sys.exit(main())
