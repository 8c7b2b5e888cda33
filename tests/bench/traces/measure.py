"""Measures one case: starts the processes, plays the trace, and counts."""

import asyncio
import json
from collections import defaultdict, deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from proxy.core.launch import N_CONTEXT_CHECKPOINTS
from proxy.core.messages import Route
from proxy.llama.files import read_state_file
from tests.bench.processes import Setup, Stack
from tests.bench.traces.catalogue import TRACES
from tests.bench.traces.exact import Exchange, exact_new_tokens
from tests.bench.traces.metrics import Counters, add_up, read_counters
from tests.bench.traces.play import Played, Player, Sent
from tests.bench.traces.result import Case, KeptState, RequestCost, Result
from tests.bench.traces.tokens import read_exchanges

RAM_CACHE_MIB = 8192
LAUNCHER = "tests.bench.traces.measured_proxy"
SAVED_BYTES = "saved_bytes_total"
N_THREADS = {"tiny": 1}
DRAFTING = {"hybrid_mtp": ("--spec-type", "draft-mtp")}


class Measurement:
    """One case on processes of its own."""

    def __init__(
        self, case: Case, leftovers: ExitStack, folder: Path, flags: tuple[str, ...] = ()
    ) -> None:
        self._case = case
        self._trace = TRACES[case.trace]()
        self._metrics_files = folder
        self.stack = Stack(
            case.kind,
            case.size,
            leftovers,
            has_proxy=case.has_proxy,
            setup=_setup(case, self._trace.n_ctx, folder, flags),
        )

    async def run(self) -> Result:
        """Play the trace; raises ChatFailed, ProxyError, LlamaServerError."""
        await self.stack.start()
        before = await self._counters_now()
        played = await Player(self.stack).play(self._trace)
        requests = await asyncio.to_thread(self._costs, played)
        counters = add_up(self._counters_left(), before)
        kept = [_read_kept(path) for path in sorted(self.stack.slots.glob("lpc-*.state"))]
        await self.stack.stop()
        return Result(
            case=self._case,
            n_evaluated=played.n_evaluated,
            seconds=played.seconds,
            n_written_bytes=int(counters.get(SAVED_BYTES, 0)),
            counters=counters,
            kept=kept,
            requests=requests,
        )

    async def _counters_now(self) -> Counters:
        return read_counters(await self.stack.proxy.metrics()) if self.stack.proxy else {}

    def _counters_left(self) -> list[Counters]:
        files = sorted(self._metrics_files.glob("*.metrics"))
        return [read_counters(file.read_text()) for file in files]

    def _costs(self, played: Played) -> list[RequestCost]:
        exchanges = read_exchanges(self.stack.server, played.sent)
        lines = self._log_lines()
        return [
            _cost(sent, len(exchange.prompt), n_exact, _lines_of(sent, exchange, lines))
            for sent, exchange, n_exact in zip(
                played.sent, exchanges, exact_new_tokens(exchanges), strict=True
            )
        ]

    def _log_lines(self) -> dict[int, deque[dict[str, Any]]]:
        """Return the proxy's lines on requests by the length of their prompt.

        Where several requests have the same length, their lines stand in the order of answering.
        """
        lines: dict[int, deque[dict[str, Any]]] = defaultdict(deque)
        if self.stack.proxy:
            for text in self.stack.proxy.log_path.read_text().splitlines():
                line = json.loads(text) if text.startswith("{") else {}
                if line.get("event") == "request":
                    lines[line.get("n_prompt", 0)].append(line)
        return lines


def _lines_of(
    sent: Sent, exchange: Exchange, lines: dict[int, deque[dict[str, Any]]]
) -> deque[dict[str, Any]]:
    """Return the lines of prompts as long as this one: none if stabilizers may have changed it."""
    return lines[len(exchange.prompt)] if sent.request.form is Route.CHAT else deque()


def _setup(case: Case, n_ctx: int, folder: Path, flags: tuple[str, ...]) -> Setup:
    stripped = ("--stripped",) if case.variant == "stripped" else ()
    ram = RAM_CACHE_MIB if case.variant == "alone-8192" else 0
    # As docs/llama-server.md says, but not for builds whose files carry none; alone, llama-server reuses
    # more with its default of 32.
    few = ("--ctx-checkpoints", str(N_CONTEXT_CHECKPOINTS)) if case.variant == "proxy" else ()
    return Setup(
        n_slots=case.n_slots,
        n_ctx=n_ctx * case.n_slots,
        n_threads=N_THREADS.get(case.size, 2),
        server_arguments=("--cache-ram", str(ram), *DRAFTING.get(case.kind, ()), *few, *flags),
        launcher=(LAUNCHER, str(folder), *stripped),
        proxy_options=("--log-format", "json"),
    )


def _read_kept(path: Path) -> KeptState:
    state = read_state_file(path)
    points = state.restore_points
    return KeptState(len(state.tokens), state.size_bytes, state.state_end, points)


def _cost(sent: Sent, n_prompt: int, n_exact: int, lines: deque[dict[str, Any]]) -> RequestCost:
    assert sent.reply is not None
    return RequestCost(
        sent.request.label,
        n_prompt,
        n_exact,
        sent.reply.timings.get("prompt_n", 0),
        sent.reply.first_token_seconds,
        sent.reply.seconds,
        lines.popleft() if lines else {},
    )
