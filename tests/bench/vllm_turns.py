"""vLLM's multi-turn benchmark, unmodified, on llama-server alone and through the proxy, on two slots.

Of the sdist of vllm (PyPI) its own folder and one module are unpacked. It makes conversations of a text, of
which two clients have three each under way, and sends answers back as they came; llama-server is greedy, so
that they are the same for all. Exit status 1 if a bar is missed.

python -m tests.bench.vllm_turns [--kind KIND ...] [--document [--add]]
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from statistics import median, quantiles

from tests.bench.aiperf import PROGRAM, save_tokenizer
from tests.bench.document import add_page_arguments, prove
from tests.bench.interrupts import run_to_the_end
from tests.bench.neutral_load import ALONE, MOST_LOSS, N_SLOTS, PROXY
from tests.bench.processes import Setup, Stack
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.lab.conversation import prose
from tests.lab.models import MEMORIES
from tests.lab.server import REPOSITORY

VERSION = "0.33.0"
FOLDER = REPOSITORY / ".lab" / "vllm-turns"
WANTED = ("benchmarks/multi_turn/", "vllm/benchmarks/lib/utils.py")
CONTENDERS = ("defaults", "similarity", PROXY)
N_CONVERSATIONS, N_AT_ONCE, N_CLIENTS = 12, 6, 2
CONVERSATIONS = {
    "filetype": "generate_conversations",
    "num_conversations": N_CONVERSATIONS,
    "text_files": ["text.txt"],
    "prompt_input": {
        "num_turns": {"distribution": "constant", "value": 10},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
        "num_tokens": {"distribution": "uniform", "min": 120, "max": 160},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 8, "max": 12}},
}
"""vLLM's own example with half the conversations, fewer turns, and a tenth of its answers."""


def fetch() -> None:
    """Download the benchmark and what it is given, unless they are there."""
    if (FOLDER / "text.txt").exists():
        return
    # pip would build the sdist to read its metadata, which takes all of PyTorch.
    tools = FOLDER / "tools"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--upgrade", "--target", str(tools), "unearth"], check=True)
    download = ["unearth", "--no-binary", f"vllm=={VERSION}", "--download", str(FOLDER)]
    environment = os.environ | {"PYTHONPATH": str(tools)}
    subprocess.run(
        [sys.executable, "-m", *download], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    inside = tuple(f"vllm-{VERSION}/{name}" for name in WANTED)
    archive = FOLDER / f"vllm-{VERSION}.tar.gz"
    with tarfile.open(archive) as opened:
        members = [m for m in opened.getmembers() if m.name.startswith(inside)]
        opened.extractall(FOLDER, members, filter="data")
    archive.unlink()
    save_tokenizer(FOLDER / "tokenizer")
    (FOLDER / "conversations.json").write_text(json.dumps(CONVERSATIONS))
    (FOLDER / "text.txt").write_text(prose(1, 20_000))


async def play(kind: str, contender: str, leftovers: ExitStack) -> tuple[list[float], int]:
    """Return each request's milliseconds to the first token, and the tokens that were evaluated."""
    # The benchmark refuses answers without content, as a random model's endless reasoning.
    plain = "--temp", "0", "--ignore-eos", "--reasoning-format", "none"
    flags = *plain, *ALONE.get(contender, ())
    setup = Setup(n_slots=N_SLOTS, n_ctx=N_SLOTS * 8192, n_threads=1, server_arguments=flags)
    stack = Stack(kind, "tiny", leftovers, has_proxy=contender == PROXY, setup=setup)
    await stack.start()
    before = await stack.evaluated_tokens()
    report = FOLDER / f"{kind}-{contender}.json"
    source = FOLDER / f"vllm-{VERSION}"
    process = await asyncio.create_subprocess_exec(
        *(PROGRAM.with_name("python"), source / "benchmarks/multi_turn" / PLAYED),
        *("--model", "tokenizer", "--served-model-name", "lab", "--url", stack.base_url),
        *("--input-file", "conversations.json", "--num-clients", str(N_CLIENTS)),
        *("--max-active-conversations", str(N_AT_ONCE), "--no-early-stop"),
        # llama-server closes connections that the benchmark would use again.
        *("--header", "Connection: close", "--stats-json-output", report),
        env=os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"},
        cwd=FOLDER,
        stdout=sys.stderr,
    )
    if await process.wait():
        raise RuntimeError(f"{PLAYED} ended with {process.returncode}")
    n_evaluated = await stack.evaluated_tokens() - before
    await stack.stop()
    return [request["ttft_ms"] for request in json.loads(report.read_text())], n_evaluated


PLAYED = "benchmark_serving_multi_turn.py"


async def run(given: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure and print; return the exit status."""
    section = Section(
        f"vLLM's multi-turn benchmark: {N_AT_ONCE} conversations at a time, {N_SLOTS} slots",
        f"p50 and p95 at most {MOST_LOSS} times as long as with the best flags",
        ("memory", "", "requests", "first token p50, ms", "p95, ms", "tokens evaluated"),
        n_keys=2,
    )
    for kind in given.kind:
        alone: list[tuple[float, float]] = []
        for contender in CONTENDERS:
            tell(f"{kind}, {contender}")
            times, n_evaluated = await play(kind, contender, leftovers)
            p50, p95 = median(times), quantiles(times, n=20, method="inclusive")[18]
            is_met = None
            if contender == PROXY:
                best = (min(each) for each in zip(*alone, strict=True))
                is_met = all(o <= MOST_LOSS * b for o, b in zip((p50, p95), best, strict=True))
            alone.append((p50, p95))
            cells = len(times), f"{p50:,.0f}", f"{p95:,.0f}", n_evaluated
            section.add(kind, contender, *cells, is_met=is_met)
    print(section.markdown())
    prove(given, "vllm", [section])
    return 1 if section.n_missed else 0


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description="Let vLLM's benchmark load the proxy.")
    parser.add_argument("--kind", nargs="+", choices=MEMORIES, default=list(MEMORIES))
    add_page_arguments(parser)
    given = parser.parse_args()
    fetch()
    return run_to_the_end(lambda leftovers: run(given, leftovers))


if __name__ == "__main__":
    sys.exit(main())
