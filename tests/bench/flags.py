"""What llama-server's default flags cost: the same conversations under several sets of flags.

Without -np there are four slots that share one cache, and llama-server moves what idle slots hold to its
RAM cache as soon as another one runs. Three conversations with a shared header take turns, or run at once;
then both processes are restarted and they go on. Every answer is held against the cold run's.

python -m tests.bench.flags [--model KIND ...] [--flags NAME ...]
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.core.tokens import TokenIds, common_prefix_length
from tests.bench.interrupts import run_to_the_end
from tests.bench.ledger import Ledger
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.bench.traces.metrics import Counters, add_up, read_counters
from tests.lab.conversation import Message, agent_requests, system, tools
from tests.lab.models import MEMORIES, model_path
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer, request

DEFAULT_CACHE = ("--cache-ram", "8192")


@dataclass(frozen=True, slots=True)
class Flags:
    """How llama-server is started; `n_slots` -1 is what it is without -np."""

    n_slots: int
    arguments: tuple[str, ...] = ()


FLAGS = {
    "-np 1 --cache-ram 0": Flags(1),
    "-np 4 --no-cache-idle-slots": Flags(4, (*DEFAULT_CACHE, "--no-cache-idle-slots")),
    "-np 2": Flags(2, DEFAULT_CACHE),
    "none": Flags(-1, DEFAULT_CACHE),
}
N_CONVERSATIONS = 3
N_BEFORE_RESTART = 4
N_ANSWER_TOKENS = 120
HEADER = [system(500)]
TOOLS = tools(4)
CONVERSATIONS = [agent_requests(3, 1, header=HEADER, seed=1000 * i) for i in range(N_CONVERSATIONS)]
N_REQUESTS = len(CONVERSATIONS[0])

Texts = dict[tuple[int, int], str]


def body(messages: list[Message]) -> dict[str, Any]:
    return {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": N_ANSWER_TOKENS}


@dataclass(slots=True)
class Run:
    """What came of one run: texts by conversation and request, tokens evaluated, the proxy's counters."""

    texts: Texts = field(default_factory=dict)
    n_evaluated: int = 0
    counters: list[Counters] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)


class FlagsBenchmark:
    """Measures one model."""

    def __init__(self, kind: str, leftovers: ExitStack) -> None:
        self._kind = kind
        self._leftovers = leftovers

    async def run(self, names: Iterable[str]) -> Section:
        section = Section(
            f"{N_CONVERSATIONS} conversations with one header and a restart ({self._kind})",
            "no drift, no restore without effect; requests in turn: texts as cold",
            (
                *(
                    "llama-server's flags",
                    "requests",
                    "through",
                    "evaluated",
                    "exact",
                    "texts as cold",
                ),
                *("saves", "restores", "written", "drift", "ineffective", "short", "reasons"),
            ),
        )
        cold, n_exact = await self._cold()
        for name in names:
            for at_once in (False, True):
                for has_proxy in (False, True):
                    tell(
                        f"{self._kind}: {name}, {'at once' if at_once else 'in turn'}, {has_proxy=}"
                    )
                    run = await self._play(FLAGS[name], has_proxy=has_proxy, at_once=at_once)
                    how = "at once" if at_once else "in turn"
                    through = "proxy" if has_proxy else "alone"
                    _add(section, (name, how, through), run, cold, n_exact)
        return section

    async def _cold(self) -> tuple[Texts, int]:
        """Return every answer without any reuse, and what an exact cache would have evaluated."""
        server = self._server(Flags(1))
        await asyncio.to_thread(server.start)
        ledger, n_exact = Ledger(server), 0
        texts: Texts = {}
        prompts: list[TokenIds] = []
        for n_request in range(N_REQUESTS):
            for i, conversation in enumerate(CONVERSATIONS):
                alone = {**body(conversation[n_request]), "cache_prompt": False}
                texts[i, n_request] = _text(await _ask(server.base_url, alone))
                rendered = await asyncio.to_thread(server.request, "POST", "/apply-template", alone)
                prompt = await ledger.text_tokens(rendered[1]["prompt"])
                known = max((common_prefix_length(prompt, p) for p in prompts), default=0)
                n_exact += len(prompt) - min(known, len(prompt) - 1)
                prompts.append(prompt)
        await asyncio.to_thread(server.stop)
        return texts, n_exact

    async def _play(self, flags: Flags, *, has_proxy: bool, at_once: bool) -> Run:
        server, run = self._server(flags), Run()
        rig = Rig(server, server.slot_save_path or Path(), idle_save_seconds=10.0)
        for first, last in ((0, N_BEFORE_RESTART), (N_BEFORE_RESTART, N_REQUESTS)):
            await asyncio.to_thread(server.start)
            if has_proxy:
                await rig.start_proxy()
            n_before = await asyncio.to_thread(server.evaluated_tokens)
            before = await self._note(rig, run) if has_proxy else {}
            url = rig.base_url if has_proxy else server.base_url
            await _converse(url, range(first, last), run, at_once=at_once)
            if has_proxy:
                run.counters.append(add_up([await self._note(rig, run)], before))
                await rig.stop_proxy()
            run.n_evaluated += await asyncio.to_thread(server.evaluated_tokens) - n_before
            await asyncio.to_thread(server.stop)
        return run

    async def _note(self, rig: Rig, run: Run) -> Counters:
        run.reasons |= {reason["kind"] for reason in (await rig.health())["reasons"]}
        async with rig.client.get(rig.admin_url + "/metrics") as reply:
            return read_counters(await reply.text())

    def _server(self, flags: Flags) -> LlamaServer:
        folder = Path(
            self._leftovers.enter_context(tempfile.TemporaryDirectory(prefix="prefix-cache-"))
        )
        (folder / "slots").mkdir(mode=0o700)
        server = LlamaServer(
            model_path(self._kind, "tiny", DEFAULT_MODEL_FOLDER),
            folder / "slots",
            n_slots=flags.n_slots,
            extra_args=flags.arguments,
            log_path=folder / "llama-server.log",
        )
        self._leftovers.callback(server.kill)
        return server


async def _converse(url: str, requests: range, run: Run, *, at_once: bool) -> None:
    """Send these requests of all conversations, in turn or with a client for each."""

    async def ask(i: int, n_request: int) -> None:
        reply = await _ask(url, body(CONVERSATIONS[i][n_request]))
        run.texts[i, n_request] = _text(reply)

    async def go_on(i: int) -> None:
        for n_request in requests:
            await ask(i, n_request)

    if at_once:
        await asyncio.gather(*(go_on(i) for i in range(N_CONVERSATIONS)))
    else:
        for n_request in requests:
            for i in range(N_CONVERSATIONS):
                await ask(i, n_request)


async def _ask(url: str, content: dict[str, Any]) -> dict[str, Any]:

    status, reply = await asyncio.to_thread(request, url, "POST", "/v1/chat/completions", content)
    if status != 200:
        raise RuntimeError(f"answered {status}: {reply}")
    return dict(reply)


def _text(reply: dict[str, Any]) -> str:
    message = reply["choices"][0]["message"]
    return str(message.get("reasoning_content", "")) + str(message["content"])


def _add(
    section: Section, cells: tuple[str, str, str], run: Run, cold: Texts, n_exact: int
) -> None:
    counters = add_up(run.counters, {})

    def n(name: str) -> int:
        return int(counters.get(name, 0))

    n_same = sum(run.texts[key] == text for key, text in cold.items())
    section.add(
        *cells,
        *(run.n_evaluated, n_exact, f"{n_same} of {len(cold)}"),
        *(n('saves_total{result="done"}'), n('restores_total{result="done"}')),
        f"{n('saved_bytes_total') / 1e6:.1f} MB",
        *(n("drift_total"), n("restore_ineffective_total"), n("live_reuse_short_total")),
        ", ".join(sorted(run.reasons)) or "-",
        is_met=_is_met(run, n_same == len(cold), in_turn="in turn" in cells),
    )


def _is_met(run: Run, has_same_texts: bool, *, in_turn: bool) -> bool | None:
    """Return whether nothing went wrong; neighbours that run at once move near ties in any case."""
    if not run.counters:
        return None
    counters = add_up(run.counters, {})
    faults = ("drift_total", "restore_ineffective_total")
    return not any(counters.get(name) for name in faults) and (has_same_texts or not in_turn)


async def run(kinds: list[str], names: list[str], leftovers: ExitStack) -> int:
    """Measure and print; return the exit status."""
    n_missed = 0
    for kind in kinds:
        section = await FlagsBenchmark(kind, leftovers).run(names)
        print(section.markdown() + "\n", flush=True)
        n_missed += section.n_missed
    return 1 if n_missed else 0


def main() -> int:
    """Run what the command line names; all by default."""
    parser = argparse.ArgumentParser(description="Measure what llama-server's flags cost.")
    parser.add_argument("--model", nargs="+", choices=MEMORIES, default=["hybrid", "full"])
    parser.add_argument("--flags", nargs="+", choices=FLAGS, default=list(FLAGS))
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: run(arguments.model, arguments.flags, leftovers))


if __name__ == "__main__":
    sys.exit(main())
