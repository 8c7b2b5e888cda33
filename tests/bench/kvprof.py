"""kvprof's view of what requests have in common, beside `explain`'s, on a real llama-server.

kvprof (PyPI) records what passes between the proxy and llama-server, and finds by itself which earlier
request each one goes on from, and where it leaves it. Replays of clients' changes in the form of chat
completions, nothing stabilized, so that both see the same requests.

python -m tests.bench.kvprof [--document] [NAME ...]
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import count, groupby
from pathlib import Path
from typing import Any

import structlog

from proxy.core.messages import Route
from tests.bench.aiperf import PROGRAM
from tests.bench.document import add_page_arguments, prove
from tests.bench.interrupts import run_to_the_end
from tests.bench.section import Section
from tests.lab.clients.replays import PATHS, REPLAYS, Replay, tagged
from tests.lab.models import model_path
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer, find_free_port

KVPROF = str(PROGRAM.with_name("kvprof"))
MOST_APART = 1
"""Tokens: the last one that two prompts share may count for either."""


async def measure(names: list[str], leftovers: ExitStack) -> Section:
    """Return the table of the replays of these names, of all without any."""
    section = Section(
        "Tokens in common with the nearest earlier request: kvprof and explain",
        f"at most {MOST_APART} token apart",
        ("change", "kvprof", "leaves it in", "explain", "its cause"),
    )
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    slots, traces = folder / "slots", folder / "traces"
    slots.mkdir(mode=0o700)
    model = model_path("full", "tiny", DEFAULT_MODEL_FOLDER)
    server = LlamaServer(model, slots, n_slots=2, n_ctx=65536, log_path=folder / "server.log")
    leftovers.callback(server.kill)
    tap = f"127.0.0.1:{find_free_port()}"
    recording = [KVPROF, "tap", "--upstream", server.base_url, "--listen", tap]
    recorder = subprocess.Popen(  # noqa: ASYNC220
        [*recording, "--trace-dir", str(traces), "--quiet"], stdout=subprocess.DEVNULL
    )
    leftovers.callback(recorder.kill)
    rig = Rig(server, slots, upstream=f"http://{tap}", stabilizers="none", settles=False)
    async with rig:
        await rig.settled()
        ours = await _asked(rig, names)
        theirs = await asyncio.to_thread(_analyzed, server, traces)
    pairs = zip(ours, theirs, strict=True)
    for name, requests in groupby(pairs, key=lambda pair: pair[0][0]):
        _add_row(section, name, [(explained, summary) for (_, explained), summary in requests])
    return section


def _add_row(
    section: Section, name: str, requests: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """Add the row of one change: what `explain` and kvprof say of each of its requests, in their order."""
    shared = [summary["lcp"] or 0 for _, summary in requests]
    known = [(explained.get("nearest") or {}).get("n_common") for explained, _ in requests]
    apart = [abs(a - b) for a, b in zip(shared, known, strict=True) if b is not None]
    section.add(
        name,
        _in_order(shared),
        _in_order(summary["diverge_section"] or "-" for _, summary in requests),
        _in_order("-" if n is None else n for n in known),
        _in_order(explained["request"]["cause"] for explained, _ in requests),
        is_met=all(n <= MOST_APART for n in apart) if apart else None,
    )


def _in_order(cells: Iterable[object]) -> str:
    return " / ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)


async def _asked(rig: Rig, names: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Send all requests; return the change and the explanation of each."""
    asked, tags = [], (f"agent_{n}" for n in count(10))
    for replay in (r for r in REPLAYS if r.form is Route.CHAT and _is_named(r, names)):
        tag = next(tags)
        for body in replay.changed:
            await rig.post(
                PATHS[replay.form], {**tagged(body, tag), "max_tokens": 4, "stream": False}
            )
            await rig.settled()
            async with rig.client.get(rig.admin_url + "/requests/last") as reply:
                asked.append((replay.name, await reply.json()))
    return asked


def _is_named(replay: Replay, names: list[str]) -> bool:
    return not names or replay.name in names or replay.name.split()[0] in names


def _analyzed(server: LlamaServer, traces: Path) -> list[dict[str, Any]]:
    """Return what kvprof says of the clients' requests, in their order."""
    analyze = [KVPROF, "analyze", "--upstream", server.base_url, "--trace-dir", str(traces)]
    said = subprocess.run(
        [*analyze, "--no-log", "--json"], capture_output=True, check=True, text=True
    )
    summaries: list[dict[str, Any]] = json.loads(said.stdout)
    return summaries


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


async def run(given: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure and print; return the exit status."""
    section = await measure(given.name, leftovers)
    print(section.markdown(), flush=True)
    prove(given, "kvprof", [section])
    return 1 if section.n_missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare explain with kvprof.")
    parser.add_argument("name", nargs="*", metavar="NAME", help="of replays; all by default")
    add_page_arguments(parser)
    given = parser.parse_args()
    structlog.configure(processors=[_drop])
    return run_to_the_end(lambda leftovers: run(given, leftovers))


if __name__ == "__main__":
    sys.exit(main())
