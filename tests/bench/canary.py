"""What real builds of several months do: file version, rule, context checkpoints, and what a restart costs.

Of each build and memory type, with the flags that `run` gives: what the proxy learns first,
where the context checkpoints of a saved file lie, and the `agent` trace with both processes restarted
half-way; where that misses the bar, also on llama-server alone. The hybrid model is also examined with
drafting (draft-mtp). Builds that are not there are fetched from PyPI (`xllamacpp`); `installed` is the
llama-server here, and comes last. Exit status 1 if a bar is missed.

python -m tests.bench.canary [--document] [--rule-only] [--kind KIND ...] [VERSION ...]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from proxy.core.launch import N_CONTEXT_CHECKPOINTS
from proxy.core.model import NEAR_TOKENS
from proxy.llama.files import StateFile, read_state_file
from tests.bench.document import add_page_arguments, prove
from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.traces.__main__ import measure
from tests.bench.traces.measure import DRAFTING
from tests.bench.traces.result import Case, Failure, Result
from tests.lab.conversation import prose
from tests.lab.models import MEMORIES, build_model
from tests.lab.older_server import binary_of, install
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer, LlamaServerError, find_llama_server

BUILDS = (
    *("2026.4.8672", "2026.5.9294", "2026.6.9713", "2026.7.10068", "2026.8.10566"),
    *("2026.9.11063", "2026.10.11549"),
)
"""One of each month since PyPI has them."""
INSTALLED = "installed"
MOST_RATIO = 1.05
N_WORDS = 800
"""Some 2,500 tokens: more than the window of the model."""
FLAGS = ("--ctx-checkpoints", str(N_CONTEXT_CHECKPOINTS))
NEAR_FLAGS = {
    version: ("--checkpoint-min-step", str(NEAR_TOKENS))
    for version in ("2026.7.10068", "2026.8.10566")
}
"""By default these builds keep context checkpoints 8,192 tokens apart."""
KINDS = (*MEMORIES, *DRAFTING)


async def learned(
    kind: str, binary: Path, flags: tuple[str, ...], leftovers: ExitStack
) -> tuple[str, StateFile | None]:
    """Return the rule that the proxy learns, and the file that it saves of a conversation, if any."""
    folder = Path(leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-")))
    slots = folder / "slots"
    slots.mkdir(mode=0o700)
    model = build_model(kind, "tiny", DEFAULT_MODEL_FOLDER)
    server = LlamaServer(
        model,
        slots,
        n_slots=1,
        n_ctx=8192,
        extra_args=(*flags, *DRAFTING.get(kind, ())),
        binary=binary,
        log_path=folder / "log",
    )
    leftovers.callback(server.kill)
    async with Rig(server, slots) as rig:
        messages = [{"role": "user", "content": prose(2, N_WORDS)}]
        await rig.chat(messages)
        await rig.settled()
        [process] = rig.running.pool.processes
        files = sorted(slots.glob("*.state"), key=lambda path: path.stat().st_mtime)
        return process.rule.kind.value, read_state_file(files[-1]) if files else None


@dataclass(frozen=True)
class Examined:
    """What is known of one build and memory type; `is_met` is None where nothing was measured."""

    words: str
    version: int | None = None
    is_met: bool | None = None


def in_words(rule: str, state: StateFile | None) -> str:
    """Return the rule, and how far before its end the context checkpoints of a file lie."""
    if state is None or not state.restore_points:
        return rule
    behind = [str(len(state.tokens) - point) for point in state.restore_points]
    drafts = ["with draft state"] if state.draft_bytes else []
    return f"{rule} ({', '.join(behind + drafts)})"


async def examine(kind: str, binary: Path, *, rule_only: bool) -> Examined:
    flags = FLAGS + NEAR_FLAGS.get(binary.parent.name, ())
    with ExitStack() as leftovers:
        try:
            rule, state = await learned(kind, binary, flags, leftovers)
        except LlamaServerError as error:
            tell(f"does not load: {str(error).splitlines()[-1]}")
            return Examined("does not load")
    words, version = in_words(rule, state), state.version if state else None
    if rule_only:
        return Examined(words, version)
    os.environ["LLAMA_SERVER_BIN"] = str(binary)
    outcome = await measure(Case("restart", kind, "tiny", 1, "proxy"), flags)
    is_met, figure = _judged(outcome)
    if not is_met:
        _, alone = _judged(await measure(Case("restart", kind, "tiny", 1, "alone"), flags))
        figure += f"; llama-server alone: {alone}"
    return Examined(f"{words}: {figure}", version, is_met)


def add_row(section: Section, name: str, examined: Sequence[Examined]) -> None:
    """Add the row of one build, with a cell for each memory type."""
    versions = {str(each.version) for each in examined if each.version is not None}
    verdicts = [each.is_met for each in examined if each.is_met is not None]
    cells = (f"**{each.words}**" if each.is_met is False else each.words for each in examined)
    is_met = all(verdicts) if verdicts else None
    section.add(name, ", ".join(sorted(versions)) or "-", *cells, is_met=is_met)


def _judged(outcome: Result | Failure) -> tuple[bool, str]:
    if isinstance(outcome, Result):
        return outcome.ratio <= MOST_RATIO, f"{outcome.ratio:.3f}"
    return False, outcome.reason.splitlines()[0][:60]


async def examine_all(given: argparse.Namespace) -> Section:
    """Return the table, which is written after each build."""
    section = Section(
        "Builds, month by month",
        f"evaluated / exact at most {MOST_RATIO} over a restart",
        ("build", "file version", *(kind.replace("_mtp", ", draft-mtp") for kind in given.kind)),
    )
    installed = find_llama_server()
    for version in given.version:
        if version == INSTALLED:
            name, binary = _installed_name(installed), installed
        else:
            install(version)
            name, binary = _name_of(version), binary_of(version)
        examined = list[Examined]()
        for kind in given.kind:
            try:
                examined.append(await examine(kind, binary, rule_only=given.rule_only))
            except Exception as error:  # no other cell depends on this one
                examined.append(Examined(f"failed: {repr(error)[-60:]}", is_met=False))
            tell(f"{name}, {kind}: {examined[-1].words}")
        add_row(section, name, examined)
        prove(given, "canary", [section])
    return section


def _name_of(version: str) -> str:
    month, _, build = version.rpartition(".")
    return f"b{build} ({month})"


def _installed_name(binary: Path) -> str:
    """Return what llama-server calls its build."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True)
    lines = (said.stdout + said.stderr).splitlines()
    return next((line.removeprefix("version: ") for line in lines if "version:" in line), INSTALLED)


async def run(given: argparse.Namespace) -> int:
    """Measure and print; return the exit status."""
    section = await examine_all(given)
    print(section.markdown())
    return 1 if section.n_missed else 0


def main() -> int:
    """Examine the builds that the command line names, or one of each month."""
    parser = argparse.ArgumentParser(description="Examine real builds of llama-server.")
    parser.add_argument("version", nargs="*", default=[*BUILDS, INSTALLED])
    add_page_arguments(parser)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rule-only", action="store_true", help="without the trace")
    given = parser.parse_args()
    if given.add and given.kind != list(KINDS):
        parser.error("a row has all kinds: --add goes without --kind")
    return run_to_the_end(lambda _: run(given))


if __name__ == "__main__":
    sys.exit(main())
